"""How the commands of `paceline` say what went wrong: one line on standard error and an exit code."""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from engine.checkpoint import ModelError
from engine.types import InvalidRequest

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # where output goes: nothing that is read fails like this
# Typer brings its own copy of click or uses click itself, depending on its version; both derive errors like this.
UsageError: Any = typer.BadParameter.__mro__[1]


class OneLineErrors(TyperGroup):
    """Says what is wrong with the arguments in one line, as every other error here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command; see TyperGroup."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except UsageError as error:
            if not standalone_mode:
                raise
            message = error.format_message().replace("Value error, ", "").rstrip(".")
            _complain(f"{message}. See '{error.ctx.command_path if error.ctx else 'paceline'} --help'.")
            code = error.exit_code
        except (typer.Abort, KeyboardInterrupt):
            if not standalone_mode:
                raise
            code = INTERRUPTED
        except OSError as error:
            if error.errno not in _NO_ROOM or not standalone_mode:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries it again
            _complain(f"the output can't be written: {error.strerror}")
            code = FAILED
        if standalone_mode:
            sys.exit(code or 0)
        return code


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns bad input into one line and exit code 2."""
    try:
        yield
    except InvalidRequest as error:
        named = {"prompt": "PROMPT", "grammar": "grammar", "bad_words": "--bad-word"}
        name = named.get(error.param, "--" + error.param.replace("_", "-"))
        fail(f"{name}: {error.message}", BAD_INPUT)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise
        fail(str(error), BAD_INPUT)


@contextmanager
def runtime_errors(*others: type[Exception]) -> Iterator[None]:
    """Turns what can go wrong while models run into one line and exit code 1."""
    import ray

    from deployments.service import GenerationFailed
    from engine.kv import PoolExhausted
    from engine.step import StepError

    ours = (GenerationFailed, ModelError, InvalidRequest, PoolExhausted, StepError)
    try:
        yield
    except (ray.exceptions.RayError, *ours, TimeoutError) as error:
        fail(one_line(error), FAILED)
    except others as error:
        fail(one_line(error), FAILED)


def one_line(error: Exception) -> str:
    """The last line of what an error says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def fail(message: str, code: int) -> NoReturn:
    """Ends the command with one line on standard error."""
    _complain(message)
    raise typer.Exit(code)


def _complain(message: str) -> None:
    typer.echo(f"paceline: {' '.join(message.split())}", err=True)
