"""The buffers that saves and loads stream through."""

from __future__ import annotations

from torch_ckpt._core import _native
from torch_ckpt.options import IoOptions

__all__ = ["STOCK_COPY_AHEAD", "buffer_pools", "retained_nbytes_limit", "useful_buffer_nbytes"]

STOCK_COPY_AHEAD = 10_000_000
_LEAST_BLOCK = 64 << 10


def buffer_pools(
    kept: list[_native.BufferPool], count: int, nbytes: int, io: IoOptions, copy_ahead: int
) -> list[_native.BufferPool]:
    """One pool of buffers for each of ``count`` threads, for ``nbytes`` of data in all.

    Args:
        kept: Those of the save before, which may be larger than this one needs: returned if they
            serve, else emptied.
        count: Of threads.
        nbytes: That they write together.
        io: The budget.
        copy_ahead: Bytes for each thread; takes the place of the budget if it is not stock's.
    """
    most = copy_ahead if copy_ahead != STOCK_COPY_AHEAD else io.buffer_nbytes // count
    # A thread needs two blocks: many threads share the budget in smaller ones.
    block_nbytes = max(_LEAST_BLOCK, min(io.block_nbytes, most // 2 // 4096 * 4096))
    pool_nbytes = useful_buffer_nbytes(nbytes // count, most, block_nbytes)
    if len(kept) == count and all(pool.nbytes >= pool_nbytes for pool in kept):
        return kept
    kept.clear()  # The old ones go before the new ones come.
    return [_native.BufferPool(pool_nbytes, block_nbytes) for _ in range(count)]


def useful_buffer_nbytes(data_nbytes: int, most_nbytes: int, block_nbytes: int) -> int:
    """How large buffers for ``data_nbytes`` of data should be: at least two blocks.

    Beyond a quarter of the data they would cost more time to prepare than they save.
    """
    return max(2 * block_nbytes, min(most_nbytes, data_nbytes // 4))


def retained_nbytes_limit(io: IoOptions) -> int:
    """Bytes of temporary copies to hold besides the buffers, before they are used and let go."""
    return io.buffer_nbytes // 4
