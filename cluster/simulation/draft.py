"""A draft replica on the virtual clock: cluster.draft's loop with its own state, cadence and drafter; only time is given."""

from collections.abc import Callable, Sequence

from cluster.cadence import Cadence
from cluster.draft_state import MOST_TOLD, CloseSession, Command, CommitTokens, DraftState, OpenSession, resend
from cluster.simulation.clock import Clock
from cluster.simulation.costs import Costs
from engine.drafters import Drafter
from engine.drafters.model import Growing
from engine.types import Down, Growth, Up

Receive = Callable[[Sequence[Up]], None]  # what a target does with messages that arrive


class SimulatedDraft:
    """Works whenever there is something to grow, and sends growth just before a target looks."""

    def __init__(
        self, clock: Clock, drafter: Drafter, growing: Growing, costs: Costs, most_told: int = MOST_TOLD
    ) -> None:
        """growing: as the drafter's; more sessions than its rows take a row each. most_told: see DraftState."""
        self._clock = clock
        self._drafter = drafter
        self._growing = growing
        self._costs = costs
        self._state = DraftState(most_told)
        self._targets: list[tuple[Receive, Cadence]] = []  # by stream
        self._inbox: list[tuple[int, float, Down]] = []  # streams, when it came in, messages
        self._fresh: dict[int, None] = {}  # keys with growth to send
        self._urgent: set[int] = set()  # keys that their target has nothing to verify for
        self._resting = True
        self.steps = 0
        self.busy_ms = 0.0
        self.messages = 0  # of growth
        self.nodes = 0  # in them

    def connect(self, receive: Receive) -> Callable[[Sequence[Down]], None]:
        """Another target, which `receive` belongs to; what it sends its messages with."""
        stream = len(self._targets)
        self._targets.append((receive, Cadence()))
        return lambda messages: self._clock.after(self._costs.latency_ms, lambda: self._arrive(stream, messages))

    def _arrive(self, stream: int, messages: Sequence[Down]) -> None:
        self._inbox.extend((stream, self._clock.seconds, message) for message in messages)
        if self._resting:
            self._resting = False
            self._turn()

    def _turn(self) -> None:
        """Takes in what came, and begins a draft step if there is anything to grow."""
        self._listen()
        self._send()
        worked = self._drafter.grow()
        if not worked:
            self._send(everything=True)
            self._resting = True
            return
        self._fresh.update(dict.fromkeys(worked))
        rows = self._growing.rows
        if self._growing.each:
            rows = min(rows, self._growing.each * len(worked))
        milliseconds = self._costs.draft_ms(max(rows, len(worked)))
        self.steps += 1
        self.busy_ms += milliseconds
        self._clock.after(milliseconds, lambda: self._grown(milliseconds))

    def _grown(self, milliseconds: float) -> None:
        for _, cadence in self._targets:
            cadence.turned(milliseconds / 1000)
        self._send()
        self._turn()

    def _listen(self) -> None:
        now = self._clock.seconds
        for stream, arrived, message in self._inbox:
            commands = self._state.received(stream, message, now)
            for command in commands:
                self._apply(command)
            self._targets[stream][1].heard(commands, arrived, now)
        self._inbox.clear()

    def _apply(self, command: Command) -> None:
        match command:
            case OpenSession():
                self._drafter.open(command.key, command.tokens, command.params, command.prompt)
            case CommitTokens():
                moved = self._drafter.commit(command.key, command.tokens)
                if command.resend:
                    self._urgent.add(command.key)
                if command.resend and moved.children:
                    resend(self._drafter.tree(command.key))
                    self._fresh[command.key] = None
            case CloseSession():
                self._drafter.close(command.key)
                self._fresh.pop(command.key, None)
                self._urgent.discard(command.key)

    def _send(self, everything: bool = False) -> None:
        now = self._clock.seconds
        urgent = {self._state.stream_of(key) for key in self._fresh if key in self._urgent}
        waited_for = {stream for stream in urgent if self._targets[stream][1].waits}
        for stream, (receive, cadence) in enumerate(self._targets):
            if everything or stream in waited_for or cadence.due(now):
                growths = self._growths(stream)
                if growths:
                    self._clock.after(self._costs.latency_ms, _delivery(receive, growths))
                    cadence.sent(now, stream in waited_for)

    def _growths(self, stream: int) -> list[Growth]:
        growths = []
        for key in [key for key in self._fresh if self._state.stream_of(key) == stream]:
            del self._fresh[key]
            growth = self._state.growth(key, self._drafter.tree(key))
            if growth is not None:
                self._urgent.discard(key)
                growths.append(growth)
                self.nodes += len(growth.tokens)
        self.messages += bool(growths)
        return growths


def _delivery(receive: Receive, growths: list[Growth]) -> Callable[[], None]:
    return lambda: receive(growths)
