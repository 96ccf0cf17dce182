"""One process of benchmarks.paired, with the code of the checkout that it runs in: a draft, or what decodes.

A file by itself, run by its path: what it imports comes from that checkout, which need not have it. Each line on standard
input is a request; each answer is a line on standard output.
"""

import json
import queue
import sys
from pathlib import Path
from typing import Any

from cluster.actors import TargetConfig, own_target
from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.grpc_link import connect
from cluster.grpc_server import DraftServer
from cluster.placement import Placement
from cluster.sequential import SequentialActor
from cluster.speculate import LinkOptions
from engine.drafters.model import Growing
from engine.types import GenerationRequest, SamplingParams, TokenChunk

LINK_TIMEOUT_S = 30.0


def main() -> None:
    """See the top."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    said, sys.stdout = sys.stdout, sys.stderr
    where = Placement(cores=(options["core"],))
    where.apply_to_process()

    def say(answer: dict[str, Any]) -> None:
        said.write(json.dumps(answer) + "\n")
        said.flush()

    if options["mode"] == "draft":
        config = DraftConfig(Path(options["draft"]), options["dtype"], shared=0)  # prompts come again
        replica = DraftReplica(make_drafter(config, where), where)
        server = DraftServer("127.0.0.1", 0, replica.add_link, LinkOptions(cores=where.cores))
        say({"address": server.address})
        sys.stdin.read()
        return
    decoder = Pipelined(options, where) if options["mode"] == "pipelined" else Turns(options, where)
    say({})
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        params = SamplingParams(asked["temperature"], seed=asked["seed"], max_tokens=asked["tokens"], ignore_eos=True)
        say(decoder.run(GenerationRequest(str(number), tuple(asked["prompt"]), params)))


class Turns:
    """Plain, or target and draft taking turns."""

    def __init__(self, options: dict[str, Any], where: Placement) -> None:
        self._actor = SequentialActor(Path(options["target"]), Path(options["draft"]), options["dtype"], where)
        length, _, lookup = options["mode"].partition("+")
        self._length = 0 if length == "plain" else int(length)
        self._lookup = Growing().lookup if lookup else 0

    def run(self, request: GenerationRequest) -> dict[str, Any]:
        """A request; `seconds` are those of steps that decoded."""
        timed = self._actor.run(request, self._length, lookup=self._lookup)
        return {
            "output": timed.generation.tokens,
            "decoded": timed.tokens,
            "seconds": timed.seconds,
            "steps": timed.steps,
            "hits": 0,
            "verified": None,
            "forward_s": timed.seconds - timed.drafting_s,
        }


class Pipelined:
    """A target linked to the draft at an address."""

    def __init__(self, options: dict[str, Any], where: Placement) -> None:
        config = TargetConfig(Path(options["target"]), options["dtype"], places=("separate",), earlier=0, max_batch=1)
        self._replica, _ = own_target(config, where, 0)
        self._replica.add_link(connect(options["address"], LINK_TIMEOUT_S, LinkOptions(cores=where.cores)))

    def run(self, request: GenerationRequest) -> dict[str, Any]:
        """A request; `seconds` are those with a decoding sequence."""
        chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
        before = self._replica.stats()
        self._replica.submit(request, chunks.put)
        output: list[int] = []
        while True:
            chunk = chunks.get()
            output += chunk.tokens
            if chunk.finish_reason is not None:
                break
        idle = self._replica.wait_idle(LINK_TIMEOUT_S)
        after = self._replica.stats()
        if chunk.finish_reason == "error" or not idle or not before.drafts or not after.drafts:
            raise RuntimeError(f"this is no pipeline any more: {chunk.error or 'the draft is gone'}")
        return {
            "output": output,
            "decoded": after.decoded - before.decoded,
            "seconds": after.active_s - before.active_s,
            "steps": after.sequence_steps - before.sequence_steps,
            "hits": after.hits - before.hits,
            "verified": after.verified - before.verified,
            "forward_s": after.forward_s - before.forward_s,
        }


if __name__ == "__main__":
    main()
