"""One vLLM engine in a process of its own: runs in .venv-vllm, of ours only with what mends it on CPUs.

    python vllm_engine_worker.py '{"target": FOLDER, "speculation": null, "dtype": "float32", "context": 1024, "streams": 1,
        "eager": false, "extension": CLASS, "cores": [0]}'

Each line on standard input asks for prompts to be decoded at the same time, each line on standard output answers with token
ids and when they came.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """See the top."""
    options = json.loads(sys.argv[1])
    answers = sys.stdout
    sys.stdout = sys.stderr  # vLLM prints
    os.sched_setaffinity(0, options["cores"])
    from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        options["target"],
        dtype=options["dtype"],
        max_model_len=options["context"],
        max_num_seqs=options["streams"],
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
        speculative_config=options["speculation"],
        worker_extension_cls=options["extension"],
    ).llm_engine
    answers.write("ready\n")
    answers.flush()
    for number, line in enumerate(sys.stdin):
        answers.write(json.dumps(run(engine, json.loads(line), number)) + "\n")
        answers.flush()


def run(engine: Any, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Decodes all prompts; one step after the other, to know when tokens came."""
    from vllm import SamplingParams

    streams: list[dict[str, Any]] = [{"tokens": [], "arrivals": []} for _ in asked["prompts"]]
    started = time.monotonic()
    for index, prompt in enumerate(asked["prompts"]):
        params = SamplingParams(temperature=asked["temperature"], max_tokens=asked["tokens"], detokenize=False)
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.monotonic() - started
        for output in outputs:
            stream = streams[int(output.request_id.split("-")[1])]
            tokens = list(output.outputs[0].token_ids)
            new = len(tokens) - len(stream["tokens"])
            if new:
                stream["tokens"] = tokens
                stream["arrivals"].append((now, new))
    return {"streams": streams}


if __name__ == "__main__":
    main()
