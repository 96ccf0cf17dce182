"""docs/VLLM.md: three commands from a running stock `vllm serve` to one with remote drafts, run as they stand there."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from benchmarks import vllm_drafts
from benchmarks.server import ROOT, free_port
from tests import exact
from tests.cluster_fixtures import until
from tests.vllm_exact import accepted_by_metrics

PAGE = Path(__file__).parent.parent / "docs" / "VLLM.md"
PROMPTS, TOKENS = 3, 48
OPTIONS = "--port {} --dtype float32 --max-model-len 512 --max-num-seqs 4 --enforce-eager"

HERE = (vllm_drafts.PYTHON.parent / "paceline").exists()


def commands(page: str) -> list[str]:
    """The commands before the first section."""
    blocks: list[str] = re.findall(r"^```\n(.*?)^```$", page.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return blocks


def test_the_page_has_three_commands() -> None:
    assert [block.split()[0] for block in commands(PAGE.read_text())] == ["paceline", "kill", "PYTHONPATH=CHECKOUT"]


@contextmanager
def running(command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A command in a shell of its own, which ends with everything that it started."""
    environment = {
        **os.environ,
        "PATH": f"{vllm_drafts.PYTHON.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], stdout=out, stderr=out, env=environment, start_new_session=True
        )
        with process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def get(url: str, body: dict[str, object] | None = None) -> str:
    """The answer, or "" while nobody is there."""
    data = json.dumps(body).encode() if body is not None else None
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return str(answer.read().decode())
    except (URLError, ConnectionError):
        return ""


def wait_served(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until vLLM answers."""

    def served() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        return bool(get(f"{url}/v1/models"))

    until(served, "vLLM serves", patience_s=600.0)


def texts(url: str, prompts: Sequence[exact.Tokens]) -> list[str]:
    """What vLLM writes behind each prompt, greedily."""
    body = {"model": str(exact.TARGET), "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    answers = [json.loads(get(f"{url}/v1/completions", {**body, "prompt": list(prompt)})) for prompt in prompts]
    return [answer["choices"][0]["text"] for answer in answers]


@pytest.mark.skipif(not HERE, reason="no vLLM here: 'make test-vllm' sets it up")
@pytest.mark.timeout(1800)
def test_they_lead_from_a_running_vllm_to_one_with_remote_drafts(tmp_path: Path) -> None:
    prompts = exact.load_prompts(PROMPTS)
    draft, port = f"127.0.0.1:{free_port()}", free_port()
    url, options = f"http://127.0.0.1:{port}", OPTIONS.format(port)
    log = tmp_path / "stock.log"
    with ExitStack() as stack:
        stock = stack.enter_context(running(f"vllm serve {exact.TARGET} {options}", log))
        wait_served(stock, url, log)
        expected = texts(url, prompts)
        known = {
            "DRAFT": str(exact.DRAFT),
            "TARGET": str(exact.TARGET),
            "CHECKOUT": str(ROOT),
            "OPTIONS": options,
            "VLLM_PID": str(stock.pid),
            "0.0.0.0:9100": draft,
            "DRAFTHOST:9100": draft,
        }
        words = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in known))
        one, two, three = (words.sub(lambda word: known[word[0]], block) for block in commands(PAGE.read_text()))
        stack.enter_context(running(one, tmp_path / "draft.log"))
        until(lambda: "ready" in (tmp_path / "draft.log").read_text(), "the draft service is ready", patience_s=300.0)
        subprocess.run(["bash", "-c", two], check=True)
        stock.wait(120)
        log = tmp_path / "drafted.log"
        drafted = stack.enter_context(running(three, log))
        wait_served(drafted, url, log)
        assert texts(url, prompts) == expected
        assert accepted_by_metrics(url) > TOKENS
