"""A process of its own for tests.test_graphs: compiles the kernels, as passes launch them, for a GPU that need not be there.

Prints, for each, its name and the bytes of shared memory that it takes.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from engine import gpu_kernels
from engine.attention import Heads
from engine.gpu_attention import DevicePart, Places
from engine.kv import PAGE

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    int: "i32",
    float: "fp32",
}


class Compiled:
    """In place of a kernel: compiles it for what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            names = self._kernel.arg_names
            given = dict(zip(names, arguments, strict=False))
            types = {name: TYPES[getattr(each, "dtype", type(each))] for name, each in given.items()}
            signature = {name: types.get(name, "constexpr") for name in names}
            made = compile(ASTSource(self._kernel, signature, constants), HOPPER, options=dict(num_warps=num_warps))
            sys.stdout.write(f"{self._kernel.__name__} {made.metadata.shared}\n")

        return launch


def main() -> None:
    for name in ("store", "attend", "join"):
        setattr(gpu_kernels, name, Compiled(getattr(gpu_kernels, name)))
    for dtype, dim, wide in ((torch.bfloat16, 64, False), (torch.bfloat16, 128, True), (torch.float32, 256, True)):
        heads, rows = Heads(2, 4, dim, (None,)), 16
        data, told = torch.zeros(1, 2, 2, 2 * PAGE, dim, dtype=dtype), torch.zeros(Places(rows).end, dtype=torch.int32)
        part, query = DevicePart(heads, data, told, rows, wide), torch.zeros(8, rows, dim, dtype=dtype)
        part.write_kv(0, query[:2], query[:2])
        part.attend(0, query, None, cap=30.0, sinks=torch.zeros(8, dtype=dtype))


if __name__ == "__main__":
    main()
