"""One vLLM engine in a process of its own, for benchmarks.vllm_drafts: runs in .venv-vllm, of ours only with the proposer.

    python vllm_worker.py TARGET '{"method": ...}' CONTEXT STREAMS DTYPE

Each line on standard input is a JSON object: prompts as token ids, and how many tokens to write for each. Each answer is a
line on standard output.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    """See the top."""
    target, speculation, context, streams, dtype = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    config = json.loads(speculation)
    ours = config is not None and config["method"] == "custom_class"
    access = {"worker_extension_cls": "cluster.vllm_proposer.WorkerAccess"} if ours else {}
    engine = LLM(
        target,
        dtype=dtype,
        max_model_len=int(context),
        max_num_seqs=int(streams),
        enable_prefix_caching=False,
        speculative_config=config,
        disable_log_stats=False,
        **access,
    )
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        before, started = counted(engine), time.monotonic()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        after = counted(engine)
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        counts = {name: after[name] - before.get(name, 0) for name in after}
        times = engine.collective_rpc("paceline_times")[0] if ours else []
        answer = {"seconds": seconds, "texts": texts, "counts": counts, "propose_s": times}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def counted(engine: Any) -> dict[str, float]:
    """The counters of speculation; `steps`: how often a text grew, apart from its first token."""
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    found = {
        name: metric.value for name, metric in metrics.items() if "spec_decode" in name and hasattr(metric, "value")
    }
    return {**found, "steps": metrics["vllm:inter_token_latency_seconds"].count}


if __name__ == "__main__":
    main()
