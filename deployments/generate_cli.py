"""The command `paceline generate`: its options, checked; what it does stands in deployments.generate."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli_errors import one_line_errors, runtime_errors
from deployments.cli_options import GUESSING, DraftOption, DtypeOption, InvariantOption, TargetOption, read_text
from engine.checkpoint import MODELS, check_checkpoint, check_pair, hidden_size
from engine.choice import check_documents
from engine.local_choice import LocalName, check_heads, check_local
from engine.types import Grammar, InvalidRequest, require

SHAPING = "What the output looks like"

Mode = Literal["pipelined", "sequential", "plain"]


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
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="the output is JSON that follows this schema",
            rich_help_panel=SHAPING,
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="the output matches this regular expression, without lookaheads and the like",
            rich_help_panel=SHAPING,
        ),
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

      paceline generate 'config = ' --regex '\[a-z]+ = [0-9]{1,3}'

      paceline generate 'import os' --local heads --heads models/code-target-heads --stats
    """
    with one_line_errors():
        text = read_input() if prompt == "-" else prompt
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


def read_input() -> str:
    """Standard input; raises InvalidRequest."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "must be UTF-8 text") from None


def chosen_grammar(json_object: bool, json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What the output has to look like; raises InvalidRequest when more than one is asked for."""
    require(regex != "", "regex", "must not be empty")
    chosen = [
        *([Grammar("json_object")] if json_object else []),
        *([Grammar("json_schema", read_text(json_schema))] if json_schema is not None else []),
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
        check_heads(heads, hidden_size(check_checkpoint(target)), target)
    if documents is not None:
        check_documents(documents)
