"""Bytes that this process reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["nbytes_read_by", "read_nbytes"]


def read_nbytes(counter: str = "rchar") -> int:
    """Bytes read until now: by system calls, or from a disk (``read_bytes``)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[counter])


def nbytes_read_by(call: Callable[..., Any], *args: Any, **options: Any) -> int:
    """Bytes that a call reads, which does so without io_uring: its reads are not counted."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # Else what a child of a former test has read is counted when it is waited for.
    with mock.patch.dict(os.environ, TORCH_CKPT_IO="threads"):
        before = read_nbytes()
        call(*args, **options)
        return read_nbytes() - before
