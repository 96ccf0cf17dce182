"""Loops over small arrays, compiled to machine code by numba: what runs between two forward passes has to be short."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiles a function of arrays and numbers at its first call, and keeps that on disk where it can.

    Beside an engine that doesn't bring numba (cluster.vllm_proposer), the function stays as it is: slower, not different.
    """
    try:
        from numba import njit
    except ImportError:
        return function
    made: Any
    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # no folder to keep it in: numba has no class for this
        made = njit()(function)
    return made  # type: ignore[no-any-return]
