"""Finds the storages of tensors in an object, and values that are refused."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.storage import TypedStorage, UntypedStorage

from torch_ckpt.formats.object_pickles import Refused

__all__ = ["ObjectParts"]


class _Sink:
    def write(self, data: Any) -> int:
        return len(data)


def _nothing() -> None: ...


class ObjectParts(pickle.Pickler):
    """The parts of an object, found by pickling it. For a DTensor, the parts of the local tensor.

    ``storages`` is address -> storage of each non-empty CPU tensor. ``refused`` are the forbidden
    names, sorted. ``not_made`` is the first allowed value that cannot be created.
    """

    def __init__(self, value: object) -> None:
        super().__init__(_Sink(), protocol=2)
        self.storages: dict[int, UntypedStorage] = {}
        self._refused: set[str] = set()
        self.not_made: Refused | None = None
        self.dump(value)
        self.refused = sorted(self._refused)

    def reducer_override(self, value: Any) -> Any:
        """Descends into values that cannot be pickled."""
        if type(value) is Refused:
            if value.error is None:
                self._refused.add(value.name)
            elif self.not_made is None:
                self.not_made = value
            return _nothing, (), value.parts
        if isinstance(value, DTensor):
            return _nothing, (), [value._local_tensor]
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        """Collects a storage."""
        if isinstance(value, TypedStorage):
            value = value._untyped_storage
        if not isinstance(value, UntypedStorage):
            return None
        if value.device == torch.device("cpu") and value.nbytes():
            self.storages[value.data_ptr()] = value
        return "storage"
