"""Files that ``torch.save`` has written: a zip archive of one pickle and the storages of tensors.

The pickle is read as ``torch.load(weights_only=True)`` reads it, but without any storage: that
tells which tensor is where in which record of the archive. The records' extents are those of the
zip directory.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, gc_paused
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.object_pickles import HOW_TO_ALLOW, load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["is_archive", "is_legacy", "open_torch_save"]

_MAX_DEPTH = 500
_LEAST_TEXT_NBYTES = 16 << 20
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_PLAIN = frozenset(
    {*_SCALARS, list, tuple, set, frozenset, dict, torch.Size, torch.dtype, torch.device}
)


def is_archive(start: bytes) -> bool:
    """Whether a file that begins so is a zip archive."""
    return start.startswith(b"PK\3\4")


def is_legacy(start: bytes) -> bool:
    """Whether ``torch.save`` has written a file that begins so before it wrote zip archives."""
    tar = start[257:262] == b"ustar" or start.startswith((b"sys_info", b"storages"))
    return tar or _LEGACY_MAGIC in start[:32]


def open_torch_save(path: Location, *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens a file that holds a state dict: nested dicts and lists of tensors and anything else.

    Args:
        path: The file.
        verify: Whether its pickle is checked against its CRC-32, as torch does not.
        trust_pickle: Whether its pickle may ask for anything.

    Raises:
        CorruptionError: It is damaged, or its pickle asks for what its records are not.
        UnsupportedError: It holds something other than a state dict, or its pickle asks for more
            than it may have. Names the global.
        StorageError: It cannot be read.
    """
    nbytes, records = path.file_system.read_archive(path.path)
    archive = _Archive(path, records)
    if verify:
        archive.check_pickle()
    with gc_paused():
        state, contents = archive.read_state(trust_pickle=trust_pickle)
        foreign = ForeignFiles(path, path.parent, [(path.name, nbytes)])
        flat, foreign.paths = _flatten(state, archive)
        for fqn, value in flat.items():
            if _is_tensor(value):
                archive.add_tensor(foreign, fqn, value)
            else:
                foreign.entries.append((fqn, None, [archive.box((), plain=False)]))
                contents.objects[fqn] = value
        version = repr([(offset, size, crc) for _, offset, size, crc in records])
        return foreign.opened(contents, version.encode())


class _Archive:
    """The records of a file."""

    def __init__(self, path: Location, records: list[tuple[str, int, int, int]]) -> None:
        self.path = path
        root = records[0][0].partition("/")[0] if records else ""
        by_name = {name.removeprefix(f"{root}/"): place for name, *place in records}
        if "data.pkl" not in by_name:
            raise UnsupportedError(f"cannot load {path}: torch.save has not written that archive")
        self.pickle_offset, self.pickle_nbytes, self.pickle_crc = by_name["data.pkl"]
        if "byteorder" in by_name:
            offset, nbytes, crc = by_name["byteorder"]
            order = path.read_part(offset, min(nbytes, 16))[1]
            if order == b"big":
                raise UnsupportedError(f"cannot load {path}: it is in big-endian byte order")
            if order != b"little" or (crc and zlib.crc32(order) != crc):
                raise CorruptionError(f"cannot load {path}: it has an unknown byte order")
        self.storages = {
            offset: (nbytes, crc)
            for name, (offset, nbytes, crc) in by_name.items()
            if nbytes
            if name.startswith("data/")
        }

    def check_pickle(self) -> None:
        """Raises CorruptionError where the pickle is not what was written."""
        _, pickled = self.path.read_part(self.pickle_offset, self.pickle_nbytes)
        if self.pickle_crc and zlib.crc32(pickled) != self.pickle_crc:
            raise CorruptionError(f"cannot load {self.path}: its pickle fails its checksum")

    def read_state(self, *, trust_pickle: bool) -> tuple[Any, _Objects]:
        """What the file holds, with tensors whose storages are not there but know their offsets."""
        contents = _Objects(self.path, trust_pickle)
        try:
            return _load(self.path, trust_pickle, map_location="meta"), contents
        except UnsupportedError:
            raise
        except Exception as error:
            if "PytorchStreamReader" in str(error):
                raise CorruptionError(f"cannot load {self.path}: {error}") from error
        # Some kinds of tensors (quantised, nested) are not made without their storages.
        return contents.mapped_state(), contents

    def add_tensor(self, foreign: ForeignFiles, fqn: str, tensor: torch.Tensor) -> None:
        """Adds a tensor to what was found."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        sizes = list(tensor.shape)
        properties = (dtype, "contiguous_format", tensor.requires_grad, False, sizes)
        storage_offset = None
        if _is_plain(tensor):
            storage_offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if storage_offset is None:
            box = self.box(sizes, plain=False)
        elif not tensor.numel():
            box = self.box(sizes, plain=True, offset=0, nbytes=0)
        else:
            nbytes, crc = self.storages.get(storage_offset, (-1, 0))
            if nbytes != tensor.untyped_storage().nbytes():
                raise CorruptionError(
                    f"cannot load {fqn!r} of {self.path}: its storage of "
                    f"{tensor.untyped_storage().nbytes()} bytes is not the record at "
                    f"{storage_offset}"
                )
            box = self.box(sizes, plain=True, offset=storage_offset, nbytes=nbytes)
            foreign.views[len(foreign.entries)] = (
                tensor.stride(),
                int(tensor.storage_offset()),
                crc,
            )
        foreign.entries.append((fqn, properties, [box]))

    def box(
        self, sizes: Any, *, plain: bool, offset: int | None = None, nbytes: int = 0
    ) -> _native.IndexBox:
        """A box that is a whole tensor or object; in the pickle, unless it is somewhere else."""
        if offset is None:
            offset, nbytes = self.pickle_offset, self.pickle_nbytes
        return ([0] * len(sizes), sizes, 0, offset, nbytes, plain, ())


class _Objects:
    """What the pickle holds itself, and tensors that only torch can read."""

    def __init__(self, path: Location, trust_pickle: bool) -> None:
        self.path = path
        self.trust_pickle = trust_pickle
        self.objects: dict[str, object] = {}
        self._mapped_state: Any = None
        self._mapped: dict[str, object] | None = None

    def value(self, fqn: str) -> object:
        value = self.objects.get(fqn)
        if fqn in self.objects and _is_plain_data(value):
            return value
        if self._mapped is None:
            self._mapped = _tensor_view.flatten(self.mapped_state())[0]
        return self._mapped[fqn]

    def mapped_state(self) -> Any:
        """What the file holds, its storages mapped if that can be: only what is touched is read."""
        if self._mapped_state is None:
            try:
                self._mapped_state = _load(
                    self.path, self.trust_pickle, map_location="cpu", mapped=self.path.local_path
                )
            except UnsupportedError:
                raise
            except Exception as error:
                raise CorruptionError(f"cannot load {self.path}: {error}") from error
        return self._mapped_state


def _load(path: Location, trust_pickle: bool, **how: Any) -> Any:
    """Unpickles a file.

    Raises:
        UnsupportedError: It asks for more than it may have.
        Exception: Whatever else ``torch.load`` raises on damage.
    """
    try:
        with path.open() as stream:
            return load_object(stream, trust_pickle=trust_pickle, **how)
    except ForbiddenPickleError as error:
        raise UnsupportedError(
            f"cannot load {path}, because unpickling it may run code: {error}. If you trust who "
            f"wrote it, {HOW_TO_ALLOW}"
        ) from error


def _flatten(state: Any, archive: _Archive) -> tuple[dict[str, Any], Any]:
    """The FQNs that DCP gives to what is in a nested state dict, and their paths."""
    if not isinstance(state, Mapping):
        raise UnsupportedError(
            f"cannot load {archive.path}: it holds a {type(state).__qualname__}, not a dict"
        )
    _check_tree(state, archive)
    try:
        return _tensor_view.flatten(state)
    except ValueError as error:
        raise UnsupportedError(f"cannot load {archive.path}: {error}") from error


def _check_tree(state: Any, archive: _Archive) -> None:
    """Sees to it that a walk of a state dict ends, and soon.

    A pickle may have a list hold itself, or a few dicts stand for billions of paths.

    Raises:
        CorruptionError: It does.
    """
    # A value takes a byte of the pickle or more, unless it is there twice; names add up.
    left = _LEAST_TEXT_NBYTES + 16 * archive.pickle_nbytes
    stack: list[tuple[Any, int, int]] = [(state, 0, 0)]  # How deep, and the length of its name.
    while stack:
        value, depth, length = stack.pop()
        keyed = value.items() if isinstance(value, Mapping) else (("", v) for v in value)
        for key, v in keyed:
            name_length = length + 1 + len(str(key))
            left -= name_length
            if left < 0 or depth > _MAX_DEPTH:
                raise CorruptionError(f"cannot load {archive.path}: its pickle has no end")
            if isinstance(v, Mapping | list | tuple | set | frozenset):
                stack.append((v, depth + 1, name_length))


def _is_tensor(value: object) -> bool:
    """Whether DCP can load parts of it; others are objects to it."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and not value.is_quantized
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are those of its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in DTYPE_CODES
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _is_plain_data(value: object) -> bool:
    """Whether it holds no tensor. Requires: a walk of it ends."""
    if type(value) not in _PLAIN:
        return False
    if isinstance(value, dict):
        return all(_is_plain_data(v) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple | set | frozenset) and type(value) is not torch.Size:
        return all(_is_plain_data(v) for v in value)
    return True
