"""Tuning options. None of them changes which bytes are written or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ckpt._core import _native

__all__ = ["READ_THREADS", "IoMode", "IoOptions"]

READ_THREADS = 4
"""Threads of one rank that read at a time."""


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """How the engine moves bytes.

    Attributes:
        buffer_nbytes: Budget of buffers of one writer or reader on one rank, in bytes. Besides the
            tensors themselves, memory in flight stays within it; where ranks exchange what they
            read, within it and ``exchange_nbytes`` together. What cannot be read into place is put
            together in memory besides, little at a time: tensors of another dtype or device, each
            whole, and rows that come by exchange, in ranges of up to 4 MiB. At least 512 KiB.
        exchange_nbytes: Budget of a reader, in bytes, for what it has in flight to and from other
            ranks that load the same; at least 4 MiB. Used only where there is something to
            exchange, and then besides ``buffer_nbytes``.
        background_nice: Niceness of threads that write staged tensors, as nice(1); 0 to 19.
        direct: Whether to go past the page cache (``O_DIRECT``) where the file system allows it.
            What the page cache holds is read from there in any case.

    Raises:
        ValueError: A value is out of range.
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

    @property
    def block_nbytes(self) -> int:
        """Bytes of one buffer, and so of the longest request: two fit into the budget."""
        return min(4 << 20, self.buffer_nbytes // 2 // 4096 * 4096)


@dataclass(frozen=True)
class IoMode:
    """How files were really written, fallbacks included. Prints as one line.

    Attributes:
        queue: ``"io_uring"`` or ``"threads"``.
        direct: Whether writes went past the page cache.
        registered_buffers: Whether the kernel had the buffers registered.
        reasons: Why it is not the fastest mode; empty when it is.
    """

    queue: str
    direct: bool
    registered_buffers: bool
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: _native.FileJob) -> IoMode:
        """How a job of the engine writes."""
        queue, direct, registered, reasons = job.mode
        return cls(queue, direct, registered, tuple(reasons))

    def __str__(self) -> str:
        parts = [self.queue, "O_DIRECT" if self.direct else "page cache"]
        if self.registered_buffers:
            parts.append("registered buffers")
        text = ", ".join(parts)
        return f"{text} ({'; '.join(self.reasons)})" if self.reasons else text
