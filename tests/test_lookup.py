"""Looking up how the text went on before: by itself, and in the trees of the model drafter."""

import math
import random
from collections.abc import Iterator

import pytest

from cluster.target_state import TargetState
from engine.drafters import ngram
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import Earned, GrowingText, Lookup
from engine.drafters.past import Past
from engine.runner import ModelRunner
from engine.tree import TokenTree
from engine.types import Commit, SamplingParams

REPEATED = [11, 12, 13, 14] * 3


@pytest.fixture
def drafter(draft: ModelRunner) -> Iterator[ModelDrafter]:
    made = ModelDrafter(draft, Growing(lookup=5))
    yield made
    made.check()
    made.close(1)


def chain(drafter: ModelDrafter) -> list[int]:
    """The tokens of a tree that is one chain."""
    tree = drafter.tree(1)
    assert tree.parent[1 : tree.size].tolist() == list(range(tree.size - 1))
    tokens: list[int] = tree.token[1 : tree.size].tolist()
    return tokens


def test_the_longest_match_decides_then_the_latest() -> None:
    index = GrowingText([1, 2, 3, 9, 2, 3, 8, 3, 7, 2])
    index.extend([3])
    assert index.lookup(2) == (2, [8, 3])
    index.extend([5])
    assert index.lookup(2) == (0, [])
    index.extend([3])
    assert index.lookup(9) == (1, [5, 3])


def test_it_finds_what_looking_at_every_place_finds() -> None:
    rng = random.Random(0)
    for _ in range(500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        path = [rng.randrange(3) for _ in range(rng.randrange(3))]
        last = (tokens[-4:] + path)[-4:]
        places = {n: [end for end in range(n, len(tokens)) if tokens[end - n : end] == last[-n:]] for n in (4, 3, 2, 1)}
        expected = next(((n, tokens[ends[-1] : ends[-1] + 5]) for n, ends in places.items() if ends), (0, []))
        text = GrowingText(tokens[:7])
        text.extend(tokens[7:])
        assert text.lookup(5, path) == expected


def test_other_texts_are_taken_where_they_match_longer() -> None:
    earlier = Past(64)
    for output in ([50, 11, 12, 13, 21, 22, 23], [60, 13, 31]):
        earlier.extend(output)
        earlier.begin()
    for tokens, expected in (
        ([11, 12, 13], [21, 22, 23]),  # not 31, which is newer
        ([13, 41, 42, 11, 12, 13], [21, 22, 23]),
        ([50, 11, 12, 13, 41, 42, 50, 11, 12, 13], [41, 42, 50, 11, 12]),  # as long in its own
        ([31, 44, 13, 31], [44, 13, 31]),  # nothing follows there
    ):
        tree = TokenTree(tokens[-1])
        Lookup(tokens, True, Earned(), 5, earlier).hang(tree)
        assert tree.token[1 : tree.size].tolist() == expected


@pytest.mark.parametrize("tokens", [[4], [4, 5], [4, 5, 6]])
def test_a_text_without_repetition_has_no_match(tokens: list[int]) -> None:
    assert GrowingText(tokens).lookup(3) == (0, [])


def test_what_followed_before_is_in_the_tree_before_the_model_ran(drafter: ModelDrafter) -> None:
    drafter.open(1, REPEATED, SamplingParams())
    assert chain(drafter) == [11, 12, 13, 14]  # as far as the text goes
    moved = drafter.commit(1, [99, 13])  # off the tree
    assert (moved.hit, moved.children) == (False, 1)
    assert chain(drafter) == [14, 99, 13]
    drafter.grow()
    assert drafter.tree(1).size > 4  # the model goes on from there


def test_without_repetition_or_without_lookup_the_model_begins(draft: ModelRunner) -> None:
    for growing, tokens in ((Growing(), [11, 12, 13]), (Growing(lookup=0), REPEATED)):
        drafter = ModelDrafter(draft, growing)
        drafter.open(1, tokens, SamplingParams())
        assert drafter.tree(1).size == 1
        drafter.close(1)


def test_confidence_is_what_lookups_have_earned(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_IN_VAIN", 1000)  # it is looked up after every commit
    drafter.open(1, REPEATED, SamplingParams())
    doubtful = float(drafter.tree(1).confidence[1])
    for _ in range(20):
        drafter.commit(1, REPEATED[:4])
    trusted = float(drafter.tree(1).confidence[1])
    assert trusted > 2 * doubtful
    for wrong in range(60):
        drafter.commit(1, [100 + wrong, 11, 12, 13, 14])
        drafter.commit(1, [200 + wrong])  # where 11 was looked up
    drafter.commit(1, [11, 12, 13, 14])
    assert drafter.tree(1).size == 1, "what is mostly wrong stays out"


def test_where_guesses_are_wrong_one_after_the_other_few_are_made() -> None:
    earned = Earned()
    lookup, tree = Lookup(REPEATED, False, earned, 5), TokenTree(REPEATED[-1], 16)
    looked = []
    for commit in range(40):  # always the same text before, and never what followed it
        lookup.hang(tree)
        looked.append(lookup._guess is not None)
        lookup.commit([100 + commit, 11, 12, 13, 14])
    assert looked[:9] == [True] * 9
    assert sum(looked[12:]) == len(looked[12:]) // 8
    assert earned.right(False)[4] < 0.2
    for _ in range(8):  # the text repeats itself now
        lookup.hang(tree)
        looked.append(lookup._guess is not None)
        lookup.commit([139, 11, 12, 13, 14])
    assert sum(looked[-4:]) == 4, "one right guess, and it is looked up every time"


def test_where_guesses_stay_out_of_the_tree_few_are_made_though_some_are_right() -> None:
    """With many sequences a guess has to be surer: half of these are right, which is not enough."""
    earned = Earned()
    lookup, tree = Lookup(REPEATED, False, earned, 5), TokenTree(REPEATED[-1], 16)
    looked = []
    for commit in range(400):
        lookup.hang(tree, doubtful=0.8)
        looked.append(lookup._guess is not None)
        followed = lookup._guess[1] if lookup._guess is not None and commit % 2 else 100 + commit
        lookup.commit([followed, 11, 12, 13, 14])
    assert tree.size == 1
    assert 400 / 8 <= sum(looked) < 400 / 3


def test_where_nothing_is_sure_enough_no_text_is_looked_through_and_it_goes_on_as_before() -> None:
    lookup, tree = Lookup([5, 6, 7, 5, 6], True, Earned(), 4), TokenTree(6)
    for token in (7, 5, 6) * 8:
        lookup.hang(tree, math.inf)
        assert tree.size == 1
        tree.commit([token])
        lookup.commit([token])
    lookup.hang(tree)
    assert tree.token[1 : tree.size].tolist() == [7, 5, 6]


def test_sampled_sessions_earn_their_own_confidence(drafter: ModelDrafter) -> None:
    drafter.open(1, REPEATED, SamplingParams())
    for _ in range(20):
        drafter.commit(1, REPEATED[:4])
    greedy = float(drafter.tree(1).confidence[1])
    drafter.open(1, REPEATED, SamplingParams(temperature=1.0))
    assert float(drafter.tree(1).confidence[1]) < greedy


def test_a_target_looks_up_by_itself_and_tells_the_draft_as_if_it_had_not() -> None:
    """Lookups fill the mirror at once; the draft still sends what it has where nothing of it was there."""
    state = TargetState(4096, lookup=5)
    state.draft_joined(0)
    session = state.session_opened(REPEATED, SamplingParams())
    assert state.hit(session)
    assert state.tokens_committed(session, [99, 13])
    mirror = state.mirror(session)
    assert mirror.token[1 : mirror.size].tolist() == [14, 99, 13]
    _, commit = state.take_messages()[0]
    assert isinstance(commit, Commit)
    assert not commit.mirrored
    assert not state.tokens_committed(session, [77]), "77 never came before"
    state.check()


def test_a_target_looks_up_in_outputs_that_have_ended_but_not_in_prompts_nor_twice() -> None:
    state = TargetState(4096, lookup=5, earlier=64)
    first = state.session_opened([1, 2, 3], SamplingParams())
    state.tokens_committed(first, [21, 22, 23, 24])
    assert not state.hit(state.session_opened([4, 21, 22], SamplingParams())), "its output goes on"
    state.session_closed(first)
    second = state.session_opened([5, 6, 21, 22], SamplingParams())
    mirror = state.mirror(second)
    assert mirror.token[1 : mirror.size].tolist() == [23, 24]
    assert not state.hit(state.session_opened([7, 1, 2], SamplingParams())), "prompts are nobody else's"
    assert not state.hit(state.session_opened([21, 22], SamplingParams(), alone=True))
    state.tokens_committed(second, [30, 31])
    state.session_closed(second)
    again = state.session_opened([5, 6, 21, 22, 30, 31], SamplingParams(), prompt=4)  # as after a preemption
    state.tokens_committed(again, [32])
    state.session_closed(again)
    assert state.hit(state.session_opened([8, 30], SamplingParams()))
    assert not state.hit(state.session_opened([8, 22, 30, 31, 32], SamplingParams()))
    state.check()


def test_without_room_for_earlier_outputs_none_are_looked_up() -> None:
    state = TargetState(4096, lookup=5)
    first = state.session_opened([1, 2, 3], SamplingParams())
    state.tokens_committed(first, [21, 22, 23, 24])
    state.session_closed(first)
    assert not state.hit(state.session_opened([5, 6, 21, 22], SamplingParams()))
