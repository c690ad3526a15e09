"""Staging: training stops for one copy into host memory, which is written while it goes on."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils import _pytree as pytree

from torch_ckpt import _native, _tensor_view
from torch_ckpt.errors import CheckpointError

__all__ = ["STAGER", "SnapshotStager"]

_ALIGNMENT = 4096
"""Of what is long: the disk takes it from where it is."""

_SMALL_ALIGNMENT = 64
_LONG_NBYTES = 256 << 10
_OVERFLOW_NBYTES = 64 << 20
"""Of memory for tensors that only a copy of their object finds."""

_THREADS = min(4, os.cpu_count() or 1)


class SnapshotStager:
    """Copies a state dict into memory that is kept from save to save; an ``AsyncStager`` of DCP.

    The memory is all there before the first byte is copied, and several threads copy. A snapshot
    is in use until the state dict that :meth:`stage` has returned is gone: with
    ``dcp.async_save``, until that save has ended. A save that begins earlier waits for it, so that
    no more than ``slots`` copies ever exist. Stagers share nothing; those of writers are one for
    the whole process.

    Args:
        slots: Snapshots that may be in use at a time.
        timeout_s: Seconds to wait for one.

    Example::

        stager = SnapshotStager()
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    """

    _synchronize_after_execute = True

    def __init__(self, *, slots: int = 1, timeout_s: float = 1800.0) -> None:
        if slots < 1:
            raise ValueError(f"{slots=} is less than 1")
        self.timeout_s = timeout_s
        self._free: list[_native.Snapshot | None] = [None] * slots
        self._changed = threading.Condition()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """As DCP asks: there is nothing left to wait for."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Returns at once."""

    def close(self) -> None:
        """Lets go of the memory that is not in use."""
        with self._changed:
            self._free = [None] * len(self._free)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies everything, tensors of other devices included.

        Returns:
            The same structure, of plain CPU tensors where there were others; objects are copied.

        Raises:
            CheckpointError: Former saves have not ended within ``timeout_s``.
            StorageError: There is not as much memory.
        """
        snapshot = self._take()
        try:
            placed = _Placed(snapshot, _storages_nbytes(state_dict), self._give_back)
        except BaseException:
            self._give_back(snapshot)
            raise
        copier = _Copier(placed)
        try:
            staged: dict[str, Any] = copier.stage(state_dict)
        finally:
            copier.close()  # type: ignore[no-untyped-call]
        placed.copy_all()
        return staged

    def _take(self) -> _native.Snapshot | None:
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            while not self._free:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise CheckpointError(
                        f"cannot stage: former saves have not ended within {self.timeout_s:g} s, "
                        "or what they have staged is still referred to"
                    )
            return self._free.pop()

    def _give_back(self, snapshot: _native.Snapshot | None) -> None:
        with self._changed:
            self._free.append(snapshot)
            self._changed.notify()


STAGER = SnapshotStager()
"""Of all writers in this process."""


class _Placed:
    """Where storages go in a snapshot, and from where."""

    def __init__(self, snapshot: _native.Snapshot | None, nbytes: int, give_back: Any) -> None:
        if snapshot is None or not nbytes <= snapshot.nbytes <= 2 * nbytes + _OVERFLOW_NBYTES:
            snapshot = None  # Before there is another.
            snapshot = _native.Snapshot(max(nbytes, _ALIGNMENT), _THREADS)
        self._snapshot = snapshot
        self._view = memoryview(snapshot)
        weakref.finalize(self._view, give_back, snapshot)
        self._end = 0
        self._copies: list[tuple[_native.TensorView, int]] = []
        self._others: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def place(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Where a storage will be copied to."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return torch.empty(0).untyped_storage()
        offset = _aligned(self._end, nbytes)
        if offset + nbytes > self._snapshot.nbytes:  # Nobody could see it from outside.
            return torch.empty(nbytes, dtype=torch.uint8).untyped_storage().copy_(storage)
        self._end = offset + nbytes
        staged = torch.frombuffer(
            self._view, dtype=torch.uint8, count=nbytes, offset=offset
        ).untyped_storage()
        if storage.device.type == "cpu":
            source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))
            self._copies.append((_tensor_view.view(source, "", writable=False), offset))
        else:
            self._others.append((staged, storage))
        return staged

    def copy_all(self) -> None:
        """Copies what was placed; returns when it is there."""
        for staged, storage in self._others:
            staged.copy_(storage, non_blocking=True)
        self._snapshot.fill(self._copies, _THREADS)
        for device in {storage.device for _, storage in self._others}:
            torch.accelerator.synchronize(device)
        self._copies, self._others = [], []


class _Copier(StateDictStager):
    """Copies a state dict as stock's stagers do, but for where storages go."""

    def __init__(self, placed: _Placed) -> None:
        super().__init__()
        self._placed = placed

    def _stage_untyped_storage(
        self, storage: torch.UntypedStorage, non_blocking: bool = False
    ) -> torch.UntypedStorage:
        return self._placed.place(storage)


def _aligned(offset: int, nbytes: int) -> int:
    alignment = _ALIGNMENT if nbytes >= _LONG_NBYTES else _SMALL_ALIGNMENT
    return -(-offset // alignment) * alignment


def _storages_nbytes(state_dict: dict[str, Any]) -> int:
    """Room for the storages of all tensors that are where DCP would find them."""
    seen: dict[int, int] = {}
    for leaf in pytree.tree_leaves(state_dict):
        local = getattr(leaf, "_local_tensor", leaf)
        if isinstance(local, torch.Tensor) and local.layout == torch.strided:
            storage = local.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    end = 0
    for nbytes in seen.values():
        end = _aligned(end, nbytes) + nbytes
    return end
