"""SnapshotStager: copies a state dict into reusable host memory for asynchronous saves."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, ClassVar

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import flat_values, gc_paused
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import time_limit_s
from torch_ckpt.coordination.statefuls import state_dicts_of
from torch_ckpt.coordination.waiting import LongWait, OwnFuture, submitted
from torch_ckpt.errors import CheckpointError, StorageError, naming_first
from torch_ckpt.filesystems.cgroups import memory_limit
from torch_ckpt.planning.replicas import ranks_per_node
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records.record import note
from torch_ckpt.staging.copied_state import CopiedState
from torch_ckpt.staging.memory_runs import (
    CopiedTensor,
    MemoryRun,
    copy_elements,
    drop_memory,
    runs_of,
)
from torch_ckpt.staging.share import Share
from torch_ckpt.staging.staged import POLL_S, Staged, UnstagedState

__all__ = ["SnapshotStager"]

_SMALLEST_NBYTES = 4096
"""Minimum size of a snapshot, in bytes."""

_SLACK_NBYTES = 64 << 20
"""A snapshot is reused if it is at most twice the required size, plus this slack, in bytes."""

_COLLECTIONS = 3
"""Maximum number of garbage collections for a snapshot that is in use."""

_LOG = logging.getLogger("torch_ckpt")

_THREADS = min(4, os.cpu_count() or 1)


class SnapshotStager:
    """Copies a state dict into a snapshot: host memory that is reused from save to save.

    It implements DCP's ``AsyncStager``, and copies with several threads. The first save allocates
    the snapshot; call :meth:`reserve` to allocate it earlier.

    A rank has at most one snapshot, of the size of its tensors. The snapshot is in use as long as
    any reference to the result of :meth:`stage` exists. With :class:`FastWriter`, it is released
    at the latest when the thread that writes it ends. A save that begins earlier waits for it, at
    most ``timeout_s`` of that save (1800 s in DCP's own functions).

    If the memory limit of the container (cgroup) leaves too little for a snapshot,
    :class:`FastWriter` writes the tensors from the memory of training before ``async_save``
    returns. Other writers, and saves in another process, raise an error.

    Args:
        blocking: Whether :meth:`stage` returns after the copy. If ``False``, ``dcp.async_save``
            returns an ``AsyncSaveResponse`` before the copy is complete. The tensors must not
            change until :meth:`wait_staged` returns.

    Attributes:
        waited: Number of saves that waited for an earlier save.
        skipped: Number of saves that :func:`torch_ckpt.async_save` skipped (``on_busy="skip"``).
        refused: Number of saves that :func:`torch_ckpt.async_save` refused (``on_busy="error"``).

    Example::

        stager = SnapshotStager()
        stager.reserve(state)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    """

    _synchronize_after_execute = True
    _copy_class: ClassVar[type[CopiedState]] = CopiedState

    def __init__(self, *, blocking: bool = True) -> None:
        self.blocking = blocking
        self.waited = self.skipped = self.refused = 0
        self.starting = Exclusive("the staging memory")
        """In use from the copy of a state until the thread of its save has started."""
        self._exclusive = Exclusive("the staging memory")
        self.share: Share | None = None  # This rank's share in the last save.
        self._snapshot: _native.Snapshot | None = None  # Also while it is in use.
        self._has_warned = False
        # At most one. An interrupt may leave a use here at any moment, but then it is unused.
        self._in_use: set[Staged] = set()
        # A C lock: an interrupt before the block of a `threading.Condition` could leave it locked.
        self._lock = threading.RLock()
        self._copying: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._devices = _native.Devices()
        self._inherited: object = None
        PROCESS.forkable.add(self)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP must call :meth:`synchronize_staging` after it has started the save."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Same as :meth:`wait_staged`. DCP calls this method."""
        self.wait_staged()

    def wait_staged(self) -> None:
        """Waits until the last :meth:`stage` has copied the tensors, which may then change.

        Raises:
            Exception: The copy failed. The save raises the same error.
        """
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    @property
    def is_busy(self) -> bool:
        """Whether the next save would wait for an earlier save."""
        with self._lock:
            self._reclaim()
            return bool(self._in_use)

    def close(self) -> None:
        """Releases the snapshot if it is not in use."""
        with self._lock:
            self._reclaim()
            if not self._in_use:
                self._snapshot = None
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def reserve(self, state_dict: dict[str, Any]) -> None:
        """Allocates and pins a snapshot for a state dict, unless the snapshot is in use.

        Copies nothing.

        Args:
            state_dict: A state dict with tensors of the same sizes as in later saves, as for
                :func:`torch_ckpt.async_save`: it may contain ``Stateful`` objects.

        Raises:
            StorageError: The memory cannot be allocated.
            ValueError: The storage of a tensor is too small for the tensor.
        """
        state_dict = state_dicts_of(state_dict)
        with naming_first("stage", lambda: flat_values(state_dict), self._try):
            placed = self._place(CopiedState(state_dict).tensors, allow_unstaged=True)
        reserved = self._use("the memory that is being reserved", sys._getframe())
        try:
            if self._is_taken_by(reserved):
                self._fitting(placed.nbytes).pin_for(placed.inspect(), self._devices)
        finally:
            reserved.release()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copies a state dict, including tensors on other devices.

        Args:
            state_dict: The state dict to copy.

        Returns:
            A state dict of the same structure with CPU tensors and copied objects. If ``blocking``
            is ``False``, a future of it.

        Raises:
            CheckpointError: The snapshot was in use by an earlier save until the timeout.
            StorageError: The memory cannot be allocated, or the tensors do not fit in the memory
                limit of the container.
            ValueError: The storage of a tensor is too small for the tensor.
        """
        return self.begin(state_dict)[0]

    def begin(
        self,
        state_dict: dict[str, Any],
        *,
        left_out: Collection[int] = (),
        allow_unstaged: bool = False,
        name: str = "the snapshot of a state dict",
    ) -> tuple[dict[str, Any] | Future[dict[str, Any]], Staged]:
        """Like :meth:`stage`, for a writer that registers the thread of its save.

        Args:
            state_dict: The state dict to copy.
            left_out: ``id`` of each tensor that this rank does not write, and so need not copy.
                Must be empty unless ``blocking``.
            allow_unstaged: Whether the caller waits until the tensors are written if they do not
                fit in memory.
            name: Name of the snapshot, for messages.

        Returns:
            The result of :meth:`stage`, and the snapshot.
        """
        with contextlib.suppress(Exception):  # The earlier save reports its own error.
            self.wait_staged()
        staged = self._use(name, sys._getframe())
        try:
            with (
                self._exclusive.use("stage a state dict", time_limit_s()),
                gc_paused(),
                naming_first("stage", lambda: flat_values(state_dict), self._try),
            ):
                return self._begin(staged, state_dict, left_out, allow_unstaged), staged
        except BaseException:
            staged.release()  # A caller may retain the error, which refers to the tensors.
            raise

    def _try(self, value: Any) -> None:
        """Raises if a value of a state dict cannot be copied, with the error of :meth:`_begin`."""
        _Placed(self._copy_class({"": value}).tensors, False)

    def _begin(
        self,
        staged: Staged,
        state_dict: dict[str, Any],
        left_out: Collection[int],
        allow_unstaged: bool,
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        copied = self._copy_class(state_dict)
        drop_memory(tensor for tensor in copied.tensors if id(tensor.live) in left_out)
        to_stage = [tensor for tensor in copied.tensors if id(tensor.live) not in left_out]
        placed = self._place(to_stage, allow_unstaged=allow_unstaged and self.blocking)
        staged.is_unstaged = bool(placed.unstaged)
        self._acquire(staged)
        snapshot = self._fitting(placed.nbytes)
        view = memoryview(snapshot)
        placed.set_memory(view)
        staged.set_memory(view)
        if not self.blocking:
            return self._copy_in_background(placed, snapshot, copied, staged)
        self._copy(placed, snapshot, copied, staged)
        return UnstagedState(staged, copied.state) if placed.unstaged else copied.state

    def _place(self, tensors: Sequence[CopiedTensor], *, allow_unstaged: bool) -> _Placed:
        """Places tensors in a snapshot, or none if the container has too little memory for it.

        Args:
            tensors: The tensors.
            allow_unstaged: Whether the save may write tensors that are not staged.
        """
        placed = _Placed(tensors, self._copy_class.keeps_sharing)
        snapshot = self._snapshot
        missing_nbytes = placed.nbytes - (0 if snapshot is None else snapshot.nbytes)
        limit = memory_limit() if missing_nbytes > 0 else None
        # The other ranks of this machine probably need the same amount at the same time.
        if limit is None or missing_nbytes <= limit.allowed_nbytes // ranks_per_node():
            return placed
        if not allow_unstaged:
            raise StorageError(
                f"cannot stage {placed.nbytes} bytes: {limit}; only FastWriter with a blocking "
                "stager can save tensors that are not staged",
                errno.ENOMEM,
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "asynchronous saves write all tensors before training continues: the staging "
                f"memory of a rank needs {missing_nbytes} more bytes; {limit}",
                stacklevel=2,
            )
        placed.leave_unstaged()
        return placed

    def _fitting(self, nbytes: int) -> _native.Snapshot:
        """Returns the snapshot, which the caller uses; reallocated if its size is unsuitable."""
        snapshot = self._snapshot
        if snapshot is not None and nbytes <= snapshot.nbytes <= 2 * nbytes + _SLACK_NBYTES:
            return snapshot
        self._snapshot = snapshot = None  # Free it before the allocation.
        self._snapshot = snapshot = _native.Snapshot(nbytes, _THREADS)
        return snapshot

    def _copy(
        self, placed: _Placed, snapshot: _native.Snapshot, copied: CopiedState, staged: Staged
    ) -> None:
        begin = time.monotonic()
        placed.copy_all(snapshot, self._devices)
        seconds = time.monotonic() - begin
        _LOG.debug("%s: copied %d bytes in %.3f s", staged.name, placed.copied_nbytes, seconds)
        note(bytes=placed.copied_nbytes)
        copied.build_wrappers()

    def _copy_in_background(
        self, placed: _Placed, snapshot: _native.Snapshot, copied: CopiedState, staged: Staged
    ) -> Future[dict[str, Any]]:
        done: OwnFuture[dict[str, Any]] = OwnFuture()

        def copy() -> None:
            try:
                self._copy(placed, snapshot, copied, staged)
            except BaseException as error:
                staged.release()
                done.set_exception(error)
                raise
            done.set_result(copied.state)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "torch_ckpt-stage")
        copying: OwnFuture[None] = OwnFuture(lambda: "the copy of a state dict into host memory")
        self._copying = submitted(self._executor, copy, future=copying)
        return done

    def _acquire(self, staged: Staged) -> None:
        """Waits for the snapshot, and takes it for a save.

        Raises:
            CheckpointError: The snapshot was in use until the timeout.
        """
        limit_s = time_limit_s()
        waiting = LongWait(
            lambda: f"a free snapshot, at most {limit_s:g} s. In use: {self._names_in_use()}"
        )
        collections = 0
        for pause_s in waiting.rounds(limit_s, POLL_S, ends_on_signal=True):
            if self._is_taken_by(staged):
                return
            if collections < _COLLECTIONS:
                # Perhaps only garbage uses it: copies with methods, or frames of an error. Another
                # collection frees objects that a finalizer used in the first one.
                gc.collect()
                collections += 1
                continue
            self.waited += collections == _COLLECTIONS
            collections += 1
            time.sleep(pause_s)
        if self._is_taken_by(staged):
            return
        raise CheckpointError(
            f"cannot stage: no snapshot was free within {limit_s:g} s. In use: "
            f"{self._names_in_use()}"
        )

    def _is_taken_by(self, staged: Staged) -> bool:
        """Takes the snapshot for a save if it is not in use, and returns whether it was not."""
        with self._lock:
            self._reclaim()
            if self._in_use:
                return False
            self._in_use.add(staged)
            return True

    def _use(self, name: str, by: FrameType) -> Staged:
        """Returns a use of the snapshot, by a call that has yet to take it."""
        return Staged(name=name, by=by, release=self._release)

    def _release(self, staged: Staged) -> None:
        with self._lock:
            self._in_use.discard(staged)

    def _reclaim(self) -> None:
        """Releases the snapshots of finished saves, even if errors still refer to their tensors."""
        for staged in list(self._in_use):
            if staged.is_unused:
                staged.release()

    def _names_in_use(self) -> str:
        return "; ".join(map(str, list(self._in_use)))

    def after_fork(self) -> None:
        """Starts without a snapshot in a forked child, which lacks the parent's threads.

        The child must not free the parent's snapshot, because it cannot unpin the parent's memory.
        """
        self._inherited = self._snapshot, self._in_use, self._executor, self._devices
        self._devices = _native.Devices()
        self._snapshot, self._in_use = None, set()
        self.starting, self._exclusive = (Exclusive("the staging memory") for _ in range(2))
        self._lock = threading.RLock()
        self._executor = self._copying = self.share = None


class _Placed:
    """The layout of a snapshot: the offset of each memory run.

    Args:
        tensors: The tensors to place.
        keeps_sharing: Whether shared elements of several tensors are in the snapshot only once.

    Attributes:
        nbytes: Size of the snapshot, in bytes; at least one page.
        copied_nbytes: Length of all memory runs in the snapshot, in bytes.
        unstaged: Memory runs that are not copied.
    """

    def __init__(self, tensors: Iterable[CopiedTensor], keeps_sharing: bool) -> None:
        self.unstaged: list[MemoryRun] = []
        self.copied_nbytes = 0
        self._places: list[tuple[MemoryRun, torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._inspected: _native.TensorBatch | None = None
        end = 0
        for run in runs_of(tensors, keeps_sharing=keeps_sharing):
            nbytes = run.nbytes
            offset = _native.place_in_snapshot(end, nbytes)
            self._places.append((run, run.live(), offset))
            end = offset + nbytes
            self.copied_nbytes += nbytes
        self.nbytes = max(end, _SMALLEST_NBYTES)

    def leave_unstaged(self) -> None:
        """Copies nothing: the copies will be views of the live tensors."""
        self.unstaged = [run for run, _, _ in self._places]
        self._places = []
        self.copied_nbytes, self.nbytes = 0, _SMALLEST_NBYTES

    def inspect(self) -> _native.TensorBatch:
        """Returns views of the live tensors, ordered after the work of the current streams."""
        return _tensor_view.inspect(
            [live for _, live, _ in self._places], writable=False, stages=True
        )

    def set_memory(self, view: memoryview) -> None:
        """Places the copies in a snapshot, or makes them views of the live tensors.

        Args:
            view: The memory of the snapshot.
        """
        self._inspected = self.inspect()
        for run, live, offset in self._places:
            nbytes = run.nbytes
            memory = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
            run.set_memory(memory)
            self._copies.append((memory, live, offset))
        for run in self.unstaged:
            run.use_live_memory()
        self._places = []

    def copy_all(self, snapshot: _native.Snapshot, devices: _native.Devices) -> None:
        """Copies the values of all placed tensors, and waits for the copies."""
        copies, self._copies = self._copies, []
        batch, self._inspected = self._inspected, None
        assert batch is not None
        plain = batch.plain
        snapshot.copy(batch, plain, [copies[i][2] for i in plain], _THREADS, devices)
        others = set()  # Devices that only torch supports.
        for number in set(range(len(copies))).difference(plain):
            memory, live, _ = copies[number]
            others.add(live.device)
            copy_elements(live, memory, wait=False)
        for device in others:
            torch.accelerator.synchronize(device)


PROCESS.stager = SnapshotStager()
