"""The values of a checkpoint in the order in which a conversion writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt.conversion.ties import find_ties
from torch_ckpt.errors import NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.layout import TensorFacts
from torch_ckpt.formats.torch_archive import PendingTensor
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.quantizing import QuantizedValues, quantized_facts
from torch_ckpt.storage.stored_values import Box, StoredValues, pieces_of

__all__ = ["IO", "PIECE_NBYTES", "Piece", "Source"]

IO = IoOptions(buffer_nbytes=16 << 20)
"""I/O buffers of the source, and of the target."""

PIECE_NBYTES = 8 << 20
"""Maximum bytes of a piece with more than one element, and of small pieces loaded together."""

_Loaded = Future[dict[int, torch.Tensor]]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor. Its elements are consecutive in row-major order.

    ``number`` is its position in the order of the conversion, and ``tensor`` the position of its
    tensor.
    """

    number: int
    tensor: int
    name: str
    box: Box


class Source:
    """The source of a conversion, a checkpoint of any format that :class:`FastReader` loads.

    While one batch of pieces is written, a thread loads the next one. Only names with the prefix
    are converted, and the prefix is removed. ``tensors`` and ``objects`` are by name, ``paths`` is
    name -> keys from the root of the nested state dict, and ``ties`` is name -> the name under
    which its tensor is stored; see :func:`find_ties`. ``ranks`` is the number of ranks for which it
    is written, if given. ``wide`` are the tensors before
    :meth:`quantize`. ``loaded_nbytes`` counts the bytes of the pieces returned so far. Raises
    NotFoundError if no name has the prefix, and UnsupportedError if a tensor is far larger than the
    files.
    """

    def __init__(
        self,
        path: Location,
        prefix: str = "",
        *,
        rules: str | None = None,
        trust_pickle: bool = False,
    ) -> None:
        self.path = path
        self._values = StoredValues(path, prefix, io=IO, trust_pickle=trust_pickle, rules=rules)
        if not self._values.has_prefix:
            raise NotFoundError(f"{path} has no name that begins with {prefix!r}")
        if prefix and "" in self._values.names:
            raise UnsupportedError(f"{prefix!r} is itself a name in {path}, and not a prefix")
        for name, why in self._values.why_oversized.items():
            raise UnsupportedError(f"cannot convert {name!r} of {path}: {why}")
        self.tensors: dict[str, PendingTensor] = {}
        objects: list[str] = []
        for name in self._values.names:
            entry = self._values.entry(name)
            if isinstance(entry, TensorStorageMetadata):
                sizes = tuple(entry.size)
                self.tensors[name] = PendingTensor(name, entry.properties.dtype, sizes)
            else:
                objects.append(name)
        loaded = self._values.objects(objects) if objects else []
        self.objects: dict[str, Any] = dict(zip(objects, loaded, strict=True))
        stored_paths = self._values.metadata.planner_data or {}
        self.paths = {
            name: _without(prefix, tuple(stored_paths.get(fqn, (fqn,))), name)
            for name, fqn in self._values.names.items()
        }
        self.ties: dict[str, str] = {}
        self.ranks: int | None = None
        self.wide: list[TensorFacts] = []
        self._load_boxes = self._values.load
        self.loaded_nbytes = 0
        self._pieces: list[Piece] = []
        self._batch_of: list[int] = []
        self._batches: list[list[Piece]] = []
        self._loaded: dict[int, _Loaded] = {}
        self._current: dict[int, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "torch_ckpt-read")

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def find_ties(self, named: Mapping[str, str]) -> None:
        """Sets :attr:`ties`, for formats that store a tied tensor once."""
        self.ties = find_ties(self._values, self.path, named)

    def quantize(self) -> None:
        """Makes the tensors those of a quantised model."""
        self.wide = wide = [
            TensorFacts(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.sizes))
            for name, tensor in self.tensors.items()
            if name not in self.ties
        ]
        self._load_boxes = QuantizedValues(self._load_boxes, wide).load
        for facts in quantized_facts(wide):
            dtype = getattr(torch, facts.dtype)
            self.tensors[facts.fqn] = PendingTensor(facts.fqn, dtype, facts.sizes)
            self.paths.setdefault(facts.fqn, (facts.fqn,))

    def cut(self, names: Sequence[str]) -> list[Piece]:
        """Cuts tensors into pieces, which must be loaded in this order.

        A tensor without elements has one piece without elements.
        """
        self._pieces, self._batch_of, self._batches = [], [], []
        nbytes = 0
        for tensor, name in enumerate(names):
            facts = self.tensors[name]
            sizes, itemsize = facts.sizes, facts.dtype.itemsize
            boxes = list(pieces_of(sizes, itemsize, PIECE_NBYTES)) if math.prod(sizes) else []
            for box in boxes or [((0,) * len(sizes), sizes)]:
                piece = Piece(len(self._pieces), tensor, name, box)
                piece_nbytes = math.prod(box[1]) * itemsize
                if not self._batches or nbytes + piece_nbytes > PIECE_NBYTES:
                    self._batches.append([])
                    nbytes = 0
                nbytes += piece_nbytes
                self._batches[-1].append(piece)
                self._batch_of.append(len(self._batches) - 1)
                self._pieces.append(piece)
        return self._pieces

    def take(self, number: int) -> torch.Tensor:
        """Loads a piece. The caller owns its memory."""
        if number not in self._current:
            batch = self._batch_of[number]
            future = self._loaded.pop(batch, None) or self._load(batch)
            self._current = future.result()
            if batch + 1 < len(self._batches):
                self._loaded = {batch + 1: self._load(batch + 1)}
        tensor = self._current.pop(number)
        self.loaded_nbytes += tensor.nbytes
        return tensor

    def _load(self, batch: int) -> _Loaded:
        def load() -> dict[int, torch.Tensor]:
            pieces = self._batches[batch]
            tensors = self._load_boxes([(piece.name, piece.box) for piece in pieces])
            return {piece.number: tensor for piece, tensor in zip(pieces, tensors, strict=True)}

        return self._thread.submit(load)


def _without(prefix: str, keys: tuple[str | int, ...], name: str) -> tuple[str | int, ...]:
    """Returns the keys of a name without its prefix; the name itself if a key has the prefix."""
    while prefix and keys:
        key = f"{keys[0]}."
        if not prefix.startswith(key):
            return (name,)
        prefix, keys = prefix.removeprefix(key), keys[1:]
    return (str(keys[0]), *keys[1:]) if keys else (name,)  # The root is a dict.
