"""Fragments the free memory of this machine, so that no huge pages are free.

A process allocates most of the free memory in small pages, and frees every other 16 KiB. The kernel
must then move pages to form a huge page. `fragmented` starts the process for a block of code.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SHARE = 0.65  # Of the available memory. The rest is for the processes to be measured.
_STEP_NBYTES = 32 << 10
_PRIVATE_ANONYMOUS, _READ_WRITE = 0x22, 3
_DONTNEED, _NOHUGEPAGE, _POPULATE_WRITE = 4, 15, 23


@contextlib.contextmanager
def fragmented() -> Iterator[None]:
    """Fragments memory during the block."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()


def _fragment() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    nbytes = int(int(found[1]) * 1024 * _SHARE) // _STEP_NBYTES * _STEP_NBYTES
    begin = libc.mmap(None, nbytes, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    libc.madvise(begin, nbytes, _NOHUGEPAGE)
    libc.madvise(begin, nbytes, _POPULATE_WRITE)
    for offset in range(0, nbytes, _STEP_NBYTES):
        libc.madvise(begin + offset, _STEP_NBYTES // 2, _DONTNEED)
    print("ready", flush=True)
    sys.stdin.read()  # Until the parent ends.


if __name__ == "__main__":
    _fragment()
