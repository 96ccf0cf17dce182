"""The simulator: what can be computed by hand comes out of it, and what was measured nearly does."""

import json
import math
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.draft_state import MOST_TOLD
from cluster.simulation.clock import Clock
from cluster.simulation.costs import Costs, Roofline, measured_times, parse_times
from cluster.simulation.fleet import Fleet, Mode, simulate
from cluster.simulation.measured import check, load_measured, measured_plan
from cluster.simulation.plan import Plan, compare, drafts_needed, drawn, recorded
from cluster.simulation.script import Acceptance, Script, ScriptedDrafter, draw_scripts, load_scripts, save_scripts
from cluster.simulation.target import Limits
from deployments import cli, simulate_preset
from deployments.simulate_cli import simulate as simulate_command
from deployments.simulate_preset import CHAINS, PUBLISHED, SEQUENTIAL_TPS, costs, fitted_rate, predict, sequential_tps
from engine.budget import GoodputWindow
from engine.drafters.model import Growing
from engine.types import InvalidRequest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED, PROFILE = RESULTS / "pipeline-2026-11-21-compiled-24-layers.json", RESULTS / "profile-2026-11-22.json"
COSTS = Costs(parse_times("10", ""), parse_times("1", ""), latency_ms=0.1)
GUESSES = Acceptance(0.8)
MODES: tuple[Mode, ...] = ("plain", "sequential", "pipelined")


def requests(count: int, rate: float = 0.8, output: int = 96) -> list[Script]:
    return draw_scripts(Acceptance(rate), count, 24, output)


def run(*options: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *options], prog_name="paceline")


def test_what_is_due_sooner_happens_sooner_and_the_rest_in_order() -> None:
    clock, seen = Clock(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.after(when, lambda name=name: seen.append((name, clock.now)))  # type: ignore[misc]
    clock.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


# --- costs


def test_a_roofline_is_flat_until_computing_takes_longer() -> None:
    roofline = Roofline(billions=70, gb_per_s=7000, tflops=2000, fixed_ms=1)
    times = roofline.times().table(1024)
    assert times[1] == times[128] == pytest.approx(21)
    assert times[1024] == pytest.approx(1 + 2 * 70 * 1024 / 2000, rel=0.001)


@pytest.mark.parametrize(
    ("text", "rows", "milliseconds"), [("18.3", 500, 18.3), ("1:10,11:20", 6, 15), ("1:10,11:20", 22, 40)]
)
def test_times_are_interpolated_and_grow_in_proportion_beyond(text: str, rows: int, milliseconds: float) -> None:
    assert parse_times(text, "x").table(rows)[rows] == pytest.approx(milliseconds)


@pytest.mark.parametrize("rows", ["0.5", "2.9", "1e300"])
def test_rows_are_whole(rows: str) -> None:
    with pytest.raises(InvalidRequest, match="x: rows must be whole numbers between 1 and"):
        parse_times(f"{rows}:3", "x")


@pytest.mark.parametrize("text", ["1e300", "1e-300", "1:5,64:1e9", "roofline:70,1e-9,1978", "roofline:1e-300,1,1"])
def test_times_that_no_step_takes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x: times must be between"):
        parse_times(text, "x")


@pytest.mark.parametrize("name", ["overhead_ms", "latency_ms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1.0])
def test_so_are_such_latencies(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: must be between 0 and"):
        Costs(COSTS.target, COSTS.draft, **{name: value})


# --- guesses


def test_guesses_are_right_at_the_shares_that_were_asked_for() -> None:
    confidences, right = Acceptance(0.7, (0.5, 0.25), spread=0.5).draw(20_000, np.random.default_rng(0))
    assert np.bincount(right, minlength=4) / len(right) == pytest.approx([0.7, 0.15, 0.075, 0.075], abs=0.01)
    sure = confidences[:, 0] > 0.9
    assert (right[sure] == 0).mean() == pytest.approx(confidences[sure, 0].mean(), abs=0.01)


def test_recorded_requests_are_read_as_they_were_written(tmp_path: Path) -> None:
    [script] = requests(1)
    save_scripts(tmp_path / "profile.json", {"T0": [script]})
    [read] = load_scripts(tmp_path / "profile.json", "T0")
    assert (read.request.prompt, read.output) == (script.request.prompt, script.output)
    assert (read.tokens == script.tokens).all()
    assert read.confidences == pytest.approx(script.confidences, abs=0.001)
    with pytest.raises(InvalidRequest, match="holds no recording of T1"):
        recorded(tmp_path / "profile.json", "T1")


def drafter_with(prompt: int, count: int, growing: Growing, seed: int = 0) -> ScriptedDrafter:
    """Session 0 has read its prompt and grown once; `count` others have just come."""
    scripts = draw_scripts(GUESSES, 1 + count, prompt, 32)
    drafter = ScriptedDrafter(scripts, growing, seed)
    for session, script in enumerate(scripts):
        drafter.open(session, script.request.prompt, script.request.params)
        while drafter.tree(0).expanded.sum() < 2:
            drafter.grow()
    return drafter


def test_half_of_the_rows_are_for_others_while_long_prompts_are_read() -> None:
    drafter = drafter_with(100, 8, Growing(lookup=0))
    for rows in (4, 1):  # tokens 65 to 100 end the prompts; a row for each session but the eight that read
        before = drafter.tree(0).expanded.sum()
        assert set(drafter.grow()) >= set(range(1, 9))
        assert drafter.tree(0).expanded.sum() - before == rows


def test_a_draft_step_reads_so_many_tokens_of_all_prompts() -> None:
    drafter = drafter_with(64, 5, Growing(rows=32, prefill_tokens=128, lookup=0))
    for read in (2, 4, 5):
        drafter.grow()
        assert sum(drafter.tree(session).size > 1 for session in range(1, 6)) == read


def test_a_seed_reaches_wrong_guesses() -> None:
    drafters = [drafter_with(8, 0, Growing(lookup=0), seed) for seed in (0, 0, 1)]
    for drafter in drafters:
        for _ in range(3):
            drafter.grow()
    same, again, other = (drafter.tree(0).token[: drafter.tree(0).size].tolist() for drafter in drafters)
    assert same == again != other
    scripts = requests(3)
    assert len({simulate(Fleet(COSTS, seed=seed), scripts).seconds for seed in range(4)}) > 1


# --- the loop


def test_plain_decoding_takes_a_step_for_each_token() -> None:
    outcome = simulate(Fleet(COSTS, "plain"), requests(3))
    assert outcome.seconds == pytest.approx(3 * 96 * 0.010)
    assert [answer.first_ms for answer in outcome.answers] == pytest.approx([10, 10, 10])


def test_a_step_that_ends_a_prompt_is_no_decoding() -> None:
    stats = simulate(Fleet(COSTS, "plain"), requests(3)).stats
    assert (stats.tokens, stats.decoded, stats.sequence_steps) == (3 * 96, 3 * 95, 3 * 95)
    assert stats.active_s == pytest.approx(3 * 95 * 0.010)


def test_a_chain_takes_its_steps_and_gains_what_its_rate_says() -> None:
    outcome = simulate(Fleet(COSTS, "sequential", chain=3, limits=Limits(prefills=False)), requests(12))
    figures = outcome.figures()
    assert figures["tokens_per_step"] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3, rel=0.05)
    assert outcome.seconds == pytest.approx(outcome.stats.steps * 0.013)


def test_a_pipeline_beats_taking_turns_where_drafting_is_slow() -> None:
    slow = replace(COSTS, draft=parse_times("3", ""))
    modes = compare(Plan(Fleet(slow), drawn(Acceptance(0.9), 16, 96, 0), 4, (1, 2, 3, 5)))
    assert modes["pipelined"]["tps"] > modes["sequential"]["tps"] > modes["plain"]["tps"]


@pytest.mark.parametrize("mode", ["sequential", "pipelined"])
def test_nothing_is_verified_behind_the_last_token(mode: Mode) -> None:
    """Five tokens are four guesses, all of them right, and the target's own."""
    fleet = Fleet(COSTS, mode, chain=8, limits=Limits(prefills=False))
    for script in draw_scripts(Acceptance(0.999, (0.0,), spread=0), 4, 24, 5):
        assert simulate(fleet, [script]).stats.verified <= 4


def test_a_last_token_waits_for_no_guesses() -> None:
    slow = replace(COSTS, draft=parse_times("40", ""))
    assert simulate(Fleet(slow), requests(12, output=2)).stats.wait_s == 0
    assert simulate(Fleet(slow), requests(12, output=3)).stats.wait_s > 0


def test_lookups_have_to_be_worth_a_row_beside_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def least(window: GoodputWindow, sequences: int) -> float:
        seen.append(sequences)
        return 0.0

    monkeypatch.setattr(GoodputWindow, "least", least)
    simulate(Fleet(COSTS), requests(1, output=4))
    assert seen[0] == 1, "it runs while it reads its prompt"


def test_a_useless_draft_costs_little() -> None:
    scripts = draw_scripts(Acceptance(0.01, (0.01,)), 2, 16, 96)
    plain, pipelined = (simulate(Fleet(COSTS, mode), scripts).tps for mode in ("plain", "pipelined"))
    assert pipelined > 0.93 * plain


@pytest.mark.parametrize("streams", [1, 4])
def test_a_draft_ten_times_slower_shrinks_windows_and_holds_hardly_any_token_up(streams: int) -> None:
    slow = replace(COSTS, draft=parse_times("10", ""))
    fleets = Fleet(COSTS, "plain"), Fleet(COSTS), Fleet(slow)
    plain, usual, slowed = (simulate(replace(fleet, streams=streams), requests(32)).figures() for fleet in fleets)
    assert slowed["verified_per_step"] < usual["verified_per_step"] / 2
    assert slowed["itl_ms_p99"] <= 1.2 * plain["itl_ms_p99"]


@pytest.mark.parametrize("warm", [0, 1])
def test_a_draft_is_busy_for_all_of_the_time_at_most(warm: int) -> None:
    endless = replace(COSTS, draft=parse_times("500", ""))
    outcome = simulate(Fleet(endless, warm=warm), requests(1 + warm, output=4))
    assert outcome.draft_busy == pytest.approx(1, abs=0.01)
    assert simulate(Fleet(endless, warm=warm, drafts=2), requests(1 + warm, output=4)).draft_busy <= 0.5


def test_a_slower_link_costs_speed() -> None:
    tps = [simulate(Fleet(replace(COSTS, latency_ms=ms)), requests(3)).tps for ms in (0.1, 4, 30)]
    assert tps == sorted(tps, reverse=True)


def test_streams_that_end_together_share_what_is_left() -> None:
    outcome = simulate(Fleet(COSTS, "plain", streams=2), requests(3, output=8))
    assert [sum(answer.sizes) for answer in outcome.answers] == [8] * 3


@pytest.mark.parametrize("mode", MODES)
def test_everybody_gets_all_tokens_though_pages_run_out(mode: Mode) -> None:
    fleet = Fleet(COSTS, mode, targets=2, streams=4, limits=Limits(kv_tokens=512))
    outcome = simulate(fleet, requests(10, output=64))
    assert [sum(answer.sizes) for answer in outcome.answers] == [64] * 10
    assert outcome.stats.requests == 10
    assert outcome.stats.preempted > 0


def test_two_runs_give_the_same_figures() -> None:
    fleet = Fleet(COSTS, targets=2, drafts=2, rate=8.0)
    assert simulate(fleet, requests(4)).figures() == simulate(fleet, requests(4)).figures()


def test_what_cannot_be_served_is_refused_by_name() -> None:
    long, many = requests(2, output=400), requests(1100, output=2)
    with pytest.raises(InvalidRequest, match="kv_tokens: one request needs 488"):
        simulate(Fleet(COSTS, limits=Limits(kv_tokens=487)), long)
    assert simulate(Fleet(COSTS, limits=Limits(kv_tokens=488)), long).stats.tokens == 800
    with pytest.raises(InvalidRequest, match="rate: too many"):
        simulate(Fleet(COSTS, "plain", rate=1e6), many)
    with pytest.raises(InvalidRequest, match="streams: too many"):
        simulate(Fleet(COSTS, "plain", streams=1100), many)
    for warm, scripts in ((1, long[:1]), (0, [])):
        with pytest.raises(InvalidRequest, match=f"requests: none begins behind the {warm}"):
            simulate(Fleet(COSTS, warm=warm), scripts)


def test_requests_that_come_faster_wait_longer() -> None:
    few, many = (
        simulate(Fleet(COSTS, "plain", rate=rate, limits=Limits(max_batch=2)), requests(12)) for rate in (0.1, 20)
    )
    assert many.figures()["ttft_ms_p50"] > 10 * few.figures()["ttft_ms_p50"]


def test_slow_drafts_are_needed_more_often_than_fast_ones() -> None:
    fleet = Fleet(replace(COSTS, draft=parse_times("0.3", "")))
    slow = replace(fleet, costs=replace(COSTS, draft=parse_times("6", "")))
    needed = [drafts_needed(Plan(each, drawn(GUESSES, 16, 48, 0), 2, ()), [2])[0]["drafts"] for each in (fleet, slow)]
    assert needed == [1, 2]


# --- what was measured


def test_what_the_simulator_says_of_its_own_figures_is_right() -> None:
    """The costs that it finds in figures are those that the figures came from."""
    true = Costs(measured_times({1: 10, 33: 26}), parse_times("1:0.8,8:2", ""), 0.5, 0.1)
    fleet = Fleet(true, growing=Growing(), lookup=8, limits=Limits(prefills=False))
    source = drawn(GUESSES, 16, 64, 0)
    modes = compare(Plan(fleet, source, 12, (2, 4)))
    values = modes["pipelined"] | {
        "plain_tps": modes["plain"]["tps"],
        "sequential_tps_by_k": {str(k): tps for k, tps in modes["sequential"]["tps_by_k"].items()},
        "pipelined_tps": modes["pipelined"]["tps"],
        "draft_step_ms": 1.9,
    }
    rows = {row["figure"]: row["error"] for row in check(measured_plan(values, source, fleet, 12, None), values)}
    assert abs(rows["sequential tokens/s, k = 4"]) < 0.003
    assert abs(rows["pipelined tokens/s"]) < 0.02


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("hit_rate", "acceptance", "tokens_per_step", "pipelined_tps")),
        *(("plain_tps", value) for value in (0, -1, math.nan, 1e300, "99.6", True)),
        ("target_idle", 1),
        ("target_wait", -0.1),
        *(("sequential_tps_by_k", value) for value in ([231.6], {}, {"3": 0}, {"x": 1}, {"64": 1}, {"3": None})),
        ("draft_rows_each", -4),
        ("draft_node_cost", "much"),
    ],
)
def test_what_a_measured_file_lacks_is_named(name: str, value: object, tmp_path: Path) -> None:
    values = json.loads(MEASURED.read_text())
    values["T1"][name] = value
    (tmp_path / "damaged.json").write_text(json.dumps(values))
    result = run("--measured", str(tmp_path / "damaged.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        result.stderr == f"paceline: --measured: {tmp_path}/damaged.json: {name} of T1 is missing or makes no sense\n"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"T0": []}', "7", '["T0"]'])
def test_a_file_of_something_else_is_no_measured_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"x.json was not written by benchmarks/pipeline.py"):
        load_measured(tmp_path / "x.json")


def test_all_that_was_measured_here_can_be_read() -> None:
    files = [file for file in RESULTS.glob("pipeline-*.json") if "sequential_tps_by_k" in file.read_text()]
    assert len(files) > 50
    for file in files:
        assert load_measured(file)


def test_a_draft_step_given_beside_what_was_measured_replaces_it() -> None:
    """By its rows in the pipeline: eight, all of them of the one stream."""
    values, source, fleet = load_measured(MEASURED)["T1"], drawn(GUESSES, 16, 24, 0), Fleet(COSTS)
    for text, milliseconds in (("1:1.3", 1.3), ("1:1,8:2.4", 2.4)):
        costs = measured_plan(values, source, fleet, 1, parse_times(text, "")).fleet.costs
        assert costs.draft_ms(8) == pytest.approx(milliseconds + 0.1)


@pytest.mark.parametrize("name", ["", "-18-layers", "-40-layers-slow-draft"])
@pytest.mark.parametrize("temperature", ["T0", "T1"])
def test_what_was_measured_is_predicted_within_a_tenth(name: str, temperature: str) -> None:
    values = load_measured(RESULTS / f"pipeline-2026-11-29{name}-bf16-xeon.json")[temperature]
    source = recorded(RESULTS / "profile-2026-11-29.json", temperature)
    fleet = Fleet(replace(COSTS, latency_ms=0.1))
    rows = check(measured_plan(values, source, fleet, 8, None), values)
    errors = {row["figure"]: row["error"] for row in rows if "tokens/s" in row["figure"]}
    assert len(errors) == 3
    assert max(map(abs, errors.values())) < 0.1, errors


# --- the command


def test_the_fitted_rate_gives_the_published_speed() -> None:
    given = costs(PUBLISHED[0])
    assert sequential_tps(fitted_rate(given, SEQUENTIAL_TPS), given) == pytest.approx(SEQUENTIAL_TPS)
    assert len(CHAINS) > 2


def test_the_preset_names_what_was_published_and_predicts_plain_decoding() -> None:
    rows = predict(requests=1, prompt=8, output=32, seed=0, limits=Limits())
    assert [row["published"]["pipelined"] for row in rows] == ["255.8", "225-276", "348"]
    assert rows[0]["predicted"]["plain"]["tps"] == pytest.approx(54.7, abs=0.1)


def test_the_pages_have_what_the_preset_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first system: its rounded figures in docs/SIMULATE.md, and what is gained, which README.md has too."""
    monkeypatch.setattr(simulate_preset, "PUBLISHED", PUBLISHED[:1])
    page = (ROOT / "docs" / "SIMULATE.md").read_text()
    assert "`paceline simulate --preset ssd-70b --requests 24`" in page
    line = next(line for line in page.splitlines() if line.startswith("| predicted |"))
    given = {name: each.default for name, each in signature(simulate_command).parameters.items()}
    limits = Limits(kv_tokens=given["kv_tokens"])
    (row,) = predict(24, given["prompt_tokens"], given["output_tokens"], given["seed"], limits)
    tps = {mode: row["predicted"][mode]["tps"] for mode in ("plain", "sequential", "pipelined", "wider")}
    figures = [float(cell.replace("*", "").split("(")[0]) for cell in line.strip("| ").split("|")[1:]]
    assert figures == pytest.approx(list(tps.values()), abs=1)
    gained, wider = (f"{tps[mode] / tps['sequential']:.2f}" for mode in ("pipelined", "wider"))
    assert f"{gained}x" in page
    assert f"{wider}x" in page
    assert f"{gained}, simulated" in (ROOT / "README.md").read_text()


def test_the_command_prints_the_modes_and_writes_them(tmp_path: Path) -> None:
    options = [
        "--requests",
        "2",
        "--output-tokens",
        "32",
        "--chains",
        "2",
        "--fleet",
        "1,2",
        "--json",
        str(tmp_path / "x.json"),
    ]
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "sequential, k = 2" in result.stdout
    assert "drafts needed" in result.stdout
    written = json.loads((tmp_path / "x.json").read_text())
    assert set(written["modes"]) == set(MODES)
    assert [row["targets"] for row in written["fleet"]] == [1, 2]


@pytest.mark.filterwarnings("error")
def test_figures_of_too_few_chunks_are_blank(tmp_path: Path) -> None:
    """Plain decoding has two chunks; where all guesses are right, the others have one."""
    options = "--prompt-tokens 1 --output-tokens 2 --requests 1 --acceptance 0.999 --spread 0 --chains 2"
    result = run(*options.split(), "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 0, result.output
    assert "nan" not in result.stdout
    modes = json.loads((tmp_path / "x.json").read_text())["modes"]
    for name in ("tps_per_stream", "itl_ms_p50", "itl_ms_p99"):
        assert modes["plain"][name] > 0
        assert modes["sequential"][name] is None
    (row,) = (line for line in result.stdout.splitlines() if "inter-token latency" in line)
    assert row.split("\u2502")[3].strip() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "ssd-70b", "--kv-tokens", "300"], "--kv-tokens: one request needs 448"),
        (["--measured", str(MEASURED), "--kv-tokens", "300"], "--kv-tokens: one request needs 448"),
        (["--profile", str(PROFILE), "--kv-tokens", "256"], "--kv-tokens: one request needs 279"),
        (["--rate", "100000", "--requests", "1100", "--output-tokens", "2"], "--rate: too many for these targets"),
        (["--chains", "2,64"], "--chains: must be whole numbers between 1 and 63"),
        (["--target-ms", "0.5:3"], "--target-ms: rows must be whole"),
        (["--draft-ms", "1e300"], "--draft-ms: times must be between"),
        (["--latency-ms", "inf"], "--latency-ms: must be between 0 and"),
        (["--measured", str(MEASURED), "--draft-ms", "-1"], "--draft-ms: all numbers must be positive"),
        (["--measured", str(MEASURED), "--draft-ms", "nan"], "--draft-ms: all numbers must be positive"),
        (["--measured", str(MEASURED), "--draft-ms", "0"], "--draft-ms: all numbers must be positive"),
        (["--measured", str(MEASURED), "--draft-ms", ""], "--draft-ms: '' is no number"),
    ],
)
def test_what_does_not_fit_is_one_line(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"paceline: {message}")
    assert result.stderr.count("\n") == 1


PRESET, MEASURES, RECORDED = ("--preset", "ssd-70b"), ("--measured", str(MEASURED)), ("--profile", str(PROFILE))


@pytest.mark.parametrize(
    ("beside", "others"),
    [
        (PRESET, "--acceptance 0.7 --streams 2 --fleet 1,2 --measured x --draft-ms 1 --overhead-ms 0.5 --told 512"),
        (MEASURES, "--target-ms 9 --streams 2 --window 31 --rows 8 --chains 2 --fleet 1 --rate 1 --temperature 1"),
        (RECORDED, "--prompt-tokens 9 --output-tokens 9 --acceptance 0.7 --following 0.5 --spread 0"),
        ((*MEASURES, *RECORDED), "--prompt-tokens 9 --output-tokens 9 --acceptance 0.7"),
        (("--rate", "2"), "--streams 2"),
    ],
)
def test_options_that_would_do_nothing_are_refused(beside: tuple[str, ...], others: str) -> None:
    """Even where they say what is the default."""
    names = others.split()[::2]
    for name, value in zip(names, others.split()[1::2], strict=True):
        result = run(*beside, name, value)
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert result.stderr == f"paceline: {name}: does nothing beside {beside[-2]}\n"


def test_a_temperature_belongs_to_a_profile() -> None:
    result = run("--temperature", "0")
    assert (result.exit_code, result.stderr) == (2, "paceline: --temperature: does nothing without --profile\n")
    options = ("--temperature", "1", "--requests", "1", "--chains", "1")
    assert run(*RECORDED, *options).exit_code == 0


def test_the_help_says_how_many_requests_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(run("--help").stdout.split())
    assert "4 per stream; 64 with --rate, 12 with --preset, 8 with --measured" in shown


def test_what_is_not_refused_beside_what_was_measured_is_taken() -> None:
    few = ("--requests", "1", "--prompt-tokens", "8", "--output-tokens", "8")
    more = ("--acceptance", "0.7", "--latency-ms", "1", "--draft-ms", "2", "--seed", "1", "--kv-tokens", "512")
    assert run(*MEASURES, *few, *more).exit_code == 0


def test_a_preset_has_the_room_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_preset, "PUBLISHED", PUBLISHED[:1])
    options = ["--preset", "ssd-70b", "--prompt-tokens", "33000", "--output-tokens", "2", "--requests", "1"]
    assert run(*options).exit_code == 0


def test_the_command_plans_with_the_trees_of_the_product() -> None:
    defaults = {name: each.default for name, each in signature(simulate_command).parameters.items()}
    assert (defaults["tree_nodes"], defaults["rows"]) == (Growing().max_nodes, Growing().rows)
    assert defaults["told"] == MOST_TOLD
