"""Ten times more requests than can be served: what is refused, how soon, and how much is served nevertheless.

python -m benchmarks.overload --out DIR     writes overload.json; exit code 1 unless everything held

The peak is what clients get that wait for their answers, as many as there is room for. Then requests come at ten times that
rate, whatever became of earlier ones (an open loop). Both alternate, since a machine's speed drifts.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.server import ROOT, get, serving

BATCH, QUEUE = 16, 16  # requests that run on a replica, and that wait for one
KEPT = 0.9  # of the peak, at least
_SETTLE_S = 5.0  # of a phase, not counted


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    status: int  # of HTTP; 0: there was none, or a stream broke off
    sent: float
    ended: float
    retry_after: str | None


class Client:
    """Asks for as many tokens each time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokens: int) -> None:
        self._session, self._url, self._tokens = session, f"{url}/v1/completions", tokens
        lines = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()
        self._prompts = [json.loads(line) for line in lines]
        self.answers: list[Answer] = []

    async def ask(self) -> None:
        """One request, streamed to its end."""
        prompt = random.choice(self._prompts)
        body = {"model": "code", "prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        sent, status, retry_after = time.monotonic(), 0, None
        try:
            async with self._session.post(self._url, json={**body, "stream": True}) as response:
                text = await response.text()
                retry_after = response.headers.get("Retry-After")
                if response.status != 200 or text.rstrip().endswith("data: [DONE]"):
                    status = response.status
        except aiohttp.ClientError:
            pass
        self.answers.append(Answer(status, sent, time.monotonic(), retry_after))

    async def closed(self, clients: int, seconds: float) -> float:
        """So many clients that wait for their answers; requests per second that were served."""
        started = time.monotonic()

        async def go_on() -> None:
            while time.monotonic() < started + seconds:
                await self.ask()

        await asyncio.gather(*(go_on() for _ in range(clients)))
        return self._served(started, seconds)

    async def opened(self, rate: float, seconds: float) -> float:
        """So many requests per second, one after the other by chance; how many were served."""
        started = due = time.monotonic()
        asked = []
        while due < started + seconds:
            await asyncio.sleep(due - time.monotonic())
            asked.append(asyncio.create_task(self.ask()))
            due += random.expovariate(rate)
        await asyncio.gather(*asked)
        return self._served(started, seconds)

    def _served(self, started: float, seconds: float) -> float:
        counted = [each for each in self.answers if started + _SETTLE_S <= each.ended <= started + seconds]
        return sum(each.status == 200 for each in counted) / (seconds - _SETTLE_S)


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    unlimited = aiohttp.TCPConnector(limit=0)
    rounds, answers = [], []
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(600)) as session:
        await Client(session, url, arguments.tokens).closed(BATCH, 2 * _SETTLE_S)
        for _ in range(arguments.rounds):
            peak = await Client(session, url, arguments.tokens).closed(2 * BATCH, arguments.seconds)
            client = Client(session, url, arguments.tokens)
            rounds.append((peak, await client.opened(arguments.times * peak, arguments.seconds)))
            answers += client.answers
        after = await Client(session, url, arguments.tokens).closed(2 * BATCH, arguments.seconds)
    waits = sorted(each.ended - each.sent for each in answers if each.status == 429)
    return {
        "tokens": arguments.tokens,
        "peak_rps": [round(peak, 2) for peak, _ in rounds],
        "overloaded_rps": [round(served, 2) for _, served in rounds],
        "peak_after_rps": round(after, 2),
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


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/overload"), help="folder of overload.json and logs")
    parser.add_argument("--tokens", type=int, default=256, help="generated for each request")
    parser.add_argument("--times", type=float, default=10.0, help="of the peak")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = ROOT / "models"
    model = {
        "name": "code",
        "target": {"checkpoint": str(folder / "code-target"), "max_batch": BATCH},
        "draft": {"checkpoint": str(folder / "code-draft")},
    }
    with serving({"models": [model], "limits": {"queue": QUEUE}}, arguments.out) as url:
        result = asyncio.run(measure(url, arguments))
    (arguments.out / "overload.json").write_text(json.dumps(result, indent=1) + "\n")
    found = complaints(result)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("".join(f"{text}\n" for text in found) or "everything held\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
