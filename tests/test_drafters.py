"""Drafters without a model: what they look up, what they keep, and that nobody can tell from the output."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.checkpoint import ModelError
from engine.decode import Generation
from engine.drafters import Drafter
from engine.drafters.jacobi import GRAM, JacobiDrafter, Pool
from engine.drafters.past import LONGEST, Past
from engine.drafters.retrieval import Documents, RetrievalDrafter, load_documents
from engine.drafters.suffix import SuffixDrafter
from engine.drafters.votes import NOTHING, hang_votes
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.types import GenerationRequest, InvalidRequest, SamplingParams
from tests import exact
from tests.exact import Tokens, differences, make_requests, run

TOKENS = 24
SEEKING = [name for name in exact.SPECULATIONS if name.startswith(("suffix", "retrieval", "jacobi"))]
texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def plain(_target: ModelRunner, prompts: list[Tokens]) -> dict[float, list[Generation]]:
    """Plain decoding of three prompts, one that repeats itself among them, by temperature."""
    return {temperature: run(_target, requests(prompts, temperature), batch=1) for temperature in (0.0, 0.8)}


def requests(prompts: list[Tokens], temperature: float) -> list[GenerationRequest]:
    return make_requests([prompts[0], prompts[2][:12] * 3, prompts[4]], temperature, TOKENS)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The confidence of each node below the root, by the tokens that lead to it."""
    return {
        tuple(tree.token[tree.lineage(node)[1:]].tolist()): float(tree.confidence[node]) for node in range(1, tree.size)
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SEEKING)
def test_nobody_can_tell_from_the_output(
    target: ModelRunner,
    draft: ModelRunner,
    prompts: list[Tokens],
    plain: dict[float, list[Generation]],
    name: str,
    temperature: float,
) -> None:
    speculation = exact.SPECULATIONS[name](draft)
    accepted = 0
    for batch in (3, 1):  # what the first run taught the drafter is used in the second
        generations = run(target, requests(prompts, temperature), speculation, batch)
        assert not list(differences(generations, [generation.tokens for generation in plain[temperature]]))
        accepted += sum(generation.accepted for generation in generations)
    assert accepted > 0, "nothing was speculated"


# votes


def voted(rows: Sequence[Sequence[int]], votes: Sequence[float], nodes: int) -> TokenTree:
    tree = TokenTree(9)
    hang_votes(tree, np.asarray(rows, np.int32), np.asarray(votes, np.float32), nodes, np.asarray([1, 0.5], np.float32))
    tree.check()
    return tree


def test_what_most_places_agree_on_is_kept_with_its_share() -> None:
    tree = voted([[1, 2], [3, 4], [1, 5], [1, 2]], [1, 1, 1, 1], 4)
    assert paths(tree) == pytest.approx({(1,): 0.75, (1, 2): 0.5 * 2 / 3, (1, 5): 0.5 / 3, (3,): 0.25})
    assert set(paths(voted([[1, 2], [3, 4], [1, 5], [1, 2]], [1, 9, 1, 1], 2))) == {(3,), (3, 4)}


def test_where_nothing_followed_nothing_is_guessed() -> None:
    assert paths(voted([[1, NOTHING], [NOTHING, NOTHING]], [1, 1], 4)) == {(1,): 1.0}
    assert voted([[NOTHING, NOTHING]], [1], 4).size == 1
    assert voted(np.zeros((0, 2), np.int32).tolist(), [], 4).size == 1


# the past


def matched(whole: Sequence[int], last: Sequence[int]) -> list[int]:
    """At which places of a text the last tokens match, tried one by one: the longest length for each place."""
    lengths = []
    for place in range(len(whole)):
        n = 0
        while n < min(len(last), place + 1, LONGEST) and whole[place - n] == last[-1 - n]:
            n += 1
        lengths.append(n)
    return lengths


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_longest_match_is_found_wherever_it_is(added: list[list[int]], last: list[int]) -> None:
    past = Past(256)
    whole: list[int] = []
    for text in added:
        past.begin()
        past.extend(text)
        whole += [NOTHING, *text]
    past.check()
    places, lengths = past.matches(np.asarray(last, np.int32), 256)
    true = matched(whole[:-1], last)  # behind the last token there is nothing
    longest = max(true)
    assert [true[place] for place in places.tolist()] == lengths.tolist()
    assert max(lengths.tolist(), default=0) == longest
    assert lengths.tolist().count(longest) == (true.count(longest) if longest else 0)
    assert places.tolist() == sorted(places.tolist(), reverse=True)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=100), max_size=8))
def test_the_newest_tokens_are_kept_in_the_same_memory(added: list[list[int]]) -> None:
    past = Past(64)
    for text in added:
        past.extend(text)
        past.begin()
        past.check()
    newest = [token for text in added for token in [*text, NOTHING]][-past.kept :]
    places, _ = past.matches(np.asarray([1], np.int32), 1000)
    assert len(places) == newest[:-1].count(1)
    assert past.follow(places, 1)[:, 0].tolist() == [
        newest[at + 1] for at in range(len(newest) - 1, -1, -1) if newest[at] == 1 and at + 1 < len(newest)
    ]


# suffix decoding


def grown(drafter: SuffixDrafter, session: int, tokens: Sequence[int], prompt: int | None = None) -> TokenTree:
    drafter.open(session, tokens, SamplingParams(), prompt)
    drafter.grow()
    drafter.check()
    return drafter.tree(session)


def test_a_session_s_own_text_is_looked_up_at_once() -> None:
    tree = grown(SuffixDrafter(), 1, [1, 2, 3, 4, 9, 2, 3, 5, 9, 2, 3])
    assert {(5,), (4,), (5, 9), (4, 9)} <= set(paths(tree))
    assert sum(tree.confidence[1 : tree.size][tree.parent[1 : tree.size] == ROOT].tolist()) < 1


def test_an_output_helps_the_sessions_after_it_and_a_prompt_does_not() -> None:
    drafter = SuffixDrafter()
    drafter.open(1, [50, 51], SamplingParams())
    drafter.commit(1, [1, 2, 3, 4])
    assert grown(drafter, 2, [8, 2, 3]).size == 1, "the output is still being written"
    drafter.close(1)
    assert (4,) in paths(grown(drafter, 3, [8, 2, 3]))
    assert grown(drafter, 4, [8, 50]).size == 1
    assert grown(SuffixDrafter(shared=0), 5, [8, 2, 3]).size == 1


def test_a_longer_match_outvotes_a_shorter_one() -> None:
    tree = grown(SuffixDrafter(), 1, [1, 2, 3, 4, 7, 3, 5, 1, 2, 3])
    confidence = paths(tree)
    assert confidence[(4,)] > confidence.get((5,), 0.0)


def test_the_oldest_outputs_are_forgotten() -> None:
    drafter = SuffixDrafter(shared=64)
    for session, first in enumerate(range(0, 1000, 10)):
        drafter.open(session, [5000], SamplingParams())
        drafter.commit(session, range(first, first + 10))
        drafter.close(session)
    assert grown(drafter, 1, [2, 3]).size == 1
    assert (994,) in paths(grown(drafter, 1, [992, 993]))


def test_a_session_opened_again_shares_its_output_once() -> None:
    drafter = SuffixDrafter()
    drafter.open(1, [1], SamplingParams())
    drafter.commit(1, [2, 3])
    drafter.open(1, [1, 2, 3], SamplingParams(), prompt=1)
    drafter.close(1)
    drafter.close(1)
    drafter.open(3, [1, 2, 3], SamplingParams(), prompt=1)  # as after a lost message, under another key
    drafter.close(3)
    assert drafter._shared is not None
    assert drafter._shared._total == 1 + 2
    drafter.open(2, [2], SamplingParams())
    drafter.grow()
    assert paths(drafter.tree(2)) == {(3,): 0.5}


@pytest.mark.parametrize("drafter", [SuffixDrafter(), RetrievalDrafter(Documents([[7, 8]]))])
def test_a_tree_that_was_looked_at_says_so_though_nothing_was_found(drafter: Drafter) -> None:
    """Else who weighs draft steps would take it for one that is not read yet, and learn from what is found alone."""
    drafter.open(1, [1, 2], SamplingParams())
    assert not drafter.tree(1).expanded[ROOT]
    drafter.grow()
    assert (drafter.tree(1).size, bool(drafter.tree(1).expanded[ROOT])) == (1, True)
    drafter.commit(1, [3])
    assert not drafter.tree(1).expanded[ROOT]


# retrieval


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5))
def test_every_place_of_the_longest_match_is_found(added: list[list[int]], last: list[int], count: int) -> None:
    documents = Documents(added)
    documents.check()
    true = matched([token for text in added for token in [NOTHING, *text]], last)
    places = [place for place, n in enumerate(true) if n == max(true)] if max(true) else []
    length, ends = documents.matches(np.asarray(last, np.int32), 1000)
    assert (length, sorted(ends.tolist())) == (max(true), places)
    some = documents.matches(np.asarray(last, np.int32), count)[1].tolist()
    assert len(some) == min(count, len(places)) == len(set(some) & set(places))


def test_documents_say_how_a_text_goes_on() -> None:
    drafter = RetrievalDrafter(Documents([[1, 2, 3, 4], [7, 2, 3, 5], [8, 2, 3, 4, 6]]), depth=2)
    drafter.open(1, [9, 2, 3], SamplingParams())
    assert drafter.grow() == [1]
    assert paths(drafter.tree(1)) == pytest.approx({(4,): 0.5, (4, 6): 0.4375, (5,): 0.25})
    assert drafter.commit(1, [4]).hit
    drafter.grow()
    assert (6,) in paths(drafter.tree(1))
    assert not drafter.commit(1, [77]).hit
    drafter.grow()
    assert drafter.tree(1).size == 1
    drafter.check()


def test_a_deployment_without_documents_guesses_nothing() -> None:
    drafter = RetrievalDrafter(Documents([]))
    drafter.open(1, [1, 1], SamplingParams())
    drafter.grow()
    assert drafter.tree(1).size == 1
    with pytest.raises(InvalidRequest, match="documents: token ids must not be negative"):
        Documents([[1, -1]])


def test_documents_are_read_from_a_file_or_a_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.txt").write_text("def two():", "utf-8")
    (tmp_path / "a.txt").write_text("def é():", "utf-8")
    texts = [tokenizer.decode(tokens) for tokens in load_documents(tmp_path, tokenizer)]
    assert texts == ["def é():", "def two():"]
    assert load_documents(tmp_path / "a.txt", tokenizer) == load_documents(tmp_path, tokenizer)[:1]


def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelError, match="no documents in"):
        load_documents(tmp_path, tokenizer)
    with pytest.raises(ModelError, match="absent can't be read: No such file"):
        load_documents(tmp_path / "absent", tokenizer)
    (tmp_path / "image").write_bytes(b"ab\xff")
    with pytest.raises(ModelError, match="image is not UTF-8 text: byte 2 is wrong"):
        load_documents(tmp_path, tokenizer)


# Jacobi


def follow(drafter: JacobiDrafter, window: Sequence[int], choices: Sequence[int], committed: Sequence[int]) -> None:
    """A step that verified the nodes along `window`, with these choices behind the root and each of them."""
    tree = drafter.tree(1)
    nodes = tree.along(window)
    assert len(nodes) == len(window), "a node to verify is not in the tree"
    drafter.learn(1, tree, np.asarray(nodes, np.int32), choices)
    drafter.commit(1, committed)
    drafter.grow()
    drafter.check()


def test_choices_behind_wrong_guesses_are_the_next_guesses() -> None:
    drafter = JacobiDrafter(length=3)
    drafter.open(1, [5, 6, 7], SamplingParams())
    drafter.grow()
    assert (5, 6, 7) in paths(drafter.tree(1)), "what fills the first guess is the text itself"
    follow(drafter, [5, 6, 7], [20, 21, 22, 23], [20])
    assert (21, 22) in paths(drafter.tree(1)), "the choice behind 7 is for a position beyond the guess"
    third = drafter.tree(1).along([21, 22])
    assert len(third) == 2
    follow(drafter, [21, 22], [21, 22, 30], [21, 22, 30])
    assert (21,) not in paths(drafter.tree(1)), "what is committed is not guessed again"


def test_what_is_not_verified_stays_as_it_was_guessed() -> None:
    drafter = JacobiDrafter(length=3)
    drafter.open(1, [5, 6, 7], SamplingParams())
    drafter.grow()
    follow(drafter, [5], [20, 21], [20])
    assert (21, 7) in paths(drafter.tree(1))
    follow(drafter, [21], [40, -1], [40])  # nothing is allowed behind 21
    assert (7,) in paths(drafter.tree(1))


def test_n_grams_of_the_text_and_of_trajectories_are_looked_up_by_the_last_token() -> None:
    drafter = JacobiDrafter(length=6)
    drafter.open(1, [1, 2, 3, 4, 9, 1], SamplingParams())
    drafter.grow()
    assert (2, 3, 4) in paths(drafter.tree(1))
    guess = list(range(50, 56))
    drafter.open(1, guess, SamplingParams())
    drafter.grow()
    for step in range(GRAM):  # position 5 is guessed anew from one step to the next
        window = max(paths(drafter.tree(1)), key=len)
        follow(drafter, window, [60, *(100 * step + i for i in range(len(window)))], [60])
    trail = [trail for trail in drafter._sessions[1].guess if len(trail) == GRAM]
    assert trail, "no trajectory is as long as an n-gram"
    drafter.commit(1, [trail[0][0]])
    drafter.grow()
    assert trail[0][1:] in paths(drafter.tree(1))


def test_a_pool_keeps_the_latest_n_grams() -> None:
    pool = Pool(2, 3)
    for other in (1, 2, 1, 3, 4):
        pool.add([7, other, other, other])
    assert pool.behind(7) == {(1, 1, 1): 2, (3, 3, 3): 1, (4, 4, 4): 1}
    for first in (8, 7, 9):
        pool.add([first, 1, 1, 1])
        pool.check()
    assert not pool.behind(8)
    assert pool.behind(7)


# audits


def test_audits_find_what_is_wrong() -> None:
    past = Past(64)
    past.extend([1, 2, 3, 1, 2, 3])
    past._before[-1, 5] = 1  # where 2 stands, not 3
    with pytest.raises(AssertionError, match="a link leads to another n-gram"):
        past.check()
    documents = Documents([[3, 1, 2]])
    documents._order[[1, 2]] = documents._order[[2, 1]]
    documents._order[[2, 3]] = documents._order[[3, 2]]
    with pytest.raises(AssertionError, match="out of order"):
        RetrievalDrafter(documents).check()
    drafter = JacobiDrafter()
    drafter.open(1, [1, 2], SamplingParams())
    drafter._sessions[1].last.append(7)
    with pytest.raises(AssertionError, match="the tree is of another text"):
        drafter.check()
