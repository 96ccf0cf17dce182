"""The command `paceline`. Thin: what the commands do stands elsewhere and is imported when a command runs."""

import json
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deployments import training_cli
from deployments.cli_errors import OneLineErrors, one_line_errors, runtime_errors
from deployments.cli_options import DraftOption, DtypeOption, InvariantOption, TargetOption, check_folder
from deployments.draft_cli import draft
from deployments.generate_cli import generate
from deployments.simulate_cli import simulate
from engine.checkpoint import MODELS, check_pair

app = typer.Typer(
    cls=OneLineErrors,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves language models faster without changing their answer.\n\n"
    "A small [bold]draft[/bold] model guesses ahead; the large [bold]target[/bold] model checks many guesses in one "
    "forward pass, and alone decides every token. The two run side by side, on a core or GPU each.\n\n"
    "[dim]Start with[/dim] paceline demo[dim], or[/dim] paceline generate 'def fibonacci(n):'",
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Handles what stands before a command."""
    if show_version:
        version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(generate)


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
        check_folder(out)
    with runtime_errors():
        run_demo(config, requests, Console(highlight=False))


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", exists=True, dir_okay=False, help="YAML; see 'paceline config schema'"
        ),
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
    grpc_port: Annotated[int | None, typer.Option(help="of the gRPC API; 0: none", show_default="9000")] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="clients need a key of it, one on a line; none: everybody may ask"),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster to serve on", show_default="one is started here")
    ] = None,
) -> None:
    """Serves models over HTTP, as OpenAI's clients expect it, and over gRPC, until it is interrupted.

    Without arguments it serves the bundled pair, on this machine's GPUs where it has any; what a file says runs on those
    that its 'replicas' ask for. On Ctrl-C it refuses new requests, and finishes those that run.

    [dim]Examples[/dim]

      paceline serve --port 8080

      paceline serve --target DIR --draft DIR --dtype bfloat16

      paceline serve --config serve.yaml
    """
    with one_line_errors():
        from deployments.config_load import check_config, chosen_config, on_gpus

        chosen = chosen_config(config, target, draft, dtype, invariant, host, port, grpc_port, api_keys_file)
        check_config(chosen)
        from ray.serve.exceptions import RayServeException
        from torch.cuda import device_count

        from deployments.serve import DeployError, check_ports, gcs_address, run_server

        if address is None:
            check_ports(chosen)
            chosen = on_gpus(chosen, device_count()) if config is None else chosen
        else:
            gcs_address(address)
    with runtime_errors(DeployError, ConnectionError, RayServeException):
        run_server(chosen, address, Console(stderr=True, highlight=False))


app.command()(draft)
app.command()(simulate)
app.command()(training_cli.train)
app.command()(training_cli.distill)
app.command()(training_cli.heads)
app.command()(training_cli.expand)

config_app = typer.Typer()
app.add_typer(config_app, name="config")
ConfigArgument = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="YAML")]


@config_app.callback(invoke_without_command=True)
def config_root(context: typer.Context) -> None:
    """The configuration of 'paceline serve'."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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


if __name__ == "__main__":
    app()
