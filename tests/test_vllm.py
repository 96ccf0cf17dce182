"""The real vLLM, in its own environment, with our drafts: the same texts, also when the draft service dies."""

import json
from pathlib import Path

import pytest

from benchmarks import vllm_drafts
from tests import exact

STREAMS, TOKENS = 4, 48

pytestmark = pytest.mark.skipif(not vllm_drafts.PYTHON.exists(), reason="no vLLM here: 'make vllm' sets it up")


def test_vllm_writes_the_same_with_our_drafts_and_when_they_end(tmp_path: Path) -> None:
    prompts = [list(prompt) for prompt in exact.load_prompts(STREAMS)]
    configs = vllm_drafts.contenders(5)
    with vllm_drafts.engine("plain", None, "", STREAMS, tmp_path) as plain:
        plain.wait_ready()
        expected = plain.ask(prompts, TOKENS)["texts"]
    with vllm_drafts.draft_service(tmp_path) as (address, service):
        paceline = vllm_drafts.engine("paceline", configs["paceline"], address, STREAMS, tmp_path)
        with paceline as served:
            served.wait_ready()
            helped = served.ask(prompts, TOKENS)
            assert helped["texts"] == expected, json.dumps(helped["counts"])
            assert helped["counts"]["vllm:spec_decode_num_accepted_tokens"] > TOKENS
            service.terminate()
            service.wait()
            alone = served.ask(prompts, TOKENS)
            assert alone["texts"] == expected
            assert alone["counts"]["vllm:spec_decode_num_drafts"] == 0
