"""The layout of a model in safetensors files, as a plain value that is equal on every rank.

A file consists of the header's length in 8 bytes, the header (JSON, padded with spaces), and the
tensors, whole and row-major, without gaps. So names, dtypes and sizes determine the offset of every
tensor, and each rank can write its boxes without communication.

Tensors of a file have the order of the library's own writer: by dtype, then by name. So the offset
of each tensor is a multiple of its element size, although there are no gaps. The padded header ends
at a page boundary. Most tensors of a model then begin at one, so their writes can bypass the page
cache.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ckpt._core.tensors import printable
from torch_ckpt.errors import UnsupportedError

__all__ = [
    "DTYPES",
    "FORMAT",
    "MAX_HEADER_NBYTES",
    "ORDER",
    "PACKED",
    "SHARDING",
    "UNTIED",
    "VERSION",
    "FilePlace",
    "ModelFile",
    "ModelLayout",
    "TensorFacts",
]

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
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "float4_e2m1fn_x2": ("F4", 1),
    "bool": ("BOOL", 1),
}
"""Torch dtype -> safetensors dtype and bytes per element of torch, for all that the library stores.

The order is that of tensors in a file of the library's writer.
"""

PACKED = {"float4_e2m1fn_x2": 2}
"""Torch dtype -> numbers per element. The last size in a header counts numbers."""

PAGE_NBYTES = 4096
MAX_HEADER_NBYTES = 100_000_000
"""Maximum length of a header that the library accepts."""

_METADATA = "__metadata__"
FORMAT = {"format": "pt"}
SHARDING, VERSION = "DCP_SHARDING_INFO", {"DCP_VERSION": "1.0"}
"""Keys of DCP's writer: the boxes of the tensors in a file, and the version of this record."""

UNTIED = frozenset({_METADATA, SHARDING, *FORMAT, *VERSION})
"""Names that a header cannot record as tied to another name, since it has such keys itself."""

ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}
"""Torch dtype -> its place among the tensors of a file."""

_OFFSETS_NBYTES = 2 * 20  # Upper bound for the two decimal numbers of data_offsets.


@dataclass(frozen=True)
class TensorFacts:
    """The facts that determine the place of a tensor.

    The dtype has torch's name, such as ``"bfloat16"``. The sizes are of the whole tensor.
    """

    fqn: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.sizes) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class FilePlace:
    """The place of a tensor: the number of its file, and the offset of its first byte in it."""

    file: int
    offset: int
    facts: TensorFacts


@dataclass(frozen=True)
class ModelFile:
    """One file of a model: all bytes before the first tensor, its length, and its FQNs in order."""

    header: bytes
    nbytes: int
    fqns: tuple[str, ...]


@dataclass(frozen=True)
class ModelLayout:
    """The files of a model, and the place of each tensor by FQN.

    ``omitted`` is name without a place -> the name that it is tied to. The header of the file with
    that tensor has it in ``__metadata__``, as that of ``safetensors.torch.save_model`` has. With
    ``states_boxes``, the headers state for DCP's reader and its consolidation that each file has
    boxes of the tensors, here the whole ones.

    Example::

        facts = [TensorFacts("up.weight", "bfloat16", (8, 4)), TensorFacts("step", "int64", ())]
        layout = ModelLayout.of(facts, max_shard_nbytes=5_000_000_000)
        print(layout.files[0].nbytes, layout.places["up.weight"].offset)  # 4168 4104
    """

    files: tuple[ModelFile, ...]
    places: Mapping[str, FilePlace]
    omitted: Mapping[str, str] = field(default_factory=dict)
    _encoded: bytes = field(repr=False, compare=False, default=b"")

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorFacts],
        *,
        max_shard_nbytes: int,
        omitted: Mapping[str, str] | None = None,
        groups: Sequence[int] = (),
        states_boxes: bool = False,
    ) -> ModelLayout:
        """Assigns tensors, in the given order, to files of at most ``max_shard_nbytes`` each.

        A larger tensor gets its own file. There is always at least one file. ``groups`` has the
        lengths of groups of tensors that share no file, from the first tensor on; the others are
        one more group. Raises UnsupportedError if the format does not support the dtype or name of
        a tensor.
        """
        tensors = list(tensors)
        for facts in tensors:
            _check(facts)
        omitted = dict(omitted or {})
        for name in omitted:
            _check_name(name)
        ties: dict[str, dict[str, str]] = {}
        for name, first in omitted.items():
            ties.setdefault(first, {})[name] = first
        ends = itertools.accumulate(groups, initial=0)
        shards: list[list[TensorFacts]] = [
            shard
            for begin, end in itertools.pairwise([*ends, len(tensors)])
            if begin < end
            for shard in _shards(tensors[begin:end], max_shard_nbytes, ties)
        ] or [[]]
        files: list[ModelFile] = []
        places: dict[str, FilePlace] = {}
        for number, shard in enumerate(shards):
            shard.sort(key=lambda facts: (ORDER[facts.dtype], facts.fqn))
            header, payload_nbytes = _header(shard, ties, states_boxes)
            offset = len(header)
            for facts in shard:
                places[facts.fqn] = FilePlace(number, offset, facts)
                offset += facts.nbytes
            fqns = tuple(facts.fqn for facts in shard)
            files.append(ModelFile(header, len(header) + payload_nbytes, fqns))
        listed = [[facts.fqn, facts.dtype, facts.sizes] for facts in tensors]
        arguments = json.dumps([max_shard_nbytes, listed, omitted, list(groups), states_boxes])
        return cls(tuple(files), places, omitted, zlib.compress(arguments.encode(), 1))

    def encode(self) -> bytes:
        """Returns the arguments of :meth:`of` in compressed form, to send to other ranks."""
        return self._encoded

    @classmethod
    def decode(cls, encoded: bytes) -> ModelLayout:
        """Returns the layout of which :meth:`encode` returned ``encoded``."""
        most, tensors, omitted, groups, boxes = json.loads(zlib.decompress(encoded))
        facts = [TensorFacts(fqn, dtype, tuple(sizes)) for fqn, dtype, sizes in tensors]
        return cls.of(
            facts, max_shard_nbytes=most, omitted=omitted, groups=groups, states_boxes=boxes
        )

    def index(self, names: Sequence[str]) -> bytes:
        """Returns the JSON index for Hugging Face's loaders, for files of the given names."""
        weight_map = {fqn: names[place.file] for fqn, place in self.places.items()}
        total = sum(place.facts.nbytes for place in self.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _check(facts: TensorFacts) -> None:
    if facts.dtype not in DTYPES:
        raise UnsupportedError(
            f"cannot store {facts.fqn!r} as safetensors: the format does not support {facts.dtype}"
        )
    if facts.dtype in PACKED and not facts.sizes:
        raise UnsupportedError(
            f"cannot store {facts.fqn!r} as safetensors: a scalar of {facts.dtype} has no "
            "dimension that counts its numbers"
        )
    _check_name(facts.fqn)


def _check_name(fqn: str) -> None:
    if fqn == _METADATA:
        raise UnsupportedError(f"cannot store {fqn!r} as safetensors: the name is reserved")
    if printable(fqn) != fqn:
        raise UnsupportedError(
            f"cannot store {fqn!r} as safetensors: the name has no UTF-8 encoding"
        )


def _entry(facts: TensorFacts, begin: int) -> dict[str, Any]:
    offsets = [begin, begin + facts.nbytes]
    sizes = list(facts.sizes)
    if facts.dtype in PACKED:
        sizes[-1] *= PACKED[facts.dtype]
    return {"dtype": DTYPES[facts.dtype][0], "shape": sizes, "data_offsets": offsets}


def _dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _padded_nbytes(header_nbytes: int) -> int:
    return -(8 + header_nbytes) % PAGE_NBYTES + 8 + header_nbytes


def _header(
    tensors: Sequence[TensorFacts], ties: Mapping[str, Mapping[str, str]], states_boxes: bool
) -> tuple[bytes, int]:
    """Returns the header of a file, and the total bytes of its tensors."""
    metadata = dict(FORMAT)
    entries: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for facts in tensors:
        metadata.update(ties.get(facts.fqn, {}))
        entries[facts.fqn] = _entry(facts, end)
        end += facts.nbytes
    if states_boxes:
        boxes = {facts.fqn: {"saved_offsets": [0] * len(facts.sizes)} for facts in tensors}
        metadata.update({SHARDING: json.dumps(boxes), **VERSION})
    text = _dump(entries)
    text = text.ljust(_padded_nbytes(len(text)) - 8)
    return len(text).to_bytes(8, "little") + text, end


def _shards(
    tensors: Sequence[TensorFacts],
    max_shard_nbytes: int,
    ties: Mapping[str, Mapping[str, str]],
) -> list[list[TensorFacts]]:
    """Splits tensors, in the given order, into as few files as possible."""
    shards: list[list[TensorFacts]] = [[]]
    empty_nbytes = len(_dump({_METADATA: FORMAT}))
    header_nbytes, payload_nbytes = empty_nbytes, 0
    for facts in tensors:
        entry_nbytes = len(_dump({facts.fqn: _entry(facts, 0)})) + _OFFSETS_NBYTES
        if facts.fqn in ties:
            entry_nbytes += len(_dump(dict(ties[facts.fqn])))
        file_nbytes = _padded_nbytes(header_nbytes + entry_nbytes) + payload_nbytes + facts.nbytes
        is_full = file_nbytes > max_shard_nbytes or header_nbytes + entry_nbytes > MAX_HEADER_NBYTES
        if is_full and shards[-1]:
            shards.append([])
            header_nbytes, payload_nbytes = empty_nbytes, 0
        shards[-1].append(facts)
        header_nbytes += entry_nbytes
        payload_nbytes += facts.nbytes
    return shards
