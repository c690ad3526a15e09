"""Takes files of an older model into a new one by hard link, if all their tensors are unchanged.

A model file has no dead bytes, so it is taken as a whole or not at all. It has no digests either:
each rank reads its boxes of the older model, the base, and compares them bit for bit. The
coordinator takes a file if no rank has found a difference in it, and if the file is byte for byte
the one that the save would write. Unchanged tensors from all other files are written to separate
files, so that the next save can take these.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_ckpt._core import _tensor_view
from torch_ckpt._core.tensors import to_plain
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.equality import same_bits
from torch_ckpt.formats.safetensors.layout import ModelLayout, TensorFacts
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.value_digests import has_memory
from torch_ckpt.storage.reuse import MAX_FILES, link_file
from torch_ckpt.storage.stored_values import Box, StoredValues, in_batches, pieces_of

__all__ = ["BaseFile", "BaseReport", "Groups", "compare_with_base", "group_by_base", "take_files"]

_SAMPLE_NBYTES = 4 << 10
"""Bytes of each box that are compared first, because most changed tensors differ there."""

_BATCH_NBYTES = 32 << 20
"""Bytes of the base in memory at a time."""


@dataclass(frozen=True)
class BaseFile:
    """A file of the base, before it was compared.

    ``path`` is text, because messages between ranks must not contain locations: constructing one
    may connect to a store. ``mark``, the inode and modification time of the file, identifies it,
    and is equal on all machines.
    """

    path: str
    nbytes: int
    mark: tuple[int, int]
    fqns: frozenset[str]


@dataclass(frozen=True)
class BaseReport:
    """The findings of one rank: the files of the base, and the changed FQNs."""

    files: Sequence[BaseFile]
    changed: Collection[str]


@dataclass(frozen=True)
class Groups:
    """The tensors of a model in the order of its files.

    Attributes:
        facts: All tensors.
        lengths: The lengths of the groups. Each group has its own files.
        taken: The files of the base with the first groups, one file per group.
    """

    facts: Sequence[TensorFacts]
    lengths: Sequence[int] = ()
    taken: Sequence[BaseFile] = field(default_factory=tuple)


def compare_with_base(
    base: Location, items: Sequence[WriteItem], planner: SavePlanner, io: IoOptions
) -> BaseReport | None:
    """Compares the tensors of a rank with those of the base.

    Returns ``None`` if the base is no such model. Warns if it cannot be read.
    """
    try:
        stored = StoredValues(base, io=io)
        return _compare(stored, base, items, planner)
    except NotFoundError:
        return None
    except CheckpointError as error:
        warnings.warn(f"everything is written, since the base is of no use: {error}", stacklevel=2)
        return None


def _compare(
    stored: StoredValues, base: Location, items: Sequence[WriteItem], planner: SavePlanner
) -> BaseReport:
    file_of = {
        index.fqn: info.relative_path for index, info in stored.metadata.storage_data.items()
    }
    fqns_of: dict[str, set[str]] = {}
    for fqn, name in file_of.items():
        fqns_of.setdefault(name, set()).add(fqn)
    files = [
        BaseFile(str(path), *facts, frozenset(fqns))
        for path, fqns in ((base / name, fqns_of[name]) for name in sorted(fqns_of))
        if (facts := _facts_of(path)) is not None
    ]
    changes = _Changes(file_of)
    for limit in (_SAMPLE_NBYTES, None):
        # Once a tensor of a file has changed, its other tensors are not read.
        wanted = (
            item
            for item in items
            if limit is not None or file_of.get(item.index.fqn) not in changes.files
        )
        for batch in in_batches(_pieces(stored, wanted, planner, limit, changes), _BATCH_NBYTES):
            loaded = stored.load([(fqn, box) for fqn, box, _ in batch])
            for (fqn, _, piece), other in zip(batch, loaded, strict=True):
                if fqn not in changes.fqns and not same_bits(to_plain(piece), other):
                    changes.add(fqn)
    return BaseReport(files, frozenset(changes.fqns))


@dataclass
class _Changes:
    """The changed FQNs, and the files of the base that contain them."""

    file_of: Mapping[str, str]
    fqns: set[str] = field(default_factory=set)
    files: set[str | None] = field(default_factory=set)

    def add(self, fqn: str) -> None:
        self.fqns.add(fqn)
        self.files.add(self.file_of.get(fqn))


def _facts_of(path: Location) -> tuple[int, tuple[int, int]] | None:
    """Returns the length and the mark of a file; ``None`` if it has none."""
    identity = path.identity()
    if not isinstance(identity, tuple):
        return None
    _, inode, nbytes, modified_ns = identity  # Device numbers differ between machines.
    return nbytes, (inode, modified_ns)


def _may_be_equal(stored: StoredValues, item: WriteItem, tensor: torch.Tensor) -> bool:
    entry = stored.metadata.state_dict_metadata.get(item.index.fqn)
    data = item.tensor_data
    return (
        isinstance(entry, TensorStorageMetadata)
        and data is not None
        and entry.size == data.size
        and entry.properties.dtype == data.properties.dtype == tensor.dtype
        and tensor.size() == data.chunk.sizes
        and _tensor_view.tensor_kind(tensor) != _tensor_view.TensorKind.TORCH_ONLY
        and has_memory(tensor)  # False if only another rank has staged it.
    )


def _pieces(
    stored: StoredValues,
    items: Iterable[WriteItem],
    planner: SavePlanner,
    limit: int | None,
    changes: _Changes,
) -> Iterator[tuple[tuple[str, Box, torch.Tensor], int]]:
    """Yields boxes with their values: whole tensors, or the first bytes of each.

    Adds tensors that cannot be equal to the changes. References a tensor that the planner creates
    only as long as its pieces.
    """
    for item in items:
        fqn = item.index.fqn
        # The planner would pickle an object.
        tensor = None if item.tensor_data is None else planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or not _may_be_equal(stored, item, tensor):
            changes.add(fqn)
            continue
        assert item.tensor_data is not None
        offsets = item.tensor_data.chunk.offsets
        itemsize = tensor.dtype.itemsize
        for first, sizes in pieces_of(tensor.size(), itemsize, limit or _BATCH_NBYTES):
            piece = tensor.detach()
            for dim, (begin, size) in enumerate(zip(first, sizes, strict=True)):
                piece = piece.narrow(dim, begin, size)
            at = tuple(sum(pair) for pair in zip(offsets, first, strict=True))
            nbytes = piece.numel() * itemsize
            if limit is not None:
                yield (fqn, (at, sizes), to_plain(piece).clone()), nbytes
                break
            yield (fqn, (at, sizes), piece), nbytes


def group_by_base(
    facts: Sequence[TensorFacts],
    reports: Sequence[BaseReport | None],
    *,
    max_shard_nbytes: int,
    omitted: Mapping[str, str],
) -> Groups:
    """Groups the tensors of a model by the files of the base. Called on the coordinator.

    Nothing is taken unless all ranks have compared with the same files. The other arguments are
    passed to :meth:`ModelLayout.of`.
    """
    found = [report for report in reports if report is not None]
    if len(found) < len(reports) or any(report.files != found[0].files for report in found):
        return Groups(facts)
    changed = frozenset().union(*(report.changed for report in found))
    left = {each.fqn: each for each in facts}
    groups: list[list[TensorFacts]] = []
    taken: list[BaseFile] = []
    for file in _worth_taking(found[0].files, changed, max_shard_nbytes):
        fqns = file.fqns - omitted.keys()  # The base lists tied names as well.
        if not left.keys() >= fqns:
            continue
        group = [left[fqn] for fqn in sorted(fqns)]
        own = {name: first for name, first in omitted.items() if first in fqns}
        layout = ModelLayout.of(group, max_shard_nbytes=max_shard_nbytes, omitted=own)
        if len(layout.files) == 1 and _has_header(Location(file.path), layout):
            groups.append(group)
            taken.append(file)
            left = {fqn: each for fqn, each in left.items() if fqn not in fqns}
    known = frozenset().union(*(file.fqns for file in found[0].files))
    stable = [each for each in left.values() if each.fqn in known - changed]
    groups += [stable, [each for each in left.values() if each.fqn not in known - changed]]
    ordered = [each for group in groups for each in group]
    return Groups(ordered, [len(group) for group in groups], taken)


def _worth_taking(
    files: Sequence[BaseFile], changed: Collection[str], max_shard_nbytes: int
) -> list[BaseFile]:
    """Returns the unchanged files; of files less than half full, only the largest ones.

    Otherwise a model would accumulate small files, one more with each save.
    """
    unchanged = [file for file in files if file.fqns.isdisjoint(changed)]
    small = [file for file in unchanged if 2 * file.nbytes < max_shard_nbytes]
    small.sort(key=lambda file: file.nbytes, reverse=True)
    return [file for file in unchanged if file not in small[MAX_FILES:]]


def _has_header(path: Location, layout: ModelLayout) -> bool:
    """Returns whether a file has the length and the header of the single file of a layout."""
    (file,) = layout.files
    with contextlib.suppress(CheckpointError):
        return path.read_range(0, len(file.header)) == (file.nbytes, file.header)
    return False


def take_files(
    taken: Sequence[BaseFile], directory: Location, names: Sequence[str], *, sync: bool
) -> int:
    """Links files of the base to the first names of a directory, replacing empty files.

    Returns the number of taken files: all before the first one that could not be taken, because it
    was replaced meanwhile, or the file system has no links.
    """
    for number, (file, name) in enumerate(zip(taken, names, strict=False)):
        target = directory / name
        target.discard()
        source = Location(file.path)
        is_same = _facts_of(source) == (file.nbytes, file.mark)
        if is_same and link_file(source, target, file.nbytes, sync=sync):
            linked = _facts_of(target)
            if linked is not None and linked[1][0] == file.mark[0]:  # Linking updates the time.
                continue
            target.discard()
        target.write(b"", sync=False)
        return number
    return len(taken)
