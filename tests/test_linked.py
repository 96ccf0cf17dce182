"""What can't be told to a draft costs its session the draft, and nobody anything else."""

import pytest

from cluster import wire
from cluster.draft import DraftReplica
from cluster.link import memory_link
from cluster.target import TargetReplica
from engine.drafters.model import ModelDrafter
from engine.runner import ModelRunner
from tests import exact
from tests.cluster_fixtures import PATIENCE_S
from tests.exact import Tokens

TOKENS = 32


def test_a_prefix_too_long_for_any_message_goes_without_drafts(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = sorted(prompts[:8], key=len)[:: len(prompts[:8]) - 1]
    requests = exact.make_requests([short, long], 0.0, TOKENS)
    expected = [each.tokens for each in exact.run(target, requests, batch=1)]
    monkeypatch.setattr(wire, "MAX_PREFIX_TOKENS", len(short) + TOKENS)
    assert len(long) > wire.MAX_PREFIX_TOKENS
    replica, drafting = TargetReplica(target, exact.goodput()), DraftReplica(ModelDrafter(draft))
    ours, theirs = memory_link()
    drafting.add_link(theirs)
    replica.add_link(ours)
    helped, alone = exact.serve(replica, requests)
    assert [helped.tokens, alone.tokens] == expected
    assert helped.accepted > 0 == alone.accepted
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    replica.close()
    drafting.close()


def test_a_text_that_grows_too_long_goes_on_without_drafts_and_the_others_with_theirs(
    target: ModelRunner, draft: ModelRunner, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits of many sessions share a message: one that the other end refused would cost all of them."""
    short, long = sorted(prompts[:8], key=len)[:: len(prompts[:8]) - 1]
    requests = exact.make_requests([short, long], 0.0, TOKENS)
    expected = [each.tokens for each in exact.run(target, requests, batch=1)]
    monkeypatch.setattr(wire, "MAX_PREFIX_TOKENS", len(long) + 4)
    assert len(short) + TOKENS < wire.MAX_PREFIX_TOKENS
    replica, drafting = TargetReplica(target, exact.goodput()), DraftReplica(ModelDrafter(draft))
    ours, theirs = memory_link()
    drafting.add_link(theirs)
    replica.add_link(ours)
    outputs = exact.serve(replica, requests)
    assert [output.tokens for output in outputs] == expected
    assert outputs[0].accepted > 0
    assert theirs.stats.garbled == 0 < theirs.stats.received
    assert replica.wait_idle(PATIENCE_S)
    replica.check()
    replica.close()
    drafting.close()
