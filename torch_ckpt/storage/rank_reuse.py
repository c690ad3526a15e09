"""Takes unchanged data of a rank from the base, in terms of its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.replicas import CutItem
from torch_ckpt.planning.value_digests import THREADS, full_digests, value_digests
from torch_ckpt.storage.data_file import FileOptions, WrittenFile
from torch_ckpt.storage.rank_work import RankWork
from torch_ckpt.storage.reuse import MAX_FILES, TakenFile, take_from_base

__all__ = ["Taken", "take_unchanged"]


@dataclass(frozen=True)
class Taken:
    """The files that one rank takes from the base, and the remaining work.

    Attributes:
        groups: The remaining work, in groups for different files.
        results: Results for each item in the taken files, as if the save had written them, and for
            each file.
    """

    groups: Sequence[RankWork]
    results: list[WriteResult] = field(default_factory=list)


def take_unchanged(
    base: Location | None,
    directory: Location,
    work: RankWork,
    how: FileOptions,
    *,
    new_name: Callable[[], str],
    finished: list[str],
) -> Taken:
    """Takes files of the base into the directory of a new checkpoint: :func:`take_from_base`."""
    sources, threads = _stored_parts(work), 1 if how.niceness else THREADS
    found = take_from_base(
        *(base, directory, work.work, value_digests(sources, "sample")),
        lambda positions: full_digests(sources, positions, threads=threads, niceness=how.niceness),
        boxes=_boxes(work),
        new_name=new_name,
        finished=finished,
        max_files=MAX_FILES if how.single_file else None,
        sync=how.sync,
    )
    is_digested = [False] * len(sources)
    for position in found.digested:
        is_digested[position] = True
    work = replace(work, samples=found.samples, digested=is_digested)
    results = [result for file in found.files for result in _results(file, work)]
    return Taken([work.part(positions) for positions in found.groups], results)


def _stored_parts(work: RankWork) -> list[object]:
    """Returns the source of each item; for a cut tensor, only the stored rows."""
    sources: list[object] = list(work.sources)
    if work.items is None:
        for position, first, rows in work.work.cuts:
            source = sources[position]
            if isinstance(source, torch.Tensor):
                sources[position] = source.detach().narrow(0, first, rows)
    return sources


def _boxes(work: RankWork) -> list[tuple[str, Sequence[int]] | None]:
    """Returns FQN and offsets of each box of DCP's items; empty if the work contains them."""
    if work.items is None:
        return []
    return [
        None if dtype is None else (item.index.fqn, list(item.index.offset or ()))
        for item, dtype in zip(work.items, work.dtypes, strict=True)
    ]


def _results(taken: TakenFile, work: RankWork) -> list[WriteResult]:
    """Returns the results for a taken file: of its items, in DCP's form, and of the file."""
    name = taken.report[0]
    file = WrittenFile(*taken.report[:3], digests=taken.report[3], origin=taken.report[4])
    results: list[WriteResult] = []
    if work.items is None:
        items = work.work.items
        extents = [(items[box[0]], box[2], box[3]) for box in taken.boxes]
        file = replace(file, extents=_native.encode_extents(extents))
    else:
        dtypes: dict[int, str] = {}
        cuts = []
        for position, _, offset, nbytes, *_ in taken.boxes:
            item, dtype = work.items[position], work.dtypes[position]
            assert dtype is not None  # Otherwise it has no name.
            results.append(WriteResult(item.index, nbytes, _StorageInfo(name, offset, nbytes)))
            dtypes[offset] = dtype
            if isinstance(item, CutItem) and not item.is_listed:
                cuts.append(item.piece)
        file = replace(file, dtypes=dtypes, cuts=cuts)
    results.append(WriteResult(MetadataIndex(name), 0, file))
    return results
