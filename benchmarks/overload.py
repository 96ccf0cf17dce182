"""Ten times more requests than can be served: what is refused, how soon, and how much is served nevertheless.

python -m benchmarks.overload --out DIR     writes overload.json; exit code 1 unless everything held
python -m benchmarks.overload --url URL     the same against a server that runs somewhere, with as many --clients as fill it

The peak is what clients get that wait for their answers, as many as there is room for. Then requests come at ten times that
rate, whatever became of earlier ones (an open loop). Both alternate, since a machine's speed drifts. Goodput is tokens/s
that reach clients, by the server's own count, since answers that end together make requests/s jump; none may break off.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.server import ROOT, get, serving

BATCH, QUEUE = 16, 16  # requests that run on a replica, and that wait for one
KEPT = 0.9  # of the peak, at least
_SETTLE_S = 5.0  # of a phase, not counted
_TOKENS_OUT = re.compile(r"^paceline_output_tokens_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    status: int  # of HTTP; 0: there was none, or a stream broke off
    sent: float
    ended: float
    retry_after: str | None


class Client:
    """Asks for as many tokens each time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokens: int, model: str) -> None:
        self._session, self._url, self._tokens, self._model = session, url, tokens, model
        lines = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()
        self._prompts = [json.loads(line) for line in lines]
        self.answers: list[Answer] = []

    async def ask(self) -> None:
        """One request, streamed to its end."""
        prompt = random.choice(self._prompts)
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        sent, status, retry_after = time.monotonic(), 0, None
        try:
            async with self._session.post(f"{self._url}/v1/completions", json={**body, "stream": True}) as response:
                text = await response.text()
                retry_after = response.headers.get("Retry-After")
                if response.status != 200 or text.rstrip().endswith("data: [DONE]"):
                    status = response.status
        except (aiohttp.ClientError, TimeoutError):  # the session's timeout is no ClientError
            pass
        self.answers.append(Answer(status, sent, time.monotonic(), retry_after))

    async def closed(self, clients: int, seconds: float) -> float:
        """So many clients that wait for their answers; tokens/s that they got."""
        started = time.monotonic()
        goodput = asyncio.create_task(self._goodput(seconds))

        async def go_on() -> None:
            while time.monotonic() < started + seconds:
                await self.ask()

        await asyncio.gather(*(go_on() for _ in range(clients)))
        return await goodput

    async def opened(self, rate: float, seconds: float) -> float:
        """So many requests per second, one after the other by chance; tokens/s that were served."""
        started = due = time.monotonic()
        goodput = asyncio.create_task(self._goodput(seconds))
        asked = []
        while due < started + seconds:
            await asyncio.sleep(due - time.monotonic())
            asked.append(asyncio.create_task(self.ask()))
            due += random.expovariate(rate)
        await asyncio.gather(*asked)
        return await goodput

    async def _goodput(self, seconds: float) -> float:
        await asyncio.sleep(_SETTLE_S)
        first, started = await self._tokens_out(), time.monotonic()
        await asyncio.sleep(seconds - _SETTLE_S)
        return (await self._tokens_out() - first) / (time.monotonic() - started)

    async def _tokens_out(self) -> float:
        async with self._session.get(f"{self._url}/metrics") as response:
            text = await response.text()
        return sum(float(number) for number in _TOKENS_OUT.findall(text))


def read_key(path: Path | None) -> dict[str, str]:
    """The header with the first API key in a file, where there is one. Raises SystemExit where it has digests only."""
    if path is None:
        return {}
    keys = [key for key in path.read_text().split() if not key.startswith("sha256:")]
    if not keys:
        raise SystemExit(f"{path} has no key that could be sent, only digests or nothing")
    return {"Authorization": f"Bearer {keys[0]}"}


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    unlimited = aiohttp.TCPConnector(limit=0)
    rounds, answers = [], []
    limits, headers = aiohttp.ClientTimeout(600), read_key(arguments.key_file)
    async with aiohttp.ClientSession(connector=unlimited, timeout=limits, headers=headers) as session:

        def client() -> Client:
            return Client(session, url, arguments.tokens, arguments.model)

        await client().closed(arguments.clients // 2, 2 * _SETTLE_S)
        for _ in range(arguments.rounds):
            peak = await client().closed(arguments.clients, arguments.seconds)
            crowd = client()
            rate = arguments.times * peak / arguments.tokens  # requests per second
            rounds.append((peak, await crowd.opened(rate, arguments.seconds)))
            answers += crowd.answers
        after = await client().closed(arguments.clients, arguments.seconds)
    waits = sorted(each.ended - each.sent for each in answers if each.status == 429)
    return {
        "tokens": arguments.tokens,
        "peak_tps": [round(peak, 1) for peak, _ in rounds],
        "overloaded_tps": [round(served, 1) for _, served in rounds],
        "peak_after_tps": round(after, 1),
        "kept": round(statistics.median(served / peak for peak, served in rounds), 3),
        "statuses": dict(Counter(each.status for each in answers)),
        "refused_without_retry_after": sum(each.status == 429 and not each.retry_after for each in answers),
        "refused_after_s": {f"p{p}": round(waits[len(waits) * p // 100], 3) for p in (50, 99)} if waits else None,
        "ready_after": get(f"{url}/ready") is not None,
    }


def complaints(result: dict[str, Any]) -> list[str]:
    """What did not hold."""
    found = []
    if set(result["statuses"]) != {200, 429}:
        found.append(f"statuses: {result['statuses']}")
    if result["refused_without_retry_after"]:
        found.append("some were refused without Retry-After")
    if result["kept"] < KEPT:
        found.append(f"{result['kept']:.0%} of the peak were kept")
    if not result["ready_after"]:
        found.append("the server is not ready any more")
    return found


def shared() -> dict[str, Any]:
    """A target and a draft that share all cores with what serves them, and with the clients."""
    folder = ROOT / "models"
    target = {"checkpoint": str(folder / "code-target"), "max_batch": BATCH}
    return {"name": "code", "target": target, "draft": {"checkpoint": str(folder / "code-draft")}}


def apart() -> dict[str, Any]:
    """A target with the first core to itself, as models have their accelerators; all else has the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others)  # and of all processes that are started from now on
    model = shared()
    del model["draft"]
    model["target"]["replicas"] = {"cores": [first]}
    return model


@contextmanager
def serve_or_use(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of the API."""
    if arguments.url is not None:
        yield arguments.url.rstrip("/")
        return
    model = apart() if not arguments.shared else shared()
    with serving({"models": [model], "limits": {"queue": QUEUE}}, arguments.out) as url:
        yield url


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/overload"), help="folder of overload.json and logs")
    parser.add_argument("--tokens", type=int, default=256, help="generated for each request")
    parser.add_argument("--times", type=float, default=10.0, help="of the peak")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="a draft too, and no core apart for the target")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--url", help="of a server that runs; without it, one is started here")
    parser.add_argument("--model", default="code")
    parser.add_argument("--clients", type=int, default=2 * BATCH, help="that wait for their answers, at the peak")
    parser.add_argument("--key-file", type=Path, help="a file whose first line is an API key")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with serve_or_use(arguments) as url:
        result = {"shared": arguments.shared, **asyncio.run(measure(url, arguments))}
    (arguments.out / "overload.json").write_text(json.dumps(result, indent=1) + "\n")
    found = complaints(result)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("".join(f"{text}\n" for text in found) or "everything held\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
