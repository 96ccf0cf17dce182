"""vLLM's own benchmark client against `paceline serve`, unchanged: `vllm bench serve` on both of OpenAI's endpoints.

python -m benchmarks.vllm_client --out DIR     exit code 1 unless every request succeeded and acceptance was printed

Needs `make vllm`. The prompts are the bundled ones, 200 pieces of held-out code.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.server import ROOT, serving
from deployments.config import bundled_model

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
ENDPOINTS = {  # of the client's backends
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def write_prompts(path: Path) -> None:
    """The held-out prompts as the client's custom data set."""
    prompts = (ROOT / "models" / "heldout.jsonl").read_text().splitlines()
    path.write_text("".join(json.dumps({"prompt": json.loads(line)}) + "\n" for line in prompts))


def run_client(url: str, backend: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the client, whose report goes where ours does; its JSON, without what it says of single requests."""
    out: Path = arguments.out
    values = {
        "backend": backend,
        "endpoint": ENDPOINTS[backend],
        "base-url": url,
        "model": bundled_model().name,
        "tokenizer": ROOT / "models" / "code-target",
        "dataset-name": "custom",
        "dataset-path": out / "prompts.jsonl",
        "custom-output-len": arguments.tokens,
        "num-prompts": arguments.prompts,
        "max-concurrency": arguments.concurrency,
        "temperature": arguments.temperature,
        "result-dir": out,
        "result-filename": f"{backend}.json",
    }
    command = [str(VLLM), "bench", "serve", *(f"--{name}={value}" for name, value in values.items())]
    flags = ["--ignore-eos", "--skip-chat-template", "--save-result", "--disable-tqdm"]
    subprocess.run([*command, *flags], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result: dict[str, Any] = json.loads((out / f"{backend}.json").read_text())
    return {name: value for name, value in result.items() if name == RATES or not isinstance(value, list)}


RATES = "spec_decode_per_position_acceptance_rates"


def holds(result: dict[str, Any]) -> bool:
    """Whether all requests succeeded, and acceptance could be read from /metrics."""
    complete = result["completed"] == result["num_prompts"] and result["failed"] == 0
    return complete and "spec_decode_acceptance_rate" in result


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/vllm"), help="folder of the results and logs")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="generated for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_prompts(arguments.out / "prompts.jsonl")
    with serving({}, arguments.out) as url:
        results = {backend: run_client(url, backend, arguments) for backend in ENDPOINTS}
    (arguments.out / "vllm.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(holds(result) for result in results.values()) else 1)


if __name__ == "__main__":
    main()
