"""What `make bench` counts, and what it makes of it: rows, the picture, arrivals of an open loop; and nothing grows."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import memory, pipeline
from benchmarks.bench.__main__ import Budget, Results
from benchmarks.bench.checkpoints import Pair
from benchmarks.bench.contenders import Environments, Notes, Peers, Place, Setup
from benchmarks.bench.equality import compare
from benchmarks.bench.http_client import Server, arrival_times, closed_loop
from benchmarks.bench.many_streams import answered
from benchmarks.bench.one_stream import Best
from benchmarks.bench.plot import draw
from benchmarks.bench.streams import (
    KEYS,
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
from cluster.target_stats import TargetStats
from tests import exact
from tests.cluster_fixtures import until

ROOT = Path(__file__).parent.parent

END = 0
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
    common = {"target_params": 11_000_000, "temperature": temperature, "accounting": "same-target-core"}
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
        assert row.keys() >= set(KEYS)
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
    assert Best.known(rows, 11_000_000).vllm == {("vllm-ngram", 0.0): 3, ("vllm-ngram", 1.0): 2}
    assert Best.known(rows, 1).vllm == {}


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
