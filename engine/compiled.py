"""Loops over small arrays, compiled to machine code by numba: what runs between two forward passes has to be short."""

import hashlib
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

try:
    from numba import config, njit

    COMPILES = not getattr(config, "DISABLE_JIT", False)
except ImportError:  # not there, or not for this numpy
    COMPILES = False
_KEPT: Path | None = None  # the folder where machine code is kept


def _kept_in(folder: str) -> Path | None:
    """Where machine code is kept: in the first that can be written to of this folder, if one is named, the folder beside
    the sources, and the user's; None: nowhere. In each of them, apart for the engine's sources as they are.

    numba looks whether a function's own file has changed, not those of the functions that became part of it; and so it
    would in places that it turns to by itself.
    """
    own = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(own.rglob("*.py")))).hexdigest()
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # unchanged where there is no home
    places = [Path(folder)] if folder else []
    places += [own / "__pycache__", *([Path(users, "paceline")] if os.path.isabs(users) else [])]
    for place in places:
        with suppress(OSError):
            (place / digest[:16]).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place / digest[:16]).close()
            return place / digest[:16]
    return None


_SUMS = {"reassoc", "contract", "nsz"}  # of LLVM's liberties with floating point, those that sums of products need

_LINE = 64  # bytes in a cache line

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F, long: bool = False, exact: bool = False) -> F:
    """Compiles a function of arrays and numbers at its first call, and keeps that on disk where it can.

    long: it lets other threads run meanwhile, and may add up and multiply in another order to be faster, unless it is exact:
    compilers may choose that anew for each caller that it becomes part of.

    Beside an engine that doesn't bring numba (cluster.vllm_proposer), the function stays as it is: slower, and other than in
    such sums not different.
    """
    if not COMPILES:
        return function
    # Divisions that don't look for zeros can be vectors.
    compile_it: Any = partial(
        njit, nogil=long, fastmath=_SUMS if long and not exact else False, error_model="numpy" if long else "python"
    )
    made: Any = compile_it(cache=_KEPT is not None)(function)
    return made  # type: ignore[no-any-return]


def widened(x: Any) -> Any:
    """A number of an array as float32. Compiled loops know bfloat16 as its bits, uint16."""
    return x


def put(out: Any, i: int, value: Any) -> None:
    """Writes a float32 to a row of float32, or rounded to one of bfloat16."""
    out[i] = value


def borrowed(argument: Any) -> Any:
    """An array that a function was given, without references that are counted: in loops, each view of it takes two atomic
    operations otherwise.

    Whoever gave it has to hold it until the function returns, and nobody may keep it or a view of it.
    """
    return argument


if COMPILES:
    from llvmlite import ir
    from numba import config as numba_config
    from numba import types
    from numba.extending import intrinsic, overload
    from numba.np import arrayobj

    _arrays: Any = arrayobj  # without types
    _settings: Any = numba_config
    _KEPT = _kept_in(_settings.CACHE_DIR)
    if _KEPT is not None:
        _settings.CACHE_DIR = str(_KEPT)

    def _borrowing(context: Any, array: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = _arrays.make_array(array)
            given, view = kind(context, builder, arguments[0]), kind(context, builder)
            _arrays.populate_array(view, given.data, given.shape, given.strides, given.itemsize, meminfo=None)
            return view._getvalue()

        return array(array), write

    _borrow: Any = intrinsic(_borrowing)

    @overload(borrowed)
    def _borrowed(argument: Any) -> Any:
        def view(argument: Any) -> Any:
            return _borrow(argument)

        return view

    def _prefetching(context: Any, address: Any) -> Any:
        """Has the cache line at an address (bytes) read ahead; any address may be given."""

        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
                builder.module, kind, "llvm.prefetch.p0"
            )
            to_read, in_all_caches, data = number(0), number(3), number(1)
            builder.call(function, [builder.inttoptr(arguments[0], byte), to_read, in_all_caches, data])
            return context.get_dummy_value()

        return types.void(types.uint64), write

    _prefetch: Any = intrinsic(_prefetching)

    @partial(compiled, long=True)
    def read_ahead(address: Any, size: int) -> None:
        """Has so many bytes from an address on brought to the caches while other work goes on."""
        for byte in range(0, size, _LINE):
            _prefetch(np.uint64(address + byte))

    @partial(compiled, long=True)
    def read_row_ahead(matrix: Any, row: int) -> None:
        """The same with a row of a matrix in C order."""
        size = matrix.shape[1] * matrix.itemsize
        read_ahead(matrix.ctypes.data + row * size, size)

    @overload(widened)
    def _widened(x: Any) -> Any:
        def plain(x: Any) -> Any:
            return x

        def bits(x: Any) -> Any:
            return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

        return bits if x == types.uint16 else plain

    @overload(put)
    def _put(out: Any, i: Any, value: Any) -> Any:
        def plain(out: Any, i: Any, value: Any) -> None:
            out[i] = value

        def rounded(out: Any, i: Any, value: Any) -> None:
            bits = np.float32(value).view(np.uint32)
            even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)  # halves go to the even neighbour
            out[i] = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

        return rounded if out.dtype == types.uint16 else plain

else:

    def read_ahead(address: Any, size: int) -> None:
        """Nothing, where nothing is compiled."""

    def read_row_ahead(matrix: Any, row: int) -> None:
        """Nothing either."""


@partial(compiled, long=True)
def exponential(x: np.float32) -> np.float32:
    """e^x within 2e-7 of it, for loops that compilers make vectors of; 0 below -80, and no more than e^80."""
    held = min(max(x, np.float32(-80)), np.float32(80))
    power = np.floor(held * np.float32(1 / math.log(2)) + np.float32(0.5))
    # What is left, in two steps: the first part of log(2) has so few digits that the product is exact.
    rest = held - power * np.float32(0.693359375) + power * np.float32(0.693359375 - math.log(2))
    # Coefficients of Cephes' expf (Moshier, https://www.netlib.org/cephes/).
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    mantissa = series * rest * rest + rest + np.float32(1)
    exponent = np.uint32(np.int32(np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    if x != x:  # held to a number above
        return x
    return np.float32(0) if x < np.float32(-80) else mantissa * exponent


def with_fields(records: Any) -> Any:
    """An array of records as functions that may be compiled take it, with its fields as attributes.

    numba finds those by itself, and takes a plain array in a fifth of the time.
    """
    return records if COMPILES else records.view(np.recarray)
