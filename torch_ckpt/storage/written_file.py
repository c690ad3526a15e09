"""What a rank reports of a data file that it has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_ckpt.planning.replicas import CutPiece

__all__ = ["WrittenFile"]


@dataclass(frozen=True)
class WrittenFile:
    """One data file of a save, as the rank that wrote it reports it to the coordinator.

    Attributes:
        name: Within the checkpoint's directory.
        nbytes: Its length in bytes.
        sums: Checksums of its blocks, as the engine gives them.
        dtypes: By offset, the dtypes of the slices that are frames of ours, in torch's words, and
            of the sizes that were planned. Only torch reads the others.
        cuts: Those of its boxes that are rows of one that the planner knows.
        extents: Of a file whose items were planned in columns: where each of them lies, as the
            engine encodes it. There are no other results then.
        refused: By FQN the classes for which a load would refuse a value.
    """

    name: str
    nbytes: int
    sums: bytes
    dtypes: Mapping[int, str] = field(default_factory=dict)
    cuts: Sequence[CutPiece] = ()
    extents: bytes | None = None
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
