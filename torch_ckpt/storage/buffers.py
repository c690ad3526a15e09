"""Sizes the I/O buffers of saves and loads."""

from __future__ import annotations

from torch_ckpt._core import _native
from torch_ckpt.options import IoOptions

__all__ = ["STOCK_COPY_AHEAD", "buffer_pools", "retained_nbytes_limit", "useful_buffer_nbytes"]

STOCK_COPY_AHEAD = 10_000_000
_MIN_BLOCK_NBYTES = 64 << 10
_LITTLE_NBYTES = 512 << 10  # Pickled objects, whose size is unknown, may follow the data.


def buffer_pools(
    pools: list[_native.BufferPool],
    count: int,
    nbytes: int,
    io: IoOptions,
    copy_ahead: int,
    file_system: _native.FileSystem,
) -> list[_native.BufferPool]:
    """Returns one buffer pool for each of ``count`` threads, which write ``nbytes`` together.

    Returns the pools of the previous save if they are large enough; otherwise frees them first.
    ``copy_ahead`` is bytes per thread, and overrides the budget of ``io`` if it differs from
    stock's default.
    """
    budget_nbytes = copy_ahead if copy_ahead != STOCK_COPY_AHEAD else io.buffer_nbytes // count
    # A thread needs two blocks, so blocks are smaller if many threads share the budget.
    block_nbytes = min(io.block_nbytes(file_system), budget_nbytes // 2 // 4096 * 4096)
    if file_system.writes_at_offsets:  # All pages are allocated at once, also for little data.
        block_nbytes = min(block_nbytes, max(nbytes // count // 4096 * 4096, _LITTLE_NBYTES))
    block_nbytes = max(_MIN_BLOCK_NBYTES, block_nbytes)
    pool_nbytes = useful_buffer_nbytes(nbytes // count, budget_nbytes, block_nbytes, file_system)
    if len(pools) == count and all(pool.nbytes >= pool_nbytes for pool in pools):
        return pools
    pools.clear()  # Frees the old buffers before the new ones are allocated.
    return [_native.BufferPool(pool_nbytes, block_nbytes) for _ in range(count)]


def useful_buffer_nbytes(
    data_nbytes: int, budget_nbytes: int, block_nbytes: int, file_system: _native.FileSystem
) -> int:
    """Returns the best total size of buffers for ``data_nbytes`` of data: at least two blocks.

    On a disk, buffers beyond a quarter of the data cost more time to allocate than they save. On a
    store, more concurrent requests save more time, because each waits for an answer.
    """
    part = 4 if file_system.writes_at_offsets else 1
    return max(2 * block_nbytes, min(budget_nbytes, data_nbytes // part))


def retained_nbytes_limit(io: IoOptions) -> int:
    """Returns the maximum bytes of temporary tensor copies in memory, besides the buffers."""
    return io.buffer_nbytes // 4
