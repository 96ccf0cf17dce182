"""What a real vLLM draws at T > 0, with our drafts, with its own and without: on CPUs, by what cluster.vllm_mended mends."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.vllm_options import VllmOptions
from cluster.vllm_target import VllmTarget
from engine.runner import ModelRunner
from engine.types import GenerationRequest, SamplingParams
from tests import exact
from tests.vllm_exact import parted
from tests.vllm_targets import ENGINE_ARGS, STREAMS, alone, drafted, likelihood_z, run, tokens

TOKENS = 48
PROMPTS = exact.load_prompts(4 * STREAMS)
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
OWN: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "draft model": {
        "method": "draft_model",
        "model": str(exact.DRAFT),
        "draft_sample_method": "probabilistic",
        "num_speculative_tokens": 3,
    },
    "none": {},
}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this environment: make test-vllm"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM's own, on import
]


@pytest.fixture(scope="module", params=["ours", *OWN])
def sampled(request: pytest.FixtureRequest) -> Iterator[tuple[VllmTarget, bool]]:
    """A target, and whether anything drafts for it."""
    if request.param == "ours":
        with drafted() as pair:
            yield pair.target, True
    else:
        config = OWN[request.param]
        own = {"speculative_config": config} if config else {}
        with alone(VllmOptions(engine_args={**ENGINE_ARGS, **own})) as target:
            yield target, bool(config)


def draw(target: VllmTarget, name: str, params: SamplingParams) -> list[list[int]]:
    """Texts that go on from held-out prompts, each with a seed of its own."""
    made = [GenerationRequest(f"{name}-{i}", prompt, replace(params, seed=i)) for i, prompt in enumerate(PROMPTS)]
    return [tokens(chunks) for chunks in run(target, made)]


def test_the_likeliest_token_is_drawn_where_no_other_is_allowed(
    sampled: tuple[VllmTarget, bool], target: ModelRunner
) -> None:
    plain = exact.run(target, [GenerationRequest(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)], batch=8)
    allowed: dict[str, dict[str, float]] = {"top-k": {"top_k": 1}, "top-p": {"top_p": 1e-6}}
    for name, only in allowed.items():
        texts = draw(sampled[0], name, replace(GREEDY, temperature=0.7, **only))  # type: ignore[arg-type]
        differ = parted(texts, [generation.tokens for generation in plain], PROMPTS)
        assert all(margin <= exact.TIE for _, margin in differ)


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, temperature=0.7),
        replace(GREEDY, temperature=1.0),
        replace(GREEDY, temperature=1.3, top_k=20, top_p=0.9),
    ],
    ids=lambda params: f"{params.temperature}",
)
def test_tokens_are_drawn_as_likely_as_they_are(
    sampled: tuple[VllmTarget, bool], target: ModelRunner, params: SamplingParams
) -> None:
    engine, drafts = sampled
    before = engine.stats().accepted
    texts = draw(engine, f"T {params.temperature}", params)
    assert (engine.stats().accepted > before) == drafts
    assert abs(likelihood_z(target, PROMPTS, texts, params)) < 5


@pytest.mark.parametrize("sampled", ["none"], indirect=True)  # how many drafts come shifts what is drawn
def test_without_drafts_a_seed_decides_the_text_however_its_prompt_is_read(sampled: tuple[VllmTarget, bool]) -> None:
    engine, _ = sampled
    params = replace(GREEDY, temperature=1.0)
    together = draw(engine, "together", params)
    for i, text in enumerate(together[:STREAMS]):
        request = GenerationRequest(f"alone-{i}", PROMPTS[i], replace(params, seed=i))
        assert tokens(run(engine, [request])[0]) == text
