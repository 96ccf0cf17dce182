"""Operations of torch for compiled loops, by the C interfaces that torch has for extensions and for what it compiles.

Neither the interpreter nor its lock takes part. A handle is the address of a tensor; one over an array copies nothing.
Where an operation fails, as for want of memory, handles of the pass are lost.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.compiled import COMPILES, compiled, put
from engine.types import FloatArray

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_LINEAR = ctypes.create_string_buffer(b"aten::fbgemm_linear_fp16_weight_fp32_activation")
_OUT = ctypes.create_string_buffer(b"out")  # the overload that writes to a tensor it is given
_FLOAT32, _CPU, _ANY = np.int32(6), np.int32(0), np.int32(-1)  # torch's numbers of a dtype, a device and its index
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllb"
_NEEDED: list[str] = []  # names of torch's functions
_WORD = 8  # bytes
# Of a product at once: there is a kernel for each number of rows up to it, made in 0.05 ms when it is needed.
ROWS = 32
# A weight lies in memory as lines, each of some outputs times two inputs. NARROW: some outputs with all inputs come after
# others, the fastest from caches. WIDE: a line is a page of PAGE_BYTES, and a product goes through _PAIRS pages at once:
# processors read ahead in each, in about so many, and get more from memory that way (benchmarks/README.md).
NARROW, WIDE = 32, 1024
_PAIRS = 32
PAGE_BYTES = 4 * WIDE
_long = partial(compiled, long=True)


@cache
def available() -> bool:
    """Makes torch's functions known to compiled loops; whether they are there and as expected."""
    if not COMPILES or not _LIBRARY.is_file():
        return False
    library = ctypes.CDLL(str(_LIBRARY))
    if not all(hasattr(library, name) for name in _NEEDED) or not hasattr(torch._C, "_aoti"):
        return False
    binding.load_library_permanently(str(_LIBRARY))
    return True


if COMPILES:
    from llvmlite import binding
    from numba import types

    _N, _I, _W = types.uint64, types.int64, types.int32

    def _function(name: str, *arguments: Any, returns: Any = _W) -> Any:
        """A function of the library, for compiled loops; most return an error's number, or 0."""
        _NEEDED.append(name)
        return types.ExternalFunction(name, returns(*arguments))

    _call = _function("torch_call_dispatcher", _N, _N, _N, _N)
    _share = _function("aoti_torch_new_tensor_handle", _N, _N)
    _release = _function("aoti_torch_delete_tensor_object", _N)
    _over = _function("aoti_torch_create_tensor_from_blob", _N, _I, _N, _N, _I, _W, _W, _W, _N)
    # at::native::cpublas::brgemm of bfloat16 and float32: oneDNN's kernels with nothing around them
    _sizes = (_I, _I, _I, _I, _I, _I, types.boolean, _N, _N, _N, types.boolean)
    _narrow = _function(f"{_BRGEMM}PKN3c108BFloat16ES5_Pfb", *_sizes, returns=types.void)
    _wide = _function(f"{_BRGEMM}PKfS3_Pfb", *_sizes, returns=types.void)
    _leave = _function("_ZN2at6native7cpublas14brgemm_releaseEb", types.boolean, returns=types.void)


@cache
def narrow_available() -> bool:
    """Whether there are kernels for products in bfloat16. Asked for others, oneDNN ends the process."""
    limited = any(f"{name}_MAX_CPU_ISA" in os.environ for name in ("ONEDNN", "DNNL"))
    able = torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(available() and able and torch._C._get_mkldnn_enabled() and not limited)


def names() -> Any:
    """What `linear` takes first, uint64 [3]: where its operation's name and overload stand, and torch's version."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return np.array([ctypes.addressof(_LINEAR), ctypes.addressof(_OUT), major << 56 | minor << 48], np.uint64)


def handles_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Handles that hold these tensors until `release_all`."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    return [int(address(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)) for tensor in tensors]


def release_all(handles: Sequence[int]) -> None:
    """Ends handles."""
    release = ctypes.CDLL(str(_LIBRARY)).aoti_torch_delete_tensor_object
    for handle in handles:
        release(ctypes.c_void_p(handle))


# numba frees an array behind its last use, a look at its address too: so arrays are made by who calls what takes addresses.


@_long
def handle_of(array: FloatArray) -> np.uint64:
    """A handle of a matrix, to be used while there is the array, and released then or later."""
    rows, columns = array.shape
    sizes, strides = np.array([rows, columns]), np.array([columns, 1])
    return _over_memory(array, sizes, strides, np.empty(1, np.uint64))


@_long
def _over_memory(array: FloatArray, sizes: Any, strides: Any, found: Any) -> np.uint64:
    data, to = array.ctypes.data, found.ctypes.data
    if _over(data, 2, sizes.ctypes.data, strides.ctypes.data, 0, _FLOAT32, _CPU, _ANY, to):
        raise RuntimeError("torch takes no array")
    handle: np.uint64 = found[0]
    return handle


@_long
def release(handle: np.uint64) -> None:
    """Ends a handle."""
    _release(handle)


@_long
def linear(names: Any, x: np.uint64, packed: np.uint64, out: np.uint64) -> None:
    """A linear layer with float16 weights (engine.cpu.HalfLinear), without its bias, by handles. names: see `names`."""
    stack = np.zeros(4, np.uint64)  # the call ends the handles it is given
    at = stack.ctypes.data
    _share(x, at)
    _share(packed, at + _WORD)
    _share(out, at + 3 * _WORD)
    if _call(names[0], names[1], at, names[2]):
        raise RuntimeError("torch failed at a linear layer")
    _release(stack[0])


def blocks_of(weight: torch.Tensor, line: int) -> torch.Tensor:
    """A bfloat16 weight [out_features, in_features] laid out for `product`, if wide, best from a multiple of PAGE_BYTES on.

    in_features is even; line: NARROW or WIDE. Returns blocks of lines [blocks x pairs of inputs x line x 2]: one part of the
    inputs after the other, with all outputs.
    """
    outputs, inputs = weight.shape
    pairs = _pairs_of(inputs, line)
    padded = F.pad(weight, (0, -inputs % (2 * pairs), 0, -outputs % NARROW))
    parts = padded.view(len(padded), -1, pairs, 2).permute(2, 1, 0, 3).reshape(pairs, -1, 2)
    lines = F.pad(parts, (0, 0, 0, -parts.shape[1] % line)).view(pairs, -1, line, 2)
    return lines.transpose(0, 1).reshape(-1)


@_long
def _pairs_of(inputs: int, line: int) -> int:
    """How many pairs of inputs a block has."""
    return _PAIRS if line == WIDE else inputs // 2


@_long
def product(x: FloatArray, blocks: np.uint64, line: int, out: FloatArray) -> None:
    """A linear layer in bfloat16 with sums in float32 (engine.cpu.BlockedLinear), without its bias, on one thread.

    x: [rows, in_features], rounded here; blocks: the address of its weight's, and line: as in blocks_of; out:
    [rows, out_features]. `leave` follows a thread's last product.
    """
    rounded: Any = np.empty(x.shape, np.uint16)
    for row in range(len(x)):
        for i in range(x.shape[1]):
            put(rounded[row], i, x[row, i])
    _product(rounded, blocks, line, out)


@_long
def _product(x: FloatArray, blocks: np.uint64, line: int, out: FloatArray) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    at, to = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    weights: Any = np.int64(blocks)
    pairs, place = _pairs_of(inputs, line), 0  # in all lines, one after the other
    for first in range(0, inputs, 2 * pairs):
        some_inputs, output = min(2 * pairs, inputs - first), 0
        while output < outputs:
            width = min(outputs - output, line - place % line)
            block = weights + (place // line * pairs * line + place % line) * 4
            for row in range(0, rows, ROWS):
                some, result = min(ROWS, rows - row), to + (row * outputs + output) * 4
                given = at + (row * inputs + first) * 2
                multiply(given, inputs, some, some_inputs, block, line, width, first > 0, result, outputs, True)
            output, place = output + width, place + width
        place += -outputs % NARROW


@_long
def multiply(
    x: int,
    x_row: int,
    rows: int,
    inputs: int,
    block: int,
    block_row: int,
    outputs: int,
    add: bool,
    out: int,
    out_row: int,
    narrow: bool,
) -> None:
    """x [rows, inputs] times a block [inputs, outputs], written to `out` or added.

    By addresses, each with how many numbers lie between the beginnings of rows. out is float32; narrow: x and block are
    bfloat16, rows of the block are of pairs of inputs, each one number; else float32. More than ROWS rows make more kernels.
    Each number is one sum in the order of the inputs, so a row's bits don't depend on the others.
    """
    if narrow:
        _narrow(rows, outputs, inputs, x_row, block_row, out_row, add, x, block, out, True)
    else:
        _wide(rows, outputs, inputs, x_row, block_row, out_row, add, x, block, out, False)


@_long
def leave() -> None:
    """Gives back what a thread's products in bfloat16 hold of the processor: tiles (AMX) that others set up anew."""
    _leave(True)
