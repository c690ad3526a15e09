"""Tuning options. No option changes which bytes are written or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch_ckpt._core import _native

__all__ = ["READ_THREADS", "IoMode", "IoOptions", "OnBusy", "Verification"]

READ_THREADS = 4
"""Number of threads with which one rank reads. The page Options states the reason."""

OnBusy = Literal["wait", "skip", "error"]
"""What a save does while an earlier save is in progress."""

Verification = bool | Literal["full"]
"""Whether a load verifies the bytes that it reads; ``"full"``: also the records around them."""


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """Memory budgets and I/O modes of a writer or reader.

    A load uses some memory in addition to these budgets. Tensors on another device, or whose dtype
    differs from the stored one, are assembled whole, a few at a time. Rows that arrive from other
    ranks are assembled in ranges of up to 4 MiB.

    A save to a store writes each file in parts of 8 MiB, or 1/5,000 of the file. If the buffers of
    a thread are smaller than a part, up to two parts of a file also are in memory. A load from a
    store into tensors on a GPU uses up to twice ``buffer_nbytes``, because the client of the store
    retains each response until it is in a buffer.

    Attributes:
        buffer_nbytes: Bytes of I/O buffers of one writer or reader on one rank; at least 512 KiB.
            They hold the data in flight, in addition to the tensors themselves.
        exchange_nbytes: Bytes of buffers for data that a reader exchanges with other ranks, in
            addition to ``buffer_nbytes``; at least 4 MiB. Used only if ranks load the same bytes.
        background_nice: Niceness of the threads that write staged tensors, as in nice(1); 0 to 19.
        direct: Whether to bypass the page cache (``O_DIRECT``) where the file system supports it.
            Pages that are already cached are read from the cache in either case.

    Raises:
        ValueError: A value is out of range.

    Example::

        options = IoOptions(buffer_nbytes=256 << 20)
        dcp.save(state, storage_writer=FastWriter("run/step-100", io=options))
    """

    buffer_nbytes: int = 64 << 20
    exchange_nbytes: int = 256 << 20
    background_nice: int = 10
    direct: bool = True

    def __post_init__(self) -> None:
        if self.buffer_nbytes < 512 << 10:
            raise ValueError(f"buffer_nbytes={self.buffer_nbytes} is less than 512 KiB")
        if not 0 <= self.background_nice <= 19:
            raise ValueError(f"background_nice={self.background_nice} is not in [0, 19]")
        if self.exchange_nbytes < 4 << 20:
            raise ValueError(f"exchange_nbytes={self.exchange_nbytes} is less than 4 MiB")

    def block_nbytes(self, file_system: _native.FileSystem) -> int:
        """Returns the size of one buffer, and of the longest I/O request, in bytes.

        It is the request size of the file system, limited so that two buffers fit in the budget.
        """
        return min(file_system.request_nbytes, self.buffer_nbytes // 2 // 4096 * 4096)


@dataclass(frozen=True)
class IoMode:
    """The I/O mode with which files were written, after any fallbacks. Prints as one line.

    Attributes:
        queue: ``"io_uring"`` or ``"threads"``.
        direct: Whether writes bypassed the page cache.
        registered_buffers: Whether the buffers were registered with the kernel.
        reasons: Reasons for each fallback from the fastest mode; empty without fallbacks.
    """

    queue: str
    direct: bool
    registered_buffers: bool
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: _native.FileJob) -> IoMode:
        """Returns the mode of a native job."""
        queue, direct, registered, reasons = job.mode
        return cls(queue, direct, registered, tuple(reasons))

    def __str__(self) -> str:
        features = [self.queue, "O_DIRECT" if self.direct else "page cache"]
        if self.registered_buffers:
            features.append("registered buffers")
        text = ", ".join(features)
        return f"{text} ({'; '.join(self.reasons)})" if self.reasons else text
