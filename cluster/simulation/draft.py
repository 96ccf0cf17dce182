"""A draft replica on the virtual clock: its sessions, cadence and drafter are the real ones; only time is given."""

from collections.abc import Callable, Sequence

from cluster.draft_sessions import DraftSessions
from cluster.draft_state import MOST_TOLD
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
        self._growing = growing
        self._costs = costs
        self._sessions = DraftSessions(drafter, most_told=most_told)
        self._targets: dict[int, Receive] = {}  # by stream
        self._inbox: list[tuple[int, float, Down]] = []  # streams, when it came in, messages
        self._resting = True
        self.steps = 0
        self._worked: list[tuple[float, float]] = []  # when steps begin and end
        self.messages = 0  # of growth
        self.nodes = 0  # in them

    def connect(self, receive: Receive) -> Callable[[Sequence[Down]], None]:
        """Another target, which `receive` belongs to; what it sends its messages with."""
        stream = self._sessions.join()
        self._targets[stream] = receive
        return lambda messages: self._clock.after(self._costs.latency_ms, lambda: self._arrive(stream, messages))

    def busy_ms(self, since: float, until: float) -> float:
        """How much of this time it was in a step."""
        return sum(max(0.0, min(ended, until) - max(began, since)) for began, ended in self._worked)

    def _arrive(self, stream: int, messages: Sequence[Down]) -> None:
        self._inbox.extend((stream, self._clock.seconds, message) for message in messages)
        if self._resting:
            self._resting = False
            self._turn()

    def _turn(self) -> None:
        """Takes in what came, and begins a draft step if there is anything to grow."""
        for stream, arrived, message in self._inbox:
            self._sessions.heard(stream, message, arrived, self._clock.seconds)
        self._inbox.clear()
        self._send()
        grown = self._sessions.grow()
        if not grown:
            self._send(everything=True)
            self._resting = True
            return
        rows = self._growing.most(self._sessions.count)
        if self._growing.each:
            rows = min(rows, self._growing.each * len(grown))
        milliseconds = self._costs.draft_ms(max(rows, len(grown)))
        self.steps += 1
        self._worked.append((self._clock.now, self._clock.now + milliseconds))
        self._clock.after(milliseconds, lambda: self._grown(milliseconds))

    def _grown(self, milliseconds: float) -> None:
        self._sessions.turned(milliseconds / 1000)
        self._send()
        self._turn()

    def _send(self, everything: bool = False) -> None:
        for stream, messages in self._sessions.due(self._clock.seconds, everything, lambda stream: True):
            self._clock.after(self._costs.latency_ms, _delivery(self._targets[stream], messages))
            self.messages += 1
            self.nodes += sum(len(message.tokens) for message in messages if isinstance(message, Growth))


def _delivery(receive: Receive, messages: list[Up]) -> Callable[[], None]:
    return lambda: receive(messages)
