"""Huge pages for what a process has loaded: weights, KV and the interpreter's own memory.

A pass reads so many pages of weights that the processor forgets where all others are; then every line of Python that runs
before the next one waits for tables to be read, in a virtual machine two levels of them (benchmarks/README.md).
"""

import ctypes
from pathlib import Path

_SIZE = 2 * 1024 * 1024  # bytes, of x86's and of most others'
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 on: at once, whatever the system's setting is
_MAPS = Path("/proc/self/maps")


def use_huge_pages() -> None:
    """Moves the memory that this process has written to so far into huge pages, where the system has any.

    What loading has freed goes back to the system first. Half a GB a second. What was only reserved stays so, but for the
    rest of a page of which some was used.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc, which would keep it
        library.malloc_trim(0)
    try:
        lines = _MAPS.read_bytes().strip().split(b"\n")  # names of files may be anything
        advise = library.madvise
    except (OSError, AttributeError):  # not Linux
        return
    for line in lines:
        addresses, access, _, _, file, *name = line.split()
        if access == b"rw-p" and file == b"0" and name in ([], [b"[heap]"]):
            start, stop = (int(address, 16) for address in addresses.split(b"-"))
            first, last = -(-start // _SIZE) * _SIZE, stop // _SIZE * _SIZE
            if first < last:  # it says so where there are none, or this Linux is older: then all stays as it was
                advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)
