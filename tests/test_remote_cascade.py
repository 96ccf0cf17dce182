"""A cascade across actors: what one draft service grows drafts for the model of another, and no token is another."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.draft import DraftReplica
from cluster.drafters import DraftConfig, make_drafter
from cluster.grpc_server import DraftServer
from cluster.link import memory_link
from cluster.placement import Placement
from cluster.remote_drafter import RemoteDrafter
from cluster.target import TargetReplica
from engine.decode import decode
from engine.drafters import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.model import Growing, ModelDrafter
from engine.drafters.retrieval import Documents, RetrievalDrafter
from engine.runner import ModelRunner
from engine.types import SamplingParams
from engine.windows import FixedTree
from tests import exact
from tests.cluster_fixtures import PATIENCE_S, faulty, until

TOKENS = 16


@contextmanager
def drafting(drafter: Drafter) -> Iterator[DraftReplica]:
    """A draft replica, audited once its sessions have ended."""
    replica = DraftReplica(drafter)
    try:
        yield replica
        until(lambda: replica.stats().sessions == 0, "the sessions end")
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
    finally:
        replica.close()


def outer(draft: ModelRunner, inner: Drafter) -> CascadeDrafter:
    return CascadeDrafter(ModelDrafter(draft, Growing(lookup=0, overrule=True)), inner)


@pytest.mark.parametrize("faults", [False, True])
def test_three_actors_in_a_row_serve_the_plain_tokens(target: ModelRunner, draft: ModelRunner, faults: bool) -> None:
    """Documents that hold the outputs -> the draft model -> the target."""
    requests = exact.make_requests(exact.load_prompts(3), 0.8, TOKENS)
    plain = [generation.tokens for generation in decode(target, requests)]
    answers = Documents([(*request.prompt, *tokens) for request, tokens in zip(requests, plain, strict=True)])
    remote = RemoteDrafter(draft.vocab_size)
    with drafting(RetrievalDrafter(answers)) as innermost:
        near, far = memory_link()
        innermost.add_link(far)
        remote.add_link(faulty(near, 1) if faults else near)
        with drafting(outer(draft, remote)) as middle:
            replica = TargetReplica(target, FixedTree(7), max_batch=2)
            near, far = memory_link()
            middle.add_link(far)
            replica.add_link(near)
            until(lambda: replica.stats().drafts == 1, "the draft is linked")

            def accepted() -> int:
                generations = exact.serve(replica, requests)
                assert not list(exact.differences(generations, plain))
                return sum(generation.accepted for generation in generations)

            until(lambda: accepted() > 0, "a guess comes in time")  # the first ones wait for loops to be compiled
            until(lambda: accepted() > 0 and innermost.stats().steps > 0, "the innermost drafter has a part in it")
            assert replica.wait_idle(PATIENCE_S)
            replica.check()
            replica.close()
        remote.hang_up()


def test_what_the_service_grows_is_in_the_outer_tree_and_its_end_is_survived(draft: ModelRunner) -> None:
    """Over gRPC. The document goes on as no model would."""
    text = [5, 6, 7, 1000, 2000, 3000, 1001, 2001, 3001]
    with drafting(RetrievalDrafter(Documents([text]))) as service:
        server = DraftServer("127.0.0.1", 0, service.add_link)
        remote = RemoteDrafter(draft.vocab_size)
        remote.keep_linked(server.address)
        cascade = outer(draft, remote)
        cascade.open(7, text[:3], SamplingParams())

        def grown(tokens: list[int]) -> bool:
            cascade.grow()
            return cascade.tree(7).path(tokens) >= 0

        until(lambda: grown([1000]) or remote.tree(7).path([1000]) >= 0, "the guess arrives")
        assert remote.tree(7).path([1000, 2000, 3000]) >= 0
        cascade.commit(7, [1000, 2000])
        until(lambda: remote.grow() == [7] or remote.tree(7).path([3000, 1001, 2001]) >= 0, "more of it arrives")
        cascade.check()
        server.stop()
        until(lambda: service.stats().streams == 0, "the service is gone")
        cascade.commit(7, [3000])
        cascade.grow()
        cascade.check()
        cascade.close(7)
        cascade.check()
        remote.hang_up()
    assert draft.pool.used_pages == 0


def test_a_configured_cascade_asks_the_service_that_it_names() -> None:
    with drafting(RetrievalDrafter(Documents([[5, 6, 7, 8]]))) as service:
        server = DraftServer("127.0.0.1", 0, service.add_link)
        config = DraftConfig(exact.DRAFT, "float32", 4096, drafter="cascade", inner=server.address)
        cascade = make_drafter(config, Placement())
        cascade.open(1, [5, 6], SamplingParams())

        def known() -> bool:
            cascade.grow()  # which also says what there is to say
            return service.stats().sessions == 1

        until(known, "the service has the session")
        cascade.close(1)
        assert isinstance(cascade, CascadeDrafter)
        assert isinstance(cascade._inner, RemoteDrafter)
        cascade._inner.hang_up()
        until(lambda: service.stats().streams == 0, "the link is gone")
        server.stop()
