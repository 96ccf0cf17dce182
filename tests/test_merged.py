"""Several drafters' trees as one: what is in it, what confidences are worth, and that nobody can tell by the output."""

from collections.abc import Sequence

import numpy as np
import pytest

from cluster.draft import DraftReplica
from cluster.draft_state import DraftState, resend
from cluster.link import memory_link
from cluster.target import TargetReplica
from engine.decode import Speculation
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.ngram import NgramDrafter
from engine.kv import PoolExhausted
from engine.runner import ModelRunner
from engine.tree import ROOT, Moved, TokenTree
from engine.types import Growth, Open, SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.exact import Make, NonsenseDrafter, Tokens, differences, make_requests, run

REPEATED = [11, 12, 13, 14] * 4


class Told:
    """Implements Drafter: proposes what it is told to, once, below every root."""

    def __init__(self, chains: Sequence[Sequence[tuple[int, float]]]) -> None:
        self.chains = chains
        self.trees: dict[int, TokenTree] = {}

    def open(self, session: int, tokens: Sequence[int], params: SamplingParams, prompt: int | None = None) -> None:
        self.trees[session] = TokenTree(tokens[-1], 16)

    def commit(self, session: int, tokens: Sequence[int]) -> Moved:
        return self.trees[session].commit(tokens)

    def grow(self) -> list[int]:
        for tree in self.trees.values():
            for chain in self.chains:
                node = ROOT
                for token, confidence in chain:
                    node = tree.add(node, token, confidence)
        return list(self.trees)

    def tree(self, session: int) -> TokenTree:
        return self.trees[session]

    def close(self, session: int) -> None:
        self.trees.pop(session, None)

    def check(self) -> None:
        for tree in self.trees.values():
            tree.check()


def confidence(drafter: MergedDrafter, *path: int) -> float:
    tree = drafter.tree(1)
    node = tree.path(path)
    assert node >= 0, f"{path} is not there"
    return float(tree.confidence[node])


def test_a_token_that_two_propose_below_the_same_path_is_one_node() -> None:
    drafter = MergedDrafter([Told([[(5, 0.5), (6, 0.3)]]), Told([[(5, 0.2), (6, 0.4)], [(5, 0.2), (7, 0.1)]])])
    drafter.open(1, [9], SamplingParams())
    assert drafter.grow() == [1]
    tree = drafter.tree(1)
    assert tree.size == 4
    assert confidence(drafter, 5) == pytest.approx(0.5)  # the surer of the two
    assert confidence(drafter, 5, 6) == pytest.approx(0.4)
    assert float(tree.probability[tree.path([5, 6])]) == pytest.approx(0.2)
    drafter.check()


def test_drafters_that_contradict_each_other_share_what_is_certain() -> None:
    drafter = MergedDrafter([Told([[(5, 0.9)]]), Told([[(6, 0.9)]])])
    drafter.open(1, [9], SamplingParams())
    drafter.grow()
    assert [confidence(drafter, 5), confidence(drafter, 6)] == pytest.approx([0.5, 0.5])
    drafter.check()


def test_the_drafter_that_is_right_more_often_gains_weight() -> None:
    drafter = MergedDrafter([Told([[(5, 0.5)]]), Told([[(6, 0.5)]])])
    drafter.open(1, [9], SamplingParams())
    for _ in range(30):
        drafter.grow()
        drafter.commit(1, [6])
    drafter.grow()
    assert confidence(drafter, 6) > 3 * confidence(drafter, 5)
    drafter.open(1, [9], SamplingParams(temperature=1.0))
    drafter.grow()
    assert confidence(drafter, 6) == confidence(drafter, 5), "sampled sessions learn for themselves"


def test_what_others_hung_in_and_was_committed_at_once_is_every_drafters() -> None:
    """Where a target takes turns with it, a commit may come before the drafters take another step."""
    drafter = MergedDrafter([Told([[(5, 0.5)]]), Told([[(6, 0.4)]])])
    drafter.open(1, [9], SamplingParams())
    tree = drafter.tree(1)
    tree.add(tree.add(ROOT, 7, 0.9), 8, 0.8)
    drafter.commit(1, [7])
    assert confidence(drafter, 8) == pytest.approx(0.8, rel=0.02)


def test_growth_is_told_from_a_tree_that_only_grows_between_commits(draft: ModelRunner) -> None:
    """The draft's side sends each node once, though confidences change; after a commit all that is left is known."""
    drafter = MergedDrafter([ModelDrafter(draft), NgramDrafter(), NonsenseDrafter(draft.vocab_size, 1)])
    drafter.open(0, REPEATED, SamplingParams())
    state = DraftState()
    state.received(0, Open(3, tuple(REPEATED), SamplingParams()), 0.0)
    mirror = TokenTree(REPEATED[-1], 512)
    for committed in ([11], [12, 13], [99], [14]):
        for _ in range(3):
            before = drafter.tree(0).token[: drafter.tree(0).size].tolist()
            drafter.grow()
            assert drafter.tree(0).token[: len(before)].tolist() == before
            growth = state.growth(0, drafter.tree(0))
            if growth is not None:
                assert isinstance(growth, Growth)
                mirror.graft([], growth.parents, growth.tokens, growth.confidences)
        tree = drafter.tree(0)
        told = np.flatnonzero(tree.sent[: tree.size])[1:]
        assert len(told) > 8
        for node in told.tolist():
            assert mirror.path(tree.token[tree.lineage(node)[1:]].tolist()) >= 0
        drafter.check()
        mirror.commit(committed)
        drafter.commit(0, committed)
        drafter.check()
        resend(drafter.tree(0))
    drafter.close(0)
    drafter.check()


def test_a_session_that_one_has_no_room_for_is_nobodys(draft: ModelRunner) -> None:
    full = ModelDrafter(draft, Growing(max_nodes=10**6, max_expanded=10**6))
    small = NgramDrafter()
    drafter = MergedDrafter([small, full])
    with pytest.raises(PoolExhausted):
        drafter.open(1, REPEATED, SamplingParams())
    with pytest.raises(KeyError):
        small.tree(1)
    drafter.check()


def test_the_audit_finds_a_node_that_nobody_proposed() -> None:
    drafter = MergedDrafter([Told([[(5, 0.5)]])])
    drafter.open(1, [9], SamplingParams())
    drafter.grow()
    drafter.check()
    drafter.tree(1).add(ROOT, 77, 0.1)
    with pytest.raises(AssertionError, match="no drafter's"):
        drafter.check()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["merged-15", "merged-goodput"])
def test_merged_trees_are_invisible(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], name: str, temperature: float
) -> None:
    requests = make_requests(prompts[:3], temperature, 24)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    generations = run(target, requests, exact.SPECULATIONS[name](draft))
    assert not list(differences(generations, plain))
    assert sum(generation.accepted for generation in generations) > 0


def test_together_they_guess_at_least_as_well_as_the_better_one(target: ModelRunner, draft: ModelRunner) -> None:
    """On repetitive text; a twentieth less would be by chance."""
    prompts = [tuple(exact.load_prompts(2)[1][:40]) * 2, exact.load_prompts(1)[0]]
    requests = make_requests(prompts, 0.0, 48)

    def steps(make: Make) -> int:
        return sum(generation.steps for generation in run(target, requests, make(draft)))

    model = steps(lambda runner: Speculation(ModelDrafter(runner, Growing(lookup=0)), FixedTree(10), 2))
    ngram = steps(lambda runner: Speculation(NgramDrafter(), FixedTree(10), 2))
    both = steps(
        lambda runner: Speculation(
            MergedDrafter([ModelDrafter(runner, Growing(lookup=0)), NgramDrafter()]), FixedTree(10), 2
        )
    )
    assert both <= 1.05 * min(model, ngram), (both, model, ngram)


@pytest.mark.parametrize("name", ["merged-15", "cascade-15", "translated-15"])
def test_replicas_draft_with_them(target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], name: str) -> None:
    """What is told to a target's mirror is told from their trees."""
    requests = make_requests(prompts[:2], 0.0, 16)
    plain = [generation.tokens for generation in run(target, requests, batch=1)]
    replica = TargetReplica(target, FixedTree(15))
    drafting = DraftReplica(exact.SPECULATIONS[name](draft).drafter)
    down, up = memory_link()
    drafting.add_link(up)
    replica.add_link(down)
    exact.serve_until_accepted(replica, requests, plain)
    assert replica.wait_idle(60.0)
    replica.check()
    replica.close()
    drafting.check()
    drafting.close()
