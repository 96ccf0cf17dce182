"""What `make bench` counts, and what it makes of it: rows, the picture, arrivals of an open loop; and nothing grows."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.progress import Progress

from benchmarks import memory, overload, pipeline, places
from benchmarks.bench import http_client
from benchmarks.bench.__main__ import Budget, Results
from benchmarks.bench.checkpoints import Pair
from benchmarks.bench.contenders import Environments, Notes, Peers, Place, Setup
from benchmarks.bench.equality import compare
from benchmarks.bench.http_client import Server, arrival_times, closed_loop
from benchmarks.bench.many_streams import Load, answered, endless, take_turns
from benchmarks.bench.one_stream import Best
from benchmarks.bench.plot import draw
from benchmarks.bench.streams import (
    OPEN,
    Ask,
    Limit,
    Row,
    Stream,
    by_text,
    cut,
    goodput,
    latencies,
    many_streams,
    one_stream,
)
from benchmarks.bench.worker import Worker, WorkerError
from benchmarks.paired import Variant
from cluster.draft import DraftStats
from cluster.target_stats import TargetStats
from engine.types import GenerationRequest, SamplingParams
from tests import exact
from tests.cluster_fixtures import until

ROOT = Path(__file__).parent.parent

END = 0
_IDLE = DraftStats(streams=1, sessions=0, steps=0, busy_s=0.0, wall_s=0.0)
STREAM = Stream(((0.5, 1), (0.6, 3), (0.8, 2)), (7, 8, 9, END, 5, 5))


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def test_nothing_behind_the_end_token_is_counted_nor_timed() -> None:
    assert cut(STREAM, {END}) == Stream(((0.5, 1), (0.6, 3)), (7, 8, 9, END))
    assert cut(Stream(((0.5, 1), (0.6, 3)), (7, END, 8, 9)), {END}).arrivals == ((0.5, 1), (0.6, 1))
    assert cut(STREAM, {99}) == STREAM


def test_prefill_is_apart_and_tokens_that_come_together_share_the_time() -> None:
    row = one_stream([STREAM, STREAM])
    assert row["tokens_per_s"] == pytest.approx(5 / 0.3, abs=0.05)  # the first token is the prefill's
    assert row["ttft_ms"] == 500
    assert STREAM.gaps_ms() == pytest.approx([100 / 3] * 3 + [100] * 2)
    assert (row["itl_ms_p50"], row["itl_ms_p99"]) == (33.33, 100)
    assert row["tokens"] == 12


def test_text_over_http_counts_as_many_tokens_as_the_server_says() -> None:
    stream = by_text([(0.1, "ab"), (0.2, "cdef"), (0.3, "gh")], 5)
    assert stream.count == 5
    assert stream.arrivals == ((0.1, 1), (0.2, 3), (0.3, 1))
    assert stream.text == "abcdefgh"
    late = by_text([(0.1, "a"), (0.2, "b" * 99)], 9)
    assert late.arrivals == ((0.1, 1), (0.2, 8)), "the first token came with the first text, however short"


def test_outputs_part_at_ties_or_otherwise() -> None:
    references = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3], [4, 5, 6]]
    streams = [
        Stream(((0.1, 3),), (1, 2, 3)),
        Stream(((0.1, 3),), (4, 9, 9)),  # parts where the margin is a tie
        Stream(((0.1, 2),), (7, 8)),  # ended too soon
        Stream(((0.1, 3),), text="bcd"),
        Stream(((0.1, 3),), text="exx"),
    ]
    margins = {(1, 1): 1e-5, (2, 2): 0.5, (4, 1): 0.3}
    found = compare(streams, references, lambda prompt, at: margins[prompt, at], decode)
    assert found == {"equal": 2, "ties": 1, "differing": 2}


def test_requests_of_an_open_loop_come_at_their_rate_the_same_for_everybody() -> None:
    times = list(arrival_times(20.0, 100.0, seed=1))
    assert times == list(arrival_times(20.0, 100.0, seed=1))
    assert times != list(arrival_times(20.0, 100.0, seed=2))
    assert 0 < times[0] <= times[-1] < 100
    assert abs(len(times) - 2000) < 5 * math.sqrt(2000)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)  # as Poisson's are


def test_goodput_is_what_came_within_the_limit() -> None:
    slow, stalled = Stream(((3.0, 1), (3.1, 1))), Stream(((0.1, 1), (0.9, 1)))
    row = goodput([STREAM, slow, stalled, Stream(())], 2.0, Limit(ttft_ms=1000, itl_ms=200))
    assert row["goodput_requests_per_s"] == 0.5
    assert (row["requests"], row["failed"], row["within_limit"]) == (4, 1, 0.25)


def made(contender: str, streams: int, temperature: float, **more: object) -> Row:
    """A row as the runs make them."""
    common: Row = {"target_params": 11_000_000, "temperature": temperature, "accounting": "same-target-core"}
    common |= {"dtype": "float32"}
    figures = one_stream([STREAM]) if streams == 1 else many_streams([(2.0, [STREAM] * streams)])
    if streams == OPEN:
        figures = latencies([STREAM]) | {"tokens_per_s": 1.0, "spread": None} | goodput([STREAM], 2.0, Limit())
    return {"contender": contender, "streams": streams, **common, **more} | figures


def all_rows() -> list[Row]:
    loops: dict[int, Row] = {1: {"loop": "prompts"}, 4: {"loop": "closed"}, OPEN: {"loop": "open", "rate": 1.5}}
    names = ("paceline-pipelined", "vllm", "transformers")
    return [
        made(name, streams, degree, **more)
        for degree in (0.0, 1.0)
        for streams, more in loops.items()
        for name in names
    ]


def test_rows_have_their_keys_and_are_on_disk_at_once_with_a_picture(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.json")
    results.add(all_rows())
    held = json.loads(results.path.read_text())
    assert len(held) == 18
    for row in held:
        assert row.keys() >= {
            "contender",
            "target_params",
            "streams",
            "temperature",
            "accounting",
            "tokens_per_s",
            "spread",
        }
        assert row.keys() >= {"ttft_ms", "itl_ms_p50", "itl_ms_p99"}
        assert isinstance(row["tokens_per_s"], float)
    draw(held, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_run_that_was_stopped_goes_on_with_the_parts_it_lacks(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.json", all_rows())
    setup = make_setup(tmp_path)
    assert results.missing(setup, (0.0, 1.0), ("prompts",), 1) == []
    assert results.missing(setup, (0.0, 0.5), ("closed", "open"), 2) == [0.5]
    assert results.missing(setup, (0.0,), ("closed", "open"), 3) == [0.0]
    assert {row["loop"] for row in results.rows if row["temperature"] == 0} == {"prompts"}
    other = replace(setup, pair=replace(setup.pair, dtype="bfloat16"))
    held = list(results.rows)
    assert results.missing(other, (0.0, 1.0), ("prompts",), 1) == [0.0, 1.0]
    assert results.rows == held, "what was measured in another dtype stays"


def test_a_worker_is_stopped_between_questions_and_says_when_it_ended(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        print("{}", flush=True)
        for line in sys.stdin:
            if "end" in line:
                break
            print('{"pid": %d}' % os.getpid(), flush=True)
    """
    worker = Worker("echo", [sys.executable, "-c", script], {}, tmp_path)
    worker.wait_ready()
    for _ in range(2):
        stat = Path(f"/proc/{worker.ask({})['pid']}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")  # noqa: B023
    for _ in range(2):
        with pytest.raises(WorkerError, match="echo ended"):
            worker.ask({"end": True})
    worker.close()


def test_a_run_that_goes_on_knows_the_best_number_of_draft_tokens_of_each_target() -> None:
    rows = [
        made("vllm-ngram", 1, 0.0, k=3),
        made("vllm-ngram", 1, 1.0, k=2),
        made("vllm-ngram", 1, 0.0, k=5) | {"target_params": 30_000_000},
        made("vllm", 1, 0.0),
        made("paceline-sequential", 1, 0.0, k=4),
    ]
    assert Best.known(rows, 11_000_000, "float32").vllm == {("vllm-ngram", 0.0): 3, ("vllm-ngram", 1.0): 2}
    assert Best.known(rows, 1, "float32").vllm == {}
    assert Best.known(rows, 11_000_000, "bfloat16").vllm == {}


def test_an_answer_without_text_is_an_answer() -> None:
    events = [
        {"choices": [{"text": "", "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
    ]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    async def asked() -> tuple[float, list[Stream]]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server:
            return await closed_loop(Server(str(server.make_url("")).rstrip("/"), "any"), [Ask((1,), 0, 1.0, 8)], 1)

    _, [stream] = asyncio.run(asked())
    assert stream.count == 1


def test_no_round_of_any_loop_has_what_another_had() -> None:
    seen: list[list[Ask]] = []

    def loop(asks: Sequence[Ask], _: int) -> tuple[float, list[Stream]]:
        seen.append(list(asks))
        return 1.0, []

    load = Load((), (), rounds=2, each=2, rates=(), seconds=1.0, limit=Limit())
    asks = endless([Ask((prompt,), 0, 1.0, 8) for prompt in range(12)])
    with Progress(disable=True) as progress:
        for streams in (1, 3):
            take_turns({"one": loop, "other": loop}, asks, streams, load, math.inf, progress, "")
    assert seen[::2] == seen[1::2], "all have the same"
    asked = [ask for asks in seen[::2] for ask in asks]
    assert [ask.prompt for ask in asked[:12]] == [(prompt,) for prompt in range(12)], (
        "a prompt comes again after all others"
    )
    assert [ask.seed for ask in asked] == list(range(3 * 2 + 3 * 6)), "and with another seed"


def test_rounds_are_small_enough_that_no_prompt_comes_again() -> None:
    assert places.round_size(1, 4, 200) == 12
    assert places.round_size(16, 4, 200) == 40
    assert places.round_size(16, 2, 200) == 48
    assert places.round_size(64, 4, 200) == 192, "there are too few prompts"


def test_a_request_that_takes_too_long_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def asked() -> tuple[list[Stream], list[overload.Answer]]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app, shutdown_timeout=0) as server:
            url = str(server.make_url("")).rstrip("/")
            _, streams = await closed_loop(Server(url, "any"), [Ask((1,), 0, 1.0, 8)], 1)
            async with http_client.connect() as session:
                client = overload.Client(session, url, 8, "any")
                await client.ask()
        return streams, client.answers

    monkeypatch.setattr(http_client, "_TIMEOUT_S", 0.2)
    streams, [failed] = asyncio.run(asked())
    assert streams == [http_client.NOTHING]
    assert failed.status == 0


def test_who_answers_nothing_has_no_row_and_failed_requests_are_noted(tmp_path: Path) -> None:
    notes, failed = Notes(tmp_path / "notes.json"), Stream(())
    rounds = {"well": [(1.0, [STREAM])], "partly": [(1.0, [STREAM, failed]), (1.0, [STREAM])], "not": [(1.0, [failed])]}
    assert list(answered(rounds, notes, "2 streams")) == ["well", "partly"]
    assert notes.lines == [
        "2 streams: 1 of 3 requests to partly failed",
        "2 streams: 1 of 1 requests to not failed",
    ]


def make_setup(folder: Path) -> Setup:
    nowhere = folder / "nowhere" / "python"
    pair = Pair(exact.TARGET, exact.DRAFT, 11_000_000)
    place = Place("same-target-core", (0, 1))
    return Setup(pair, place, Environments(nowhere, nowhere, False), Notes(folder / "notes.json"), folder)


def test_a_peer_that_is_not_installed_is_left_out_with_a_note(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    with Peers(setup) as peers:
        assert peers.bring([("vllm", 0)]) == {}
    [note] = json.loads(setup.notes.path.read_text())
    assert "left out: vllm, there is no" in note


def test_time_is_shared_out_among_what_is_left() -> None:
    budget = Budget(100.0, 4)
    first = budget.share() - budget.started
    assert first == pytest.approx(25, abs=1)
    assert budget.share() - budget.started == pytest.approx(100 / 3, abs=1)  # the first took no time
    assert Budget(None, 4).share() == math.inf


def test_a_target_and_a_draft_hold_what_they_need_and_nothing_afterwards(tmp_path: Path) -> None:
    # in a process of its own: what other tests leave behind is freed and used again here
    found = tmp_path / "memory.json"
    options = ["--tokens", "960", "--streams", "2", "--length", "24", "--json", str(found)]
    command = [sys.executable, "-m", "benchmarks.memory", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(found.read_text())
    assert told["complaints"] == []
    assert len(told["samples"]) == 20
    assert told["samples"][-1]["tokens"] == 960
    assert all(0 < sample["most_pages"] <= sample["allowed_pages"] for sample in told["samples"])


def test_growth_is_complained_of() -> None:
    steady = [memory.Sample(n, 500.0, 1000, (0, 0), 0, 3, 4) for n in range(8)]
    assert memory.complaints(steady) == []
    leaking = [memory.Sample(n, 500.0 + 20 * n, 1000 * (n + 1), (0, 0), 0, 3, 4) for n in range(8)]
    assert len(memory.complaints(leaking)) == 2
    assert memory.complaints([*steady, memory.Sample(8, 500.0, 1000, (1, 0), 0, 5, 4)])[0].endswith("are held")


def test_batches_alternate_between_temperatures() -> None:
    [first, second] = islice(memory.batches([(1, 2)], 2, 8), 2)
    assert [request.params.temperature for request in first] == [0.0, 1.0]
    assert {request.request_id for request in first}.isdisjoint(request.request_id for request in second)


def test_counters_of_a_target_are_what_happened_between_two_looks() -> None:
    before = TargetStats(steps=3, forward_s=0.5, places={"replica": 3}, link={"growths": 1})
    after = TargetStats(steps=10, forward_s=1.5, running=1, places={"replica": 9}, link={"growths": 7})
    assert pipeline.difference(after, before) == TargetStats(steps=7, forward_s=1.0, running=1)


def totals(**rates: float) -> dict[str, pipeline.Totals]:
    """So many tokens per second of two requests for each contender, by its name with _ for spaces."""
    found: dict[str, pipeline.Totals] = {}
    for name, rate in rates.items():
        held = found[name.replace("_", " ")] = pipeline.Totals()
        for request in ("first", "second"):
            held.add(request, 100, 100 / rate, 50, 40, 50)
    return found


@pytest.mark.parametrize(("lookup", "best"), [(300.0, "sequential lookup 3"), (100.0, "sequential 2")])
def test_a_pipeline_is_compared_with_the_best_that_takes_turns(lookup: float, best: str) -> None:
    rates = {"sequential_2": 200.0, "sequential_3": 150.0, "sequential_lookup_2": 50.0, "sequential_lookup_3": lookup}
    rates |= {"plain": 90.0, "plain_two_cores": 95.0, "sequential_two_cores_2": 70.0, "sequential_two_cores_3": 80.0}
    spent = [TargetStats(steps=50, sequence_steps=50, active_s=1.0, forward_s=0.5)]
    row = pipeline.summary(totals(pipelined=330.0, **rates), spent, [], (_IDLE, _IDLE), (2, 3))
    assert row["sequential_best"] == best
    assert row["pipelined_over_sequential"] == pytest.approx(330 / max(200, lookup))
    assert (row["sequential_tps"], row["sequential_k"]) == (200, 2)
    assert (row["sequential_lookup_tps"], row["sequential_lookup_k"]) == (lookup, 3)


def test_steps_of_a_draft_are_counted_behind_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 100 ms for the prompt that warms up, then four of 1 ms for each prompt."""
    stats = _IDLE

    def decode(_: object, request: GenerationRequest, totals: pipeline.Totals) -> tuple[list[int], TargetStats]:
        nonlocal stats
        steps, busy_s = (1, 0.1) if request.request_id == "t0-0" else (4, 0.004)
        stats = replace(stats, steps=stats.steps + steps, busy_s=stats.busy_s + busy_s)
        totals.add(request.request_id, 8, 1.0, 4, 4, 4)
        return [1], TargetStats(steps=4, sequence_steps=4, active_s=1.0, forward_s=0.5)

    def in_turn(_: object, request: GenerationRequest, k: int, totals: pipeline.Totals, lookup: int) -> list[int]:
        totals.add(request.request_id, 8, 1.0, 4, 4, 4)
        return [1]

    class Draft:
        class stats:
            remote = staticmethod(lambda: stats)

    class Cluster:
        drafts = (Draft,)

    monkeypatch.setattr(pipeline, "run_pipelined", decode)
    monkeypatch.setattr(pipeline, "run_sequential", in_turn)
    monkeypatch.setattr("benchmarks.pipeline.ray.get", lambda found: found)
    requests = [GenerationRequest(f"t0-{index}", (1,), SamplingParams()) for index in range(3)]
    anything: Any = Cluster
    assert pipeline.measure(anything, anything, anything, requests, 1, (2,))["draft_step_ms"] == 1.0


@pytest.mark.parametrize("mode", ["pipelined", "plain", "3", "3+lookup"])
def test_a_variant_says_how_it_decodes(mode: str) -> None:
    assert Variant.parse(f"now={ROOT}@{mode}").mode == mode
    with pytest.raises(SystemExit, match="the mode is"):
        Variant.parse(f"now={ROOT}@plain+lookup")
