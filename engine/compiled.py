"""Loops over small arrays, compiled to machine code by numba: what runs between two forward passes has to be short."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

try:
    from numba import config, njit

    COMPILES = not getattr(config, "DISABLE_JIT", False)
except ImportError:  # not there, or not for this numpy
    COMPILES = False

_SUMS = {"reassoc", "contract", "nsz"}  # of LLVM's liberties with floating point, those that sums of products need

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F, long: bool = False) -> F:
    """Compiles a function of arrays and numbers at its first call, and keeps that on disk where it can.

    long: it lets other threads run meanwhile, and may add up in another order to be faster; what was kept on disk doesn't
    know of changes to that. Beside an engine that doesn't bring numba (cluster.vllm_proposer), the function stays as it is:
    slower, not different, but for such sums.
    """
    if not COMPILES:
        return function
    made: Any
    compile_it: Any = partial(njit, nogil=long, fastmath=_SUMS if long else False)
    try:
        made = compile_it(cache=True)(function)
    except RuntimeError:  # no folder to keep it in: numba has no class for this
        made = compile_it()(function)
    return made  # type: ignore[no-any-return]


def with_fields(records: Any) -> Any:
    """An array of records as functions that may be compiled take it, with its fields as attributes.

    numba finds those by itself, and takes a plain array in a fifth of the time.
    """
    return records if COMPILES else records.view(np.recarray)
