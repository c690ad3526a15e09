"""Adds the values of files of ranks to the index of a checkpoint."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.torch_save import flatten, is_plain_data
from torch_ckpt.frameworks.rank_files.files import (
    Boxed,
    Computed,
    File,
    Files,
    Loaded,
    Partitioned,
    Stored,
    Unreadable,
    Value,
)

__all__ = ["Entries"]


class Entries:
    """Adds values to the index of a checkpoint, under the FQNs of DCP.

    Adding a second value under the same keys raises CorruptionError.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.foreign = files.foreign
        self._paths: dict[str, Sequence[str | int]] = {}
        self._contents = _Contents()

    def opened(self) -> Opened:
        """Returns the open checkpoint. Raises CorruptionError for an invalid name or number."""
        self.foreign.paths = self._paths
        version = hashlib.sha256(b"".join(self.files.versions)).digest()
        return self.foreign.opened(self._contents, version)

    def add(self, keys: tuple[str | int, ...], value: Value | Loaded) -> None:
        """Adds a value, or each value in it, under its keys from the root of the state dict."""
        if isinstance(value, Partitioned | Boxed):
            self._add_tensor(keys, value.dtype, value.sizes, value.boxes)
        elif isinstance(value, Computed):
            self._add_read(keys, value.file, value.dtype, value.sizes, value.tensor)
        elif isinstance(value, Loaded):
            self.add_object(keys, value, value.read)
        elif isinstance(value, Unreadable):
            self.foreign.add_unreadable(self._named(keys), value.error)
        else:
            flat, paths = flatten({"": value.value}, value.file.archive)
            for name, one in flat.items():
                self._add_stored(keys, value, paths[name][1:], one)

    def add_rank_state(
        self, keys: tuple[str | int, ...], rank: int, ranks: int, value: Stored | Boxed | Loaded
    ) -> None:
        """Adds a value of one rank, in the form and under the name of a ``RankState``."""
        key = f"rank_{rank:05}_of_{ranks:05}"
        self.add_object((*keys, key), value, lambda: (self.files.read_value(value),))

    def add_object(
        self,
        keys: tuple[str | int, ...],
        value: Stored | Boxed | Loaded,
        read: Callable[[], object],
    ) -> None:
        """Adds a value as one object that ``read`` returns, even if it is a tensor."""
        fqn = self._named(keys)
        if isinstance(value, Loaded):
            box: _native.IndexBox = ((), (), value.file, 0, value.nbytes, False, ())
        elif isinstance(value, Boxed):
            box = ((), (), *value.boxes[0][2:5], False, ())
        else:
            box = value.file.archive.box((), plain=False)
        self.foreign.entries.append((fqn, None, [box]))
        self._contents.read[fqn] = read

    def _add_stored(
        self, keys: tuple[str | int, ...], stored: Stored, within: tuple[str | int, ...], value: Any
    ) -> None:
        """Adds a tensor or object within a stored value."""
        keys = (*keys, *within)
        read = stored.read
        if within:
            name = ".".join(map(str, (*stored.keys, *within)))
            read = functools.partial(stored.file.objects.value, name)
        if is_plain_data(value):
            read = functools.partial(copy.copy, value)
        fqn = self._named(keys)
        stored.file.archive.add(self.foreign, fqn, value)
        self._contents.read[fqn] = read

    def _add_read(
        self,
        keys: tuple[str | int, ...],
        file: File,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        read: Callable[[], object],
    ) -> None:
        """Adds a tensor without an extent."""
        self._add_tensor(keys, dtype, sizes, [file.archive.box(sizes, plain=False)])
        self._contents.read[".".join(map(str, keys))] = read

    def _add_tensor(
        self,
        keys: tuple[str | int, ...],
        dtype: torch.dtype,
        sizes: Sequence[int],
        boxes: list[_native.IndexBox],
    ) -> None:
        if not boxes and not math.prod(sizes):  # An index requires a box.
            boxes = [([0] * len(sizes), list(sizes), 0, 0, 0, True, ())]
        name = str(dtype).removeprefix("torch.")
        properties = (name, "contiguous_format", False, False, list(sizes))
        self.foreign.entries.append((self._named(keys), properties, boxes))

    def _named(self, keys: Iterable[str | int]) -> str:
        keys = tuple(keys)
        fqn = ".".join(map(str, keys))
        if fqn in self._paths:
            raise CorruptionError(f"cannot load {self.files.folder}: it has {fqn!r} twice")
        self._paths[fqn] = keys
        return fqn


@dataclass
class _Contents:
    """The values without extents: FQN -> function that reads one."""

    read: dict[str, Callable[[], object]] = field(default_factory=dict)
    _last: tuple[str, object] = ("", None)

    def value(self, fqn: str) -> object:
        """Returns an object, or a tensor that has no extent.

        Caches the last value, because the boxes of a tensor are usually loaded one after another.
        """
        if self._last[0] != fqn:
            self._last = fqn, self.read[fqn]()
        return self._last[1]
