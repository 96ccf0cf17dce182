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

from engine.compiled import COMPILES, borrowed, compiled, put
from engine.types import FloatArray

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_LINEAR = ctypes.create_string_buffer(b"aten::fbgemm_linear_fp16_weight_fp32_activation")
_OUT = ctypes.create_string_buffer(b"out")  # the overload that writes to a tensor it is given
_FLOAT32, _CPU, _ANY = np.int32(6), np.int32(0), np.int32(-1)  # torch's numbers of a dtype, a device and its index
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllb"
_NEEDED: list[str] = []  # names of torch's functions
_WORD = 8  # bytes
_NO_SIGN = np.int32(0x7FFFFFFF)  # the other bits of a float32
MIDDLE = 128  # the level of an input that is 0: kernels take inputs without a sign
# Rows of a product at once, with weights from caches, from memory where they lie, and that were brought near. There is a
# kernel for each number of rows, made in 0.05 ms when it is needed; one that follows another sets the processor up anew.
ROWS, _WIDE_ROWS, _MANY = 32, 64, 128
_FEW = 80  # rows, up to which pages are used where they lie: reading ahead then goes on beside arithmetic
# A weight lies in memory as lines, each of some outputs times a unit of inputs: two of bfloat16 or four of 8 bits.
# NARROW: some outputs with all inputs come after others, the fastest from caches. WIDE: a line is a page of PAGE_BYTES, and
# a product goes through _UNITS pages at once: processors read ahead in each, in about so many, and get more from memory that
# way (benchmarks/README.md).
NARROW, WIDE = 32, 1024
_UNITS = 32
_UNIT_BYTES = 4
PAGE_BYTES = _UNIT_BYTES * WIDE
_PANEL = 64  # outputs whose weights lie side by side for many rows
_NEAR = 1 << 18  # bytes of weights that are brought near at a time, but a panel at least: a part of a second cache
_LINE_BYTES = 64  # of a cache
_SMALL = 1 << 13  # numbers of an array: finding a line costs as much as it gains
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
    # at::native::cpublas::brgemm of bfloat16, float32 and bytes: oneDNN's kernels with nothing around them
    _sizes = (_I, _I, _I, _I, _I, _I, types.boolean, _N, _N, _N, types.boolean)
    _narrow = _function(f"{_BRGEMM}PKN3c108BFloat16ES5_Pfb", *_sizes, returns=types.void)
    _wide = _function(f"{_BRGEMM}PKfS3_Pfb", *_sizes, returns=types.void)
    _bytes = _function(f"{_BRGEMM}PKhPKaPib", *_sizes, returns=types.void)
    _leave = _function("_ZN2at6native7cpublas14brgemm_releaseEb", types.boolean, returns=types.void)
    _copy = _function("memcpy", _N, _N, _N, returns=_N)


@cache
def narrow_available() -> bool:
    """Whether there are kernels for products in bfloat16. Asked for others, oneDNN ends the process."""
    limited = any(f"{name}_MAX_CPU_ISA" in os.environ for name in ("ONEDNN", "DNNL"))
    able = torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(available() and able and torch._C._get_mkldnn_enabled() and not limited)


@cache
def bytes_available() -> bool:
    """Whether there are kernels for products of bytes, and what they add up is right."""
    if not narrow_available():
        return False
    x, weight = (
        np.arange(2.0 * 36, dtype=np.float32).reshape(2, -1) % 7 - 3,
        torch.arange(40 * 36).view(40, 36) % 255 - 127,
    )
    blocks, levels = blocks_of(weight.to(torch.int8), NARROW), np.round(x * (127 / np.float32(3))).astype(np.int32)
    found, ones, zeros = np.empty((2, 40), np.float32), np.ones(40, np.float32), np.zeros(40, np.int32)
    rounded_product(x, np.uint64(blocks.data_ptr()), NARROW, ones, zeros, found)
    leave()
    expected = (levels + MIDDLE) @ weight.numpy().T * (np.float32(3) / 127)
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-2))


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
def room(rows: int, columns: int, kind: Any) -> Any:
    """An array [rows, columns], nothing written to it, that begins with a line of the caches if it is not small.

    Kernels read and write 64 bytes at a time: of two lines each, products of many rows take up to twice as long.
    """
    size = rows * columns
    if size < _SMALL:
        return np.empty((rows, columns), kind)
    wide = np.empty(size + _LINE_BYTES, kind)
    first = np.int64(wide.ctypes.data) % _LINE_BYTES
    first = (_LINE_BYTES - first) % _LINE_BYTES // wide.itemsize
    return wide[first : first + size].reshape(rows, columns)


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
    """A weight [out_features, in_features] of bfloat16 or int8 laid out for products, if wide, best from a multiple of
    PAGE_BYTES on.

    in_features come in whole units; line: NARROW or WIDE. Returns blocks of lines [blocks x units of inputs x line x unit]:
    one part of the inputs after the other, with all outputs.
    """
    outputs, inputs = weight.shape
    unit = _UNIT_BYTES // weight.element_size()
    units = _units_of(inputs // unit, line)
    padded = F.pad(weight, (0, -inputs % (unit * units), 0, -outputs % NARROW))
    parts = padded.view(len(padded), -1, units, unit).permute(2, 1, 0, 3).reshape(units, -1, unit)
    lines = F.pad(parts, (0, 0, 0, -parts.shape[1] % line)).view(units, -1, line, unit)
    return lines.transpose(0, 1).reshape(-1)


@_long
def _units_of(all_units: int, line: int) -> int:
    """How many units of inputs a block has."""
    return _UNITS if line == WIDE else all_units


@_long
def product(x: FloatArray, blocks: np.uint64, line: int, out: FloatArray) -> None:
    """A linear layer in bfloat16 with sums in float32 (engine.cpu.BlockedLinear), without its bias, on one thread.

    x: [rows, in_features], rounded here; blocks: the address of its weight's, and line: as in blocks_of; out:
    [rows, out_features], best a `room`. `leave` follows a thread's last product.
    """
    rounded = room(len(x), x.shape[1], np.uint16)
    _round(x, rounded)
    _product(rounded, blocks, line, out)


@_long
def _round(x: FloatArray, out: Any) -> None:
    """Rows of float32, as bfloat16."""
    x, out = borrowed(x), borrowed(out)
    for row in range(len(x)):
        numbers, to = x[row], out[row]
        for i in range(len(to)):
            put(to, i, numbers[i])


@partial(_long, exact=True)  # called by itself and from within a pass
def rounded_product(
    x: FloatArray, blocks: np.uint64, line: int, scales: FloatArray, middles: Any, out: FloatArray
) -> None:
    """A linear layer with weights of 8 bits (engine.cpu.ByteLinear): as `product`, but rows are rounded to 8 bits.

    scales: float32, what a level of an output's weights is; middles: int32, what the middle of all inputs adds to it.
    """
    levels, factors = room(len(x), x.shape[1], np.uint8), np.empty(len(x), np.float32)
    # Without their sign, numbers are in the order of their bits, whose largest compilers find with vectors.
    bits: Any = x.view(np.int32)
    for row in range(len(x)):
        most, numbers, rounded = np.int32(0), x[row], levels[row]
        for i in range(len(numbers)):
            most = max(most, np.int32(bits[row, i] & _NO_SIGN))
        largest = max(np.int32(most).view(np.float32), np.float32(1e-12))
        factors[row], many = largest / np.float32(127), np.float32(127) / largest
        for i in range(len(numbers)):
            rounded[i] = np.int32(numbers[i] * many + np.float32(MIDDLE + 0.5))
    sums = room(len(x), out.shape[1], np.int32)
    _product(levels, blocks, line, sums)
    for row in range(len(x)):
        factor, added, numbers = factors[row], sums[row], out[row]
        for i in range(len(numbers)):
            numbers[i] = np.float32(np.int32(added[i] - middles[i])) * (factor * scales[i])


@_long
def _product(x: Any, blocks: np.uint64, line: int, out: Any) -> None:
    """x: [rows, in_features], rounded; out: [rows, out_features], float32 or int32."""
    units = x.shape[1] * x.itemsize // _UNIT_BYTES
    if len(x) <= (ROWS if line == NARROW else _FEW):
        _few_rows(x, blocks, line, out)
    else:
        some = min(_near_outputs(units), out.shape[1] + _PANEL) if line == WIDE else 0
        _many_rows(x, blocks, line, room(some, units, np.uint32), out)


@_long
def _few_rows(x: Any, blocks: np.uint64, line: int, out: Any) -> None:
    """Weights are read once, in the order in which they lie."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    at, to = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    unit = _UNIT_BYTES // x.itemsize
    weights: Any = np.int64(blocks)
    units, place = _units_of(inputs // unit, line), 0  # in all lines, one after the other
    for first in range(0, inputs, unit * units):
        some_inputs, output = min(unit * units, inputs - first), 0
        while output < outputs:
            width = min(outputs - output, line - place % line)
            block = weights + (place // line * units * line + place % line) * _UNIT_BYTES
            for row in range(0, rows, _WIDE_ROWS):
                some, result = min(_WIDE_ROWS, rows - row), to + (row * outputs + output) * 4
                given = at + (row * inputs + first) * x.itemsize
                _block(given, inputs, some, some_inputs, block, line, width, first > 0, result, outputs, x.itemsize)
            output, place = output + width, place + width
        place += -outputs % NARROW


@_long
def _near_outputs(units: int) -> int:
    """Outputs whose weights are brought near at a time: whole panels."""
    return max(1, _NEAR // (_PANEL * units * _UNIT_BYTES)) * _PANEL


@_long
def _many_rows(x: Any, blocks: np.uint64, line: int, near: Any, out: Any) -> None:
    """Weights are read for _MANY rows at a time, all inputs of some outputs one after the other; near: room for them."""
    outputs = out.shape[1]
    if line == NARROW:
        _panels(x, np.int64(blocks), NARROW, 0, outputs, out)
    else:
        some = _near_outputs(near.shape[1])
        for first in range(0, outputs, some):
            stop = min(first + some, outputs)
            _bring_near(blocks, outputs, first, stop, near)
            _panels(x, np.int64(near.ctypes.data), _PANEL, first, stop, out)


@_long
def _bring_near(blocks: np.uint64, outputs: int, first: int, stop: int, near: Any) -> None:
    """Copies the weights of outputs first..stop from pages to panels [panels, units, _PANEL] in `near`."""
    source, to, units = np.int64(blocks), np.int64(near.ctypes.data), near.shape[1]
    padded = outputs + -outputs % NARROW
    for block in range(0, units, _UNITS):
        some, output = min(_UNITS, units - block), first
        while output < stop:
            place, into = block // _UNITS * padded + output, (output - first) % _PANEL
            width = min(_PANEL - into, stop - output, WIDE - place % WIDE)
            at = source + place // WIDE * _UNITS * PAGE_BYTES + place % WIDE * _UNIT_BYTES
            panel = to + (((output - first) // _PANEL * units + block) * _PANEL + into) * _UNIT_BYTES
            for unit in range(some):  # of so many pages at once, as they are read fastest
                _copy(panel + unit * _PANEL * _UNIT_BYTES, at + unit * PAGE_BYTES, width * _UNIT_BYTES)
            output += width


@_long
def _panels(x: Any, panels: Any, panel: int, first: int, stop: int, out: Any) -> None:
    """Outputs first..stop, of all inputs; panels: the address of their weights, [panels, units, so many outputs each]."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    at, to = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    for row in range(0, rows, _MANY):
        some, given = min(_MANY, rows - row), at + row * inputs * x.itemsize
        for output in range(first, stop, panel):
            block, result = panels + (output - first) * inputs * x.itemsize, to + (row * outputs + output) * 4
            width = min(panel, stop - output)
            _block(given, inputs, some, inputs, block, panel, width, False, result, outputs, x.itemsize)


@_long
def _block(
    x: int,
    x_row: int,
    rows: int,
    inputs: int,
    block: int,
    line: int,
    outputs: int,
    add: bool,
    out: int,
    out_row: int,
    size: int,
) -> None:
    """As `multiply`; size: of an input in bytes, 2 of bfloat16, 1 of levels without a sign."""
    if size == 2:
        multiply(x, x_row, rows, inputs, block, line, outputs, add, out, out_row, True)
    else:
        _bytes(rows, outputs, inputs, x_row, line, out_row, add, x, block, out, True)


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
    bfloat16, rows of the block are of pairs of inputs, each one number; else float32. Each number of rows makes a kernel.
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
