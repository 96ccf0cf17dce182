"""Options that several commands of `paceline` have, and files that are named on its command line."""

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import typer

from engine.types import InvalidRequest

GUESSING = "What guesses"  # a panel of --help
MOST_THREADS = 1024
MOST_KV_TOKENS = 2**30  # slots have numbers of 32 bits
_MOST_BYTES = 4 * 1024 * 1024  # of a configuration or schema

Dtype = Literal["auto", "float32", "bfloat16"]

TargetOption = Annotated[
    Path, typer.Option(metavar="DIR", help="checkpoint of the target, if not the bundled one", show_default=False)
]
DraftOption = Annotated[
    Path, typer.Option(metavar="DIR", help="checkpoint of the draft, if not the bundled one", show_default=False)
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        metavar="DTYPE",
        help="auto, float32 or bfloat16; auto: bfloat16 where it is faster",
    ),
]
InvariantOption = Annotated[
    bool,
    typer.Option("--invariant", help="bits that don't depend on how tokens are batched: the same text in every mode"),
]


def read_text(path: Path) -> str:
    """The text of a small file; raises ValueError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"{path} is larger than {_MOST_BYTES // 2**20} MiB")
        return data.decode()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} can't be read: it is not UTF-8 text") from None


def check_folder(path: Path, option: str = "out") -> None:
    """Makes a folder for output and tries to write there, before the work; raises InvalidRequest."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
    except OSError as error:
        raise InvalidRequest(option, f"{path} can't be written: {error.strerror}") from None


def check_file(path: Path, option: str) -> None:
    """The same for a file, which may be a pipe and is not opened yet."""
    if not path.exists():
        check_folder(path.parent, option)
    elif path.is_dir() or not os.access(path, os.W_OK):
        raise InvalidRequest(option, f"{path} can't be written: it is no file, or not ours")
