"""The command `paceline`. Thin: what the commands do stands elsewhere and is imported when a command runs."""

import json
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from deployments import training_cli
from deployments.cli_errors import OneLineErrors, one_line_errors, runtime_errors
from deployments.simulate_cli import simulate
from deployments.training_cli import TargetOption
from engine.checkpoint import MODELS, check_checkpoint, check_pair
from engine.choice import DrafterName, Weights, check_documents
from engine.local_choice import LocalName, check_heads, check_local
from engine.types import Grammar, require

SHAPING = "What the output looks like"
GUESSING = "What guesses"

Dtype = Literal["auto", "float32", "bfloat16"]
Mode = Literal["pipelined", "sequential", "plain"]

app = typer.Typer(
    cls=OneLineErrors,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves language models faster without changing their answer.\n\n"
    "A small [bold]draft[/bold] model guesses ahead; the large [bold]target[/bold] model checks many guesses in one "
    "forward pass, and alone decides every token. The two run side by side, on a core or GPU each, and never wait for "
    "each other.\n\n"
    "[dim]Start with[/dim] paceline demo[dim], or[/dim] paceline generate 'def fibonacci(n):'",
)

DraftOption = Annotated[
    Path, typer.Option(metavar="DIR", help="checkpoint of the draft, if not the bundled one", show_default=False)
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        metavar="DTYPE",
        help="auto, float32 or bfloat16, of both models; auto: bfloat16 where it is faster",
    ),
]
InvariantOption = Annotated[
    bool,
    typer.Option("--invariant", help="bits that don't depend on how tokens are batched: the same text in every mode"),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Handles what stands before a command."""
    if show_version:
        version()
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="text to continue; - reads it from standard input")],
    target: TargetOption = MODELS / "code-target",
    draft: DraftOption = MODELS / "code-draft",
    dtype: DtypeOption = "auto",
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 samples from the model as it is")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="sample from so many likeliest tokens; 0: from all")] = 0,
    top_p: Annotated[
        float, typer.Option(help="sample from the likeliest tokens that hold this much probability")
    ] = 1.0,
    min_p: Annotated[float, typer.Option(help="drop tokens below this share of the likeliest one's probability")] = 0.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    max_tokens: Annotated[int, typer.Option(help="new tokens at most")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="end before this text; may be given several times")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="new tokens at least", rich_help_panel=SHAPING)] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="divides the logits of tokens seen before, prompt included", rich_help_panel=SHAPING)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="subtracted from the logits of tokens in the output", rich_help_panel=SHAPING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="the same, once for every time that a token came", rich_help_panel=SHAPING)
    ] = 0.0,
    bad_word: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="never write this; may be given several times", rich_help_panel=SHAPING),
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json", help="the output is a JSON object", rich_help_panel=SHAPING)
    ] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the output is JSON that follows this schema", rich_help_panel=SHAPING),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="the output matches this expression", rich_help_panel=SHAPING),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="pipelined: two actors that work at the same time; sequential: one process, in turns; plain: no draft",
        ),
    ] = "pipelined",
    local: Annotated[
        LocalName | None,
        typer.Option(
            metavar="NAME",
            help="what guesses in the target's own process, beside the draft: heads, early-exit, jacobi, suffix, ngram, "
            "retrieval",
            rich_help_panel=GUESSING,
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="what 'paceline heads' wrote, for heads", rich_help_panel=GUESSING),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="a text file, or a folder of them, for retrieval", rich_help_panel=GUESSING),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="what is verified in a step: goodput, heuristic, threshold, bandit, chain:N, tree:N or off",
            show_default="goodput",
            rich_help_panel=GUESSING,
        ),
    ] = "",
    invariant: InvariantOption = False,
    stats: Annotated[bool, typer.Option("--stats", help="print speed and acceptance to standard error")] = False,
) -> None:
    r"""Continues a prompt and streams the text to standard output.

    The mode changes the speed, not the text: seed and parameters decide that.

    [dim]Examples[/dim]

      paceline generate 'import os' --mode plain

      paceline generate - --temperature 0.8 --seed 7 --stats < prompt.txt

      paceline generate 'def add(' --stop $'\n\n' --max-tokens 64

      paceline generate 'config = ' --regex '[a-z]+ = [0-9]{1,3}'

      paceline generate 'import os' --local heads --heads models/code-target-heads --stats
    """
    with one_line_errors():
        text = sys.stdin.read() if prompt == "-" else prompt
        require(bool(text), "prompt", "must not be empty")
        grammar = chosen_grammar(json_object, json_schema, regex)
        pair_draft = draft if mode != "plain" else None
        context = check_pair(target, pair_draft)
        require(not window or mode == "pipelined", "window", "only in pipelined mode")
        check_own_drafter(mode, target, local, heads, documents)
        from cluster.drafters import LocalConfig
        from deployments.fields import GenerationFields, TextModel, make_requests, validated
        from deployments.generate import Pair, print_text
        from engine.text import load_tokenizer

        fields = {
            "prompt": text,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "max_tokens": max_tokens,
            "stop": stop,
            "min_tokens": min_tokens,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "bad_words": bad_word,
            "grammar": grammar,
            "window": window,
        }
        tokenizer = load_tokenizer(target)
        model = TextModel(tokenizer=tokenizer, context=context, vocab_size=check_checkpoint(target)["vocab_size"])
        (request,) = make_requests(validated(GenerationFields, fields), model, "paceline-generate", trusted=True)
    with runtime_errors():
        print_text(
            request,
            Pair(target, pair_draft, dtype, invariant, LocalConfig(local, heads, documents)),
            mode,
            tokenizer,
            stats,
        )


@app.command()
def demo(
    target: TargetOption = MODELS / "code-target",
    draft: DraftOption = MODELS / "code-draft",
    dtype: DtypeOption = "auto",
    tokens: Annotated[int, typer.Option(min=16, help="new tokens per prompt")] = 128,
    out: Annotated[Path, typer.Option(help="folder of the picture")] = Path("build/demo"),
    invariant: InvariantOption = False,
) -> None:
    """Shows the two actors at work: coloured streams, a table of alternatives, and a picture of who did what when.

    Starts Ray here, with a target and a draft on a core or GPU each.

    Streams three prompts, at T = 0 and at T = 1.

    Then runs them plain (the target alone) and sequentially (in turns), and compares.
    """
    with one_line_errors():
        context = check_pair(target, draft)
        from deployments.demo import DemoConfig, load_requests, run_demo

        config = DemoConfig(target, draft, dtype, tokens, out, invariant)
        requests = load_requests(config, MODELS / "heldout.jsonl", context)
    with runtime_errors():
        run_demo(config, requests, Console(highlight=False))


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML; see 'paceline config schema'")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="checkpoint of the target, if not the bundled pair")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="DIR", help="checkpoint of the draft; without one, the target decodes alone")
    ] = None,
    dtype: DtypeOption = "auto",
    invariant: InvariantOption = False,
    host: Annotated[
        str | None, typer.Option(help="address of the HTTP API; 0.0.0.0: all", show_default="127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option(help="of the HTTP API", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="of the gRPC API", show_default="9000")] = None,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster to serve on", show_default="one is started here")
    ] = None,
) -> None:
    """Serves models over HTTP, as OpenAI's clients expect it, and over gRPC, until it is interrupted.

    Without arguments it serves the bundled pair. Then it ends what runs, and takes nothing new.

    [dim]Examples[/dim]

      paceline serve --port 8080

      paceline serve --target DIR --draft DIR --dtype bfloat16

      paceline serve --config serve.yaml
    """
    with one_line_errors():
        from deployments.config_load import check_config, chosen_config

        chosen = chosen_config(config, target, draft, dtype, invariant, host, port, grpc_port)
        check_config(chosen)
        from deployments.serve import DeployError, check_ports, run_server

        if address is None:
            check_ports(chosen)
    with runtime_errors(DeployError, ConnectionError):
        run_server(chosen, address, Console(stderr=True, highlight=False))


@app.command()
def draft(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="checkpoint of the draft, for auto, model, cascade and merged",
            show_default="the bundled draft; for merged none",
        ),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="where targets find it")] = "127.0.0.1:9100",
    drafter: Annotated[
        DrafterName, typer.Option(metavar="NAME", help="what guesses, one of the names above", rich_help_panel=GUESSING)
    ] = "auto",
    documents: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="a text file, or a folder of them, for retrieval and merged", rich_help_panel=GUESSING
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="folder with the target's tokenizer.json: documents are read with it, and a model that has another "
            "one is translated",
            show_default="the model's own",
            rich_help_panel=GUESSING,
        ),
    ] = None,
    inner: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="another draft service, which drafts for the model of cascade; it may be a cascade itself",
            show_default="lookup",
            rich_help_panel=GUESSING,
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    weights: Annotated[
        Weights,
        typer.Option(
            metavar="KIND",
            help="auto, or int8, on GPUs also int4: large layers rounded to so many bits; guesses change",
        ),
    ] = "auto",
    kv_tokens: Annotated[int, typer.Option(min=256, help="tokens whose KV is kept, all sessions together")] = 65536,
    threads: Annotated[int, typer.Option(min=1, help="of the model's arithmetic on CPUs")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="on the first GPU")] = False,
) -> None:
    """Serves drafts to a vLLM that you have already, or to any other target, until it is interrupted.

    vLLM needs the package and nothing else of ours: see docs/VLLM.md.

    [dim]Drafters[/dim], of which docs/DRAFTING.md says more

      auto       the model, with lookup beside it

      model      the model alone

      cascade    the model, for which lookup drafts, or another draft service

      ngram      no model: what followed the last few tokens earlier in the text

      suffix     no model: the same by longer matches, and in earlier outputs

      retrieval  no model: the same in your documents

      merged     suffix with a model, documents or both, in one tree

    [dim]Examples[/dim]

      paceline draft --model DIR --listen 0.0.0.0:9100

      paceline draft --drafter retrieval --documents docs --tokenizer TARGET

      paceline draft --drafter cascade --model MIDDLE --inner 127.0.0.1:9101

      PACELINE_DRAFT=127.0.0.1:9100 vllm serve TARGET --speculative-config '{"method": "custom_class", ...}'
    """
    from cluster.address import parse_address
    from cluster.link import LinkError
    from deployments.draft import DraftFailed, DraftOptions, check_options, run_draft

    with one_line_errors():
        host, port = parse_address(listen, "--listen", listens=True)
        bundled = MODELS / "code-draft" if drafter in ("auto", "model", "cascade") else None
        options = DraftOptions(
            model or bundled, host, port, drafter, documents, tokenizer, dtype, kv_tokens, threads, gpu, weights, inner
        )
        check_options(options)
    with runtime_errors(LinkError, DraftFailed):
        run_draft(options, Console(stderr=True, highlight=False))


app.command()(simulate)
app.command()(training_cli.train)
app.command()(training_cli.distill)
app.command()(training_cli.heads)
app.command()(training_cli.expand)

config_app = typer.Typer(help="The configuration of 'paceline serve'.", no_args_is_help=True)
app.add_typer(config_app, name="config")
ConfigArgument = Annotated[Path, typer.Argument(metavar="FILE", help="YAML")]


@config_app.command("schema")
def config_schema() -> None:
    """Prints the JSON schema of the configuration."""
    from deployments.config import ServeConfig

    typer.echo(json.dumps(ServeConfig.model_json_schema(), indent=2))


@config_app.command("check")
def config_check(path: ConfigArgument) -> None:
    """Checks a configuration without loading anything; exit code 2 and one line when it can't be used."""
    with one_line_errors():
        from deployments.config_load import check_config, load_config

        found = load_config(path)
        check_config(found)
    typer.echo(f"good: {', '.join(model.name for model in found.models)}")


@config_app.command("export")
def config_export(path: ConfigArgument) -> None:
    """Prints a configuration as Ray Serve takes it: for 'serve run', 'serve deploy' and KubeRay's serveConfigV2."""
    with one_line_errors():
        import yaml

        from deployments.config_load import load_config
        from deployments.serve import serve_schema

        values = serve_schema(load_config(path)).model_dump(mode="json", exclude_unset=True)
    typer.echo(yaml.safe_dump(values, sort_keys=False), nl=False)


@app.command()
def version() -> None:
    """Prints the version."""
    try:
        typer.echo(f"paceline {installed_version('paceline')}")
    except PackageNotFoundError:
        typer.echo("paceline, not installed")


def chosen_grammar(json_object: bool, json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What the output has to look like; raises InvalidRequest when more than one is asked for."""
    chosen = [
        *([Grammar("json_object")] if json_object else []),
        *([Grammar("json_schema", json_schema.read_text())] if json_schema is not None else []),
        *([Grammar("regex", regex)] if regex is not None else []),
    ]
    require(len(chosen) <= 1, "grammar", "only one of --json, --json-schema and --regex")
    return chosen[0] if chosen else None


def check_own_drafter(
    mode: Mode, target: Path, local: LocalName | None, heads: Path | None, documents: Path | None
) -> None:
    """What can be told of a target's own drafter before anything loads; raises InvalidRequest or ModelError."""
    require(local is None or mode == "pipelined", "local", "only in pipelined mode")
    check_local(local, heads, documents)
    if heads is not None:
        check_heads(heads, check_checkpoint(target).get("hidden_size"), target)
    if documents is not None:
        check_documents(documents)


if __name__ == "__main__":
    app()
