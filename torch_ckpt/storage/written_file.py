"""The report of a rank about a data file that it has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_ckpt.planning.replicas import CutPiece

__all__ = ["WrittenFile"]


@dataclass(frozen=True)
class WrittenFile:
    """The report about one data file of a save, for the coordinator.

    Attributes:
        name: Name in the checkpoint's directory.
        nbytes: Length in bytes.
        sums: Checksums of the file's blocks, encoded by the engine.
        dtypes: Offset -> torch name of the dtype, for slices that the engine framed with the
            planned dtype and sizes. Only torch can read the other slices.
        cuts: Boxes of the file that are rows of a box in the planner's items.
        extents: Encoded extents of the items, if they were planned in columns. The save then has no
            other write results for the file.
        refused: FQN -> classes in its value that a load will refuse.
    """

    name: str
    nbytes: int
    sums: bytes
    dtypes: Mapping[int, str] = field(default_factory=dict)
    cuts: Sequence[CutPiece] = ()
    extents: bytes | None = None
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
