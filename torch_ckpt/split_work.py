"""What a rank writes, split over its data files: by items of DCP, or by columns of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _native
from torch_ckpt.data_file import write_data_file, write_planned_file
from torch_ckpt.index import WrittenFile
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planned import PlannedItems
from torch_ckpt.save_planner import FastSavePlanner
from torch_ckpt.sharing import item_nbytes, split_over_files, work_of

__all__ = ["Part", "SplitWork", "split"]

Part = list[Any]
"""What goes into one file."""


@dataclass(frozen=True)
class SplitWork(ABC):
    """What a rank writes, by file.

    Attributes:
        parts: That of each file; some may be empty.
        nbytes: Of all, objects aside.
    """

    parts: Sequence[Part]
    nbytes: int
    planner: SavePlanner
    transforms: _StorageWriterTransforms

    @abstractmethod
    def write(
        self,
        part: Part,
        directory: Path,
        name: str,
        *,
        fs: _native.FileSystem,
        pool: _native.BufferPool,
        io: IoOptions,
        sync: bool,
    ) -> tuple[list[WriteResult], WrittenFile, IoMode]:
        """Writes a part to the new file ``directory / name``, as :func:`write_data_file`."""


def split(
    plan: SavePlan, planner: SavePlanner, transforms: _StorageWriterTransforms, count: int | None
) -> SplitWork:
    """Splits what a rank is to write by its final plan over files of about the same size.

    Args:
        plan: That of the rank.
        planner: Its own.
        transforms: What is done to the bytes of each item.
        count: How many files; one for each item if ``None``.
    """
    columns: Any = plan.items
    if (
        isinstance(columns, PlannedItems)
        and isinstance(planner, FastSavePlanner)
        and not transforms.extensions
    ):
        work = columns.work
        sources = planner.sources(work.items)
        if sources is not None:
            nbytes = work.nbytes
            parts = _parts(range(len(work)), nbytes, count)
            return _Columns(parts, sum(nbytes), planner, transforms, work, sources)
    items: list[WriteItem] = work_of(plan)
    nbytes = [item_nbytes(item) for item in items]
    return _Items(_parts(items, nbytes, count), sum(nbytes), planner, transforms)


def _parts(items: Sequence[Any], nbytes: Sequence[int], count: int | None) -> Sequence[Part]:
    if count is None:
        return [[item] for item in items]
    return split_over_files(items, nbytes, count)


class _Items(SplitWork):
    """Parts are items as DCP has them."""

    def write(
        self, part: Part, directory: Path, name: str, **how: Any
    ) -> tuple[list[WriteResult], WrittenFile, IoMode]:
        return write_data_file(
            directory, name, part, self.planner, transforms=self.transforms, **how
        )


@dataclass(frozen=True)
class _Columns(SplitWork):
    """Parts are positions in what was planned."""

    work: _native.Work
    sources: list[Any]

    def write(
        self, part: Part, directory: Path, name: str, **how: Any
    ) -> tuple[list[WriteResult], WrittenFile, IoMode]:
        file, mode = write_planned_file(
            directory,
            name,
            self.work if len(part) == len(self.work) else self.work.part(part),
            self.planner,
            [self.sources[at] for at in part],
            transforms=self.transforms,
            **how,
        )
        return [], file, mode
