"""The drafts that a target is linked to: their messages in and out, between two steps. Nothing in it waits."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.best_place import BestPlace, Kind, Place
from cluster.link import Link, send_all
from cluster.rest import Rests
from cluster.target_state import TargetState
from cluster.trace import Trace
from engine.types import Commit, Down, Growth, Up

if TYPE_CHECKING:
    from cluster.loop import Loop  # which needs torch; vLLM's proposer does without


class LinkedDrafts:
    """The links of one target replica, for its loop alone. They are left alone where another place is better."""

    def __init__(
        self, state: TargetState, trace: Trace, loop: "Loop | None", places: Sequence[Place] = ("separate",)
    ) -> None:
        """loop: hears of what comes in; None: nobody does. places: where drafts may run; see BestPlace."""
        self._state = state
        self._trace = trace
        self._loop = loop
        self._links: dict[int, Link[Down, Up]] = {}
        self._lost: dict[int, int] = {}  # messages, by draft
        self._next_draft = 0
        self._places = places
        self._rests = Rests()
        self._best = BestPlace(self._there())
        self._heard_last = False  # whether any did before the last step

    def __len__(self) -> int:
        return len(self._links)

    @property
    def place(self) -> Place:
        """Where drafts run now."""
        return self._best.place

    def join(self, link: Link[Down, Up]) -> None:
        """A draft is there."""
        draft = self._next_draft
        self._next_draft += 1
        self._links[draft], self._lost[draft] = link, 0
        if self._loop is not None:
            self._loop.hear(link)
        self._rests.joined(draft)
        self._best = self._measure_anew()  # it may be a better one
        self._leave_alone_or_ask()
        self._state.draft_joined(draft)
        self.send()

    def receive(self) -> None:
        """Takes in what the drafts said; those that are gone leave."""
        for draft, link in list(self._links.items()):
            alive = link.alive
            messages = link.receive()
            if messages:
                started = time.monotonic()
                for message in messages:
                    self._state.received(draft, message)
                grown = [len(message.tokens) for message in messages if isinstance(message, Growth)]
                if grown:
                    self._rests.heard(draft)
                self._trace.add("growth", started, sum(grown))
            if not alive:
                if self._loop is not None:
                    self._loop.forget(link)
                self._count_lost(draft)
                del self._links[draft], self._lost[draft]
                self._rests.left(draft)
                self._state.draft_left(draft)
                self._best = self._measure_anew()  # what is known was of all of them
                self._leave_alone_or_ask()

    def accepted(self, session: int, tokens: int) -> None:
        """The step that ends accepted so many draft tokens of a session, whose draft that speaks for."""
        draft = self._state.draft_of(session)
        if draft is not None:
            self._rests.accepted(draft, tokens)

    def stepped(self) -> None:
        """A step ended. A draft that is never right is left alone for a while."""
        self._heard_last = self._rests.any_heard
        if self.place != "separate":
            self._rests.passed_over()
        elif self._rests.stepped():
            self._best.settle()
            self._leave_alone_or_ask()

    def took(self, kind: Kind, tokens: int, seconds: float, prompt_tokens: int = 0) -> None:
        """How long the last step took in all, which says where drafts are best. prompt_tokens: that it read besides."""
        if not self._links or len(self._rests.resting) < len(self._links):
            self._best.stepped(kind, tokens, seconds, self._heard_last or self.place == "shared", prompt_tokens)
            self._leave_alone_or_ask()

    def never_at(self, place: Place) -> None:
        """Drafts run there no more."""
        if place in self._places:
            self._places = [other for other in self._places if other != place]
            self._best = self._measure_anew()
            self._leave_alone_or_ask()

    def _measure_anew(self) -> BestPlace:
        return BestPlace(self._there(), self._best)

    def _there(self) -> list[Place]:
        return [place for place in self._places if place != "separate" or self._links]

    def _leave_alone_or_ask(self) -> None:
        self._state.drafts_left_alone(self._rests.resting if self.place == "separate" else set(self._links))

    def send(self) -> None:
        """Everything that there is to say goes out."""
        for draft, messages in self._state.take_messages().items():
            started = time.monotonic()
            send_all(self._links[draft], messages, self._state.not_told)
            self._count_lost(draft)
            commits = sum(isinstance(message, Commit) for message in messages)
            if commits:
                self._trace.add("commit", started, commits)

    def _count_lost(self, draft: int) -> None:
        """What its link lost since the last time."""
        stats = self._links[draft].stats
        lost = stats.dropped + stats.garbled
        self._state.counters.lost += lost - self._lost[draft]
        self._lost[draft] = lost

    def close(self) -> None:
        """Ends all links."""
        for link in self._links.values():
            link.close()
