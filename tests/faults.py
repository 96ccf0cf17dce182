"""The first promise under faults: requests cancelled anywhere, drafts and targets killed under their streams.

A part of tests.matrix. Target and drafts are processes on gRPC links, killed by SIGKILL; each audits itself in the end. What
clients got must be what plain decoding gives, up to where they cancelled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, cycle
from random import Random

from engine.decode import Generation
from engine.runner import ModelRunner
from engine.types import GenerationRequest, TokenChunk
from tests import exact
from tests.killable import Cancel, Child, Join, run_draft, run_target

STREAMS = 16  # at a time
CANCELLATIONS, DRAFT_KILLS, TARGET_KILLS = 1000, 20, 3
_CANCELLED_TOKENS = 32  # of a request that may be cancelled
_HELPED = 16  # tokens that a draft has guessed before it is killed


class Streams:
    """What clients asked for and got so far, whichever target it came from."""

    def __init__(self, expected: dict[str, list[int]]) -> None:
        """expected: by the first part of a request's id, up to a slash."""
        self.all: dict[str, Generation] = {}
        self.open: dict[str, Generation] = {}
        self._expected = expected

    def start(self, target: Child, request: GenerationRequest) -> None:
        self.all[request.request_id] = self.open[request.request_id] = Generation(request)
        target.say(request)

    def take(self, chunk: TokenChunk) -> Generation:
        """Adds a chunk to its stream, which must not have ended."""
        generation = self.open[chunk.request_id]
        generation.tokens += chunk.tokens
        generation.accepted += chunk.origins.count("draft")
        generation.finish_reason = chunk.finish_reason
        if chunk.finish_reason is not None:
            del self.open[chunk.request_id]
        return generation

    def resume(self, target: Child) -> None:
        """Another target goes on with what has not ended."""
        for generation in self.open.values():
            target.say(replace(generation.request, resume_tokens=tuple(generation.tokens)))

    def finish(self, target: Child) -> None:
        while self.open:
            self.take(target.hear())

    def wrong(self) -> list[exact.Difference]:
        """Where outputs are not as expected; cancelled ones may be shorter."""
        whole = []
        for name, generation in self.all.items():
            tokens = self._expected[name.split("/")[0]]
            assert generation.finish_reason in ("length", "cancelled"), generation
            whole.append(tokens if generation.finish_reason == "length" else tokens[: len(generation.tokens)])
        return list(exact.differences(list(self.all.values()), whole))


def cancelled(requests: Sequence[GenerationRequest], expected: dict[str, list[int]], number: int) -> exact.Result:
    """So many requests at once, cancelled after a random number of tokens: at once, in the queue, or never, too."""
    random, streams = Random(5), Streams(expected)
    target, draft = start_pair()
    after: dict[str, int] = {}
    for index, request in zip(range(number), cycle(requests), strict=False):
        request_id = f"{request.request_id}/{index}"
        after[request_id] = random.randrange(-4, request.params.max_tokens + 2)
        streams.start(target, replace(request, request_id=request_id))
        if after[request_id] < 0:
            target.say(Cancel(request_id))
    while streams.open:
        generation = streams.take(target.hear())
        request_id = generation.request.request_id
        if generation.finish_reason is None and len(generation.tokens) >= after[request_id]:
            target.say(Cancel(request_id))
    target.end()
    draft.end()
    reasons = [generation.finish_reason for generation in streams.all.values()]
    assert set(reasons) == {"cancelled", "length"}
    return f"{reasons.count('cancelled')} of {number}", streams.wrong()


def drafts_killed(requests: Sequence[GenerationRequest], expected: dict[str, list[int]], kills: int) -> exact.Result:
    """Drafts are killed under streams that they help, one after the other; each time another takes over."""
    streams, upcoming, numbers = Streams(expected), cycle(requests), count()

    def start() -> None:
        request = next(upcoming)
        streams.start(target, replace(request, request_id=f"{request.request_id}/{next(numbers)}"))

    target, draft = start_pair()
    spare: Child | None = Child(run_draft)
    for _ in requests:
        start()
    killed = helped = 0
    while streams.open:
        chunk = target.hear()
        helped += chunk.origins.count("draft")
        if streams.take(chunk).finish_reason is not None and spare is not None:
            start()
        if spare is not None and spare.heard and helped >= _HELPED:
            draft.kill()
            draft, killed, helped = spare, killed + 1, 0
            target.say(Join(draft.address()))
            spare = Child(run_draft) if killed < kills else None
    target.end()
    draft.end()
    return f"{killed} under {len(requests)} streams, {len(streams.all)} in all", streams.wrong()


def targets_killed(requests: Sequence[GenerationRequest], expected: dict[str, list[int]], kills: int) -> exact.Result:
    """Targets are killed under their streams; another goes on from the tokens that the clients have."""
    streams = Streams(expected)
    target, draft = Child(run_target), Child(run_draft)
    address = draft.address()
    target.say(Join(address))
    for request in requests:
        streams.start(target, request)
    whole = sum(request.params.max_tokens for request in requests)
    for kill in range(kills):
        until = whole * (kill + 1) // (kills + 2)
        while sum(len(generation.tokens) for generation in streams.all.values()) < until:
            streams.take(target.hear())
        target.kill()
        _hear_out(target, streams)
        target = Child(run_target)
        target.say(Join(address))
        streams.resume(target)
    resumed = len(streams.open)
    assert resumed, "nothing was left to resume"
    streams.finish(target)
    target.end()
    draft.end()
    return f"{kills} under {len(requests)} streams, {resumed} resumed by the last", streams.wrong()


def _hear_out(target: Child, streams: Streams) -> None:
    """What a dead target still said; the end of its last chunk may be missing, as on any broken connection."""
    try:
        while True:
            streams.take(target.hear())
    except (EOFError, OSError):
        return


def start_pair() -> tuple[Child, Child]:
    """A target, linked to a draft."""
    target, draft = Child(run_target), Child(run_draft)
    target.say(Join(draft.address()))
    return target, draft


def plain(runner: ModelRunner, requests: Sequence[GenerationRequest]) -> dict[str, list[int]]:
    """What plain decoding gives, by request."""
    return {generation.request.request_id: generation.tokens for generation in exact.run(runner, requests, batch=1)}


def faults_matrix(
    runner: ModelRunner,
    prompts: Sequence[exact.Tokens],
    tokens: int,
    cancellations: int = CANCELLATIONS,
    draft_kills: int = DRAFT_KILLS,
    target_kills: int = TARGET_KILLS,
) -> Iterator[exact.Comparison]:
    """One stream a prompt, of which every other is greedy and the others are not."""
    short, long = (mixed(prompts, length) for length in (min(tokens, _CANCELLED_TOKENS), tokens))
    expected = cache(lambda: plain(runner, long))
    yield exact.Comparison("requests cancelled", lambda: cancelled(short, plain(runner, short), cancellations))
    yield exact.Comparison("drafts killed", lambda: drafts_killed(long, expected(), draft_kills))
    yield exact.Comparison("targets killed", lambda: targets_killed(long, expected(), target_kills))


def mixed(prompts: Sequence[exact.Tokens], tokens: int) -> list[GenerationRequest]:
    """One request a prompt, greedy and seeded ones in turns."""
    greedy, seeded = (exact.make_requests(prompts, temperature, tokens) for temperature in (0.0, 1.0))
    return [pair[index // 2 % 2] for index, pair in enumerate(zip(greedy, seeded, strict=True))]
