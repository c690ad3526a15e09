"""Checkpoints in which each rank wrote its own ``torch.save`` files: their tensors and objects.

A tensor of the checkpoint consists of boxes in the files of several ranks. The module of a format,
such as DeepSpeed's, determines which boxes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.allowed_classes import NO_STAND_INS, StandIns
from torch_ckpt.formats.object_pickles import Refused
from torch_ckpt.formats.opened import ForeignFiles
from torch_ckpt.formats.placements import MAX_BOXES
from torch_ckpt.formats.reading import now_reading, reading
from torch_ckpt.formats.torch_save import Archive, Objects, check_allowed, check_tree
from torch_ckpt.formats.unions import Placed
from torch_ckpt.options import Verification

__all__ = [
    "INVALID",
    "Boxed",
    "Computed",
    "File",
    "Files",
    "Fragment",
    "Loaded",
    "Partitioned",
    "Stored",
    "Unreadable",
    "Value",
    "as_boxed",
    "united",
]


INVALID = (
    *(AttributeError, IndexError, KeyError, OverflowError, RecursionError),
    *(TypeError, ValueError, ZeroDivisionError),
)
"""What the use of a value of another type or form raises."""

_MAX_RANKS = 1 << 20

_FREE_BOXES = 1 << 14
"""Boxes of shards that the files of a checkpoint may state in addition to one for each byte."""


class Fragment(NamedTuple):
    """Consecutive elements of a flattened parameter, in a file that ``rank`` wrote.

    ``begin`` is the position of the first element in the parameter, and ``offset`` its byte offset
    in the file.
    """

    rank: int
    file: int
    begin: int
    numel: int
    offset: int


@dataclass
class Partitioned:
    """A tensor with the shape of a parameter, whose elements lie in several files."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    fragments: list[Fragment] = field(default_factory=list)

    @property
    def boxes(self) -> list[_native.IndexBox]:
        """The boxes of the fragments, at most ``2 * ndim - 1`` for each."""
        boxes: list[_native.IndexBox] = []
        for _, file, begin, numel, offset in self.fragments:
            for offsets, sizes in _native.flat_range_to_boxes(self.sizes, begin, begin + numel):
                nbytes = math.prod(sizes) * self.dtype.itemsize
                boxes.append((offsets, sizes, file, offset, nbytes, True, ()))
                offset += nbytes  # The elements of a flat range are in row-major order.
        return boxes


@dataclass
class Boxed:
    """A tensor whose boxes lie in several files, each with consecutive elements."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    boxes: list[_native.IndexBox]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A value as the file stores it: a tensor, an object, or a dict or list of these.

    The storages of its tensors have no memory. ``keys`` are the path to the value in the file.
    """

    file: File
    value: Any
    keys: tuple[str | int, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.value.dtype
        return dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def read(self) -> object:
        """Returns the value with its elements. The elements of tensors are mapped into memory."""
        return self.file.objects.value(".".join(map(str, self.keys)))


@dataclass(frozen=True)
class Computed:
    """A tensor that a load computes from stored tensors, one of which is in ``file``."""

    file: File
    dtype: torch.dtype
    sizes: tuple[int, ...]
    tensor: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """An object that was read with its whole file, which has ``nbytes`` bytes."""

    value: object
    file: int
    nbytes: int

    def read(self) -> object:
        """Returns a copy of the value."""
        return copy.deepcopy(self.value)


@dataclass(frozen=True)
class Unreadable:
    """A value whose load raises an error. Other values of the checkpoint can be loaded.

    ``sizes`` are the sizes of the tensor, if they are known.
    """

    error: CheckpointError
    sizes: tuple[int, ...] = ()


Value = Partitioned | Boxed | Stored | Computed | Unreadable


class File:
    """An open file."""

    def __init__(self, name: str, archive: Archive, state: Any, objects: Objects) -> None:
        self.name = name
        self.archive = archive
        self.state = state
        self.objects = objects

    @property
    def path(self) -> Location:
        return self.archive.path

    def at(self, *keys: str | int, kind: type | tuple[type, ...] = object) -> Any:
        """Returns a value in the nested state.

        Raises CorruptionError if it is missing or of another type than ``kind``, and
        UnsupportedError if its class is forbidden.
        """
        now_reading(self.path, keys)
        value = self.state
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                self._check_allowed(value, keys)
                raise self.damage(f"it has no {'.'.join(map(str, keys))}") from None
        if not isinstance(value, kind):
            self._check_allowed(value, keys)
            raise self.damage(f"{'.'.join(map(str, keys))} is a {type(value).__name__}")
        return value

    def _check_allowed(self, value: object, keys: Sequence[str | int]) -> None:
        if isinstance(value, Refused):
            check_allowed(value, f"{'.'.join(map(str, keys))!r} of {self.path}")

    def flat(self, fqn: str, tensor: torch.Tensor) -> int:
        """Returns the offset in bytes of the first element of a contiguous tensor.

        Raises CorruptionError if the file does not have the elements in row-major order.
        """
        record = self.archive.record_of(fqn, tensor)
        if record is None or not tensor.is_contiguous():
            raise self.damage(f"the elements of {fqn!r} are not contiguous")
        offset, nbytes, _ = record
        begin = int(tensor.storage_offset()) * tensor.itemsize
        if tensor.numel() and begin + tensor.numel() * tensor.itemsize > nbytes:
            raise self.damage(f"the elements of {fqn!r} exceed their record")
        return offset + begin

    def same_value(self, value: Any, other: File, theirs: Any) -> bool:
        """Returns whether a value may equal a value of another file.

        Objects are compared by their text. Tensors are compared by the CRC-32 of their storages, or
        only by their shape if the storages are not records of the archive.
        """
        if not isinstance(value, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return type(value) is type(theirs) and repr(value) == repr(theirs)
        mine, yours = self.archive.record_of("", value), other.archive.record_of("", theirs)
        if mine is None or yours is None:
            return value.shape == theirs.shape
        return value.shape == theirs.shape and mine[1:] == yours[1:]

    def same_record(self, tensor: torch.Tensor, other: File, theirs: torch.Tensor) -> bool | None:
        """Returns whether a tensor has the same elements as one of another file, by their CRC-32.

        Returns ``None`` if the checksums do not decide, so that the elements must be compared.
        """
        if tensor.shape != theirs.shape or tensor.dtype != theirs.dtype:
            return False
        mine, yours = self.archive.record_of("", tensor), other.archive.record_of("", theirs)
        if mine is None or yours is None or not (mine[1] and yours[1]):
            return None
        same_view = tensor.stride() == theirs.stride()
        same_view = same_view and tensor.storage_offset() == theirs.storage_offset()
        if same_view and self is other and mine[0] == yours[0]:
            return True
        if not (mine[2] and yours[2]):
            return None  # Torch can also save without checksums.
        if same_view and mine[1:] == yours[1:]:
            return True
        # Different storages may have views with the same elements.
        is_view = tensor.nbytes != mine[1] or theirs.nbytes != yours[1] or not same_view
        return None if is_view else False

    def damage(self, what: str) -> CorruptionError:
        """Returns the error for unexpected contents."""
        return CorruptionError(f"cannot read {self.path}: {what}")


class Files:
    """Opens the files of a checkpoint and numbers them; ``verify`` is as for FastReader."""

    def __init__(
        self,
        folder: Location,
        format: str,
        *,
        verify: Verification,
        trust_pickle: bool,
        stand_ins: StandIns = NO_STAND_INS,
    ) -> None:
        self.folder = folder
        self.foreign = ForeignFiles(folder, folder, format)
        self.versions: list[bytes] = []
        self._archives: dict[int, Archive] = {}  # Number of the file -> its records.
        self._boxes = _FREE_BOXES  # How many more boxes the files may state.
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._stand_ins = stand_ins

    def read(self, name: str) -> File:
        """Opens a file of ``torch.save``.

        Raises NotFoundError if it is missing, CorruptionError if it is damaged, and
        UnsupportedError if its pickle requests a forbidden class or function.
        """
        with reading(self.folder / name):
            archive = Archive(self.folder / name, len(self.foreign.files), verify=self._verify)
            state, objects = archive.read_state(
                trust_pickle=self._trust_pickle, stand_ins=self._stand_ins
            )
            check_tree(state, archive)
        self.add(name, archive.nbytes, archive.version)
        self._archives[archive.number] = archive
        self.foreign.records[name] = [
            (offset, nbytes, crc) for offset, (nbytes, crc) in archive.storages.items() if crc
        ]
        return File(name, archive, state, objects)

    def add(self, name: str, nbytes: int, version: bytes) -> int:
        """Adds an open file to the index, and returns its number.

        ``version`` identifies its contents.
        """
        self.versions.append(version)
        self.foreign.files.append((name, nbytes))
        self._boxes += nbytes
        return len(self.foreign.files) - 1

    @property
    def box_limit(self) -> int:
        """The maximum number of boxes of the next shard.

        A few bytes can state very many boxes, by a split factor or by a pickle that refers to one
        list many times. But each box with elements needs at least one byte of a file.
        """
        return MAX_BOXES if self._trust_pickle else max(min(self._boxes, MAX_BOXES), 0)

    def add_boxes(self, count: int) -> None:
        """Counts the boxes of a shard."""
        self._boxes -= count

    def read_value(self, value: Boxed | Stored | Loaded) -> Any:
        """Reads a value, whatever its kind."""
        return self.read_boxes(value) if isinstance(value, Boxed) else value.read()

    def read_boxes(self, value: Boxed) -> torch.Tensor:
        """Reads a whole tensor. Raises CorruptionError if a file is damaged or too short."""
        tensor = torch.empty(value.sizes, dtype=value.dtype, device="cpu")
        for offsets, sizes, file, offset, nbytes, _, _ in value.boxes:
            path = self.folder / self.foreign.files[file][0]
            elements = bytearray(path.read_range(offset, nbytes)[1])
            if len(elements) != nbytes:
                raise CorruptionError(f"cannot read {path}: it ends before {offset + nbytes}")
            if file in self._archives:
                self._archives[file].check_range(offset, elements, f"a part of {path}")
            where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            if elements:
                tensor[where] = torch.frombuffer(elements, dtype=value.dtype).view(list(sizes))
        return tensor

    def open_ranks(
        self, names: dict[int, str], count: int, opened: dict[int, File]
    ) -> dict[int, CheckpointError]:
        """Opens the files (rank -> name) of ranks ``[0, count)``, and adds them to ``opened``.

        Returns, by rank, why a file cannot be read. Raises CorruptionError if there are files of
        further ranks.
        """
        if more := sorted(rank for rank in names if rank >= count):
            raise CorruptionError(
                f"cannot load {self.folder}: {count} ranks have saved it, but it has "
                f"{names[more[0]]}; is it of another save?"
            )
        if count > _MAX_RANKS:
            raise CorruptionError(f"cannot load {self.folder}: {count} ranks have saved it")
        absent: dict[int, CheckpointError] = {}
        for rank in range(count):
            try:
                if rank not in names:
                    raise NotFoundError(f"there is no file of rank {rank} in {self.folder}")
                if rank not in opened:
                    opened[rank] = self.read(names[rank])
            except (NotFoundError, CorruptionError) as error:
                absent[rank] = error
        return absent

    def covered(
        self, tensors: Mapping[str, Partitioned], absent: Mapping[int, CheckpointError], what: str
    ) -> dict[str, Value]:
        """Returns the tensors whose fragments have each element exactly once.

        A tensor becomes unreadable if elements are missing because the file of their rank cannot be
        read (``absent`` has the reasons), or if the files disagree. ``what`` names their kind in
        messages.
        """
        found: dict[str, Value] = dict(tensors)
        for fqn, tensor in tensors.items():
            position = 0
            for fragment in sorted(tensor.fragments, key=lambda one: one.begin):
                if fragment.begin != position:
                    break
                position += fragment.numel
            else:
                if position == math.prod(tensor.sizes):
                    continue
            found[fqn] = Unreadable(self._uncovered(fqn, tensor, absent, what), tensor.sizes)
        return found

    def _uncovered(
        self, fqn: str, tensor: Partitioned, absent: Mapping[int, CheckpointError], what: str
    ) -> CheckpointError:
        """Returns why a tensor lacks elements, or has them twice."""
        for rank, error in absent.items():
            return type(error)(
                f"cannot load {what} of {fqn!r} from {self.folder}: the part of rank {rank} "
                f"cannot be read: {error}"
            )
        ranges = [
            f"[{one.begin}, {one.begin + one.numel}) of rank {one.rank} in "
            f"{self.foreign.files[one.file][0]}"
            for one in tensor.fragments
        ]
        return CorruptionError(
            f"cannot load {what} of {fqn!r} from {self.folder}: its files have elements "
            f"{', '.join(ranges) or 'of no rank'}, not each of [0, {math.prod(tensor.sizes)}) "
            "once"
        )


def as_boxed(fqn: str, value: Value) -> Boxed:
    """Returns the boxes of a shard.

    Raises CheckpointError if it cannot be loaded, or its elements are not contiguous.
    """
    if isinstance(value, Unreadable):
        raise value.error
    if isinstance(value, Partitioned):
        return Boxed(value.dtype, value.sizes, value.boxes)
    if isinstance(value, Stored):
        tensor, sizes, file = value.value, value.sizes, value.file
        box = ([0] * len(sizes), list(sizes), file.archive.number, file.flat(fqn, tensor))
        return Boxed(value.dtype, sizes, [(*box, tensor.nbytes, True, ())])
    assert isinstance(value, Boxed)
    return value


def united(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    placed: Sequence[Placed],
    shards: Mapping[int, Boxed],
) -> Boxed:
    """Returns a tensor that consists of the placed boxes of several ranks' shards."""
    boxes = [
        box
        for one in placed
        for stored in shards[one.rank].boxes
        for box in _part_of_box(stored, one, dtype.itemsize)
    ]
    return Boxed(dtype, sizes, boxes)


def _part_of_box(box: _native.IndexBox, one: Placed, itemsize: int) -> Iterator[_native.IndexBox]:
    """Yields the part of a stored box that lies in a placed one, as boxes of the whole tensor.

    Each has consecutive elements of the stored box.
    """
    offsets, sizes, file, begin, _, plain, crc = box
    low = [max(a, b) for a, b in zip(offsets, one.offsets, strict=True)]
    high = [
        min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, one.offsets, one.sizes, strict=True)
    ]
    part = [end - start for start, end in zip(low, high, strict=True)]
    if any(size <= 0 for size in part):
        return
    whole_below = len(sizes)  # From this dimension on, the part spans the whole stored box.
    while whole_below > 0 and part[whole_below - 1] == sizes[whole_below - 1]:
        whole_below -= 1
    single = max(whole_below - 1, 0)  # Before this dimension, each index becomes one box.
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    for index in itertools.product(*(range(size) for size in part[:single])):
        at = [*(start + i for start, i in zip(low, index, strict=False)), *low[single:]]
        cut = [*([1] * single), *part[single:]]
        skipped = sum((a - o) * s for a, o, s in zip(at, offsets, strides, strict=True))
        place = [a - o + p for a, o, p in zip(at, one.offsets, one.at, strict=True)]
        nbytes = math.prod(cut) * itemsize
        yield (place, cut, file, begin + skipped * itemsize, nbytes, plain, crc)
