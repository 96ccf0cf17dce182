"""The command line: help, bad input, generation in every mode, the demo's figures and its picture."""

import inspect
import io
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import engine.train
from cluster.actors import TargetConfig
from cluster.drafters import DraftConfig
from cluster.target_stats import TargetStats
from cluster.trace import Kind, Span
from deployments import cli, demo_view, timeline
from deployments.demo import Results
from deployments.figures import Figures
from deployments.generate import Pair, start
from deployments.training_cli import train
from engine.checkpoint import MODELS
from engine.kv import PoolExhausted
from engine.runner import ModelRunner
from engine.step import StepError
from engine.types import GenerationRequest, SamplingParams
from tests.http_fixtures import PROMPT

ROOT = Path(__file__).parent.parent
EXACT = ["--invariant", "--dtype", "float32", "--max-tokens", "24", "--temperature", "1"]
FIGURES = Figures(tokens=30, seconds=0.5, steps=20, tried=16, accepted=10, idle_s=0.1, hits=12)


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli.app, arguments, input=stdin, prog_name="paceline")


def run_process(*arguments: str, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=500, check=False)


# --- help and bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "generate"),
        (["--help"], "demo"),
        (["generate", "--help"], "--temperature"),
        (["demo", "-h"], "--tokens"),
        (["train", "-h"], "--batch-size"),
        (["distill", "-h"], "--layers"),
        (["heads", "-h"], "--sequence-length"),
        (["draft", "-h"], "retrieval"),
        (["simulate", "-h"], "--target-ms"),
        (["config"], "schema"),
        (["--version"], "paceline"),
        (["version"], "paceline"),
    ],
)
def test_help_and_version(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert text in result.stdout


def test_starting_the_command_imports_nothing_slow() -> None:
    code = "import sys, deployments.cli; print({'torch', 'ray', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate"], "PROMPT"),
        (["generate", ""], "PROMPT: must not be empty"),
        (["generate", "-"], "PROMPT: must not be empty"),
        (["generate", "\udcff"], "PROMPT: must be UTF-8 text"),
        (["generate", "x", "--bad-word", "\udcff"], "--bad-word: must be UTF-8 text"),
        (["generate", "x", "--stop", "\udcff"], "--stop: must be UTF-8 text"),
        (["generate", "x", "--temperature", "-1"], "--temperature: must be between"),
        (["generate", "x", "--temperature", "nan"], "--temperature"),
        (["generate", "x", "--temperature", "warm"], "--temperature"),
        (["generate", "x", "--top-k", "-1"], "--top-k"),
        (["generate", "x", "--top-p", "0"], "--top-p"),
        (["generate", "x", "--min-p", "2"], "--min-p"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "5000"], "the model's context is"),
        (["generate", "x", "--stop", ""], "--stop"),
        (["generate", "x", "--min-tokens", "-1"], "--min-tokens"),
        (["generate", "x", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["generate", "x", "--regex", "[a-z"], "the regex can't be used"),
        (["generate", "x", "--regex", "a", "--json"], "only one of"),
        (["generate", "x", "--regex", ""], "--regex: must not be empty"),
        (["generate", "x", "--window", "wide"], "--window: must be goodput"),
        (["generate", "x", "--window", "off", "--mode", "plain"], "--window: only in pipelined mode"),
        (["generate", "x", "--local", "heads"], "the drafter heads needs heads"),
        (["generate", "x", "--local", "jacobi", "--mode", "plain"], "--local: only in pipelined mode"),
        (["generate", "x", "--json-schema", "no/such/file"], "--json-schema': file 'no/such/file' does not exist"),
        (["generate", "x", "--json-schema", "/dev/zero"], "/dev/zero is larger than 4 MiB"),
        (["generate", "x", "--mode", "fast"], "'--mode': 'fast' is not one of"),
        (["generate", "x", "--dtype", "int8"], "--dtype"),
        (["generate", "x", "--target", "no/such/folder"], "no model at no/such/folder"),
        (["generate", "x", "--draft", "no/such/folder"], "no model at no/such/folder"),
        (["demo", "--draft", "no/such/folder"], "no model at no/such/folder"),
        (["demo", "--out", "/proc/x"], "--out: /proc/x can't be written"),
        (["demo", "--tokens", "5000"], "--tokens"),
        (["demo", "--tokens", "many"], "--tokens"),
        (["train", "--steps", "0"], "--steps"),
        (["train", "--out", "/proc/x"], "--out: /proc/x can't be written"),
        (["train", "--work", __file__], f"--work: {__file__} can't be written"),
        (["distill"], "--out"),
        (["distill", "--out", "/proc/x"], "--out: /proc/x can't be written"),
        (["distill", "--out", "x", "--draft", "no/such/folder"], "no model at no/such/folder"),
        (["draft", "--drafter", "guess"], "--drafter"),
        (["draft", "--drafter", "retrieval"], "the drafter retrieval needs documents"),
        (["draft", "--drafter", "ngram", "--model", "x"], "the drafter ngram uses no checkpoint"),
        (["draft", "--documents", "x"], "the drafter auto uses no documents"),
        (["draft", "--drafter", "merged"], "the drafter merged needs a checkpoint or documents"),
        (["draft", "--drafter", "merged", "--documents", "no/such/file"], "there is nothing at no/such/file"),
        (["draft", "--drafter", "retrieval", "--documents", __file__], "name its folder by --tokenizer"),
        (["draft", "--tokenizer", "no/such/folder"], "--tokenizer: no/such/folder has no tokenizer.json"),
        (["draft", "--model", "no/such/folder"], "no model at no/such/folder"),
        (["draft", "--threads", "100000"], "--threads"),
        (["draft", "--kv-tokens", str(10**18)], "--kv-tokens"),
        (["draft", "--weights", "int2"], "--weights"),
        (["draft", "--weights", "int4"], "weights int4: only on GPUs"),
        (["draft", "--weights", "int4", "--gpu", "--dtype", "float32"], "weights int4: not in float32"),
        (["draft", "--inner", "localhost:1"], "the drafter auto uses no inner draft service: cascade does"),
        (["draft", "--drafter", "cascade", "--inner", "localhost"], "--inner: 'localhost' is not HOST:PORT"),
        (["draft", "--weights", "int8", "--drafter", "ngram"], "weights int8: there is no checkpoint"),
        (["simulate", "--target-ms", "fast"], "--target-ms: 'fast' is no number"),
        (["simulate", "--target-ms", "1:0"], "--target-ms: all numbers must be positive"),
        (["simulate", "--target-ms", "roofline:70"], "--target-ms: a roofline is"),
        (["simulate", "--acceptance", "1"], "--acceptance: must be between 0 and 1"),
        (["simulate", "--following", "0.9,0.9"], "--following: must be shares"),
        (["simulate", "--following", "much"], "--following: 'much' is no list"),
        (["simulate", "--chains", "0"], "--chains: must be whole numbers"),
        (["simulate", "--chains", ""], "--chains: must not be empty"),
        (["simulate", "--prompt-tokens", "200000"], "--prompt-tokens"),
        (["simulate", "--kv-tokens", "300"], "--kv-tokens: one request needs"),
        (["simulate", "--profile", "no/such/file"], "no/such/file"),
        (["simulate", "--profile", __file__], "holds no recording"),
        (["simulate", "--measured", __file__], "was not written by benchmarks/pipeline.py"),
        (["simulate", "--preset", "gpt"], "--preset"),
        (["simulate", "--kv-tokens", str(10**18)], "--kv-tokens"),
        (["simulate", "--json", "/proc/x.json"], "--json: /proc can't be written"),
        (["simulate", "--json", str(ROOT)], f"--json: {ROOT} can't be written"),
        (["heads", "no/such/folder", "--out", "x"], "no model at no/such/folder"),
        (["heads", str(MODELS / "code-target"), "--out", "/proc/x"], "--out: /proc/x can't be written"),
        (["expand", str(MODELS / "code-target"), "--layers", "9", "--out", "/proc/x"], "--out: /proc/x can't be"),
        (["expand", str(MODELS / "code-target"), "--layers", "1", "--out", str(MODELS / "code-target")], "made from"),
        (["serve", "--address", "nowhere"], "--address: 'nowhere' is not HOST:PORT"),
        (["serve", "--config", ""], "--config"),
        (["config", "check", ""], "'FILE': file '' is a directory"),
        (["config", "check", "/dev/zero"], "/dev/zero is larger than 4 MiB"),
        (["unserve"], "unserve"),
        (["--loud"], "--loud"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    result = run(*arguments, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("paceline: ")
    assert result.stderr.count("\n") == 1
    assert text in result.stderr


def test_standard_input_of_another_encoding_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["generate", "-"], input=b"\xff\xfe", prog_name="paceline")
    assert (result.exit_code, result.stderr) == (2, "paceline: PROMPT: must be UTF-8 text\n")


def test_a_schema_that_is_not_followed_to_the_letter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["a", "b"], "not": {"const": "a"}}')
    result = run("generate", "x", "--json-schema", str(file), "--mode", "plain")
    assert (result.exit_code, result.stderr) == (2, "paceline: grammar: not is not supported in a schema\n")


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "code-target", tmp_path, dirs_exist_ok=True)
    for content, reason in (("{}", "KeyError: 'added_tokens'"), ("no JSON", "JSONDecodeError")):
        (tmp_path / "tokenizer.json").write_text(content)
        result = run("generate", "x", "--target", str(tmp_path), "--mode", "plain")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"paceline: {tmp_path}/tokenizer.json can't be read: {reason}")
        assert result.stderr.count("\n") == 1


def test_the_version_is_all_that_is_said() -> None:
    result = run("--version", "config", "schema")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)


@pytest.mark.parametrize("command", [["--version"], ["--help"], ["config", "schema"]], ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = run_process(*command, stdout=full)
    assert result.returncode == 1
    assert result.stderr == "paceline: the output can't be written: No space left on device\n"


def test_a_command_that_is_interrupted_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deployments.generate_cli.check_pair", interrupt)
    result = run("generate", "def f(x):")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


def test_models_with_different_vocabularies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    (tmp_path / "model.safetensors").touch()
    result = run("generate", "x", "--draft", str(tmp_path))
    assert result.exit_code == 2
    assert "vocabularies differ: 4096 tokens in" in result.stderr
    assert ", 7 in" in result.stderr


def test_an_unreadable_checkpoint_is_one_line(tmp_path: Path) -> None:
    for file in (MODELS / "code-target").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_text("no weights")
    result = run("generate", "x", "--target", str(tmp_path), "--mode", "plain")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "can't be loaded" in result.stderr


# --- generate


@pytest.fixture(scope="module")
def sample() -> tuple[list[str], str]:
    """Options of a generation, and the text that plain decoding gives: not a short one, whatever the bundled pair is."""
    for seed in range(20):
        options = [*EXACT, "--seed", str(seed)]
        text: str = run("generate", PROMPT, "--mode", "plain", *options).stdout
        if len(text.strip()) > 20:
            return options, text
    raise AssertionError("the bundled target ends every text at once")


def test_plain_and_sequential_give_the_same_text(sample: tuple[list[str], str]) -> None:
    options, text = sample
    sequential = run("generate", "-", "--mode", "sequential", "--stats", *options, stdin=PROMPT)
    assert sequential.exit_code == 0
    assert sequential.stdout == text
    assert "acceptance" in sequential.stderr


def test_another_seed_gives_another_text() -> None:
    texts = {run("generate", PROMPT, "--mode", "plain", *EXACT, "--seed", seed).stdout for seed in "1234"}
    assert len(texts) > 1


def test_figures_of_one_process_leave_the_prompt_out() -> None:
    pair = Pair(MODELS / "code-target", None)
    request = GenerationRequest("0", tuple(range(100, 400)), SamplingParams(max_tokens=4, ignore_eos=True))
    engine = start("plain", pair, lambda text: None)
    assert [len(chunk.tokens) for chunk in engine.stream(request)] == [1] * 4
    figures = engine.figures()
    assert (figures.tokens, figures.steps) == (3, 3), "the first token came with the end of the prompt"
    engine.close()


def test_one_process_has_the_room_of_two_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = MODELS / "code-target", MODELS / "code-draft"
    rooms: dict[Path, int] = {}
    load = ModelRunner.__init__

    def note(runner: ModelRunner, path: Path, **options: Any) -> None:
        load(runner, path, **options)
        rooms[path] = runner.pool.capacity

    monkeypatch.setattr(ModelRunner, "__init__", note)
    engine = start("sequential", Pair(target, draft), lambda text: None)
    assert rooms[target] >= TargetConfig(target).kv_tokens
    assert rooms[draft] >= DraftConfig(draft).kv_tokens
    engine.close()


def test_what_one_process_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.generate.TargetConfig", partial(TargetConfig, kv_tokens=320))
    result = run("generate", PROMPT, "--mode", "plain", "--max-tokens", "300")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert re.search(r"prompt and max_tokens make 3\d\d tokens; the target has room for 256", result.stderr)


@pytest.mark.parametrize("error", [PoolExhausted("there are no pages left"), StepError("the request")])
def test_what_fails_while_a_model_runs_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("deployments.generate.start", fail)
    result = run("generate", PROMPT, "--mode", "plain")
    assert (result.exit_code, result.stderr) == (1, f"paceline: {error}\n")


def test_text_follows_an_expression() -> None:
    options = ("--mode", "plain", "--temperature", "1", "--max-tokens", "32")
    result = run("generate", PROMPT, *options, "--regex", "[a-z]{2,5} = [0-9]{1,4}")
    assert re.fullmatch("[a-z]{2,5} = [0-9]{1,4}\n", result.stdout)


def test_text_ends_before_a_stop_string(sample: tuple[list[str], str]) -> None:
    options, text = sample
    stop = text[8:10]
    cut = run("generate", PROMPT, "--mode", "plain", *options, "--stop", stop)
    assert cut.exit_code == 0
    assert cut.stdout == text[: text.index(stop)] + "\n"


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_actors_give_the_text_of_plain_decoding(sample: tuple[list[str], str]) -> None:
    """Starts Ray, in another process."""
    options, text = sample
    pipelined = run_process("generate", PROMPT, "--stats", *options)
    assert pipelined.returncode == 0, pipelined.stderr
    assert pipelined.stdout == text
    assert pipelined.stderr.count("\n") == 1, "Ray and transformers keep quiet"
    assert "hit rate" in pipelined.stderr or "acceptance" not in pipelined.stderr


# --- train


def test_training_options_are_the_recipe() -> None:
    recipe = engine.train.TrainingConfig()
    defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    assert defaults.pop("device") is None
    assert defaults == {name: getattr(recipe, name) for name in defaults}


def test_train_prints_the_final_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def fake(config: engine.train.TrainingConfig) -> dict[str, float]:
        seen.append(config)
        return {"steps": 5, "held_out_loss": 3.25, "agreement": 0.5}

    monkeypatch.setattr(engine.train, "train", fake)
    result = run("train", "--steps", "5", "--out", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 0
    assert seen == [engine.train.TrainingConfig(steps=5, out=tmp_path, device="cpu")]
    assert "held-out loss 3.250, agreement 0.500" in result.stdout


def test_train_refuses_the_state_of_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(config: engine.train.TrainingConfig) -> dict[str, float]:
        raise ValueError("state.pt was written by another recipe")

    monkeypatch.setattr(engine.train, "train", fake)
    result = run("train")
    assert result.exit_code == 2
    assert result.stderr == "paceline: state.pt was written by another recipe\n"


# --- the demo's figures


def test_figures_add_up() -> None:
    both = FIGURES + Figures(tokens=10, seconds=0.5, steps=10, tried=0, accepted=0)
    assert both.tokens_per_second == 40
    assert both.tokens_per_step == pytest.approx(40 / 30)
    assert both.acceptance == pytest.approx(10 / 16)
    assert both.hit_rate == pytest.approx(12 / 30)
    assert both.idle == pytest.approx(0.1)


def test_figures_of_a_target_are_a_difference() -> None:
    before = TargetStats(
        tokens=6, decoded=5, sequence_steps=4, active_s=1.0, forward_s=0.5, tried=1, accepted=1, hits=2
    )
    after = TargetStats(
        tokens=28, decoded=25, sequence_steps=14, active_s=2.0, forward_s=1.25, tried=11, accepted=9, hits=7
    )
    assert Figures.between(before, after) == Figures(20, 1.0, 10, 10, 8, idle_s=0.25, hits=5)
    alone = Figures.between(before, before)
    assert (alone.acceptance, alone.hit_rate, alone.idle, alone.tokens_per_second) == (None, None, None, 0.0)


def test_an_output_that_differs_is_named_with_its_position() -> None:
    results, request = Results(), GenerationRequest("prompt 1", (1,), SamplingParams())
    results.compare("a", request, [1, 2, 3], [1, 2, 3])
    results.compare("b", request, [1, 9, 3], [1, 2, 3])
    results.compare("c", request, [1, 2], [1, 2, 3])
    assert [(found.contender, found.position) for found in results.differences] == [("b", 1), ("c", 2)]


def test_table_and_verdict_fit_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    names = ("plain", "sequential k=2", "pipelined")
    demo_view.print_table(console, [demo_view.Row(t, name, FIGURES) for t in (0.0, 1.0) for name in names])
    demo_view.print_verdict(console, [])
    demo_view.print_verdict(console, [demo_view.Divergence("pipelined", "prompt 2, T = 1", 17, 0.0156)])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert "sequential k=2      60.0     1.00x         1.50        0.62      0.60  0.20" in text
    assert "outputs equal: yes\n" in text
    assert "outputs equal: no\n" in text
    assert "from token 17 on, margin 0.0156" in text


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_demo_runs(tmp_path: Path) -> None:
    """Starts Ray, in another process. In invariant mode no output may differ, whatever the hardware."""
    done = run_process("demo", "--tokens", "16", "--invariant", "--dtype", "float32", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "outputs equal: yes" in done.stdout
    assert done.stdout.count("16 tokens, ") == 6
    assert str(tmp_path / "timeline.png") in done.stdout.replace("\n", "")
    assert (tmp_path / "timeline.png").stat().st_size > 20_000


# --- the picture


def spans(kind: Kind, *times: tuple[float, float, int]) -> list[Span]:
    """Spans of (start, end, amount), in milliseconds."""
    return [Span(kind, start / 1000, end / 1000, amount) for start, end, amount in times]


TARGET = [
    *spans("target step", *((12.0 * i, 12.0 * i + 9, 1 + i % 5) for i in range(40))),
    *spans("wait", *((12.0 * i + 10.5, 12.0 * i + 11.5, 1) for i in range(0, 40, 7))),
    *spans("commit", *((12.0 * i + 9.5, 12.0 * i + 9.6, 1) for i in range(40))),
    *spans("growth", *((12.0 * i + 9.1, 12.0 * i + 9.3, 20) for i in range(40))),
]
DRAFT = [
    *spans("draft step", *((3.0 * i, 3.0 * i + 2.5, 1) for i in range(160))),
    *spans("commit", *((12.0 * i + 11.7, 12.0 * i + 11.8, 2) for i in range(40))),
    *spans("growth", *((3.0 * i + 2.6, 3.0 * i + 2.7, 8) for i in range(160))),
]


def test_picture_is_written(tmp_path: Path) -> None:
    png, svg = timeline.draw(TARGET, DRAFT, tmp_path / "new" / "timeline", "Two actors")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 20_000
    for text in ("Two actors", "draft step", "commit", "growth"):
        assert f"<!-- {text}" in svg.read_text()


def test_picture_shows_the_middle() -> None:
    excerpt = timeline.middle(TARGET, DRAFT)
    assert excerpt.seconds == pytest.approx(0.12)
    assert (excerpt.start + excerpt.end) / 2 == pytest.approx(0.234)
    assert excerpt.busy(TARGET, "target step") == pytest.approx(0.75)
    assert excerpt.busy(DRAFT, "draft step") == pytest.approx(2.5 / 3, abs=0.01)


def test_messages_are_matched_with_their_arrival() -> None:
    excerpt = timeline.middle(TARGET, DRAFT)
    commits, growths = list(timeline.commits(excerpt)), list(timeline.growths(excerpt))
    assert commits
    assert growths
    assert all(applied.start - sent.start == pytest.approx(0.0022) for sent, applied in commits)
    assert all(0 < read.start - sent.end < 0.012 for sent, read in growths)


def test_picture_needs_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no two target steps"):
        timeline.draw([], [], tmp_path / "timeline", "Nothing")


def test_app_is_what_the_package_installs() -> None:
    assert isinstance(cli.app, typer.Typer)
    assert 'paceline = "deployments.cli:app"' in (ROOT / "pyproject.toml").read_text()
