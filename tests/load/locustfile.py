"""Clients of two models: those of `busy` come and go, one of `quiet` stays. benchmarks/load.py runs this, headless.

locust -f tests/load/locustfile.py --headless --host http://127.0.0.1:8000
"""

import json
import logging
from itertools import count

from locust import HttpUser, LoadTestShape, between, task

logger = logging.getLogger(__name__)
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "def read(path):\n    with open(path) as file:\n",
    "import os\n\n\ndef walk(top):\n",
)
TOKENS = 96
# (until so many seconds from the start, users): one of them is the quiet model's.
STAGES = ((20, 3), (50, 9), (150, 17), (165, 9), (180, 2))
_requests = count()


class _User(HttpUser):
    abstract = True
    model = ""

    @task
    def complete(self) -> None:
        """A streamed completion; it counts as failed unless it is whole."""
        number = next(_requests)
        body = {"model": self.model, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS}
        body |= {"stream": True, "seed": number, "ignore_eos": True}
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True, name=self.model, timeout=300
        ) as response:
            wrong = complaint(response.status_code, list(response.iter_lines()))
            if wrong is None:
                response.success()
            else:
                logger.warning("%s: %s", self.model, wrong)
                response.failure(wrong)


def complaint(status: int, lines: list[bytes]) -> str | None:
    """What is wrong with a streamed answer; None when it is whole."""
    if status != 200:
        return f"status {status}: {lines[:1]}"
    events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return f"cut off after {len(events)} events: {events[-1:]}"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    return None if reasons == ["length"] else f"ended by {reasons}"


class BusyUser(_User):
    """Asks again at once."""

    model = "busy"


class QuietUser(_User):
    """Asks now and then."""

    model = "quiet"
    fixed_count = 1
    wait_time = between(1, 2)


class RampUpAndDown(LoadTestShape):
    """STAGES."""

    def tick(self) -> tuple[int, float] | None:
        """(users, users started per second) now; None at the end."""
        elapsed = self.get_run_time()  # type: ignore[no-untyped-call]
        return next(((users, 4.0) for until, users in STAGES if elapsed < until), None)
