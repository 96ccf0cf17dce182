"""Loops over small arrays, compiled to machine code by numba: what runs between two forward passes has to be short."""

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiles a function of arrays and numbers at its first call; what was compiled is kept on disk where that is possible."""
    try:
        made: F = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        made = numba.njit(function)
    return made
