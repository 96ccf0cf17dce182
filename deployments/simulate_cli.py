"""The command `paceline simulate`: its options, checked; what it does stands in deployments.simulate."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from deployments.cli_errors import one_line_errors
from deployments.cli_options import MOST_KV_TOKENS, check_file

COSTS, GUESSES, LOAD = "What things cost", "How good the draft is", "What runs"


def simulate(
    context: typer.Context,
    target_ms: Annotated[
        str,
        typer.Option(
            metavar="TIMES",
            help="of a target step: milliseconds, ROWS:MS,ROWS:MS,... or roofline:BILLIONS,GB/S,TFLOPS[,FIXED MS]",
            rich_help_panel=COSTS,
        ),
    ] = "1:18.3,64:19,256:21",
    draft_ms: Annotated[
        str | None,
        typer.Option(metavar="TIMES", help="of a draft step", show_default="1.3", rich_help_panel=COSTS),
    ] = None,
    overhead_ms: Annotated[
        float, typer.Option(min=0, help="of a pipelined target's step, beside its pass", rich_help_panel=COSTS)
    ] = 0.5,
    latency_ms: Annotated[
        float, typer.Option(min=0, help="of a message between target and draft", rich_help_panel=COSTS)
    ] = 0.1,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="costs from a JSON of benchmarks/pipeline.py, and its figures beside the predicted ones",
            rich_help_panel=COSTS,
        ),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="share of the draft's first guesses that are right", rich_help_panel=GUESSES)
    ] = 0.8,
    following: Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="where the first is wrong: shares at which the second is right, the third...",
            show_default="0.53,0.23,0.09,0.045,0.045",
            rich_help_panel=GUESSES,
        ),
    ] = None,
    spread: Annotated[float, typer.Option(help="of the confidences; 0: all the same", rich_help_panel=GUESSES)] = 0.35,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="a draft's guesses, recorded by benchmarks/simulate.py --record, in place of all that",
            rich_help_panel=GUESSES,
        ),
    ] = None,
    temperature: Annotated[
        Literal["0", "1"], typer.Option(help="at which the profile was recorded", rich_help_panel=GUESSES)
    ] = "0",
    targets: Annotated[int, typer.Option(min=1, max=64, help="target replicas", rich_help_panel=LOAD)] = 1,
    drafts: Annotated[int, typer.Option(min=1, max=64, help="draft replicas", rich_help_panel=LOAD)] = 1,
    streams: Annotated[
        int, typer.Option(min=1, max=1024, help="per target, one request after the other", rich_help_panel=LOAD)
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="requests per second and target, at random times; replaces --streams", rich_help_panel=LOAD
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="per target",
            show_default="4 per stream; 64 with --rate, 12 with --preset, 8 with --measured",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=100_000, rich_help_panel=LOAD, help="per request")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, max=100_000, rich_help_panel=LOAD, help="per request")] = 256,
    kv_tokens: Annotated[
        int, typer.Option(min=256, max=MOST_KV_TOKENS, help="that fit in a target", rich_help_panel=LOAD)
    ] = 131_072,
    chains: Annotated[str, typer.Option(help="draft tokens per step that sequential speculation tries")] = "2,3,5,8",
    window: Annotated[int, typer.Option(min=1, max=512, help="draft tokens verified per step at most")] = 31,
    rows: Annotated[int, typer.Option(min=1, max=512, help="nodes expanded per draft step")] = 8,
    tree_nodes: Annotated[int, typer.Option(min=16, max=8192, help="of a session's tree")] = 2048,
    told: Annotated[int, typer.Option(min=1, max=8192, help="nodes of a tree that the target hears of")] = 512,
    fleet: Annotated[
        str, typer.Option(metavar="TARGETS,...", help="also how many drafts so many targets need: 1,2,4,8")
    ] = "",
    preset: Annotated[
        Literal["ssd-70b"] | None,
        typer.Option(help="a 70B target with a 1B draft, beside published figures", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of texts, guesses and times")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures here")] = None,
) -> None:
    """Plans: what plain, sequential and pipelined decoding would do if steps took so long. No model runs.

    The policies are the real ones, on a virtual clock: see docs/SIMULATE.md, and how far to trust it.

    [dim]Examples[/dim]

      paceline simulate --preset ssd-70b

      paceline simulate --target-ms roofline:70,7660,1978 --draft-ms 1.4 --acceptance 0.8

      paceline simulate --streams 8 --fleet 1,2,4 --window 128

      paceline simulate --measured build/pipeline.json --profile profile.json
    """
    with one_line_errors():
        from deployments.simulate import Options, check_given, run

        check_given(_given(context))
        options = Options(
            target_ms=target_ms,
            draft_ms=draft_ms,
            overhead_ms=overhead_ms,
            latency_ms=latency_ms,
            measured=measured,
            acceptance=acceptance,
            following=following,
            spread=spread,
            profile=profile,
            temperature=temperature,
            targets=targets,
            drafts=drafts,
            streams=streams,
            rate=rate,
            requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            kv_tokens=kv_tokens,
            chains=chains,
            window=window,
            rows=rows,
            tree_nodes=tree_nodes,
            told=told,
            fleet=fleet,
            preset=preset,
            seed=seed,
        )
        if json_file is not None:
            check_file(json_file, "json")
        run(options, Console(highlight=False), json_file)


def _given(context: typer.Context) -> set[str]:
    """The options that stand in the command line, by the names of their parameters."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
