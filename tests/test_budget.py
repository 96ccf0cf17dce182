"""What is verified: calibration, cost, the windows, and how long a miss may wait."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import _MEMORY, _PROBE_EVERY, Calibration, CostModel, GoodputWindow, Patience, Window, _cell
from engine.step import MAX_WINDOW
from engine.tree import ROOT, TokenTree
from engine.types import IntArray
from engine.windows import Bandit, ConfidenceThreshold, FixedChain, FixedTree, Heuristic
from tests.rows import chain

FREE = {1: 10.0, 1000: 10.001}  # milliseconds by rows: verifying costs nothing
STEEP = {1: 10.0, 2: 1000.0}


def costs(first: dict[int, float]) -> CostModel:
    model = CostModel()
    for rows, milliseconds in first.items():
        model.start(rows, milliseconds)
    return model


def star(*confidences: float) -> TokenTree:
    """Children of the root."""
    tree = TokenTree(0, len(confidences) + 1)
    for token, confidence in enumerate(confidences):
        tree.add(ROOT, token, confidence)
    return tree


def nodes(*indices: int) -> IntArray:
    return np.asarray(indices, np.int32)


trees = st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1, width=32)), max_size=100).map(
    lambda made: planted([(parent, confidence) for parent, confidence in made])
)


def planted(made: Sequence[tuple[int, float]]) -> TokenTree:
    """Each node hangs below an earlier one."""
    tree = TokenTree(0, len(made) + 1)
    for token, (parent, confidence) in enumerate(made):
        tree.add(parent % tree.size, token, confidence)
    return tree


# calibration


def test_before_anything_was_seen_the_confidence_is_believed() -> None:
    tree = star(0.05, 0.5, 0.95)
    assert Calibration().paths(tree).tolist() == pytest.approx([1.0, 0.05, 0.5, 0.95])


def test_the_rate_that_was_seen_replaces_the_confidence() -> None:
    calibration, tree = Calibration(), star(0.9, 0.1)
    for step in range(1000):
        calibration.observe(tree, nodes(1, 2), [1] if step % 4 == 0 else [2])
    assert calibration.paths(tree).tolist() == pytest.approx([1.0, 0.25, 0.75], abs=0.02)


def test_confidences_and_depths_are_calibrated_apart() -> None:
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe(star(0.9), nodes(1), [])
    assert calibration.paths(star(0.5))[1] == pytest.approx(0.5)
    assert calibration.paths(chain(0.5, 0.9))[2] == pytest.approx(0.45)


@pytest.mark.parametrize("other", [0.95, 0.98, 0.995])
def test_the_surest_are_calibrated_apart_from_the_nearly_sure(other: float) -> None:
    calibration = Calibration()
    for step in range(1000):
        calibration.observe(star(0.9995), nodes(1), [1])
        calibration.observe(star(other), nodes(1), [1] if step % 2 else [])
    assert calibration.paths(star(0.9995))[1] > 0.99
    assert calibration.paths(star(other))[1] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("confidence", [0.0, 1.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("depth", [0, 1, 1000])
def test_every_confidence_has_a_cell(confidence: float, depth: int) -> None:
    trials, _ = Calibration().counts(star())
    at, level = _cell(confidence, depth)
    assert 0 <= at < trials.shape[0]
    assert 0 <= level < trials.shape[1]


def test_only_children_of_the_walked_path_were_tried() -> None:
    calibration, tree = Calibration(), chain(0.9, 0.8, 0.7)
    calibration.observe(tree, nodes(1, 2, 3), [1])  # 2 was refused, 3 never looked at
    assert [(round(bin_, 2), rate, trials) for bin_, rate, trials in calibration.table()] == [
        (0.85, 0, 1),
        (0.93, 1, 1),
    ]


def test_what_greedy_trees_teach_is_not_believed_of_others() -> None:
    calibration, greedy, other = Calibration(), star(0.5), star(0.5)
    other.greedy = False
    for _ in range(100):
        calibration.observe(greedy, nodes(1), [1])
        calibration.observe(other, nodes(1), [])
    assert calibration.paths(greedy)[1] > 0.9
    assert calibration.paths(other)[1] < 0.1
    ((_, rate, trials),) = calibration.table()
    assert (rate, trials) == (0.5, 200)


def test_old_trials_are_forgotten() -> None:
    calibration, tree = Calibration(), star(0.5)
    for hit in (True, False):
        for _ in range(3 * int(_MEMORY)):
            calibration.observe(tree, nodes(1), [1] if hit else [])
    ((_, rate, trials),) = calibration.table()
    assert trials <= _MEMORY
    assert rate < 0.1


@given(trees)
def test_a_child_is_never_more_probable_than_its_parent(tree: TokenTree) -> None:
    paths = Calibration().paths(tree)
    assert paths.shape == (tree.size,)
    assert bool((paths[1:] <= paths[tree.parent[1 : tree.size]]).all())
    assert float(paths.min()) >= 0


# cost


def test_costs_before_anything_was_seen_are_equal() -> None:
    assert CostModel().table(5).tolist() == [1.0] * 6


def test_costs_between_measurements_are_interpolated() -> None:
    assert costs({1: 10.0, 3: 20.0}).table(3).tolist() == [10.0, 10.0, 15.0, 20.0]


def test_costs_beyond_the_last_measurement_grow_in_proportion() -> None:
    assert costs({10: 10.0}).table(400)[[10, 20, 400]].tolist() == [10.0, 20.0, 400.0]


def test_rows_cost_what_the_size_costs_that_they_are_called_with() -> None:
    model = CostModel(bucket=lambda rows: -(-rows // 4) * 4)
    model.start(4, 10.0)
    model.observe(7, 30.0)
    assert model.table(8).tolist() == [10.0, *[10.0] * 4, *[30.0] * 4]


def test_one_slow_step_is_noise_and_many_are_not() -> None:
    model = CostModel()
    model.observe(4, 10.0)
    model.observe(4, 20.0)
    assert model.table(4)[4] == pytest.approx(10 * 1.0125**2)  # half of it in what is its own, half in what all share
    for _ in range(200):
        model.observe(4, 20.0)
    assert model.table(4)[4] == pytest.approx(20, rel=0.01)


def test_a_size_that_is_slow_the_first_time_is_noise_too() -> None:
    model = costs({rows: 10 + 0.1 * rows for rows in (16, 20, 24, 32)})
    model.observe(19, 20 * 11.9)
    assert model.table(32)[19] < 2.1 * 11.9
    for _ in range(40):
        model.observe(19, 11.9)
        model.observe(24, 12.4)
    assert model.table(32)[24] == pytest.approx(12.4, rel=0.1)


def test_a_size_beyond_all_others_may_cost_much_less_than_in_proportion() -> None:
    """As on a GPU, where more rows cost next to nothing."""
    model = costs({rows: 10 + 0.005 * rows for rows in (1, 16, 32)})
    for _ in range(20):
        model.observe(256, 11.3)
    assert model.table(256)[256] == pytest.approx(11.3, rel=0.01)
    assert model.table(256)[32] == pytest.approx(10.2, rel=0.01)


def test_small_steps_that_were_slow_do_not_make_larger_ones_look_free() -> None:
    """Steps that verify nothing come after a miss, when everything is cold: rare and slow."""
    model = costs({2: 5.0, 8: 8.0, 16: 12.0})
    for step in range(100):
        model.observe(8, 8.0)
        model.observe(16, 12.0)
        if step % 20 == 0:
            model.observe(2, 15.0)
    assert model.table(16)[2] <= model.table(16)[8] < 9
    assert model.table(16)[16] - model.table(16)[8] > 3


def test_a_machine_that_became_slower_is_slower_at_all_sizes() -> None:
    model = costs({1: 10.0, 8: 12.0})
    for _ in range(200):
        model.observe(1, 20.0)
    assert model.table(8)[8] == pytest.approx(24, rel=0.01)


def test_a_clock_that_stands_still_says_nothing() -> None:
    model = costs({1: 10.0})
    for rows in (1, 2, 1):
        model.observe(rows, 0.0)
    assert model.table(1)[1] == 10.0


def test_sizes_seen_rarely_follow_a_machine_that_became_slower() -> None:
    """What they cost over others was learned before, and still holds."""
    model = costs({1: 10.0, 8: 12.0, 16: 14.0})
    for _ in range(200):
        model.observe(1, 10.0)
        model.observe(8, 18.0)
    for _ in range(300):
        model.observe(8, 36.0)
    assert model.table(16)[[1, 8]] == pytest.approx([20, 36], rel=0.1)


@given(st.dictionaries(st.integers(1, 100), st.floats(0.01, 1000), max_size=6), st.integers(0, 300))
def test_costs_never_fall_with_the_rows(seen: dict[int, float], rows: int) -> None:
    model = CostModel()
    for row, milliseconds in seen.items():
        model.observe(row, milliseconds)
    table = model.table(rows)
    assert table.shape == (rows + 1,)
    assert bool((np.diff(table) >= 0).all())
    assert float(table.min()) > 0


# windows

WINDOWS: list[Window] = [
    FixedChain(1),
    FixedChain(5),
    FixedChain(1000),
    FixedTree(1),
    FixedTree(12),
    FixedTree(1000),
    Heuristic(1000),
    ConfidenceThreshold(1000),
    Bandit(costs({1: 10.0, 8: 11.0, 64: 30.0}), 1000),
    GoodputWindow(Calibration(), costs(FREE), max_nodes=10_000),
    GoodputWindow(Calibration(), costs({1: 10.0, 8: 11.0, 64: 30.0})),
]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: type(window).__name__)
@given(st.lists(trees, max_size=3))
def test_a_window_is_a_tree_below_the_root_in_index_order(window: Window, grown: list[TokenTree]) -> None:
    chosen = window.choose(grown)
    assert len(chosen) == len(grown)
    for tree, picked in zip(grown, chosen, strict=True):
        indices = picked.tolist()
        assert picked.dtype == np.int32
        assert indices == sorted(set(indices))
        assert len(indices) <= MAX_WINDOW
        assert all(0 < node < tree.size for node in indices)
        assert {int(tree.parent[node]) for node in indices} <= {ROOT, *indices}, "a parent is missing"


def test_a_fixed_chain_follows_the_most_confident_children() -> None:
    tree = planted([(0, 0.2), (0, 0.7), (2, 0.1), (2, 0.6), (1, 0.9)])
    assert FixedChain(5).choose([tree])[0].tolist() == [2, 4]
    assert FixedChain(1).choose([tree])[0].tolist() == [2]


def test_a_fixed_tree_takes_the_most_probable_nodes() -> None:
    tree = planted([(0, 0.2), (0, 0.7), (2, 0.1), (2, 0.6), (1, 0.9)])
    assert FixedTree(3).choose([tree])[0].tolist() == [1, 2, 4]


def test_goodput_takes_everything_that_is_free() -> None:
    window = GoodputWindow(Calibration(), costs(FREE))
    assert len(window.choose([chain(*[0.9] * 20)])[0]) == 20


def test_goodput_takes_nothing_that_costs_more_than_it_earns() -> None:
    window = GoodputWindow(Calibration(), costs(STEEP))
    assert len(window.choose([chain(*[0.9] * 20)])[0]) == 0


def test_goodput_takes_nothing_that_earns_nothing() -> None:
    assert len(GoodputWindow(Calibration(), costs(FREE)).choose([star(*[0.0] * 20)])[0]) == 0


def test_goodput_stops_where_the_next_node_does_not_pay() -> None:
    """A row costs a tenth of a step: a node pays while its probability is above a tenth of (tokens per step) / (cost)."""
    window = GoodputWindow(Calibration(), costs({1: 10.0, 101: 110.0}))
    assert window.choose([star(0.4, 0.3, 0.2, 0.05, 0.04)])[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("sequences", "row_ms", "least"), [(1, 1.0, 0.1), (4, 1.0, 0.4), (4, 0.0, 0.0), (20, 1.0, 2.0)]
)
def test_what_costs_more_than_it_earns_is_known_beforehand(sequences: int, row_ms: float, least: float) -> None:
    """A step of 10 ms brings a token to each sequence: a row of 1 ms has to bring a tenth of these."""
    cost = costs({sequences: 10.0, sequences + 100: 10.0 + 100 * row_ms})
    window = GoodputWindow(Calibration(), cost)
    assert window.least(sequences) == pytest.approx(least, rel=1e-3)
    for confidence in (least + 0.1, least - 0.1):
        if 0 < confidence <= 1:
            alone = [star() for _ in range(sequences - 1)]
            assert (len(window.choose([star(confidence), *alone])[0]) == 1) == (confidence > least)


def test_time_between_steps_makes_larger_windows_pay() -> None:
    tree = star(0.4, 0.3, 0.2, 0.05, 0.04)
    sizes = [
        len(GoodputWindow(Calibration(), costs({1: 10.0, 101: 110.0}), overhead_ms=overhead).choose([tree])[0])
        for overhead in (0.0, 30.0, 1000.0)
    ]
    assert sizes == [3, 4, 5]


@pytest.mark.parametrize("confidence", [0.5, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_goodput_never_takes_more_than_it_may(confidence: float, count: int) -> None:
    """Also where many nodes are equally probable."""
    window = GoodputWindow(Calibration(), costs(FREE), max_nodes=9)
    chosen = window.choose([star(*[confidence] * 40) for _ in range(count)])
    assert sum(len(picked) for picked in chosen) == 9


def test_goodput_shares_the_window_by_probability() -> None:
    window = GoodputWindow(Calibration(), costs(FREE), max_nodes=4)
    chosen = window.choose([star(0.9, 0.1, 0.1), star(0.8, 0.7, 0.6, 0.5, 0.4, 0.1)])
    assert [picked.tolist() for picked in chosen] == [[1], [1, 2, 3, 4, 5]]


def test_goodput_takes_three_of_each_of_many() -> None:
    window = GoodputWindow(Calibration(), costs(FREE), max_nodes=4)
    chosen = window.choose([star(*[0.5] * 8) for _ in range(20)])
    assert sum(len(picked) for picked in chosen) == window.most(20) == 60


def with_further(rows_ms: float, further_ms: float) -> CostModel:
    """A step of 5 ms, which each row and each further sequence add so much to."""
    model = costs({rows: 5 + rows_ms * rows for rows in (1, 16, 32)})
    model.start_further(16, 5 + rows_ms * 16 + further_ms * 15)
    return model


def test_each_further_sequence_takes_what_was_measured() -> None:
    model = with_further(0.1, 0.3)
    assert model.verifying(1, 8) == pytest.approx(model.table(9)[1:])
    assert model.verifying(10, 4) == pytest.approx([5 + 0.1 * rows + 0.3 * 9 for rows in range(10, 15)])
    assert model.milliseconds(14, 10) == pytest.approx(5 + 1.4 + 2.7)
    assert model.again().milliseconds(14, 10) == model.milliseconds(14, 10)


def test_what_each_sequence_takes_is_learned_apart_from_its_rows() -> None:
    """Contexts become longer: many sequences take longer, one of them hardly does, and a further row still takes as long."""
    model = with_further(0.1, 0.2)
    for step in range(600):
        rows = 64 + 16 * (step % 5)
        model.observe(rows, 5 + 0.1 * rows + 0.4 * 63, 64)
        model.observe(4, 5.4)
    for rows in (64, 96, 128):
        assert model.milliseconds(rows, 64) == pytest.approx(5 + 0.1 * rows + 0.4 * 63, rel=0.03)
    assert model.milliseconds(4, 1) == pytest.approx(5.4, rel=0.03)
    assert model.milliseconds(128, 64) - model.milliseconds(64, 64) == pytest.approx(6.4, rel=0.25)


def test_goodput_verifies_where_sequences_are_dear_and_rows_are_not() -> None:
    """A step of 64 sequences takes 30 ms and each row of it 0.1: guesses that are right half of the time pay."""
    window = GoodputWindow(Calibration(), with_further(0.1, 0.3))
    for _ in range(100):  # nothing else was seen so far
        window.cost.observe(64, 5 + 6.4 + 18.9, 64)
    assert sum(len(picked) for picked in window.choose([star(0.5) for _ in range(64)])) == 64


def test_a_size_beyond_all_others_takes_no_less_than_those() -> None:
    """Where sequences were taken to be dearer than they are, nothing would be left for the rows."""
    model = with_further(0.1, 3.0)
    model.observe(64, 20.0, 64)
    assert model.table(64)[64] >= model.table(32)[32]


def test_goodput_looks_now_and_then_whether_speculation_pays_again() -> None:
    window = GoodputWindow(Calibration(), costs(STEEP))
    sizes = [len(window.choose([star(*[0.1] * 30)])[0]) for _ in range(3 * _PROBE_EVERY)]
    assert max(sizes) == 1
    assert sum(sizes) == 3


@pytest.mark.parametrize("empty", [0, 1])
def test_goodput_looks_also_where_only_every_other_step_finds_something(empty: int) -> None:
    window = GoodputWindow(Calibration(), costs(STEEP))
    trees = [star(0.1) if step % 2 != empty else TokenTree(0, 1) for step in range(6 * _PROBE_EVERY)]
    assert sum(len(window.choose([tree])[0]) for tree in trees) == 3


def test_goodput_learns_that_a_confident_draft_is_wrong() -> None:
    window = GoodputWindow(Calibration(), costs({1: 10.0, 101: 110.0}))
    tree = star(0.95)
    assert len(window.choose([tree])[0]) == 1
    for _ in range(300):
        window.observe(tree, nodes(1), [])
    assert len(window.choose([tree])[0]) == 0


def test_a_choice_says_what_it_expects() -> None:
    window = GoodputWindow(Calibration(), costs({1: 10.0, 101: 110.0}))
    assert window.explain() is None
    window.choose([star(0.4, 0.3, 0.2, 0.05, 0.04)])
    choice = window.explain()
    assert choice is not None
    assert (choice.sequences, choice.nodes) == (1, 3)
    assert choice.accepted == pytest.approx(0.9, abs=1e-3)
    assert (choice.milliseconds, choice.alone_ms) == pytest.approx((13.0, 10.0))
    assert str(choice) == "3 draft tokens: 1.90 tokens expected in 13.0 ms, 1 in 10.0 ms without"
    fixed: Window = FixedTree(3)
    assert fixed.explain() is None


# patience


def fed(reaction_s: float, arrived: bool = True) -> Patience:
    """Tokens of 10 ms; after a wait one draft token is accepted; growth takes `reaction_s`."""
    patience = Patience()
    for _ in range(100):
        patience.stepped(0.01, 1, 0, verified=False)
        patience.waited(reaction_s, arrived)
        patience.stepped(0.01, 2, 1, verified=True)
    return patience


def test_without_any_experience_nobody_waits() -> None:
    assert Patience().limit_s() == 0


def test_growth_that_comes_soon_is_waited_for_but_never_long() -> None:
    assert 0 < fed(reaction_s=0.001).limit_s() <= 0.02


@pytest.mark.parametrize(("reaction_s", "arrived"), [(0.02, True), (0.02, False)])
def test_growth_that_comes_late_or_never_is_only_looked_for_now_and_then(reaction_s: float, arrived: bool) -> None:
    patience = fed(reaction_s, arrived)
    limits = [patience.limit_s() for _ in range(32)]
    assert sum(limit > 0 for limit in limits) == 4
    assert max(limits) <= 0.01


@pytest.mark.parametrize("arrived", [True, False])
def test_growth_that_is_never_right_is_looked_for_more_and_more_rarely(arrived: bool) -> None:
    patience = Patience()
    looks = 0
    for _ in range(5000):
        patience.stepped(0.01, 1, 0, verified=arrived)
        if patience.limit_s() > 0:
            looks += 1
            patience.waited(0.01, arrived)
    assert 5 <= looks <= 15
    patience.stepped(0.01, 2, 1, verified=True)  # something was right after all
    assert sum(patience.limit_s() > 0 for _ in range(32)) == 4


def test_a_draft_that_became_quick_is_waited_for_again() -> None:
    patience = fed(0.02, arrived=False)
    for _ in range(100):
        patience.waited(0.001, arrived=True)
        patience.stepped(0.01, 2, 1, verified=True)
    assert patience.limit_s() > 0
    assert patience.limit_s() > 0


def test_one_wait_in_vain_ends_no_others_and_several_in_a_row_do() -> None:
    patience = fed(reaction_s=0.003)
    patience.waited(patience.limit_s(), arrived=False)
    assert patience.limit_s() > 0
    for _ in range(10):
        patience.waited(0.02, arrived=False)
        patience.stepped(0.01, 2, 1, verified=True)
    assert sum(patience.limit_s() > 0 for _ in range(32)) == 4


@pytest.mark.parametrize(("in_vain", "fewest", "most"), [(0.1, 900, 1000), (0.4, 0, 400), (0.5, 0, 40)])
def test_waits_that_are_often_in_vain_are_given_up(in_vain: float, fewest: int, most: int) -> None:
    """Of 1,000 misses; also where growth that does come is there at once, so that waits seem short."""
    chance = Random(1)
    patience = fed(reaction_s=0.00005)
    waits = 0
    for _ in range(1000):
        limit = patience.limit_s()
        arrived = limit > 0 and chance.random() >= in_vain
        if limit > 0:
            waits += 1
            patience.waited(0.00005 if arrived else limit, arrived)
        patience.stepped(0.01, 1 + arrived, int(arrived), verified=arrived)
    assert fewest <= waits <= most
