"""Drafts run where a target is fastest with them, as it measures itself."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from cluster.best_place import PLACES, BestPlace, Kind, Place, kind_of
from cluster.link import memory_link
from cluster.linked import LinkedDrafts
from cluster.place_speed import Speed
from cluster.target_state import TargetState
from cluster.trace import Trace
from engine.types import Growth, KVHandle, SamplingParams

ONE, SAMPLED, MANY = kind_of(1, True), kind_of(1, False), kind_of(16, True)
GUESSING: tuple[Place, ...] = ("separate", "shared", "none")
Rates = Mapping[Place, float]  # tokens per second
BEST: dict[Place, Rates] = {
    "separate": {"separate": 1.5, "shared": 1.2, "none": 1.0, "off": 0.9},
    "shared": {"separate": 1.1, "shared": 1.4, "none": 1.0, "off": 0.9},
    "none": {"separate": 0.8, "shared": 0.9, "none": 1.0, "off": 0.7},
    "off": {"separate": 0.6, "shared": 0.7, "none": 0.8, "off": 1.0},
}


def shares(best: BestPlace, steps: int, kind: Kind, rates: Rates, drawn: random.Random | None = None) -> Rates:
    """Where so many steps were, as shares of them. drawn: makes the seconds of a step vary."""
    found: Counter[Place] = Counter()
    for _ in range(steps):
        found[best.place] += 1
        seconds = 0.02 / rates[best.place] * (drawn.uniform(0.6, 1.4) if drawn else 1.0)
        best.stepped(kind, 2, seconds, heard=True)
    return {place: found[place] / steps for place in PLACES}


@pytest.mark.parametrize("place", GUESSING)
def test_the_best_place_is_found_soon_and_hardly_ever_left(place: Place) -> None:
    best = BestPlace(PLACES)
    shares(best, 250, ONE, BEST[place])
    assert best.place == place
    assert shares(best, 100_000, ONE, BEST[place])[place] > 0.97


def test_guessing_nothing_is_for_many_sequences_for_which_it_is_clearly_faster() -> None:
    best = BestPlace(PLACES)
    assert shares(best, 5_000, ONE, BEST["off"])["off"] == 0
    assert shares(best, 5_000, MANY, BEST["off"])["off"] > 0.9
    assert shares(best, 40, kind_of(8, True), BEST["none"])["none"] >= 0.9
    drawn, alike = random.Random(0), BestPlace(("none", "off"))
    assert shares(alike, 20_000, MANY, {"none": 1.0, "off": 1.0}, drawn)["off"] < 0.3


def test_batches_of_many_sequences_say_so_sooner() -> None:
    best = BestPlace(PLACES)
    shares(best, 90, MANY, BEST["none"])
    assert best.place == "none"


@pytest.mark.parametrize("place", GUESSING)
def test_speeds_that_vary_are_told_apart(place: Place) -> None:
    drawn = random.Random(0)
    best = BestPlace(PLACES)
    assert shares(best, 50_000, ONE, BEST[place], drawn)[place] > 0.95


def test_all_places_are_looked_at_now_and_then() -> None:
    best = BestPlace(PLACES)
    shares(best, 250, ONE, BEST["shared"])
    found = shares(best, 100_000, ONE, BEST["shared"])
    assert all(found[place] > 0.001 for place in GUESSING)


def test_a_place_is_looked_at_the_more_often_the_nearer_it_is_to_the_best() -> None:
    best = BestPlace(PLACES)
    rates: Rates = {"separate": 1.0, "shared": 0.9, "none": 0.6, "off": 0.5}
    drawn = random.Random(1)
    shares(best, 1_000, ONE, rates, drawn)
    found = shares(best, 100_000, ONE, rates, drawn)
    assert 0.1 > found["shared"] > 3 * found["none"] > 0


@pytest.mark.parametrize("near", ["separate", "shared"])
def test_looks_that_cost_much_are_rare_however_near_a_place_is_to_the_best(near: Place) -> None:
    """Behind every change to a draft 25 steps take longer: with many sequences it has many texts to read."""
    drawn, best, here, since = random.Random(0), BestPlace(PLACES), None, 0
    rates: Rates = {"separate": 0.85, "shared": 0.85, "none": 1.0, "off": 0.9, near: 0.97}
    seconds = []
    for _ in range(5_000):
        here, since = best.place, since + 1 if best.place == here else 0
        reading = here in ("separate", "shared") and since < 25
        seconds.append(2 / rates[here] * drawn.uniform(0.9, 1.1) * (1.6 if reading else 1.0))
        best.stepped(kind_of(64, True), 2, seconds[-1], heard=not reading)
    assert (
        2 * 4_500 / sum(seconds[500:]) > 0.95
    )  # tokens per second, of those of the best place; 0.97 is as good as that


def test_many_sequences_begin_without_drafts_which_are_tried_once_there_is_time_for_it() -> None:
    best = BestPlace(PLACES)
    shares(best, 1, MANY, BEST["separate"])
    assert shares(best, 40, MANY, BEST["separate"])["none"] == 1
    shares(best, 2_000, MANY, BEST["separate"])
    assert best.place == "separate"


@pytest.mark.parametrize("place", GUESSING)
def test_fewer_sequences_begin_where_more_are_fastest(place: Place) -> None:
    best = BestPlace(PLACES)
    shares(best, 5_000, kind_of(64, True), BEST[place])
    for sequences in (32, 16, 8):
        assert shares(best, 40, kind_of(sequences, True), BEST[place])[place] >= 0.9


@pytest.mark.parametrize("pays", ["separate", "shared"])
def test_more_sequences_begin_without_drafts_although_they_pay_with_fewer(pays: Place) -> None:
    """And samples say nothing of greedy ones."""
    best = BestPlace(PLACES)
    shares(best, 1_000, ONE, BEST[pays])
    assert shares(best, 40, kind_of(64, True), BEST["none"])["none"] >= 0.9
    shares(best, 48, SAMPLED, BEST[pays])
    assert shares(best, 40, SAMPLED, BEST[pays])["separate"] == 1


def test_what_looks_cost_in_all_is_bounded_however_many_kinds_of_batches_there_are() -> None:
    """Sixty sequences, ten, and so on, each for a while: drafts are slower with any of them, and read texts first."""
    best, spent, lost = BestPlace(PLACES), 0.0, 0.0
    for turn in range(400):
        kind, since, here = kind_of((60, 30, 12, 7)[turn % 4], turn % 8 < 4), 0, best.place
        for _ in range(100):
            since, here = (since + 1, here) if best.place == here else (0, best.place)
            slower = 1.0 if here in ("none", "off") else 1.4 if since > 10 else 2.0
            spent, lost = spent + 0.02 * slower, lost + 0.02 * (slower - 1)
            best.stepped(kind, 2, 0.02 * slower, heard=since > 10)
    assert 0 < lost < 0.02 * spent + 0.4


def test_fewer_sequences_for_a_moment_are_no_reason_for_a_look() -> None:
    """What is left of a full batch: its sequences end, and others come."""
    best = BestPlace(PLACES)
    shares(best, 1_000, kind_of(64, True), BEST["none"])
    for _ in range(50):
        assert shares(best, 40, MANY, BEST["none"])["none"] >= 0.9
        shares(best, 60, kind_of(64, True), BEST["none"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("least", "most"), [(0, 128), (1, 64), (64, 65)])
def test_steps_that_read_prompts_count_too(least: int, most: int, place: Place) -> None:
    """For a server that always reads some: without the time that takes, which is no merit of a place."""
    drawn, best = random.Random(0), BestPlace(PLACES)
    found: Counter[Place] = Counter()
    for step in range(20_000):
        found[best.place] += step >= 10_000
        prompt_tokens = drawn.randrange(least, most)
        seconds = 0.02 / BEST[place][best.place] * drawn.uniform(0.9, 1.1) + 1e-4 * prompt_tokens
        best.stepped(MANY, 2, seconds, heard=True, prompt_tokens=prompt_tokens)
    assert found[place] > 0.9 * 10_000


def test_a_place_that_has_become_slower_than_another_was_is_left_without_a_look() -> None:
    best = BestPlace(("separate", "none"))
    shares(best, 90, MANY, {"separate": 1.1, "none": 1.0})
    assert best.place == "separate"
    assert shares(best, 200, MANY, {"separate": 0.7, "none": 1.0})["none"] > 0.5


def test_a_kind_whose_looks_are_cheap_takes_none_from_another() -> None:
    """Sixteen sequences look at drafts that are nearly as fast, again and again; sixty-four never did, where they pay."""
    best, found = BestPlace(("separate", "none")), 0.0
    for _ in range(20):
        shares(best, 2_000, kind_of(16, False), {"separate": 0.97, "none": 1.0})
        found = shares(best, 500, kind_of(64, True), {"separate": 1.4, "none": 1.0})["separate"]
    assert found > 0.9


def test_what_another_number_of_sequences_says_is_over_the_place_where_a_kind_begins() -> None:
    best = BestPlace(PLACES)
    rates: Rates = {"separate": 1.5, "shared": 1.35, "none": 1.0, "off": 0.9}
    assert shares(best, 1_000, kind_of(8, True), rates)["separate"] > 0.8
    found = shares(best, 2_000, kind_of(16, True), {"separate": 0.5, "shared": 1.5, "none": 1.0, "off": 0.9})
    assert found["shared"] > 0.3


def test_sequences_whose_number_goes_up_and_down_keep_their_drafts() -> None:
    """Between two kinds, in both of which these pay; and beside a few that sample, which nothing is known of."""
    drawn, best = random.Random(0), BestPlace(("separate", "none"))
    shares(best, 1_000, MANY, BEST["separate"])
    found: Counter[Place] = Counter()
    kind = MANY
    for _ in range(5_000):
        if drawn.random() < 0.1:
            kind = drawn.choice([MANY, MANY, kind_of(32, True), kind_of(16, False)])
        found[best.place] += 1
        best.stepped(kind, 2, 0.02 / BEST["separate"][best.place], heard=True)
    assert found["separate"] > 0.9 * 5_000


def test_steps_that_mostly_read_prompts_say_nothing() -> None:
    """Few of those that begin decode yet: how long such a step takes is no merit of a place either."""
    drawn, best = random.Random(0), BestPlace(("separate", "none"))
    for step in range(4_000):
        many = step % 200 < 20
        prompt_tokens = 512 if many else drawn.randrange(64)
        seconds = (0.02 if best.place == "separate" else 0.03) + 1e-3 * prompt_tokens * drawn.uniform(0.5, 1.5) * many
        best.stepped(ONE, 2, seconds + 1e-4 * prompt_tokens, heard=True, prompt_tokens=prompt_tokens)
    assert best.place == "separate"


@pytest.mark.parametrize(
    ("sequences", "like"), [(1, 1), (2, 2), (5, 4), (6, 8), (46, 64), (63, 64), (64, 64), (90, 64)]
)
def test_a_full_batch_and_nearly_a_full_one_are_measured_together(sequences: int, like: int) -> None:
    assert kind_of(sequences, True) == (like, True)


def test_what_is_much_slower_is_not_looked_at_again_with_twice_as_many_sequences() -> None:
    """Nor does that hold with many times as many, or for ever, or for what is nearly as fast."""
    best = BestPlace(("separate", "none"))
    slow: Rates = {"separate": 0.7, "none": 1.0}
    shares(best, 200, MANY, slow)
    assert shares(best, 2_000, kind_of(32, True), {"separate": 1.4, "none": 2.0})["separate"] == 0
    assert shares(best, 20_000, kind_of(32, True), {"separate": 1.4, "none": 2.0})["separate"] > 0
    assert shares(best, 2_000, kind_of(128, True), slow)["separate"] > 0
    near = BestPlace(("separate", "none"))
    shares(near, 200, MANY, {"separate": 0.95, "none": 1.0})
    assert shares(near, 2_000, kind_of(32, True), {"separate": 0.95, "none": 1.0})["separate"] > 0


def test_a_look_that_another_batch_interrupts_is_given_up() -> None:
    """Drafts that have just been asked say nothing for 90 steps, and another batch comes before that each time."""
    best, since, here = BestPlace(("none", "separate")), 0, None
    kinds = [kind_of(16, True), kind_of(128, True)]
    away = 0
    for step in range(6_000):
        since, here = since + 1 if best.place == here else 0, best.place
        away += here == "separate"
        reading = here == "separate" and since < 90
        best.stepped(kinds[step // 60 % 2], 2, 2.0 if reading else 1.0, heard=here == "separate" and not reading)
    assert 0 < away < 0.2 * 6_000


def test_what_has_changed_is_noticed() -> None:
    best = BestPlace(PLACES)
    shares(best, 20_000, ONE, BEST["separate"])
    shares(best, 20_000, ONE, BEST["none"])
    assert shares(best, 1_000, ONE, BEST["none"])["none"] > 0.9


def test_each_kind_of_batch_has_its_own_answer() -> None:
    best = BestPlace(PLACES)
    pays: dict[Kind, Place] = {ONE: "separate", SAMPLED: "shared", MANY: "none"}
    for _ in range(3):
        for kind, place in pays.items():
            shares(best, 3_000, kind, BEST[place])
    for kind, place in pays.items():
        shares(best, 80, kind, BEST[place])
        assert shares(best, 100, kind, BEST[place])[place] > 0.5


def test_drafts_that_still_read_the_texts_are_waited_for() -> None:
    """They need 40 steps after each return before they say anything, and are worth it from then on."""
    best, back = BestPlace(("separate", "none")), 0
    without = 0
    for _ in range(50_000):
        without += best.place == "none"
        back = 0 if best.place == "none" else back + 1
        best.stepped(ONE, 2, 1.0 if back > 40 else 2.0, heard=back > 40)
    assert without < 0.01 * 50_000


def test_drafts_that_never_say_anything_are_not_waited_for_forever() -> None:
    best, looks = BestPlace(("separate", "none")), 0
    for _ in range(10_000):
        looks += best.place == "none"
        best.stepped(ONE, 2, 2.0, heard=False)
    assert looks > 30


@pytest.mark.parametrize("kind", [ONE, MANY])
@pytest.mark.parametrize("heard", [True, False])
def test_requests_that_fail_at_their_first_token_bring_none(kind: Kind, heard: bool) -> None:
    """They say nothing of any place, and are no reason to fail."""
    best = BestPlace(PLACES)
    for _ in range(2_000):
        best.stepped(kind, 0, 1.0, heard)
    shares(best, 500, kind, BEST["none"])
    assert shares(best, 1_000, kind, BEST["none"])["none"] > 0.9


def test_a_place_that_was_left_long_ago_is_forgotten() -> None:
    speed = Speed()
    for _ in range(12):
        speed.add(2, 0.01)
    for _ in range(20_000):
        speed.fade()
    assert speed.rate == pytest.approx(200)
    assert speed.doubt > 10 * speed.rate
    for _ in range(1_600_000):  # until numbers can't tell the sums from nothing
        speed.fade()
    assert speed.forgotten
    assert speed.at_best == math.inf, "it is looked at again"


def test_a_batch_that_comes_and_goes_changes_nothing() -> None:
    """Every change would have all texts read again."""
    best = BestPlace(PLACES)
    shares(best, 3_000, ONE, BEST["separate"])
    shares(best, 3_000, SAMPLED, BEST["none"])
    changes = 0
    for step in range(6_000):
        before = best.place
        kind, rates = (SAMPLED, BEST["none"]) if step // 3 % 2 else (ONE, BEST["separate"])
        best.stepped(kind, 2, 2 / rates[before], heard=True)
        changes += best.place != before
    assert changes < 30


@pytest.mark.parametrize("place", PLACES)
def test_a_single_place_is_not_measured(place: Place) -> None:
    assert shares(BestPlace((place,)), 5_000, ONE, BEST["none"])[place] == 1


def test_without_a_place_nobody_drafts() -> None:
    assert BestPlace(()).place == "none"


class Served:
    """One session of a target that decodes at given speeds."""

    def __init__(self, places: tuple[Place, ...] = ("separate", "none")) -> None:
        self.state = TargetState(16)
        self.drafts = LinkedDrafts(self.state, Trace(), None, places)
        self.session = self.state.session_opened([1, 2], SamplingParams())
        self.links = [memory_link()]
        self.drafts.join(self.links[0][0])

    def step(self, seconds_with: float, seconds_without: float, accepted: int = 1) -> bool:
        """One step; whether the session is with a draft after it."""
        with_drafts = self.state.attached(self.session)
        if with_drafts:
            below = np.full(1, -1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
            self.links[-1][1].send([Growth(self.session, KVHandle(2, bytes(16)), *below)])
        self.drafts.receive()
        self.drafts.accepted(self.session, accepted)
        self.drafts.stepped()
        self.drafts.took(ONE, 2, seconds_with if with_drafts else seconds_without)
        self.drafts.send()
        self.state.check()
        return self.state.attached(self.session)

    def close(self) -> None:
        self.drafts.close()
        for _, up in self.links:
            up.close()


@pytest.fixture
def make_served() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(*places: Place) -> Served:
        made.append(Served(*([places] if places else [])))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_draft_that_joins_is_tried_where_another_was_left_alone(make_served: Callable[..., Served]) -> None:
    served = make_served()
    while served.step(2.0, 1.0):
        pass
    for _ in range(100):
        served.step(2.0, 1.0)
    assert not served.state.attached(served.session)
    served.links.append(memory_link())
    served.drafts.join(served.links[-1][0])
    assert served.state.attached(served.session)
    assert all(served.step(1.0, 2.0) for _ in range(40))


def test_those_that_stay_are_tried_when_one_of_several_leaves(make_served: Callable[..., Served]) -> None:
    served = make_served()
    served.links.append(memory_link())
    served.drafts.join(served.links[-1][0])
    while served.step(2.0, 1.0):
        pass
    for _ in range(100):
        served.step(2.0, 1.0)
    assert not served.state.attached(served.session)
    served.links[0][1].close()
    served.drafts.receive()
    assert len(served.drafts) == 1
    assert served.state.attached(served.session)
    served.state.check()


def test_drafts_that_are_never_right_and_slow_are_still_looked_at(make_served: Callable[..., Served]) -> None:
    served = make_served()
    attached = [served.step(2.0, 1.0, accepted=0) for _ in range(20_000)]
    assert sum(attached) < 0.1 * 20_000
    assert any(attached[10_000:])


def test_sessions_leave_drafts_that_make_a_target_slower(make_served: Callable[..., Served]) -> None:
    served = make_served()
    attached = [served.step(2.0, 1.0) for _ in range(15_000)]
    assert attached[0]
    assert not any(attached[200:2_000])
    assert any(attached[2_000:])


def test_drafts_are_not_left_alone_where_that_is_no_place(make_served: Callable[..., Served]) -> None:
    served = make_served("separate")
    assert all(served.step(2.0, 1.0) for _ in range(500))


def test_a_target_without_links_has_its_own_draft(make_served: Callable[..., Served]) -> None:
    served = make_served("separate", "shared", "none")
    places = [served.drafts.place]
    served.links[0][1].close()
    served.drafts.receive()
    assert [*places, served.drafts.place] == ["separate", "shared"]


def test_a_target_whose_last_draft_leaves_while_it_rests_measures_on(make_served: Callable[..., Served]) -> None:
    served = make_served("separate", "shared", "none")
    while served.step(2.0, 2.0, accepted=0):
        pass
    served.links[0][1].close()
    found: Counter[Place] = Counter()
    for _ in range(2_000):
        served.drafts.receive()
        found[served.drafts.place] += 1
        served.drafts.stepped()
        served.drafts.took(ONE, 2, 1.0 if served.drafts.place == "none" else 2.0)
    assert found["none"] > 0.8 * 2_000


def test_a_place_that_failed_is_never_one_again(make_served: Callable[..., Served]) -> None:
    served = make_served("shared", "none")
    served.drafts.never_at("shared")
    assert served.drafts.place == "none"
    served.links.append(memory_link())
    served.drafts.join(served.links[-1][0])
    assert served.drafts.place == "none"
