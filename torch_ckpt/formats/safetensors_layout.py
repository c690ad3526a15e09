"""Where every byte of a model lies in safetensors files: a plain value, the same on every rank.

A file is 8 bytes that say how long its header is, the header (JSON, padded with spaces), and the
tensors, each whole and row-major, one behind the other. So names, dtypes and sizes decide where all
of them lie, and any rank can write its part of a tensor without asking the others.

Within a file tensors are in the order of the library's own writer, by dtype and name, so that each
begins at a multiple of its items' size although there are no gaps. The header is padded until the
first of them begins at a page: then most tensors of a model do, and go past the page cache.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt.errors import UnsupportedError

__all__ = ["DTYPES", "MAX_HEADER_NBYTES", "FilePlace", "ModelFile", "ModelLayout", "TensorFacts"]

DTYPES = {
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Dtypes that ``safetensors.torch`` loads, by torch's word: its own word, and bytes of an item.

In the order in which its writer puts tensors into a file.
"""

PAGE_NBYTES = 4096
MAX_HEADER_NBYTES = 100_000_000
"""A longer header is refused by the library."""

_METADATA = {"__metadata__": {"format": "pt"}}
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}
_OFFSETS_NBYTES = 2 * 20  # Of the two numbers of an entry, at most.


@dataclass(frozen=True)
class TensorFacts:
    """What decides on the place of a tensor.

    Attributes:
        fqn: Its name.
        dtype: In torch's word, such as ``"bfloat16"``.
        sizes: Of all of it.
    """

    fqn: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return math.prod(self.sizes) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class FilePlace:
    """Where a tensor lies.

    Attributes:
        file: Number of its file, from 0.
        offset: Of its first byte in the file.
        facts: What it is.
    """

    file: int
    offset: int
    facts: TensorFacts


@dataclass(frozen=True)
class ModelFile:
    """One file.

    Attributes:
        header: All bytes before those of the tensors.
        nbytes: Length of the file.
        fqns: Of its tensors, in the order in which they lie.
    """

    header: bytes
    nbytes: int
    fqns: tuple[str, ...]


@dataclass(frozen=True)
class ModelLayout:
    """All files of a model.

    Attributes:
        files: In order.
        places: Those of all tensors, by FQN.

    Example::

        facts = [TensorFacts("up.weight", "bfloat16", (8, 4)), TensorFacts("step", "int64", ())]
        layout = ModelLayout.of(facts, max_shard_nbytes=5_000_000_000)
        print(layout.files[0].nbytes, layout.places["up.weight"].offset)  # 4168 4104
    """

    files: tuple[ModelFile, ...]
    places: Mapping[str, FilePlace]
    _encoded: bytes = field(repr=False, compare=False, default=b"")

    @classmethod
    def of(cls, tensors: Iterable[TensorFacts], *, max_shard_nbytes: int) -> ModelLayout:
        """Lays out tensors, in the given order, in files of at most ``max_shard_nbytes`` each.

        A tensor that is larger has a file to itself. There is one file at least.

        Raises:
            UnsupportedError: The format has no such dtype or name.
        """
        tensors = list(tensors)
        for facts in tensors:
            _check(facts)
        shards = _shards(tensors, max_shard_nbytes)
        files: list[ModelFile] = []
        places: dict[str, FilePlace] = {}
        for number, shard in enumerate(shards):
            shard.sort(key=lambda facts: (_ORDER[facts.dtype], facts.fqn))
            header, payload_nbytes = _header(shard)
            offset = len(header)
            for facts in shard:
                places[facts.fqn] = FilePlace(number, offset, facts)
                offset += facts.nbytes
            fqns = tuple(facts.fqn for facts in shard)
            files.append(ModelFile(header, len(header) + payload_nbytes, fqns))
        return cls(tuple(files), places, _encode(tensors, max_shard_nbytes))

    def encode(self) -> bytes:
        """As it travels: what it was made of, compressed, since names of tensors repeat."""
        return self._encoded

    @classmethod
    def decode(cls, encoded: bytes) -> ModelLayout:
        """The layout that was encoded."""
        max_shard_nbytes, tensors = json.loads(zlib.decompress(encoded))
        facts = [TensorFacts(fqn, dtype, tuple(sizes)) for fqn, dtype, sizes in tensors]
        return cls.of(facts, max_shard_nbytes=max_shard_nbytes)

    def index(self, names: Sequence[str]) -> bytes:
        """The index of the files, which have these names: JSON, as Hugging Face's loaders want."""
        weight_map = {fqn: names[place.file] for fqn, place in self.places.items()}
        total = sum(place.facts.nbytes for place in self.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _check(facts: TensorFacts) -> None:
    if facts.dtype not in DTYPES:
        raise UnsupportedError(
            f"cannot store {facts.fqn!r} as safetensors: that has no dtype for {facts.dtype}"
        )
    if facts.fqn in _METADATA:
        raise UnsupportedError(f"cannot store {facts.fqn!r} as safetensors: the name is reserved")


def _entry(facts: TensorFacts, begin: int) -> dict[str, Any]:
    offsets = [begin, begin + facts.nbytes]
    return {"dtype": DTYPES[facts.dtype][0], "shape": facts.sizes, "data_offsets": offsets}


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _padded_nbytes(header_nbytes: int) -> int:
    return -(8 + header_nbytes) % PAGE_NBYTES + 8 + header_nbytes


def _header(tensors: Sequence[TensorFacts]) -> tuple[bytes, int]:
    """The header of a file, and the bytes of all tensors in it."""
    entries: dict[str, Any] = {**_METADATA}
    end = 0
    for facts in tensors:
        entries[facts.fqn] = _entry(facts, end)
        end += facts.nbytes
    text = _dump(entries)
    text = text.ljust(_padded_nbytes(len(text)) - 8)
    return len(text).to_bytes(8, "little") + text, end


def _shards(tensors: Sequence[TensorFacts], max_shard_nbytes: int) -> list[list[TensorFacts]]:
    """Splits tensors, in their order, over as few files as that needs."""
    shards: list[list[TensorFacts]] = [[]]
    empty_nbytes = len(_dump(_METADATA))
    header_nbytes, payload_nbytes = empty_nbytes, 0
    for facts in tensors:
        more = len(_dump({facts.fqn: _entry(facts, 0)})) + _OFFSETS_NBYTES
        file_nbytes = _padded_nbytes(header_nbytes + more) + payload_nbytes + facts.nbytes
        is_full = file_nbytes > max_shard_nbytes or header_nbytes + more > MAX_HEADER_NBYTES
        if is_full and shards[-1]:
            shards.append([])
            header_nbytes, payload_nbytes = empty_nbytes, 0
        shards[-1].append(facts)
        header_nbytes += more
        payload_nbytes += facts.nbytes
    return shards


def _encode(tensors: Sequence[TensorFacts], max_shard_nbytes: int) -> bytes:
    listed = [[facts.fqn, facts.dtype, facts.sizes] for facts in tensors]
    return zlib.compress(json.dumps([max_shard_nbytes, listed]).encode(), 1)
