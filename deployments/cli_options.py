"""Options that several commands of `paceline` have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

GUESSING = "What guesses"  # a panel of --help

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
        help="auto, float32 or bfloat16, of both models; auto: bfloat16 where it is faster",
    ),
]
InvariantOption = Annotated[
    bool,
    typer.Option("--invariant", help="bits that don't depend on how tokens are batched: the same text in every mode"),
]
