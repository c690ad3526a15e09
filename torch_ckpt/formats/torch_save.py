"""Opens files of ``torch.save``: a zip archive of one pickle and of the tensors' storages.

The pickle is read as by ``torch.load(weights_only=True)``, but without any storage. The result
shows which elements of which record each tensor uses. The zip directory lists the extents of the
records.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, gc_paused
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.allowed_classes import HOW_TO_ALLOW, NO_STAND_INS, StandIns
from torch_ckpt.formats.expansion import OBJECTS_NBYTES, Expansion, ExpansionError
from torch_ckpt.formats.object_parts import ObjectParts
from torch_ckpt.formats.object_pickles import Refused, load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError
from torch_ckpt.formats.reading import now_reading
from torch_ckpt.options import Verification

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "Archive",
    "Objects",
    "check_allowed",
    "check_tree",
    "flatten",
    "has_boxes",
    "is_archive",
    "is_legacy",
    "is_plain",
    "is_plain_data",
    "open_torch_save",
]

_MAX_DEPTH = 500
_PIECE_NBYTES = 4 << 20  # Bytes read at a time for a checksum.
_MIN_UNREAD_NBYTES = 32 << 10  # As in csrc/engine/load/load_batch.cc.
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_PLAIN = frozenset(
    {*_SCALARS, list, tuple, set, frozenset, dict, torch.Size, torch.dtype, torch.device}
)


def is_archive(start: bytes) -> bool:
    """Returns whether ``start`` is the start of a zip archive."""
    return start.startswith(b"PK\3\4")


def is_legacy(start: bytes) -> bool:
    """Returns whether ``start`` is the start of a file in a legacy format of ``torch.save``."""
    tar = start[257:262] == b"ustar" or start.startswith((b"sys_info", b"storages"))
    return tar or _LEGACY_MAGIC in start[:32]


def open_torch_save(path: Location, *, verify: Verification, trust_pickle: bool) -> Opened:
    """Opens a file with a state dict: nested dicts and lists of tensors and other objects.

    Raises CorruptionError if the pickle does not match its records, and UnsupportedError if the
    value is not a state dict, or the pickle requests a forbidden class or function.
    """
    archive = Archive(path, verify=verify)
    with gc_paused():
        state, contents = archive.read_state(trust_pickle=trust_pickle)
        foreign = ForeignFiles(path, path.parent, "torch.save", [(path.name, archive.nbytes)])
        flat, foreign.paths = flatten(state, archive)
        for fqn, value in flat.items():
            archive.add(foreign, fqn, value)
        contents.objects = flat
        return foreign.opened(contents, archive.version)


class Archive:
    """The records of a file, which has a number in a foreign index.

    ``verify`` checks the pickle and the storages of objects against their CRC-32, unlike torch.
    ``"full"`` also checks each storage before any part of it is used. ``version`` identifies the
    contents. Raises UnsupportedError if the file is not from ``torch.save``.
    """

    def __init__(self, path: Location, number: int = 0, *, verify: Verification) -> None:
        self.path = path
        self.number = number
        self.verify = verify
        self._checked: set[int] = set()  # Offsets of sound storages.
        nbytes, records = path.file_system.read_archive(path.path)
        self.nbytes: int = nbytes
        self.version = repr([(offset, size, crc) for _, offset, size, crc in records]).encode()
        root = records[0][0].partition("/")[0] if records else ""
        by_name: dict[str, list[int]]
        by_name = {name.removeprefix(f"{root}/"): extent for name, *extent in records}
        if "data.pkl" not in by_name:
            raise UnsupportedError(f"cannot load {path}: the archive is not from torch.save")
        self.pickle_offset, self.pickle_nbytes, self.pickle_crc = by_name["data.pkl"]
        if "byteorder" in by_name:
            offset, nbytes, crc = by_name["byteorder"]
            order = path.read_range(offset, min(nbytes, 16))[1]
            if order == b"big":
                raise UnsupportedError(f"cannot load {path}: its byte order is big-endian")
            if order != b"little" or (crc and zlib.crc32(order) != crc):
                raise CorruptionError(f"cannot load {path}: its byte order is unknown")
        data = {
            name.removeprefix("data/"): extent
            for name, extent in by_name.items()
            if extent[1]
            if name.startswith("data/")
        }
        self.storages = {offset: (nbytes, crc) for offset, nbytes, crc in data.values()}
        self._offsets = {key: offset for key, (offset, _, _) in data.items()}
        self._sorted_offsets = sorted(self.storages)
        if verify:
            self._check_pickle()

    def _check_pickle(self) -> None:
        _, pickled = self.path.read_range(self.pickle_offset, self.pickle_nbytes)
        if self.pickle_crc and zlib.crc32(pickled) != self.pickle_crc:
            raise CorruptionError(f"cannot load {self.path}: its pickle fails its checksum")

    def check_storage(self, key: str, storage: torch.UntypedStorage, what: str) -> None:
        """Checks a storage in memory, once, and raises CorruptionError if it is damaged.

        ``key`` is the key of its record. ``what`` names its owner in messages.
        """
        if (offset := self._offsets.get(key)) is not None:
            elements: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._check(offset, what, lambda: zlib.crc32(elements.set_(storage).numpy()))

    def check_range(self, begin: int, data: Buffer, what: str) -> None:
        """Checks the storage that contains offset ``begin``, once, if verification requires it.

        Raises CorruptionError if it is damaged. ``what`` names its owner in messages.
        """
        number = bisect.bisect_right(self._sorted_offsets, begin) - 1
        if number < 0:
            return
        offset = self._sorted_offsets[number]
        nbytes = self.storages[offset][0]
        rest = nbytes - memoryview(data).nbytes
        if not rest:
            self._check(offset, what, lambda: zlib.crc32(data))
        elif self.verify == "full" or rest <= max(nbytes // 16, _MIN_UNREAD_NBYTES):
            self._check(offset, what, lambda: self._crc_of(offset))

    def _check(self, offset: int, what: str, crc_of: Callable[[], int]) -> None:
        nbytes, crc = self.storages[offset]
        if not self.verify or not crc or offset in self._checked:
            return
        if crc_of() != crc:
            raise CorruptionError(
                f"cannot load {what}: bytes [{offset}, {offset + nbytes}) of {self.path} fail "
                "their checksum"
            )
        self._checked.add(offset)

    def _crc_of(self, offset: int) -> int:
        end, crc = offset + self.storages[offset][0], 0
        for begin in range(offset, end, _PIECE_NBYTES):
            piece = self.path.read_range(begin, min(_PIECE_NBYTES, end - begin))[1]
            crc = zlib.crc32(piece, crc)
        return crc

    def read_state(
        self, *, trust_pickle: bool, stand_ins: StandIns = NO_STAND_INS
    ) -> tuple[Any, Objects]:
        """Returns the unpickled state dict, and the contents that only torch can read.

        The storages of its tensors have no memory, but record their offsets in the file.
        """
        contents = Objects(self, trust_pickle, stand_ins)
        try:
            return _load(self.path, trust_pickle, stand_ins, map_location="meta"), contents
        except UnsupportedError:
            raise
        except Exception as error:
            if "PytorchStreamReader" in str(error):
                raise CorruptionError(f"cannot load {self.path}: {error}") from error
        # Some kinds of tensors (quantised, nested) cannot be built without their storages.
        return contents.mapped_state(), contents

    def add(self, foreign: ForeignFiles, fqn: str, value: object) -> None:
        """Adds the entry of a tensor or object to ``foreign``."""
        now_reading(self.path, fqn)
        if not has_boxes(value):
            foreign.entries.append((fqn, None, [self.box((), plain=False)]))
            return
        assert isinstance(value, torch.Tensor)
        dtype = str(value.dtype).removeprefix("torch.")
        sizes = list(value.shape)
        properties = (dtype, "contiguous_format", value.requires_grad, False, sizes)
        try:
            record = self.record_of(fqn, value)
        except CorruptionError as error:
            foreign.add_unreadable(fqn, error)
            return
        if record is None:
            box = self.box(sizes, plain=False)
        elif not value.numel():
            box = self.box(sizes, plain=True, offset=0, nbytes=0)
        else:
            offset, nbytes, crc = record
            box = self.box(sizes, plain=True, offset=offset, nbytes=nbytes)
            foreign.views[len(foreign.entries)] = value.stride(), int(value.storage_offset()), crc
        foreign.entries.append((fqn, properties, [box]))

    def record_of(self, fqn: str, tensor: torch.Tensor) -> tuple[int, int, int] | None:
        """Returns offset, length and CRC-32 of a tensor's storage; zeros if it has no elements.

        Returns ``None`` if the storage does not contain the tensor's elements unchanged.
        """
        offset = None
        if is_plain(tensor):
            offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is None:
            return None
        if not tensor.numel():
            return 0, 0, 0
        nbytes, crc = self.storages.get(offset, (-1, 0))
        if nbytes != tensor.untyped_storage().nbytes():
            raise CorruptionError(
                f"cannot load {fqn!r} of {self.path}: its storage of "
                f"{tensor.untyped_storage().nbytes()} bytes is not the record at {offset}"
            )
        return offset, nbytes, crc

    def box(
        self, sizes: Any, *, plain: bool, offset: int | None = None, nbytes: int = 0
    ) -> _native.IndexBox:
        """Returns a box of a whole tensor or object. By default, its extent is the pickle."""
        if offset is None:
            offset, nbytes = self.pickle_offset, self.pickle_nbytes
        return ([0] * len(sizes), sizes, self.number, offset, nbytes, plain, ())


class Objects:
    """The objects of the pickle, created without storages, and tensors that only torch can read."""

    def __init__(self, archive: Archive, trust_pickle: bool, stand_ins: StandIns) -> None:
        self.archive, self.path = archive, archive.path
        self.trust_pickle = trust_pickle
        self.stand_ins = stand_ins
        self.objects: dict[str, object] = {}
        self._mapped_state: Any = None
        self._mapped: dict[str, object] | None = None
        self._keys: dict[int, str] = {}  # Address of a storage -> key of its record.

    def value(self, fqn: str) -> object:
        """Returns a value by its FQN in the file.

        Raises UnsupportedError if its pickle requests a forbidden class or function for the value.
        """
        value = self.objects.get(fqn)
        if fqn in self.objects and is_plain_data(value):
            return value
        if self._mapped is None:
            self._mapped = _tensor_view.flatten({"": self.mapped_state()})[0]
        # The state of a file may be a single value, whose FQN is empty.
        value = self._mapped[f".{fqn}" if f".{fqn}" in self._mapped else fqn]
        what = f"{fqn!r} of {self.path}"
        for storage in check_allowed(value, what):
            if (key := self._keys.get(storage.data_ptr())) is not None:
                self.archive.check_storage(key, storage, what)
        return value

    def mapped_state(self) -> Any:
        """Returns the state dict, with storages mapped into memory where possible.

        Only the mapped pages that are accessed are read.
        """
        if self._mapped_state is None:
            try:
                self._mapped_state = _load(
                    self.path,
                    self.trust_pickle,
                    self.stand_ins,
                    storages=self._keys,
                    map_location="cpu",
                    mapped=self.path.local_path,
                )
            except UnsupportedError:
                raise
            except Exception as error:
                raise CorruptionError(f"cannot load {self.path}: {error}") from error
        return self._mapped_state


def _load(path: Location, trust_pickle: bool, stand_ins: StandIns, **options: Any) -> Any:
    """Unpickles a file. Values of forbidden classes are :class:`Refused`.

    Raises UnsupportedError if nothing can be used without a forbidden class or function. On damage,
    raises the errors of ``torch.load``.
    """
    try:
        with path.open() as stream:
            return load_object(
                stream,
                trust_pickle=trust_pickle,
                stand_ins=stand_ins,
                refuse_later=True,
                **options,
            )
    except ExpansionError as error:
        raise UnsupportedError(f"cannot load {path}: {error}") from error
    except ForbiddenPickleError as error:
        raise _forbidden(str(path), str(error)) from error


def check_allowed(value: object, what: str) -> list[torch.UntypedStorage]:
    """Checks that nothing in an unpickled value was refused. Returns its storages with elements.

    Only CPU storages are returned. Raises CorruptionError if the value is nested too deeply, and
    UnsupportedError if it needs a forbidden class or function, or cannot be created.
    """
    try:
        parts = ObjectParts(value)
    except RecursionError:
        raise CorruptionError(f"cannot load {what}: it is nested too deeply") from None
    if parts.refused:
        raise _forbidden(what, ", ".join(f"GLOBAL {name}" for name in parts.refused))
    if (refused := parts.not_made) is not None:
        # The parts of a tensor contradict each other if its file is damaged.
        is_tensor = refused.name.startswith("torch._utils._rebuild_")
        is_damaged = is_tensor and not isinstance(refused.error, ExpansionError)
        kind = CorruptionError if is_damaged else UnsupportedError
        raise kind(f"cannot load {what}: {refused.error}")
    return [*parts.storages.values()]


def _forbidden(what: str, names: str) -> UnsupportedError:
    return UnsupportedError(
        f"cannot load {what}, because unpickling it may run code: {names}. If you trust its "
        f"author, {HOW_TO_ALLOW}"
    )


def flatten(state: Any, archive: Archive) -> tuple[dict[str, Any], Any]:
    """Flattens a nested state dict as DCP does; returns the values and the paths by FQN."""
    if isinstance(state, Refused):
        check_allowed(state, str(archive.path))
    if not isinstance(state, Mapping):
        raise UnsupportedError(
            f"cannot load {archive.path}: its value is a {type(state).__qualname__}, not a dict"
        )
    check_tree(state, archive)
    try:
        return _tensor_view.flatten(state)
    except ValueError as error:
        raise UnsupportedError(f"cannot load {archive.path}: {error}") from error


def check_tree(state: Any, archive: Archive) -> None:
    """Checks that traversing a state dict ends after a reasonable time.

    In a crafted pickle, a list may contain itself, or a few dicts may have billions of paths. Each
    path is charged the length of its FQN. Raises CorruptionError if it is nested too deeply, and
    UnsupportedError if it has more paths than its pickle justifies.
    """
    expansion = Expansion(OBJECTS_NBYTES, archive.pickle_nbytes)
    stack: list[tuple[Any, int, int]] = []  # Value, depth, and length of its FQN.
    if isinstance(state, Mapping | list | tuple | set | frozenset):
        stack.append((state, 0, 0))
    while stack:
        value, depth, length = stack.pop()
        keyed = value.items() if isinstance(value, Mapping) else (("", v) for v in value)
        for key, v in keyed:
            name_length = length + 1 + len(str(key))
            if depth > _MAX_DEPTH:
                raise CorruptionError(
                    f"cannot load {archive.path}: its pickle is nested without end"
                )
            try:
                expansion.charge(name_length)
            except ExpansionError as error:
                raise UnsupportedError(f"cannot load {archive.path}: {error}") from error
            if isinstance(v, Mapping | list | tuple | set | frozenset):
                stack.append((v, depth + 1, name_length))


def has_boxes(value: object) -> bool:
    """Returns whether DCP can load boxes of the value; DCP treats other values as objects."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_quantized
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements are stored as they are in its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and has_boxes(tensor)
        and tensor.dtype in DTYPE_CODES
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_plain_data(value: object) -> bool:
    """Returns whether the value contains only plain data, and no tensor.

    Requires: traversing the value ends.
    """
    if type(value) not in _PLAIN:
        return False
    if isinstance(value, dict):
        return all(is_plain_data(v) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple | set | frozenset) and type(value) is not torch.Size:
        return all(is_plain_data(v) for v in value)
    return True
