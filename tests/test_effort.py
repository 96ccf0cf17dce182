"""How much is drafted where drafter and target take turns: by costs that are given as numbers."""

import numpy as np
import pytest

from engine.automatic import GROWING, taking_turns
from engine.budget import Calibration, CostModel
from engine.decode import decode_steps
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.votes import NOTHING
from engine.effort import EffortWindow, draft_steps
from engine.runner import ModelRunner
from engine.tree import ROOT, TokenTree
from engine.types import GenerationRequest, SamplingParams

TARGET_MS, DRAFT_MS = 10.0, 2.0


class World:
    """One sequence, a clock that goes by given costs, and a drafter whose guesses are right with a given probability."""

    def __init__(self, right: float, seed: int = 0, guess: float = DRAFT_MS) -> None:
        self.right = right  # of each draft token, which the drafter knows
        self.now = 0.0  # seconds
        self.tokens = self.drafted = self.steps = 0
        cost = CostModel()
        for rows, milliseconds in ((1, TARGET_MS), (32, TARGET_MS + 3.1)):  # 0.1 ms a row
            cost.start(rows, milliseconds)
        self.window = EffortWindow(Calibration(), cost, guess, rows=1, clock=lambda: self.now)
        self.rng = np.random.default_rng(seed)
        self.tree = TokenTree(0)

    def turn(self) -> int:
        """Draft steps as long as they pay, a target step, a commit; the number of draft steps."""
        drafted = 0
        while drafted < 8 and self.window.pays([self.tree]):
            [node] = self.tree.frontier(1, 100)
            self.tree.expand([node], np.ones((1, 1), np.int32), np.full((1, 1), self.right, np.float32))
            self.now += DRAFT_MS / 1000
            self.window.grew([self.tree])
            drafted += 1
        self.window.drafted()
        [nodes] = self.window.choose([self.tree])
        self.now += (TARGET_MS + 0.1 * len(nodes)) / 1000
        path: list[int] = []
        for node in nodes.tolist():
            if self.rng.random() >= self.right:
                break
            path.append(node)
        self.window.observe(self.tree, nodes, path)
        self.window.stepped(1 + len(nodes), 1 + len(path))
        self.tree.reset(0)
        self.tokens, self.drafted, self.steps = self.tokens + 1 + len(path), self.drafted + drafted, self.steps + 1
        return drafted

    def turns(self, count: int) -> list[int]:
        return [self.turn() for _ in range(count)]


def best_chain(right: float) -> float:
    """Tokens per millisecond of the best fixed number of draft steps."""
    return max(sum(right**depth for depth in range(n + 1)) / (TARGET_MS + n * (DRAFT_MS + 0.1)) for n in range(9))


@pytest.mark.parametrize("right", [0.05, 0.6, 0.95])
def test_as_fast_as_the_best_fixed_number_of_draft_steps(right: float) -> None:
    world = World(right)
    world.turns(200)
    tokens, began = world.tokens, world.now
    world.turns(1000)
    rate = (world.tokens - tokens) / (1000 * (world.now - began))
    assert rate > max(0.97 * best_chain(right), 0.98 / TARGET_MS)


def test_better_guesses_are_drafted_deeper() -> None:
    depths = []
    for right in (0.3, 0.7, 0.95):
        world = World(right)
        world.turns(200)
        depths.append(np.mean(world.turns(300)))
    assert depths[0] <= 1 < depths[1] < depths[2]


def test_drafting_rests_where_it_does_not_pay_and_looks_cost_less_than_a_hundredth() -> None:
    world = World(0.02)
    world.turns(100)
    drafted, began = world.drafted, world.now
    world.turns(3000)
    looks = world.drafted - drafted
    assert looks > 3, "it never looks again"
    assert looks * DRAFT_MS < 0.01 * 1000 * (world.now - began)


def test_drafting_comes_back_when_it_pays_again() -> None:
    world = World(0.02)
    world.turns(500)
    world.right = 0.95
    until = next(turn for turn in range(3000) if sum(world.turns(10)) >= 20)
    assert until < 300


def test_what_lookup_has_already_is_not_drafted() -> None:
    """A chain that is nearly sure leaves nothing to draft for; where it is known to end, its end is drafted on."""
    world = World(0.8)
    world.turns(200)
    node = ROOT
    for token in range(8):
        node = world.tree.add(node, token, 0.99)
    assert not world.window.pays([world.tree])


def test_a_surer_draft_drafts_where_something_was_looked_up() -> None:
    """Step by step it adds little to what is there; many steps in a row would put a better chain in its place."""
    world = World(0.97)
    world.turns(200)
    node = ROOT
    for token in range(8):
        node = world.tree.add(node, token, 0.5)
    assert world.window.pays([world.tree])


def test_a_slower_draft_drafts_less() -> None:
    def depth(draft_ms: float) -> float:
        world = World(0.8)
        world.turns(100)
        for steps in range(1, 9):
            world.window.drafting(1).start(steps, steps * draft_ms)
        count = 0
        while count < 8 and world.window.pays([world.tree]):
            [node] = world.tree.frontier(1, 100)
            world.tree.expand([node], np.ones((1, 1), np.int32), np.full((1, 1), 0.8, np.float32))
            count += 1
        return count

    assert depth(0.1) > depth(2.0) > depth(20.0) == 0


@pytest.mark.parametrize("guess", [0.2, 6.0])
def test_what_draft_steps_cost_is_learned_from_any_guess(guess: float) -> None:
    """Also where there are always many of them: their number says what one takes."""
    world = World(0.95, guess=guess)
    world.turns(1000)
    costs = world.window.drafting(1).table(8)
    assert costs[1:] == pytest.approx(DRAFT_MS * np.arange(1, 9), rel=0.25)


def test_draft_steps_that_grow_many_trees_have_costs_of_their_own() -> None:
    world = World(0.95)
    world.turns(300)
    alone = world.window.drafting(1).table(1)[1]
    trees = [TokenTree(0) for _ in range(40)]
    for _ in range(300):
        world.window.pays(trees)
        world.now += 20 * DRAFT_MS / 1000
        world.window.grew(trees)
        world.window.drafted()
        world.now += TARGET_MS / 1000
        world.window.stepped(40, 40)
    assert world.window.drafting(40).table(1)[1] == pytest.approx(20 * DRAFT_MS, rel=0.1)
    assert world.window.drafting(1).table(1)[1] == alone == pytest.approx(DRAFT_MS, rel=0.1)


def test_a_draft_that_has_much_to_read_first_has_to_bring_more() -> None:
    """What reading takes is learned from turns that began with it."""
    world = World(0.8)
    world.turns(200)
    for _ in range(200):
        stakes = world.window.stakes(world.tree, 12)
        world.now += (2 * DRAFT_MS + 10 * 0.5) / 1000
        world.window.grew_on(2, stakes.covered, stakes.reached, 12)
        world.window._begin(world.now)
    assert world.window.behind_ms == pytest.approx(0.5, rel=0.1)
    assert world.window.drafting(1).table(2)[2] == pytest.approx(2 * DRAFT_MS, rel=0.1)
    assert world.window.stakes(world.tree, 2).costs[2] == 0
    assert world.window.stakes(world.tree, 12).costs[2] == pytest.approx(5, rel=0.1)


def test_reading_a_long_prefix_says_nothing_about_the_drafter() -> None:
    world = World(0.8)
    share = world.window.share
    for _ in range(10):
        world.window.pays([world.tree])
        world.window.grew([world.tree])  # nothing was expanded
    assert world.window.share == share


def test_an_earlier_output_is_known_to_the_next_session(draft: ModelRunner) -> None:
    prompt, answer = [5, 6, 7], [11, 12, 13, 14, 15, 16]
    for growing, guessed in ((GROWING, True), (Growing(), False)):
        drafter = ModelDrafter(draft, growing)
        for session in range(20):  # lookups have to earn their trust
            drafter.open(session, [*prompt, *answer[:1]], SamplingParams(), len(prompt))
            for token in answer[1:]:
                drafter.commit(session, [token])
            drafter.close(session)
        drafter.open(20, [*prompt, *answer[:2]], SamplingParams(), len(prompt))
        tree = drafter.tree(20)
        assert (tree.path(answer[2:]) > 0) is guessed
        drafter.close(20)
        drafter.check()


def test_a_session_that_is_opened_again_shares_its_text_once(draft: ModelRunner) -> None:
    drafter = ModelDrafter(draft, GROWING)
    drafter.open(0, [1, 2, 3], SamplingParams(), 1)
    drafter.commit(0, [4, 5])
    drafter.open(0, [1, 2, 3, 4, 5], SamplingParams(), 1)
    drafter.commit(0, [6])
    drafter.close(0)
    drafter.open(1, [1, 2, 3, 4, 5, 6], SamplingParams(), 1)
    drafter.close(1)
    assert drafter._shared is not None
    assert [token for token in drafter._shared._tokens[:6].tolist() if token != NOTHING] == [4, 5, 6]
    assert drafter._shared._total == 2 + 2 + 1, "more than the two texts"


def test_a_drafter_that_expands_nothing_is_learned_from_and_rests_too() -> None:
    """As lookup: its trees grow, but none of their nodes is marked as expanded."""

    class Looking:
        """Guesses one token after each commit, for nothing."""

        def __init__(self, tree: TokenTree) -> None:
            self.shown = tree
            self.asked = 0

        def tree(self, session: int) -> TokenTree:
            return self.shown

        def grow(self) -> list[int]:
            self.asked += 1
            return [0] if self.shown.size == 1 and self.shown.add(ROOT, 1, 0.3) > 0 else []

    world = World(0.8, guess=0.001)
    drafter = Looking(world.tree)
    for _ in range(300):
        before = drafter.asked
        draft_steps(drafter, [0], 16, world.window)  # type: ignore[arg-type]  # two methods of a Drafter are enough
        assert drafter.asked - before <= 2, "it is asked again though it has nothing more"
        [nodes] = world.window.choose([world.tree])
        world.now += TARGET_MS / 1000
        world.window.observe(world.tree, nodes, [])
        world.window.stepped(1 + len(nodes), 1)
        world.tree.reset(0)
    assert world.window.share < 0.5, "what its guesses are worth was not learned"


def test_a_step_that_failed_ends_its_draft_steps_too() -> None:
    world = World(0.95)
    world.turns(100)
    for _ in range(4):
        drafted = 0
        while drafted < 12 and world.window.pays([world.tree]):
            [node] = world.tree.frontier(1, 100)
            world.tree.expand([node], np.ones((1, 1), np.int32), np.full((1, 1), 0.95, np.float32))
            world.window.grew([world.tree])
            drafted += 1
        assert drafted > 2
        world.window.drafted()
        world.window.ended([], [])
        assert world.window._draft_steps == 0
        world.tree.reset(0)


def test_steps_that_read_a_prompt_say_nothing_of_what_drafting_costs(target: ModelRunner, draft: ModelRunner) -> None:
    """One sequence decodes while another's long prompt is read: the draft steps of each turn end with it."""
    speculation = taking_turns(draft, CostModel(), 0.1)
    effort = speculation.effort
    assert effort is not None
    prompts = [(5, 6, 7), tuple(range(100, 900))]
    requests = [GenerationRequest(str(n), prompt, SamplingParams(max_tokens=12)) for n, prompt in enumerate(prompts)]
    mixed = 0
    for _, outcome in decode_steps(target, requests, speculation):
        assert effort._draft_steps == 0, "draft steps of an earlier turn are counted in this one"
        mixed += not outcome.decoded
    assert mixed > 5
