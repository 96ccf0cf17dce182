"""The commands of `paceline` that make checkpoints: train, distill, heads, expand."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deployments.cli_errors import one_line_errors
from deployments.cli_options import TargetOption, check_folder
from engine.checkpoint import MODELS, check_checkpoint, check_pair
from engine.types import require


def train(
    out: Annotated[Path, typer.Option(help="folder that gets the two checkpoints")] = Path("models"),
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 2400,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per step")] = 8,
    sequence_length: Annotated[int, typer.Option(min=2, help="tokens per sequence")] = 256,
    learning_rate: Annotated[float, typer.Option(min=0, help="peak; the schedule is a cosine")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="of weights and batches")] = 0,
    work: Annotated[Path, typer.Option(help="folder of the state from which a run resumes")] = Path("build/train"),
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="where to compute", show_default="cuda if there is one")
    ] = None,
) -> None:
    """Trains the bundled pair: a target from scratch and a draft distilled from it, on Python's own standard library.

    An hour or so on two cores.

    Interrupt it at any time: the same command goes on from the last saved step.

    [dim]Example[/dim]

      paceline train --steps 200 --out build/tiny --work build/tiny-state
    """
    import torch

    from engine.train import TrainingConfig
    from engine.train import train as run

    given: dict[str, Any] = {"device": device} if device else {}
    config = TrainingConfig(
        out=out,
        work=work,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        seed=seed,
        **given,
    )
    with one_line_errors():
        require(device != "cuda" or torch.cuda.is_available(), "device", "there is no CUDA device here")
        check_folder(out)
        check_folder(work, "work")
        figures = run(config)
    typer.echo(f"held-out loss {figures['held_out_loss']:.3f}, agreement {figures['agreement']:.3f}")
    typer.echo(f"written: {out}/code-target, {out}/code-draft")


def distill(
    out: Annotated[Path, typer.Option(help="folder that gets the new draft")],
    target: TargetOption = MODELS / "code-target",
    draft: Annotated[
        Path,
        typer.Option(metavar="DIR", help="where the draft starts from, if not the bundled one", show_default=False),
    ] = MODELS / "code-draft",
    layers: Annotated[
        int | None, typer.Option(min=1, help="decoder layers of the new draft", show_default="as many as it has")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 3200,
    batch_size: Annotated[int, typer.Option(min=2, help="windows per step, half of them the target's own text")] = 8,
    sequence_length: Annotated[int, typer.Option(min=64, help="tokens per window")] = 256,
    own_windows: Annotated[int, typer.Option(min=2, help="windows that the target writes before the training")] = 4096,
    learning_rate: Annotated[float, typer.Option(min=0, help="peak; the schedule is a cosine")] = 2e-3,
    loss: Annotated[
        Literal["kl", "tv"],
        typer.Option(
            help="what is minimized: the divergence, or the total variation: about what isn't accepted at T = 1"
        ),
    ] = "kl",
    seed: Annotated[int, typer.Option(min=0, help="of texts and batches")] = 0,
    work: Annotated[Path, typer.Option(help="folder of the state from which a run resumes")] = Path("build/distill"),
) -> None:
    """Makes a draft guess its target better: trains it on the text that the target itself writes, and on the corpus.

    The corpus is Python's standard library, so the target should be one of Python code.

    Interrupt it at any time: the same command goes on from the last saved step.

    [dim]Example[/dim]

      paceline distill --out build/draft --layers 4
    """
    with one_line_errors():
        check_pair(target, draft)
        check_folder(out)
        check_folder(work, "work")
        from transformers.utils import logging as transformers_logging

        from engine.distill import DistillConfig
        from engine.distill import distill as run

        transformers_logging.disable_progress_bar()
        figures = run(
            DistillConfig(
                target,
                draft,
                out,
                work,
                layers=layers,
                steps=steps,
                batch_size=batch_size,
                sequence_length=sequence_length,
                own_windows=own_windows,
                learning_rate=learning_rate,
                seed=seed,
                loss=loss,
            )
        )
    if figures:
        agreement = (
            f"{figures['held_out_agreement']:.3f} on held-out files, {figures['own_agreement']:.3f} on its own text"
        )
        typer.echo(f"agreement with the target: {agreement}")
    typer.echo(f"written: {out}")


def heads(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="checkpoint folder of the target")],
    out: Annotated[Path, typer.Option(help="folder that gets the heads")],
    count: Annotated[int, typer.Option(min=1, max=8, help="heads: tokens guessed beyond the target's own")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="windows per step")] = 4,
    sequence_length: Annotated[int, typer.Option(min=16, help="tokens per window")] = 256,
    learning_rate: Annotated[float, typer.Option(min=0, help="peak; the schedule is a cosine")] = 2e-3,
    seed: Annotated[int, typer.Option(min=0, help="of the batches")] = 0,
    work: Annotated[Path, typer.Option(help="folder of the state from which a run resumes")] = Path("build/heads"),
) -> None:
    """Trains heads that guess several tokens at once from a target's last hidden state; the target stays as it is.

    The corpus is Python's standard library, so the target should be one of Python code.

    Interrupt it at any time: the same command goes on from the last saved step.

    [dim]Example[/dim]

      paceline heads models/code-target --out build/heads-of-code-target
    """
    with one_line_errors():
        check_checkpoint(target)
        check_folder(out)
        check_folder(work, "work")
        from transformers.utils import logging as transformers_logging

        from engine.train_heads import HeadsConfig, train_heads

        transformers_logging.disable_progress_bar()
        figures = train_heads(
            HeadsConfig(
                target,
                out,
                work,
                heads=count,
                steps=steps,
                batch_size=batch_size,
                sequence_length=sequence_length,
                learning_rate=learning_rate,
                seed=seed,
            )
        )
    if figures:
        agreement = ", ".join(f"{share:.3f}" for share in figures["held_out_agreement"])
        typer.echo(f"agreement with the target on held-out files, head by head: {agreement}")
    typer.echo(f"written: {out}")


def expand(
    model: Annotated[Path, typer.Argument(help="checkpoint folder")],
    layers: Annotated[int, typer.Option(min=1, help="decoder layers of the new model")],
    out: Annotated[Path, typer.Option(help="folder that gets the new checkpoint")],
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="a multiple of the model's own", show_default="as it is")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="a multiple of the model's own", show_default="as it is")
    ] = None,
) -> None:
    """Makes a model larger without changing its output, so that a benchmark has a target of any size.

    The added layers, heads and units cost what such things cost, and add nothing.

    [dim]Examples[/dim]

      paceline expand models/code-target --layers 24 --out build/code-target-24

      paceline expand models/code-target --layers 32 --hidden-size 4224 --intermediate-size 14336 --out build/as-8b
    """
    with one_line_errors():
        check_checkpoint(model)
        check_folder(out)
        from engine.expand import expand as run

        parameters = run(model, layers, out, hidden_size, intermediate_size)
    typer.echo(f"written: {out}, {parameters / 1e6:.1f} M parameters")
