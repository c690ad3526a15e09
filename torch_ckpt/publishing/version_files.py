"""The files of published versions: their names, what they state, and which version is the newest.

A version is a directory ``version-<N>``. A *whole* version is a safetensors model, with
``version.json``. A *delta* has one data file for each rank that writes, and ``delta.json``, which
commits it. ``latest.json`` beside the versions names the newest one.

Each of these JSON files ends with a digest of its other bytes. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.commits.delta import DELTA
from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.stored_json import from_json

__all__ = [
    "BLOCK_NBYTES",
    "ENTRY_NBYTES",
    "WHOLE",
    "DataFile",
    "StoredBox",
    "Version",
    "chain_of",
    "committed_versions",
    "forget_latest",
    "has_version",
    "kind_of",
    "listed_versions",
    "new_chain",
    "newest_number",
    "newest_version",
    "numbers_among",
    "path_of",
    "read_version",
    "table_nbytes",
    "write_latest",
]

WHOLE = "version.json"
"""The file that makes a safetensors model a version."""

BLOCK_NBYTES = _native.BLOCK_NBYTES
"""Bytes of a block of a stored box; the last one may be shorter."""

ENTRY_NBYTES = _native.BLOCK_ROW_NBYTES
"""Bytes of a block's entry in the table of its box."""

_LATEST = "latest.json"
_NAME = re.compile(r"version-(0|[1-9][0-9]{0,18})")
_MODELS = frozenset({"model.safetensors", "model.safetensors.index.json"})
_CHAIN = re.compile(r"[0-9a-f]{16}")
_DATA_FILE = re.compile(r"rank-[0-9]+-[0-9a-f]{16}\.delta")
_ITEMSIZES = dict(zip(_native.DTYPE_NAMES, _native.DTYPE_ITEMSIZES, strict=True))
_SEAL = ', "xxh3": "'
_SEAL_LENGTH = len(_SEAL) + 16 + 2


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a data file of a delta.

    Attributes:
        fqn: Name of the tensor.
        offsets: Where the box begins in the tensor.
        sizes: Its sizes.
        begin: Offset of its encoded blocks in the file.
        table: Offset of its block table in the file.
        digest: XXH3-64 of the table.
    """

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    table: int
    digest: int


@dataclass(frozen=True)
class DataFile:
    """A data file of a delta: its name, its length in bytes, and its boxes."""

    name: str
    nbytes: int
    boxes: Sequence[StoredBox]


@dataclass(frozen=True)
class Version:
    """What the JSON file of a version states.

    Attributes:
        number: The version.
        term: Term of its publisher.
        line: Number and chain of each version from the whole one, to which the deltas are added, up
            to this one. A chain is an id of the values: two versions with one chain are equal.
        tensors: Name -> dtype and sizes of each tensor.
        ties: Other names of tensors -> the name that ``tensors`` has.
        files: The data files of a delta.
    """

    number: int
    term: int
    line: Sequence[tuple[int, str]]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    ties: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[DataFile] = ()

    @property
    def chain(self) -> str:
        """The id of its values."""
        return self.line[-1][1]

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole version, and not a delta."""
        return len(self.line) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            self.itemsize(fqn) * math.prod(sizes) for fqn, (_, sizes) in self.tensors.items()
        )

    def dtype_name(self, fqn: str) -> str:
        """Returns the published dtype of a tensor, such as ``"bfloat16"``, by any of its names."""
        return self.tensors[self.ties.get(fqn, fqn)][0]

    def itemsize(self, fqn: str) -> int:
        """Returns the bytes of each element of a tensor, by any of its names."""
        return _ITEMSIZES[self.dtype_name(fqn)]

    @functools.cached_property
    def boxes(self) -> dict[str, list[tuple[str, StoredBox]]]:
        """The boxes of each tensor, each with the name of its data file."""
        found: dict[str, list[tuple[str, StoredBox]]] = {}
        for file in self.files:
            for box in file.boxes:
                found.setdefault(box.fqn, []).append((file.name, box))
        return found

    def files_in(self, root: Location) -> Mapping[str, Location]:
        """Returns the data files by their names: the same objects each time."""
        found: dict[Location, Mapping[str, Location]] = self._files
        if root not in found:
            path = path_of(root, self.number)
            found[root] = {file.name: path / file.name for file in self.files}
        return found[root]

    @functools.cached_property
    def _files(self) -> dict[Location, Mapping[str, Location]]:
        return {}

    def encode(self) -> bytes:
        """Returns the contents of its JSON file."""
        facts = dataclasses.asdict(self)
        facts["files"] = [
            [file.name, file.nbytes, [list(dataclasses.astuple(box)) for box in file.boxes]]
            for file in self.files
        ]
        return _sealed(facts)


def table_nbytes(sizes: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of the block table of a box."""
    return ENTRY_NBYTES * -(-math.prod(sizes) * itemsize // BLOCK_NBYTES)


def path_of(root: Location, number: int) -> Location:
    """Returns the directory of a version."""
    return root / f"version-{number}"


def new_chain() -> str:
    """Returns the chain of a new whole version."""
    return secrets.token_hex(8)


def chain_of(base: str, number: int, digests: Iterable[int]) -> str:
    """Returns the chain of a delta, from that of its base and the digests of its block tables."""
    parts = [int(base, 16), number, *digests]
    return f"{_native.xxh3(b''.join(part.to_bytes(8, 'little') for part in parts)):016x}"


def _sealed(facts: dict[str, Any]) -> bytes:
    body = json.dumps(facts)[:-1].encode()
    return body + f'{_SEAL}{_native.xxh3(body):016x}"}}'.encode()


def _unsealed(file: Location, use: Callable[[Any], Any]) -> Any:
    """Reads a JSON file. Raises CorruptionError if its bytes are not those that were written."""
    contents = file.read()
    body, seal = contents[:-_SEAL_LENGTH], contents[-_SEAL_LENGTH:]
    if seal != f'{_SEAL}{_native.xxh3(body):016x}"}}'.encode():
        raise CorruptionError(f"{file} is damaged: its bytes do not match their digest")
    try:
        return from_json(contents, use)
    except ValueError as error:
        raise CorruptionError(f"{file} is damaged: {error}") from None


def _number(value: Any, limit: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.40} is not a number below {limit}")
    return value


def _version_of(facts: dict[str, Any]) -> Version:
    """Returns what a JSON file states. Raises ValueError unless the engine can rely on it."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, sizes) in facts["tensors"].items():
        tensors[name] = dtype, tuple(map(_number, sizes))
        _number(_ITEMSIZES[dtype] * math.prod(size or 1 for size in tensors[name][1]))
    line = [(_number(number), chain) for number, chain in facts["line"]]
    numbers = [number for number, _ in line]
    is_rising = all(before < after for before, after in itertools.pairwise(numbers))
    if not is_rising or numbers[-1] != facts["number"]:
        raise ValueError(f"{numbers} do not lead to version {facts['number']!r:.40}")
    if not all(_CHAIN.fullmatch(chain) for _, chain in line):
        raise ValueError("a chain is invalid")
    ties = {str(name): str(other) for name, other in facts["ties"].items()}
    if not tensors.keys() >= set(ties.values()):
        raise ValueError("a name of a tensor has no tensor")
    files = [_data_file_of(tensors, *each) for each in facts["files"]]
    return Version(numbers[-1], _number(facts["term"]), line, tensors, ties, files)


def _data_file_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], name: Any, nbytes: Any, boxes: Any
) -> DataFile:
    if not _DATA_FILE.fullmatch(name):
        raise ValueError(f"{name!r:.40} is no name of a data file")
    found = []
    for fqn, at, lengths, begin, table, digest in boxes:
        dtype, whole = tensors[fqn]
        offsets, sizes = tuple(map(_number, at)), tuple(map(_number, lengths))
        ends = zip(offsets, sizes, whole, strict=True)
        if not all(offset + size <= length for offset, size, length in ends):
            raise ValueError(f"a box of {list(sizes)} at {list(offsets)} is not inside {fqn!r}")
        end = _number(nbytes) - table_nbytes(sizes, _ITEMSIZES[dtype])
        if not _number(begin) <= _number(table) <= end:
            raise ValueError(f"a block table of {fqn!r} is not inside {name}")
        found.append(StoredBox(fqn, offsets, sizes, begin, table, _number(digest, 1 << 64)))
    return DataFile(name, _number(nbytes), found)


def read_version(root: Location, number: int, chain: str = "", *, kind: str = "") -> Version:
    """Reads what a version states.

    ``chain`` is the one that it must have, if that is known; ``kind`` is the name of its JSON file.
    Raises NotFoundError if there is no such version, and CorruptionError on damage.
    """
    path = path_of(root, number)
    found: list[Version] = []
    for name in [kind] if kind else [DELTA, WHOLE]:
        try:
            version: Version = _unsealed(path / name, _version_of)
        except NotFoundError:
            continue
        if version.number != number:
            raise CorruptionError(f"{path / name} is of version {version.number}")
        found.append(version)
    # A publisher that was superseded may have left a file of the other kind.
    found = [version for version in found if chain in ("", version.chain)]
    if not found:
        of = f" with the chain {chain}" if chain else ""
        raise NotFoundError(f"there is no version {number}{of} in {root}")
    return max(found, key=lambda version: version.term)


def kind_of(path: Location) -> str:
    """Returns the name of the JSON file of a version; empty if none is committed there."""
    try:
        names = set(path.names())
    except NotFoundError:
        return ""
    if DELTA in names and _has_delta(path, names):
        return DELTA
    return WHOLE if _has_whole(names) else ""


def _has_delta(path: Location, names: Set[str]) -> bool:
    """Returns whether a directory with ``delta.json``, and these names, is a delta.

    A store may receive the file of a dead publisher late, when the next one has removed its data.
    """
    if WHOLE not in names and any(map(_DATA_FILE.fullmatch, names)):
        return True
    try:
        version: Version = _unsealed(path / DELTA, _version_of)
    except NotFoundError:
        return False
    except CorruptionError:
        return True
    return names >= {file.name for file in version.files}


def _has_whole(names: Set[str]) -> bool:
    """Returns whether names are those of a whole version.

    A store may receive the index of a dead publisher late, when the next one has removed its files.
    """
    has_weights = any(name.endswith(".safetensors") for name in names)
    return has_weights and WHOLE in names and not names.isdisjoint(_MODELS)


def _is_there(path: Location, kind: str) -> bool:
    """Returns whether a version with this JSON file is committed."""
    if kind == DELTA:
        return (path / DELTA).exists()
    try:
        return _has_whole(set(path.names()))
    except NotFoundError:
        return False


def has_version(path: Location) -> bool:
    """Returns whether a directory has a committed version, whole or damaged."""
    return bool(kind_of(path))


def listed_versions(root: Location) -> list[int]:
    """Returns all directories with the name of a version, committed or not, the newest first."""
    try:
        names = root.directory_names()
    except NotFoundError:
        return []
    return sorted(numbers_among(names), reverse=True)


def numbers_among(names: Iterable[str]) -> list[int]:
    """Returns the numbers of the versions whose names are among these."""
    return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]


def committed_versions(root: Location) -> list[int]:
    """Returns the committed versions, the newest first."""
    return [number for number in listed_versions(root) if has_version(path_of(root, number))]


def write_latest(root: Location, version: Version) -> None:
    """Writes which version is the newest. It need not be there yet."""
    facts = {"number": version.number, "chain": version.chain, "is_whole": version.is_whole}
    (root / _LATEST).replace(_sealed(facts), sync=True)


def forget_latest(root: Location) -> None:
    """Has subscribers find the newest version by a listing, until the next publish."""
    (root / _LATEST).discard()


def newest_version(root: Location, known: Version | None = None) -> Version | None:
    """Reads the newest version; returns ``None`` if there is none.

    Returns the ``known`` one, without another read, if it is the newest. Lists the versions only if
    ``latest.json`` does not name one that is there. Raises CorruptionError if the newest version is
    damaged.
    """
    try:
        number, chain, kind = _named_latest(root)
        if known is not None and chain == known.chain:
            return known
        if kind == DELTA or _is_there(path_of(root, number), kind):
            return read_version(root, number, chain, kind=kind)
    except (CorruptionError, NotFoundError):
        pass
    newest = _newest_listed(root)
    return None if newest is None else read_version(root, newest)


def newest_number(root: Location) -> int | None:
    """Returns the number of the newest version, as :func:`newest_version` finds it."""
    try:
        number, _, kind = _named_latest(root)
        if _is_there(path_of(root, number), kind):
            return number
    except (CorruptionError, NotFoundError):
        pass
    return _newest_listed(root)


def _newest_listed(root: Location) -> int | None:
    listed = listed_versions(root)
    return next((number for number in listed if has_version(path_of(root, number))), None)


def _named_latest(root: Location) -> tuple[int, str, str]:
    def named(facts: dict[str, Any]) -> tuple[int, str, str]:
        return _number(facts["number"]), str(facts["chain"]), WHOLE if facts["is_whole"] else DELTA

    found: tuple[int, str, str] = _unsealed(root / _LATEST, named)
    return found
