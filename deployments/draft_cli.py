"""The command `paceline draft`: its options, checked; what it does stands in deployments.draft."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deployments.cli_errors import one_line_errors, runtime_errors
from deployments.cli_options import GUESSING, MOST_KV_TOKENS, MOST_THREADS, DtypeOption
from engine.checkpoint import MODELS
from engine.choice import LEAST_KV_TOKENS, DrafterName, Weights


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
            help="auto: of 8 bits where that is faster; full: as they are; int8, on GPUs also int4: rounded to so many bits",
        ),
    ] = "auto",
    kv_tokens: Annotated[
        int,
        typer.Option(min=LEAST_KV_TOKENS, max=MOST_KV_TOKENS, help="tokens whose KV is kept, all sessions together"),
    ] = 65536,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="of the model's arithmetic on CPUs")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="on the first GPU")] = False,
) -> None:
    """Serves drafts to a vLLM that you have already, or to any other target, until it is interrupted.

    vLLM needs a checkout on its PYTHONPATH and nothing else of ours: see docs/VLLM.md.

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
