"""The real vLLM, in its own environment, with our drafts: the same texts, also while the draft service dies and returns."""

from pathlib import Path

import pytest

from benchmarks import vllm_drafts
from benchmarks.server import free_port
from tests import exact
from tests.vllm_exact import DRAFT_TOKENS, interrupted, plain_texts

PROMPTS, STREAMS, TOKENS = 6, 2, 48

pytestmark = [
    pytest.mark.skipif(not vllm_drafts.PYTHON.exists(), reason="no vLLM here: 'make test-vllm' sets it up"),
    pytest.mark.timeout(1200),
]


def test_vllm_writes_the_same_with_our_drafts_while_their_service_is_killed_and_restarted(tmp_path: Path) -> None:
    prompts = exact.load_prompts(PROMPTS)
    expected = plain_texts(prompts, TOKENS, [STREAMS], tmp_path)[STREAMS]
    address = f"127.0.0.1:{free_port()}"
    config = vllm_drafts.contenders([DRAFT_TOKENS])[f"paceline-{DRAFT_TOKENS}"]
    with vllm_drafts.engine("paceline", config, address, STREAMS, tmp_path) as served:
        served.wait_ready()
        written = interrupted(served, address, prompts, STREAMS, TOKENS, tmp_path)
    assert written.texts == expected
    assert written.accepted > TOKENS
