"""What an unmodified vLLM writes with our drafts, at length: `make exact-vllm`. The tests run a sample of it.

100 held-out prompts, one and eight at a time, greedy in fp32, against the same vLLM without speculation; the draft service
is killed and started again midway. Then 1,000 requests, after which the draft has to hold nothing.
"""

import argparse
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import vllm_drafts
from benchmarks.server import free_port
from cluster.draft import DraftReplica
from cluster.grpc_server import DraftServer
from engine.decode import Generation
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from tests import exact
from tests.cluster_fixtures import until

AT_A_TIME = (1, 8)
DRAFT_TOKENS = 5
_ACCEPTED, _DRAFTS = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts"
console = Console()

Texts = list[list[int]]
Prompts = Sequence[exact.Tokens]


@dataclass(frozen=True)
class Written:
    """What came of some prompts."""

    texts: Texts
    accepted: int  # tokens that a draft had guessed
    drafts: int  # proposals


def write(engine: vllm_drafts.Engine, prompts: Prompts, at_a_time: int, tokens: int) -> Written:
    """So many prompts at a time, greedily."""
    texts: Texts = []
    accepted = drafts = 0.0
    for start in range(0, len(prompts), at_a_time):
        answer = engine.ask([list(prompt) for prompt in prompts[start : start + at_a_time]], tokens)
        texts += answer["texts"]
        accepted += answer["counts"].get(_ACCEPTED, 0)
        drafts += answer["counts"].get(_DRAFTS, 0)
    return Written(texts, int(accepted), int(drafts))


def accepted_by_metrics(url: str) -> float:
    """Draft tokens that a server accepted, as /metrics has it under the name that vLLM gave it."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)))


def plain_texts(prompts: Prompts, tokens: int, streams: Sequence[int], out: Path) -> dict[int, Texts]:
    """Of a stock vLLM, by how many prompts it had at a time."""
    with vllm_drafts.engine("plain", None, "", max(streams), out) as plain:
        plain.wait_ready()
        return {number: write(plain, prompts, number, tokens).texts for number in streams}


def interrupted(
    engine: vllm_drafts.Engine, address: str, prompts: Prompts, number: int, tokens: int, out: Path
) -> Written:
    """A third of the prompts with a draft service, a third after that was killed, the rest with another in its place."""
    first, second = len(prompts) // 3, 2 * len(prompts) // 3
    with vllm_drafts.draft_service(out, address) as (_, service):
        wait_drafted(engine, prompts[0])
        before = write(engine, prompts[:first], number, tokens)
        service.kill()
        service.wait()
    without = write(engine, prompts[first:second], number, tokens)
    assert not without.drafts, "drafts came from a service that was killed"
    with vllm_drafts.draft_service(out, address):
        wait_drafted(engine, prompts[0])
        after = write(engine, prompts[second:], number, tokens)
    assert min(before.accepted, after.accepted) > 0
    texts = [*before.texts, *without.texts, *after.texts]
    return Written(texts, before.accepted + after.accepted, before.drafts + after.drafts)


def wait_drafted(engine: vllm_drafts.Engine, prompt: exact.Tokens) -> None:
    """Until vLLM gets drafts."""
    until(lambda: write(engine, [prompt], 1, 8).drafts > 0, "vLLM finds the draft service")


def parted(texts: Texts, expected: Texts, prompts: Prompts) -> Iterator[tuple[int, float]]:
    """(prompt, distance of the two best scores where the texts part) of each text that is not as expected."""
    runner: ModelRunner | None = None
    for index, (text, other) in enumerate(zip(texts, expected, strict=True)):
        if text != other:
            runner = runner or ModelRunner(exact.TARGET, dtype="float32", kv_tokens=2048)
            at = next(at for at, (a, b) in enumerate(zip(text, other, strict=True)) if a != b)
            yield index, margin(runner, (*prompts[index], *text[:at]))


def margin(runner: ModelRunner, tokens: exact.Tokens) -> float:
    """Distance between the two best scores behind these tokens."""
    (generation,) = exact.run(runner, exact.make_requests([tokens], 0.0, 1), margins=True)
    return generation.margins[0]


def left_behind(engine: vllm_drafts.Engine, address: str, prompts: Prompts, requests: int) -> str:
    """Many short requests with a draft in this process; raises AssertionError unless it then holds nothing."""
    runner = ModelRunner(exact.DRAFT, dtype="float32", kv_tokens=16384)
    replica = DraftReplica(ModelDrafter(runner))
    host, _, port = address.rpartition(":")
    server = DraftServer(host, int(port), replica.add_link)
    try:
        wait_drafted(engine, prompts[0])
        asked = [prompts[i % len(prompts)][: 24 + i % 40] for i in range(requests)]
        written = write(engine, asked, max(AT_A_TIME), 8)
        at_the_end, started = replica.stats().sessions, time.monotonic()
        until(lambda: not replica.stats().sessions, "the sessions on the draft end")
        seconds = time.monotonic() - started
        replica.check()
        assert not runner.pool.used_pages, "pages are left behind"
        return (
            f"{requests} requests, {written.accepted} tokens accepted; {at_the_end} sessions, 0 after {seconds:.0f} s"
        )
    finally:
        server.stop()
        replica.close()


def main() -> int:
    """See the top; the number of texts that differ and are no ties."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=48)
    chosen = parser.parse_args()
    prompts = exact.load_prompts(chosen.prompts)
    failed = 0
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        expected = plain_texts(prompts, chosen.tokens, AT_A_TIME, out)
        own: list[Generation] = exact.run(
            ModelRunner(exact.TARGET, dtype="float32", kv_tokens=16384),
            exact.make_requests(prompts, 0.0, chosen.tokens),
            batch=8,
        )
        address = f"127.0.0.1:{free_port()}"
        config = vllm_drafts.contenders([DRAFT_TOKENS])[f"paceline-{DRAFT_TOKENS}"]
        engine = stack.enter_context(vllm_drafts.engine("paceline", config, address, max(AT_A_TIME), out))
        engine.wait_ready()
        for number in AT_A_TIME:
            written = interrupted(engine, address, prompts, number, chosen.tokens, out)
            for name, texts in (("stock vLLM", expected[number]), ("our engine", [each.tokens for each in own])):
                differ = list(parted(written.texts, texts, prompts))
                failed += sum(distance > exact.TIE for _, distance in differ)
                console.print(
                    f"{number} at a time, {written.accepted} tokens accepted: {len(prompts) - len(differ)} of "
                    f"{len(prompts)} texts equal those of {name}; {differ or 'none'} differ",
                    soft_wrap=True,
                )
        console.print(left_behind(engine, address, prompts, chosen.requests))
    return failed


if __name__ == "__main__":
    sys.exit(main())
