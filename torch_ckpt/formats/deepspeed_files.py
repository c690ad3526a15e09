"""Files of a DeepSpeed checkpoint: their names, their pickles, and the extents of their tensors.

Each file is one of ``torch.save``. Its pickle may contain a few classes of DeepSpeed, which are
read as plain data, so DeepSpeed need not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.data_classes import NeedsState
from torch_ckpt.formats.object_pickles import StandIns
from torch_ckpt.formats.opened import ForeignFiles
from torch_ckpt.formats.torch_save import Archive, Objects

__all__ = [
    "Boxed",
    "Computed",
    "File",
    "Files",
    "Fragment",
    "Mapped",
    "Model",
    "Optimizer",
    "Partitioned",
    "Shapes",
    "Stored",
    "Value",
    "empty_box",
    "sizes_of",
]

_MAX_NUMEL = 2**60

Shapes = dict[str, tuple[int, ...]]
"""FQN -> sizes of the parameters of one flat group, in the order of their elements."""


def _fields() -> NeedsState:
    """Builds a dict of the attributes of an object."""

    def make(state: Any) -> dict[str, Any]:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("its state is not a dict of attributes")
        return dict(state)

    return NeedsState(make)


def _number(value: int) -> int:
    if type(value) is not int:
        raise ValueError("its value is not an int")
    return value


_STAND_INS: StandIns = {
    "deepspeed.utils.tensor_fragment.fragment_address": _fields,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _fields,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _fields,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": _fields,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _number,
}


class Fragment(NamedTuple):
    """Consecutive elements of a flattened parameter in a file.

    Attributes:
        rank: The rank that wrote them.
        file: Number of the file.
        begin: Number of the first element in the parameter.
        numel: Number of elements.
        offset: Offset of the first element in the file, in bytes.
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

    def boxes(self) -> list[_native.IndexBox]:
        """Returns the boxes of the fragments, at most ``2 * ndim - 1`` for each."""
        if not math.prod(self.sizes):
            return [empty_box(self.sizes)]
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
    """A value as it is in a file: a tensor, an object, or a dict or list of these.

    Attributes:
        file: The file.
        value: The value. The storages of its tensors have no memory.
        keys: The keys of the value in the file.
    """

    file: File
    value: Any
    keys: tuple[str | int, ...]


@dataclass(frozen=True)
class Mapped:
    """A whole tensor of a file that the index cannot name, because it is in a subdirectory.

    Torch maps the file into memory. A load then reads the pages of the elements that it wants.
    """

    file: File
    dtype: torch.dtype
    sizes: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Returns the tensor."""
        state = self.file.objects.mapped_state()
        tensor: torch.Tensor = state["param"] if isinstance(state, dict) else state
        return tensor.reshape(self.sizes)


@dataclass(frozen=True)
class Computed:
    """A tensor that is computed from stored ones when it is loaded.

    Attributes:
        file: The file of a stored one.
        dtype: Its dtype.
        sizes: Its sizes.
        tensor: Returns the tensor.
    """

    file: File
    dtype: torch.dtype
    sizes: tuple[int, ...]
    tensor: Callable[[], torch.Tensor]


Value = Partitioned | Boxed | Mapped | Stored | Computed


@dataclass
class Model:
    """The model files of one model-parallel rank.

    Attributes:
        groups: The parameters of each flat group of the optimizer.
        tensors: FQN -> buffer, frozen parameter or extra state.
        aliases: FQN -> FQN of the parameter that it shares.
        rest: Name -> a value of the engine or of the client.
        buffers: FQNs of the buffers.
        file: One of the files.
    """

    groups: list[Shapes]
    tensors: dict[str, Value]
    aliases: dict[str, str]
    rest: dict[str, Stored]
    buffers: Sequence[str]
    file: File

    def sizes(self) -> Shapes:
        """Returns the sizes of each parameter of the optimizer."""
        return {fqn: sizes for shapes in self.groups for fqn, sizes in shapes.items()}


@dataclass
class Optimizer:
    """The state of an optimizer.

    Attributes:
        weights: FQN -> the weights that the optimizer updates, in fp32 with mixed precision.
        states: FQN -> name of a state -> its value.
        param_groups: The options of each parameter group; ``params`` are FQNs.
        rest: Name -> a value of the engine, such as the loss scale.
        file: The file with the parameter groups.
    """

    weights: Mapping[str, Value]
    states: dict[str, dict[str, Value]]
    param_groups: list[dict[str, Any]]
    rest: dict[str, Stored]
    file: File


class File:
    """An open file."""

    def __init__(self, name: str, archive: Archive, state: Any, objects: Objects) -> None:
        self.name = name
        self.archive = archive
        self.state = state
        self.objects = objects

    @property
    def is_indexed(self) -> bool:
        """Whether the index can name the file, which is directly in the folder."""
        return "/" not in self.name

    @property
    def path(self) -> Location:
        """The path of the file."""
        return self.archive.path

    def at(self, *keys: str | int, kind: type | tuple[type, ...] = object) -> Any:
        """Returns a value in the nested state.

        Raises:
            CorruptionError: The value is missing or of another type.
        """
        value = self.state
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self.damage(f"it has no {'.'.join(map(str, keys))}") from None
        if not isinstance(value, kind):
            raise self.damage(f"{'.'.join(map(str, keys))} is a {type(value).__name__}")
        return value

    def flat(self, fqn: str, tensor: torch.Tensor) -> int:
        """Returns the offset in bytes of the first element of a contiguous tensor.

        Raises:
            CorruptionError: The file does not have the tensor's elements in row-major order.
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
        """Returns whether a value here equals one of another file. Compares tensors by CRC-32."""
        if not isinstance(value, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return type(value) is type(theirs) and repr(value) == repr(theirs)
        records = self.archive.record_of("", value), other.archive.record_of("", theirs)
        if records[0] is None or records[1] is None:
            return True  # Only torch can read such tensors.
        return value.shape == theirs.shape and records[0][1:] == records[1][1:]

    def damage(self, what: str) -> CorruptionError:
        """Returns the error for unexpected contents."""
        return CorruptionError(f"cannot read {self.path}: {what}")


class Files:
    """Opens the files of a checkpoint, and numbers them.

    Args:
        folder: The directory.
        verify: Whether to check pickles against their CRC-32.
        trust_pickle: Whether pickles may contain any class and run any code.
    """

    def __init__(self, folder: Location, *, verify: bool, trust_pickle: bool) -> None:
        self.folder = folder
        self.foreign = ForeignFiles(folder, folder, "DeepSpeed")
        self.versions: list[bytes] = []
        self.first: File | None = None
        self._verify = verify
        self._trust_pickle = trust_pickle

    def read(self, name: str) -> File:
        """Opens a file of ``torch.save``.

        The index names the files that are directly in the folder. Their tensors have extents.

        Raises:
            NotFoundError: The file is missing.
            CorruptionError: The file is damaged.
            UnsupportedError: The pickle requests a forbidden class or function.
        """
        archive = Archive(self.folder / name, len(self.foreign.files))
        if self._verify:
            archive.check_pickle()
        state, objects = archive.read_state(trust_pickle=self._trust_pickle, stand_ins=_STAND_INS)
        self.versions.append(archive.version)
        file = File(name, archive, state, objects)
        if file.is_indexed:
            self.foreign.files.append((name, archive.nbytes))
            self.first = self.first or file
        return file

    def read_boxes(self, value: Boxed) -> torch.Tensor:
        """Reads a whole tensor.

        Raises:
            CorruptionError: A file has become shorter.
            StorageError: A file cannot be read.
        """
        tensor = torch.empty(value.sizes, dtype=value.dtype)
        for offsets, sizes, file, offset, nbytes, _, _ in value.boxes:
            path = self.folder / self.foreign.files[file][0]
            elements = bytearray(path.read_range(offset, nbytes)[1])
            if len(elements) != nbytes:
                raise CorruptionError(f"cannot read {path}: it ends before {offset + nbytes}")
            where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            if elements:
                tensor[where] = torch.frombuffer(elements, dtype=value.dtype).view(list(sizes))
        return tensor

    def open_ranks(
        self, names: dict[int, str], count: int, opened: dict[int, File]
    ) -> dict[int, CheckpointError]:
        """Opens the files of ranks ``[0, count)``.

        Args:
            names: Rank -> name of its file.
            count: Number of ranks that have saved.
            opened: Rank -> open file, to which the files are added.

        Returns:
            Rank -> why its file cannot be read.

        Raises:
            CorruptionError: There are files of further ranks.
        """
        if more := sorted(rank for rank in names if rank >= count):
            raise CorruptionError(
                f"cannot load {self.folder}: {count} ranks have saved it, but it has "
                f"{names[more[0]]}; is it of another save?"
            )
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

    def check_cover(
        self, tensors: dict[str, Partitioned], absent: dict[int, CheckpointError], what: str
    ) -> None:
        """Checks that fragments have each element of each tensor exactly once.

        Args:
            tensors: FQN -> tensor.
            absent: Rank -> why its file cannot be read.
            what: The kind of the tensors, for messages.

        Raises:
            CheckpointError: An element is missing, since the file of its rank cannot be read.
            CorruptionError: The files disagree.
        """
        for fqn, tensor in tensors.items():
            position = 0
            for fragment in sorted(tensor.fragments, key=lambda one: one.begin):
                if fragment.begin != position:
                    break
                position += fragment.numel
            else:
                if position == math.prod(tensor.sizes):
                    continue
            for rank, error in absent.items():
                raise type(error)(
                    f"cannot load {what} of {fqn!r} from {self.folder}: the part of rank {rank} "
                    f"cannot be read: {error}"
                ) from error
            ranges = [
                f"[{one.begin}, {one.begin + one.numel}) of rank {one.rank} in "
                f"{self.foreign.files[one.file][0]}"
                for one in tensor.fragments
            ]
            raise CorruptionError(
                f"cannot load {what} of {fqn!r} from {self.folder}: its files have elements "
                f"{', '.join(ranges) or 'of no rank'}, not each of [0, {math.prod(tensor.sizes)}) "
                "once"
            )
        for error in absent.values():
            raise error


def empty_box(sizes: Sequence[int]) -> _native.IndexBox:
    """Returns the box of a tensor without elements. An index requires one."""
    return ([0] * len(sizes), list(sizes), 0, 0, 0, True, ())


def sizes_of(file: File, fqn: str, sizes: Any) -> tuple[int, ...]:
    """Returns the sizes of a parameter from a file.

    Raises:
        CorruptionError: They are not sizes of a tensor.
    """
    valid = isinstance(sizes, Sequence) and all(type(size) is int and size >= 0 for size in sizes)
    if not valid or math.prod(max(size, 1) for size in sizes) > _MAX_NUMEL:
        raise file.damage(f"the shape of {fqn!r} is {str(sizes)[:200]}")
    return tuple(sizes)
