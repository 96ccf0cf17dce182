"""When drafts are left alone: hearing what is never right, and telling of commits, takes time as well."""

from collections import Counter

_FIRST = 128  # steps with growth, of which nothing is accepted, before the first rest
_LOOK = 64  # such steps between later rests
_SHORTEST, _LONGEST = 256, 1024  # steps of a rest, each twice as long as the one before


class Rest:
    """Begins when nothing of what drafts say is ever accepted, and ends now and then to look again.

    A draft that says nothing yet, because it still reads prompts, is not at fault.
    """

    def __init__(self) -> None:
        self._patience = _FIRST
        self._in_vain = 0  # steps with growth since something was accepted
        self._length = _SHORTEST
        self._left = 0  # steps of the present rest

    @property
    def resting(self) -> bool:
        """Whether drafts are to be left alone."""
        return self._left > 0

    def stepped(self, heard: bool, accepted: int) -> bool:
        """A step ended for which growth came, or not; whether a rest begins or ends."""
        if self._left:
            self._left -= 1
            return self._left == 0
        if accepted:
            self._in_vain, self._patience, self._length = 0, _FIRST, _SHORTEST
            return False
        self._in_vain += heard
        if self._in_vain < self._patience:
            return False
        self._in_vain, self._patience = 0, _LOOK
        self._left, self._length = self._length, min(2 * self._length, _LONGEST)
        return True


class Rests:
    """A rest for each of several drafts, by their numbers."""

    def __init__(self) -> None:
        self._rests: dict[int, Rest] = {}
        self._heard: set[int] = set()  # drafts that said something since the last step
        self._accepted: Counter[int] = Counter()  # tokens of each draft, since the last step

    @property
    def resting(self) -> set[int]:
        """The drafts that are to be left alone."""
        return {draft for draft, rest in self._rests.items() if rest.resting}

    @property
    def any_heard(self) -> bool:
        """Whether any draft said something since the last step."""
        return bool(self._heard)

    def joined(self, draft: int) -> None:
        """A draft is there."""
        self._rests[draft] = Rest()

    def left(self, draft: int) -> None:
        """A draft is gone."""
        del self._rests[draft]
        self._heard.discard(draft)

    def heard(self, draft: int) -> None:
        """Growth of a draft came."""
        self._heard.add(draft)

    def accepted(self, draft: int, tokens: int) -> None:
        """So many tokens of a draft were right; it may have left."""
        self._accepted[draft] += tokens

    def stepped(self) -> bool:
        """A step ended; whether some rest begins or ends."""
        changed = [rest.stepped(draft in self._heard, self._accepted[draft]) for draft, rest in self._rests.items()]
        self.passed_over()
        return any(changed)

    def passed_over(self) -> None:
        """A step ended that says nothing of the drafts."""
        self._heard.clear()
        self._accepted.clear()
