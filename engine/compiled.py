"""Loops over small arrays, compiled to machine code by numba: what runs between two forward passes has to be short."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiles a function of arrays and numbers at its first call, and keeps that on disk where it can."""
    made: Any
    try:
        made = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in: numba has no class for this
        made = numba.njit()(function)
    return made  # type: ignore[no-any-return]
