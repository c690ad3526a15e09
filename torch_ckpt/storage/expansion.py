"""Bounds what the files of a checkpoint may expand to.

A few bytes can stand for very many: a compressed stream, or a tensor that repeats its elements
(``Tensor.expand``) or has none (the meta device). Where nobody has asked for a tensor of the size
that a file states, its files must justify it.
"""

from __future__ import annotations

__all__ = ["allowed_nbytes"]

_RATIO = 64
_MIN_NBYTES = 256 << 20


def allowed_nbytes(stored_nbytes: int) -> int:
    """Returns the bytes that stored bytes may expand to: 256 MiB, and 64 for each stored byte.

    ``trust_pickle`` lifts this limit.

    Args:
        stored_nbytes: Length of the stored bytes.
    """
    return _MIN_NBYTES + _RATIO * stored_nbytes
