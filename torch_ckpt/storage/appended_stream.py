"""AppendedStream: writes an item of unknown length to the end of a data file, piece by piece."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["AppendedStream"]

_PIECE_NBYTES = 1 << 20
"""The engine appends pieces of this length without gaps, followed by one shorter piece."""

_START_NBYTES = 4 << 20


class AppendedStream(io.RawIOBase):
    """A stream whose bytes are appended to a data file while they are written.

    Torch pickles tensors of any size into it. At most one piece is in memory at a time. ``append``
    returns offset and length of a piece. ``start`` contains the first 4 MiB, with the pickle of an
    archive of ``torch.save``.
    """

    def __init__(self, append: Callable[[Buffer], tuple[int, int]]) -> None:
        super().__init__()
        self._append = append
        self._piece = bytearray()
        self._offset: int | None = None  # Offset of the first piece.
        self._end = 0
        self._nbytes = 0
        self.start = bytearray()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes

    def write(self, data: Buffer) -> int:
        left = memoryview(data).cast("B")
        nbytes = len(left)
        self.start += left[: _START_NBYTES - len(self.start)]
        self._nbytes += nbytes
        while left:
            if not self._piece and len(left) >= _PIECE_NBYTES:
                self._append_piece(left[:_PIECE_NBYTES])
                left = left[_PIECE_NBYTES:]
                continue
            count = _PIECE_NBYTES - len(self._piece)
            self._piece += left[:count]
            left = left[count:]
            if len(self._piece) == _PIECE_NBYTES:
                self._append_piece(self._piece)
                self._piece = bytearray()
        return nbytes

    def end(self) -> int:
        """Appends the last piece, and returns the offset of the first."""
        if self._piece or self._offset is None:
            self._append_piece(self._piece)
        assert self._offset is not None
        return self._offset

    def _append_piece(self, piece: Buffer) -> None:
        offset, nbytes = self._append(piece)
        if self._offset is None:
            self._offset = self._end = offset
        if offset != self._end:
            raise CheckpointError(f"cannot append at {self._end} of a data file: {offset} is next")
        self._end = offset + nbytes
