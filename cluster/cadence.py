"""When to send growth: a target looks at what came when its step ends, so the best moment is before that, by as much as
steps differ in length.

Every message costs both sides and the cores they share; growth sent earlier would only be followed by more of it.
"""

from collections.abc import Sequence

from cluster.draft_state import CloseSession, Command, CommitTokens, OpenSession

# Of a step's time: steps differ in length. What comes too late is waited for, which costs less than what is left out.
_EARLY = 0.75
# From then on it is sent again, not sooner than a message, which takes both sides some 0.3 ms, costs little: of a target's
# step, and of a slow draft's, whose every step counts.
_AGAIN, _AGAIN_S = 0.1, 0.0015  # of a step's time; seconds
_RATE = 0.2  # weight of the newest observation
_SAME = 0.1  # of a step's time: commits closer than this are of one step


class Cadence:
    """The rhythm of one target's steps, as its draft sees it. All times are in seconds."""

    def __init__(self) -> None:
        self._step = 0.0  # how long the target's steps take, 0 while unknown
        self._began: float | None = None  # the step it is in
        self._next = 0.0  # when it will look
        self._turn = 0.0  # how long the draft's steps take
        self._hits: dict[int, bool] = {}  # of sessions committed in this step: is there something to verify?

    def heard(self, commands: Sequence[Command], arrived: float, now: float) -> None:
        """What a message that came in at `arrived` told the draft to do at `now`."""
        for command in commands:
            match command:
                case OpenSession():
                    self.opened(now)
                case CommitTokens():
                    self.committed(command.key, arrived, hit=not command.resend)
                case CloseSession():
                    self.closed(command.key)

    def opened(self, now: float) -> None:
        """A session came: what follows is no step like the others, and growth is wanted as soon as there is some."""
        self._began, self._next = None, now

    def committed(self, key: int, now: float, hit: bool) -> None:
        """A commit of a session came in at `now`, perhaps a while ago: the target began another step. Of those that come
        together the first says so. hit: the target has something to verify behind it.
        """
        since = _SAME * self._step if key not in self._hits else 0.0  # no session commits twice in a step
        if self._began is None or now - self._began > since:
            if self._began is not None:
                self._step = _blend(self._step, now - self._began)
            self._hits.clear()
            self._begin(now)
        self._hits[key] = hit

    def closed(self, key: int) -> None:
        """A session ended: nothing of it is verified."""
        self._hits.pop(key, None)

    @property
    def waits(self) -> bool:
        """Whether the target has nothing at all to verify: one session's miss holds up no other's hit."""
        return bool(self._hits) and not any(self._hits.values())

    def turned(self, seconds: float) -> None:
        """A draft step, with what belongs to it, took this long."""
        self._turn = _blend(self._turn, seconds)

    def due(self, now: float) -> bool:
        """Whether growth of the next draft step would come too late for the target's next look."""
        return now + self._turn >= self._next

    def sent(self, now: float, waited_for: bool) -> None:
        """Growth was sent; in a short step that is enough. If the target waited for it, its step begins now."""
        if waited_for:
            self._hits.clear()
            self._begin(now)
        else:
            self._next = max(self._next, now) + min(self._step, max(_AGAIN * self._step, _AGAIN_S))

    def _begin(self, now: float) -> None:
        self._began = now
        self._next = now + _EARLY * self._step


def _blend(old: float, new: float) -> float:
    return new if old == 0 else old + _RATE * (new - old)
