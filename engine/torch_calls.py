"""Operations of torch for compiled loops, by the C interfaces that torch has for extensions and for what it compiles.

Neither the interpreter nor its lock takes part. A handle is the address of a tensor; one over an array copies nothing.
Where an operation fails, as for want of memory, handles of the pass are lost.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.compiled import COMPILES, compiled, put
from engine.types import FloatArray

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_LINEAR = ctypes.create_string_buffer(b"aten::fbgemm_linear_fp16_weight_fp32_activation")
_OUT = ctypes.create_string_buffer(b"out")  # the overload that writes to a tensor it is given
_FLOAT32, _CPU, _ANY = np.int32(6), np.int32(0), np.int32(-1)  # torch's numbers of a dtype, a device and its index
_NEEDED: list[str] = []  # names of torch's functions
_WORD = 8  # bytes
_ROWS = (
    32  # of a product at once: there is a kernel for each number of rows up to it, made in 0.05 ms when it is needed
)
_FIT = 1 << 17  # bytes of weights of a product at once, at most: the caches of a core hold them
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
    some = torch.zeros(1, 2, 3, 4)
    attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(some, some, some)[0]
    return bool(attended.is_contiguous())


if COMPILES:
    from llvmlite import binding
    from numba import types

    _N, _I, _D, _W = types.uint64, types.int64, types.float64, types.int32

    def _function(name: str, *arguments: Any, returns: Any = _W) -> Any:
        """A function of the library, for compiled loops; most return an error's number, or 0."""
        _NEEDED.append(name)
        return types.ExternalFunction(name, returns(*arguments))

    _call = _function("torch_call_dispatcher", _N, _N, _N, _N)
    _share = _function("aoti_torch_new_tensor_handle", _N, _N)
    _release = _function("aoti_torch_delete_tensor_object", _N)
    _over = _function("aoti_torch_create_tensor_from_blob", _N, _I, _N, _N, _I, _W, _W, _W, _N)
    _data = _function("aoti_torch_get_data_ptr", _N, _N)
    _flash = _function("aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu", _N, _N, _N, _D, _W, _N, _N, _N, _N)
    _copy = _function("memcpy", _N, _N, _N, returns=_N)
    # at::native::cpublas::brgemm of bfloat16: oneDNN's kernels with nothing around them
    _multiply = _function(
        "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
        *(_I, _I, _I, _I, _I, _I, types.boolean, _N, _N, _N, types.boolean),
        returns=types.void,
    )


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
    return _over_array(array, np.array([1, 1, rows, columns]), columns, rows * columns)


@_long
def _over_array(array: FloatArray, sizes: Any, row: int, matrix: int) -> np.uint64:
    """sizes: int64 [4], of which the first is 1; row, matrix: strides of the third and second."""
    return _over_memory(array, sizes, np.array([matrix, matrix, row, 1]), np.empty(1, np.uint64))


@_long
def _over_memory(array: FloatArray, sizes: Any, strides: Any, found: Any) -> np.uint64:
    data, to = array.ctypes.data, found.ctypes.data
    if _over(data, 4, sizes.ctypes.data, strides.ctypes.data, 0, _FLOAT32, _CPU, _ANY, to):
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


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    """A bfloat16 weight [out_features, in_features] laid out for `product`: blocks of outputs, pairs of inputs together.

    in_features is even. Returns [out_features x in_features].
    """
    parts = weight.split(_outputs(weight.shape[1]))
    return torch.cat([part.view(len(part), -1, 2).transpose(0, 1).reshape(-1) for part in parts])


@_long
def _outputs(inputs: int) -> int:
    """How many outputs a block has."""
    return 64 if 64 * 2 * inputs <= _FIT else 32


@_long
def product(x: FloatArray, blocks: np.uint64, out: FloatArray) -> None:
    """A linear layer in bfloat16 with sums in float32 (engine.cpu.BlockedLinear), without its bias, on one thread.

    x: [rows, in_features], rounded here; blocks: the address of its weight's; out: [rows, out_features].
    """
    rounded: Any = np.empty(x.shape, np.uint16)
    for row in range(len(x)):
        for i in range(x.shape[1]):
            put(rounded[row], i, x[row, i])
    _product(rounded, blocks, out)


@_long
def _product(x: FloatArray, blocks: np.uint64, out: FloatArray) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    at, to = x.ctypes.data, out.ctypes.data
    block = _outputs(inputs)
    for first in range(0, outputs, block):
        width = min(block, outputs - first)
        for row in range(0, rows, _ROWS):
            some, x_row, out_row = min(_ROWS, rows - row), at + row * inputs * 2, to + (row * outputs + first) * 4
            block_at = blocks + np.uint64(first * inputs * 2)
            _multiply(some, width, inputs, inputs, width, outputs, False, x_row, block_at, out_row, True)


@_long
def attention(
    query: FloatArray, keys: FloatArray, values: FloatArray, bias: FloatArray, scale: float, out: FloatArray
) -> None:
    """torch's attention. query, out: [kv_heads, rows, head_dim]; keys, values: [kv_heads, keys, head_dim], of equal strides.

    bias: [rows, keys], empty for none.
    """
    handles = np.zeros(6, np.uint64)
    handles[0], handles[1], handles[2] = _handle3(query), _handle3(keys), _handle3(values)
    if bias.size:
        handles[3] = handle_of(bias)
    _attention(handles, np.array([scale]), out)
    for handle in handles:
        if handle:
            release(handle)


@_long
def _handle3(array: FloatArray) -> np.uint64:
    sizes = np.array([1, array.shape[0], array.shape[1], array.shape[2]])
    return _over_array(array, sizes, array.strides[1] // 4, array.strides[0] // 4)


@_long
def _attention(handles: Any, scales: Any, out: FloatArray) -> None:
    """handles: of query, keys, values and bias (0: none); the fifth and sixth are written."""
    at = handles.ctypes.data
    bias = at + 3 * _WORD if handles[3] else 0
    results = at + 4 * _WORD, at + 5 * _WORD
    if _flash(handles[0], handles[1], handles[2], 0.0, 0, bias, scales.ctypes.data, results[0], results[1]):
        raise RuntimeError("torch failed at an attention")
    _copy_data(handles[4], np.empty(1, np.uint64), out)


@_long
def _copy_data(handle: np.uint64, address: Any, out: FloatArray) -> None:
    _data(handle, address.ctypes.data)
    _copy(out.ctypes.data, address[0], out.size * 4)
