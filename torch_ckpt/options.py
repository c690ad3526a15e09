"""Tuning options. None of them changes which bytes are written or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ckpt import _native

__all__ = ["IoMode", "IoOptions"]


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """How the engine moves bytes.

    Attributes:
        buffer_nbytes: Budget of buffers of one writer or reader on one rank, in bytes. Besides the
            tensors themselves, memory in flight stays within it; where ranks exchange what they
            read, within it and ``exchange_nbytes`` together. What cannot be read into place is put
            together in memory besides, little at a time: tensors of another dtype or device, each
            whole, and rows that come by exchange, in ranges of up to ``block_nbytes``.
        block_nbytes: Size of one buffer, and so of the longest single request, in bytes: a multiple
            of 4096, at least 256 KiB. Every thread needs at least two.
        threads: Threads that read. A writer uses one for each file (``thread_count``).
        exchange_nbytes: Budget of a reader, in bytes, for what it has in flight to and from other
            ranks that load the same; at least 4 MiB. Used only where there is something to
            exchange, and then besides ``buffer_nbytes``.
        exchange_on_gpus: Whether ranks that each use a GPU of their own exchange from GPU to GPU,
            over NCCL. Not by default, since that has not run on GPUs yet.
        background_nice: By how much threads that write what was staged step back behind others
            that want the CPU, as nice(1); 0 to 19.
        background_share: Most of the time that each of these is at work where CPUs are short, that
            is where it has to wait for one; for the rest it rests, up to 10 s a file, so that
            training is slowed less at a time, and the save takes longer. Above 0, at most 1, which
            is never to rest. Nor does it while a save waits for the memory that former ones hold.
        direct: Whether to go past the page cache (``O_DIRECT``) where the file system allows it.
            What the page cache holds is read from there in any case.

    Raises:
        ValueError: A value is out of range, or the budget does not hold two blocks.
    """

    buffer_nbytes: int = 64 << 20
    block_nbytes: int = 4 << 20
    threads: int = 4
    exchange_nbytes: int = 256 << 20
    exchange_on_gpus: bool = False
    background_nice: int = 5
    background_share: float = 0.1
    direct: bool = True

    def __post_init__(self) -> None:
        if self.block_nbytes < 256 << 10 or self.block_nbytes % 4096:
            raise ValueError(
                f"block_nbytes={self.block_nbytes} is no multiple of 4096 of at least 256 KiB"
            )
        if self.buffer_nbytes < 2 * self.block_nbytes:
            raise ValueError(
                f"buffer_nbytes={self.buffer_nbytes} does not hold two blocks of "
                f"{self.block_nbytes} bytes"
            )
        if not 0 <= self.background_nice <= 19:
            raise ValueError(f"background_nice={self.background_nice} is not in [0, 19]")
        if not 0 < self.background_share <= 1:
            raise ValueError(f"background_share={self.background_share} is not in (0, 1]")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads} is not positive")
        if self.exchange_nbytes < 4 << 20:
            raise ValueError(f"exchange_nbytes={self.exchange_nbytes} is less than 4 MiB")


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
    def of(cls, job: _native.SaveJob | _native.PartJob) -> IoMode:
        """How a job of the engine writes."""
        queue, direct, registered, reasons = job.mode
        return cls(queue, direct, registered, tuple(reasons))

    def __str__(self) -> str:
        parts = [self.queue, "O_DIRECT" if self.direct else "page cache"]
        if self.registered_buffers:
            parts.append("registered buffers")
        text = ", ".join(parts)
        return f"{text} ({'; '.join(self.reasons)})" if self.reasons else text
