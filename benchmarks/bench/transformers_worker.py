"""transformers' `generate` in a process of its own: runs in .venv-transformers, without anything of ours in it.

    python transformers_worker.py '{"target": FOLDER, "draft": FOLDER or null, "dtype": "float32", "cores": [0]}'

Each line on standard input asks for something, each line on standard output answers: prompts to be decoded, as one batch
(answer: token ids, and when they came), or the margins of an output (the distance between the two best logits at each
position). With a draft it is assisted generation.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class Clock(BaseStreamer):
    """When tokens came, and how many for each prompt: the prompts themselves come first."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.started = time.monotonic()
        self.prompted = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompted:
            each = value.numel() if value.dim() < 2 or value.shape[0] == 1 else value.shape[-1]
            self.arrivals.append((time.monotonic() - self.started, each))
        self.prompted = True

    def end(self) -> None:
        pass


class BatchClock(Clock):
    """The same for several prompts: a step brings one token to each."""

    def put(self, value: torch.Tensor) -> None:
        if self.prompted:
            self.arrivals.append((time.monotonic() - self.started, 1))
        self.prompted = True


def load(path: str, dtype: str) -> Any:
    """A model."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def assists(draft: Any) -> None:
    """The dynamic schedule: as many tokens as the draft is sure enough of, by a threshold that learns."""
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.num_assistant_tokens = 20
    draft.generation_config.assistant_confidence_threshold = 0.4


@torch.inference_mode()
def run(target: Any, draft: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Decodes all prompts as one batch, filled up on the left."""
    prompts = asked["prompts"]
    width = max(map(len, prompts))
    device = target.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    sampling = {"temperature": asked["temperature"], "top_k": 0, "top_p": 1.0} if asked["temperature"] else {}
    torch.manual_seed(asked["seeds"][0])
    clock = Clock() if len(prompts) == 1 else BatchClock()
    made = target.generate(
        ids,
        attention_mask=mask,
        do_sample=asked["temperature"] > 0,
        max_new_tokens=asked["tokens"],
        pad_token_id=0,
        streamer=clock,
        **({"assistant_model": draft} if draft is not None else {}),
        **sampling,
    )
    outputs = made[:, width:].tolist()
    return {"streams": [{"tokens": output, "arrivals": clock.arrivals} for output in outputs]}


@torch.inference_mode()
def margins(target: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """How far apart the two best logits were at each position of an output."""
    prompt, output = asked["prompt"], asked["output"]
    logits = target(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    best = torch.topk(logits, 2).values
    return {"margins": (best[:, 0] - best[:, 1]).tolist()}


def main() -> None:
    """See the top."""
    options = json.loads(sys.argv[1])
    answers = sys.stdout
    sys.stdout = sys.stderr
    os.sched_setaffinity(0, options["cores"])
    torch.set_num_threads(len(options["cores"]))
    transformers.logging.set_verbosity_error()
    target = load(options["target"], options["dtype"])
    draft = load(options["draft"], options["dtype"]) if options["draft"] else None
    if draft is not None:
        assists(draft)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        answer = margins(target, asked) if "output" in asked else run(target, draft, asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
