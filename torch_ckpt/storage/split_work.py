"""What a rank writes, split over its data files: by items of DCP, or by columns of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.planned import PlannedItems
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.planning.sharing import item_nbytes, split_over_files, work_of
from torch_ckpt.storage.data_file import resolve_whole, write_data_file, write_planned_file
from torch_ckpt.storage.written_file import WrittenFile

__all__ = ["Part", "SplitWork", "split"]

Part = list[Any]
"""What goes into one file."""


@dataclass(frozen=True)
class SplitWork(ABC):
    """What a rank writes, by file.

    Attributes:
        first: That of each file that is to be written before all others.
        parts: That of each other file; some may be empty.
        nbytes: Of all, objects aside.
    """

    first: Sequence[Part]
    parts: Sequence[Part]
    nbytes: int
    planner: SavePlanner
    transforms: _StorageWriterTransforms

    @abstractmethod
    def write(
        self,
        part: Part,
        directory: Location,
        name: str,
        *,
        pool: _native.BufferPool,
        io: IoOptions,
        sync: bool,
        niceness: int,
    ) -> tuple[list[WriteResult], WrittenFile, IoMode]:
        """Writes a part to the new file ``directory / name``, as :func:`write_data_file`."""


def split(
    plan: SavePlan,
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
    count: int | None,
    *,
    can_wait: Callable[[torch.Tensor | None], bool] | None = None,
) -> SplitWork:
    """Splits what a rank is to write by its final plan over files of about the same size.

    Args:
        plan: That of the rank.
        planner: Its own.
        transforms: What is done to the bytes of each item.
        count: How many files; one for each item if ``None``.
        can_wait: Tells what need not be written first, of an object by ``None``; ``None`` if all
            can wait.
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
            waits = [can_wait is None or can_wait(source) for source in sources]
            both = _parts(range(len(work)), nbytes, waits, count)
            return _Columns(*both, sum(nbytes), planner, transforms, work, sources)
    items: list[WriteItem] = work_of(plan)
    nbytes = [item_nbytes(item) for item in items]
    waits = [can_wait is None or can_wait(_source(item, planner)) for item in items]
    return _Items(*_parts(items, nbytes, waits, count), sum(nbytes), planner, transforms)


def _source(item: WriteItem, planner: SavePlanner) -> torch.Tensor | None:
    return None if item.type == WriteItemType.BYTE_IO else resolve_whole(planner, item)


def _parts(
    items: Sequence[Any], nbytes: Sequence[int], waits: list[bool], count: int | None
) -> tuple[Sequence[Part], Sequence[Part]]:
    """Files that are to be written first, and others."""

    def parts_of(which: bool) -> Sequence[Part]:
        chosen = [at for at, wait in enumerate(waits) if wait == which]
        some = [items[at] for at in chosen]
        if count is None:
            return [[item] for item in some]
        return split_over_files(some, [nbytes[at] for at in chosen], count) if some else []

    return parts_of(False), parts_of(True)


class _Items(SplitWork):
    """Parts are items as DCP has them."""

    def write(
        self, part: Part, directory: Location, name: str, **how: Any
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
        self, part: Part, directory: Location, name: str, **how: Any
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
