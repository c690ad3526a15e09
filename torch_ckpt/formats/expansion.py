"""Bounds what stored bytes may expand to: values in a pickle, streams, and elements of tensors.

A few bytes can expand to very many: a pickle that refers to one value again and again, a compressed
stream, or a tensor that repeats its elements (``Tensor.expand``) or has none (the meta device). The
bytes of a file must justify the sizes that it states, unless the caller requested these sizes.
"""

from __future__ import annotations

from torch_ckpt.errors import UnsupportedError

__all__ = [
    "HOW_TO_LIFT",
    "OBJECTS_NBYTES",
    "RATIO",
    "Expansion",
    "ExpansionError",
    "allowed_nbytes",
]

HOW_TO_LIFT = "If you trust its author, trust_pickle=True lifts the limit"

RATIO = 64
"""Bytes that each stored byte may expand to."""

OBJECTS_NBYTES = 16 << 20
"""Additional bytes that all objects of one load together may expand to."""

_MIN_NBYTES = 256 << 20


class ExpansionError(UnsupportedError):
    """A value expands to more than its bytes justify, or is nested too deeply."""


class Expansion:
    """The bytes that stored bytes may still expand to; ``free`` are allowed without any."""

    def __init__(self, free: float, stored_nbytes: int = 0) -> None:
        self.left = free
        self._stored_nbytes = 0
        self.justify(stored_nbytes)

    def justify(self, stored_nbytes: int) -> None:
        """Adds what further stored bytes may expand to."""
        self._stored_nbytes += stored_nbytes
        self.left += RATIO * stored_nbytes

    def charge(self, nbytes: int) -> None:
        """Uses up bytes. Raises ExpansionError if fewer are left."""
        if nbytes > self.left:
            raise ExpansionError(
                f"it expands to more than its {self._stored_nbytes} bytes justify. {HOW_TO_LIFT}"
            )
        self.left -= nbytes


def allowed_nbytes(stored_nbytes: int) -> int:
    """Returns the bytes that stored bytes may expand to: 256 MiB, and 64 for each stored byte.

    ``trust_pickle`` lifts this limit.
    """
    return _MIN_NBYTES + RATIO * stored_nbytes
