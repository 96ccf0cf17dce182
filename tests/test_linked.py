"""What can't be told to a draft costs its session the draft, and nobody anything else."""

from collections.abc import Callable

import pytest

from cluster import link, wire
from cluster.draft import DraftReplica
from cluster.link import LinkStats, memory_link
from cluster.linked import LinkedDrafts
from cluster.target import TargetReplica
from cluster.target_state import TargetState
from cluster.trace import Trace
from engine.decode import Generation
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from engine.types import SamplingParams
from tests import exact
from tests.cluster_fixtures import PATIENCE_S
from tests.exact import Tokens

TOKENS = 32

# With messages that carry prefixes of so many tokens at most: what a short and a long prompt gave, and the draft's link.
Serve = Callable[[int], tuple[Generation, Generation, LinkStats]]


@pytest.fixture
def short_and_long(prompts: list[Tokens]) -> tuple[Tokens, Tokens]:
    few = sorted(prompts[:8], key=len)
    return few[0], few[-1]


@pytest.fixture
def serve(
    target: ModelRunner, draft: ModelRunner, short_and_long: tuple[Tokens, Tokens], monkeypatch: pytest.MonkeyPatch
) -> Serve:
    requests = exact.make_requests(short_and_long, 0.0, TOKENS)
    plain = [generation.tokens for generation in exact.run(target, requests, batch=1)]

    def both(most: int) -> tuple[Generation, Generation, LinkStats]:
        monkeypatch.setattr(wire, "MAX_PREFIX_TOKENS", most)
        replica, drafting = TargetReplica(target, exact.goodput()), DraftReplica(ModelDrafter(draft))
        ours, theirs = memory_link()
        drafting.add_link(theirs)
        replica.add_link(ours)
        short, long = exact.serve_until_accepted(replica, requests, plain)
        assert replica.wait_idle(PATIENCE_S)
        replica.check()
        replica.close()
        drafting.close()
        return short, long, theirs.stats

    return both


def test_a_prefix_too_long_for_any_message_goes_without_drafts(
    serve: Serve, short_and_long: tuple[Tokens, Tokens]
) -> None:
    short, long = short_and_long
    assert len(long) > len(short) + TOKENS
    helped, alone, _ = serve(len(short) + TOKENS)
    assert helped.accepted > 0 == alone.accepted


def test_a_text_that_grows_too_long_goes_on_without_drafts_and_the_others_with_theirs(
    serve: Serve, short_and_long: tuple[Tokens, Tokens]
) -> None:
    """Commits of many sessions share a message: one that the other end refused would cost all of them."""
    short, long = short_and_long
    assert len(short) + TOKENS < len(long) + 4
    helped, _, told = serve(len(long) + 4)
    assert helped.accepted > 0
    assert told.garbled == 0 < told.received


def test_what_a_link_loses_is_counted_also_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_QUEUED_MESSAGES", 4)
    state = TargetState(100)
    drafts = LinkedDrafts(state, Trace(), None)
    for ends in range(2):
        ours, theirs = memory_link()
        drafts.join(ours)
        theirs.receive()
        for _ in range(10):
            state.session_closed(state.session_opened([1, 2, 3], SamplingParams()))
            drafts.send()
        assert state.counters.lost == 16 * (ends + 1)
        theirs.close()
        drafts.receive()
        assert len(drafts) == 0
    assert state.counters.lost == 32
