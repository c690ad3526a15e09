"""Staging: training stops for one copy into host memory, which is written while it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.copied_state import (
    CopiedState,
    CopiedTensor,
    MemoryRun,
    drop_memory,
    runs_of,
)
from torch_ckpt.staging.share import Share
from torch_ckpt.staging.staged import POLL_S, PartlyStaged, Staged

__all__ = ["TIMEOUT_S", "SnapshotStager"]

_SMALLEST_NBYTES = 4096
"""Of a snapshot, which has some memory in any case."""

_SLACK_NBYTES = 64 << 20
"""A snapshot is kept if it has no more than twice what is needed, and this."""

_LOG = logging.getLogger("torch_ckpt")
_WARN_AFTER_S = 5.0

TIMEOUT_S = 1800.0
"""How long a save waits for the former one to give its memory back."""

_THREADS = min(4, os.cpu_count() or 1)


class SnapshotStager:
    """Copies a state dict into memory that is kept from save to save; an ``AsyncStager`` of DCP.

    The memory is all there before the first byte is copied, and several threads copy. The first
    save has to make it; :meth:`reserve` does so beforehand. A snapshot is in use until the state
    dict that :meth:`stage` has returned is gone, or with :class:`FastWriter` until the thread that
    saves has ended; a save that begins earlier waits for that, at most 1800 s. So at most one copy
    exists: on a rank, the bytes of its tensors, or ``max_host_nbytes``.

    Args:
        max_host_nbytes: Most bytes of a snapshot. Tensors beyond it are not copied: with
            :class:`FastWriter`, ``async_save`` returns when they have been written from where they
            are, and the rest is written in the background. Other writers, and saves by another
            process, have no such thing, and staging raises.
        blocking: Whether :meth:`stage` returns when everything is copied. Otherwise
            ``dcp.async_save`` returns an ``AsyncSaveResponse`` before, and the tensors must not
            change until :meth:`wait_staged` has returned.

    Raises:
        ValueError: ``max_host_nbytes`` is less than 1.

    Attributes:
        waits: How often a save had to wait for a former one.
        skips: How often :func:`torch_ckpt.async_save` skipped one instead.
        refusals: How often it raised.

    Example::

        stager = SnapshotStager()
        stager.reserve(state)
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    """

    _synchronize_after_execute = True

    def __init__(
        self,
        *,
        max_host_nbytes: int | None = None,
        blocking: bool = True,
    ) -> None:
        if max_host_nbytes is not None and max_host_nbytes < 1:
            raise ValueError(f"{max_host_nbytes=} is less than 1")
        self.max_host_nbytes = max_host_nbytes
        self.blocking = blocking
        self.waits = self.skips = self.refusals = 0
        self.share: Share | None = None  # Of this rank, in the last save.
        self._free: list[_native.Snapshot | None] = [None]  # Empty while the snapshot is in use.
        self._in_use: set[Staged] = set()
        self._changed = threading.Condition()
        self._copying: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._devices = _native.Devices()
        self._inherited: object = None
        PROCESS.forkable.add(self)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """As DCP asks: whether :meth:`synchronize_staging` is to be called."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """As :meth:`wait_staged`."""
        self.wait_staged()

    def wait_staged(self) -> None:
        """Returns when the tensors that were staged last may change.

        Raises:
            Exception: They could not be copied; the save raises the same.
        """
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    @property
    def is_busy(self) -> bool:
        """Whether the next save would wait for a former one."""
        with self._changed:
            self._reclaim()
            return not self._free

    def close(self) -> None:
        """Lets go of the memory that is not in use."""
        with self._changed:
            if self._free:
                self._free = [None]
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def reserve(self, state_dict: dict[str, Any]) -> None:
        """Makes the memory for such a state dict unless it is in use, and copies nothing.

        Raises:
            StorageError: There is not as much memory.
            ValueError: A tensor in it has no memory.
        """
        placed = _Placed(CopiedState(state_dict).tensors, self.max_host_nbytes)
        with self._changed:
            free, self._free = self._free, []
        if not free:
            return
        try:
            snapshot = _fitting(free, placed.nbytes)
            free.append(snapshot)
            snapshot.pin_for(placed.inspect(), self._devices)
        finally:
            for snapshot_or_none in free:
                self._give_back(snapshot_or_none)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copies everything, tensors of other devices included.

        Returns:
            The same structure, of plain CPU tensors where there were others; objects are copied.
            A future of it unless ``blocking``.

        Raises:
            CheckpointError: The former save has not ended within 1800 s.
            StorageError: There is not as much memory.
            UnsupportedError: ``max_host_nbytes`` does not hold the state.
            ValueError: A tensor has no memory.
        """
        return self.begin(state_dict)[0]

    def begin(
        self,
        state_dict: dict[str, Any],
        *,
        left_out: Collection[int] = (),
        may_leave: bool = False,
        name: str = "that of a state dict",
    ) -> tuple[dict[str, Any] | Future[dict[str, Any]], Staged]:
        """As :meth:`stage`, for a writer that knows when its save has ended.

        Args:
            state_dict: What to copy.
            left_out: ``id`` of tensors that will not be written, and so need not be copied; none
                unless ``blocking``.
            may_leave: Whether the writer first writes what ``max_host_nbytes`` leaves.
            name: Names the snapshot in messages.
        """
        with contextlib.suppress(Exception):  # It was the former save's.
            self.wait_staged()
        with gc_paused():
            return self._begin(state_dict, left_out, may_leave, name)

    def _begin(
        self, state_dict: dict[str, Any], left_out: Collection[int], may_leave: bool, name: str
    ) -> tuple[dict[str, Any] | Future[dict[str, Any]], Staged]:
        copied = CopiedState(state_dict)
        rest = [tensor for tensor in copied.tensors if id(tensor.live) in left_out]
        drop_memory(rest)
        wanted = [tensor for tensor in copied.tensors if id(tensor.live) not in left_out]
        placed = _Placed(wanted, self.max_host_nbytes)
        if placed.left and not (may_leave and self.blocking):
            raise UnsupportedError(
                f"cannot stage {placed.nbytes + sum(run.nbytes for run in placed.left)} bytes in "
                f"{self.max_host_nbytes=}: only FastWriter, with a stager that blocks, writes what "
                "is left in time"
            )
        taken = self._take()
        try:
            snapshot = _fitting(taken, placed.nbytes)
        finally:
            for unfit in taken:
                self._give_back(unfit)
        staged = self._use(snapshot, placed, name)
        try:
            if self.blocking:
                placed.copy_all(snapshot, self._devices)
                copied.put_together()
                state = PartlyStaged(staged, copied.state) if placed.left else copied.state
                return state, staged
            return self._copy_later(placed, snapshot, copied, staged), staged
        except BaseException:
            staged.release()  # The error may be referred to for long, and so may its frames.
            raise

    def _use(self, snapshot: _native.Snapshot, placed: _Placed, name: str) -> Staged:
        """Gives what was placed memory of the snapshot, which is in use until it is released."""

        def release(staged: Staged) -> None:
            with self._changed:
                if staged in self._in_use:
                    self._in_use.remove(staged)
                    self._give_back(snapshot)

        view = memoryview(snapshot)
        try:
            address = placed.set_memory(view)
        except BaseException:
            self._give_back(snapshot)
            raise
        staged = Staged(
            address,
            snapshot.nbytes,
            name=name,
            has_left=bool(placed.left),
            release=release,
        )
        with self._changed:
            self._in_use.add(staged)
        # When no tensor has the memory any more.
        weakref.finalize(view, release, staged).atexit = False
        return staged

    def _copy_later(
        self, placed: _Placed, snapshot: _native.Snapshot, copied: CopiedState, staged: Staged
    ) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()

        def copy() -> None:
            try:
                placed.copy_all(snapshot, self._devices)
                copied.put_together()
            except BaseException as error:
                staged.release()
                done.set_exception(error)
                raise
            done.set_result(copied.state)

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "torch_ckpt-stage")
        self._copying = self._executor.submit(copy)
        return done

    def _take(self) -> list[_native.Snapshot | None]:
        """One that is free, when there is one."""
        begin = time.monotonic()
        warn_at = begin + _WARN_AFTER_S
        with self._changed:
            self._reclaim()
            self.waits += not self._free
            while not self._free:
                now = time.monotonic()
                if now - begin >= TIMEOUT_S:
                    raise CheckpointError(
                        f"cannot stage: no snapshot was free within {TIMEOUT_S:g} s. In use: "
                        f"{self._names_in_use()}"
                    )
                if now >= warn_at:
                    warn_at += TIMEOUT_S
                    _LOG.warning(
                        "async_save waits, at most %g s, for a snapshot to be free. In use: %s",
                        TIMEOUT_S,
                        self._names_in_use(),
                    )
                self._changed.wait(min(begin + TIMEOUT_S - now, POLL_S))
                self._reclaim()
            return [self._free.pop()]

    def _reclaim(self) -> None:
        """Takes back what saves had that have ended, whoever still refers to it: errors do."""
        for staged in list(self._in_use):
            if staged.is_over:
                staged.release()

    def _names_in_use(self) -> str:
        return "; ".join(str(staged) for staged in self._in_use)

    def after_fork(self) -> None:
        """Called in a forked child, which has no thread that saves, and must not free the memory.

        Copies of it are the child's, but memory that is pinned is not its own to unpin.
        """
        self._inherited = self._free, self._in_use, self._executor, self._devices
        self._devices = _native.Devices()
        self._free, self._in_use = [None], set()
        self._changed = threading.Condition()
        self._executor = self._copying = self.share = None

    def _give_back(self, snapshot: _native.Snapshot | None) -> None:
        with self._changed:
            self._free.append(snapshot)
            self._changed.notify()


class _Placed:
    """What goes where in a snapshot: the one who decides it.

    Args:
        tensors: Those to be placed.
        max_nbytes: Of the snapshot.

    Attributes:
        nbytes: Of a snapshot that holds them, at least one page.
        left: Runs that it has no room for.
    """

    def __init__(self, tensors: Iterable[CopiedTensor], max_nbytes: int | None) -> None:
        self.left: list[MemoryRun] = []
        self._places: list[tuple[MemoryRun, torch.Tensor, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._inspected: _native.TensorBatch | None = None
        end = 0
        for run in runs_of(tensors):
            offset = _native.place_in_snapshot(end, run.nbytes)
            if max_nbytes is not None and offset + run.nbytes > max_nbytes:
                self.left.append(run)
                continue
            self._places.append((run, run.live_bytes(), offset))
            end = offset + run.nbytes
        self.nbytes = max(end, _SMALLEST_NBYTES)

    def inspect(self) -> _native.TensorBatch:
        """Views of what is to be copied, after what the current streams do."""
        return _tensor_view.inspect(
            [live for _, live, _ in self._places], writable=False, stages=True
        )

    def set_memory(self, view: memoryview) -> int:
        """Has the copies of tensors lie in a snapshot, those of others be views of them.

        Returns:
            The address of the snapshot.
        """
        self._inspected = self.inspect()
        for run, live, offset in self._places:
            nbytes = run.nbytes
            memory = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
            run.set_memory(memory)
            self._copies.append((memory, live, offset))
        for run in self.left:
            run.use_live_memory()
        self._places = []
        return torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()

    def copy_all(self, snapshot: _native.Snapshot, devices: _native.Devices) -> None:
        """Copies what was placed; returns when it is there."""
        copies, self._copies = self._copies, []
        looked, self._inspected = self._inspected, None
        assert looked is not None
        plain = looked.plain
        snapshot.copy(looked, plain, [copies[i][2] for i in plain], _THREADS, devices)
        others = set()  # Devices that the engine does not know.
        for number in set(range(len(copies))).difference(plain):
            memory, live, _ = copies[number]
            others.add(live.device)
            memory.copy_(live.detach().reshape(-1).view(torch.uint8), non_blocking=True)
        for device in others:
            torch.accelerator.synchronize(device)


def _fitting(free: list[_native.Snapshot | None], nbytes: int) -> _native.Snapshot:
    """Takes the last of those that are free, or makes another in its place if its size is wrong."""
    kept = free.pop()
    if kept is not None and nbytes <= kept.nbytes <= 2 * nbytes + _SLACK_NBYTES:
        return kept
    del kept  # Before there is another.
    try:
        return _native.Snapshot(nbytes, _THREADS)
    except BaseException:
        free.append(None)
        raise


PROCESS.stager = SnapshotStager()
