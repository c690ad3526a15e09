"""Asynchronous loads: reads into host memory in the background, and copies to the targets later.

The ranks plan and read as in any load, in a thread, but each target is replaced by a tensor in host
memory. ``LoadFuture.result`` copies these to the targets. The call of the ranks begins with
``async_load`` and ends with ``result``: a rank that fails or cancels in between fails all.
"""

from __future__ import annotations

import itertools
import traceback
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import are_disjoint
from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.background import in_thread
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import Call
from torch_ckpt.coordination.statefuls import StateDicts
from torch_ckpt.errors import CancelledError
from torch_ckpt.planning.load_planner import FastLoadPlanner, PlannedReads
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.storage.target_copies import Copies

__all__ = ["LoadFuture", "begin_load"]

_TORCH_ONLY, _kind = _tensor_view.TensorKind.TORCH_ONLY, _tensor_view.tensor_kind


class LoadFuture:
    """The future of an asynchronous load; see :func:`torch_ckpt.async_load`.

    All ranks must call :meth:`result` or :meth:`cancel`. It holds host memory until then.
    """

    def __init__(self, call: Call, what: str, objects: StateDicts, planner: _HostPlanner) -> None:
        self._call, self._what = call, what
        self._loaded: tuple[StateDicts, _HostPlanner] | None = objects, planner
        self._report: LoadReport | None = None
        self._error: BaseException | None = None
        self._exclusive = Exclusive(what)
        self._reads: Future[None]

    def done(self) -> bool:
        """Returns whether all bytes are in host memory, or the load has failed or was cancelled.

        After ``True``, :meth:`result` only copies, and waits for other ranks.
        """
        return self._loaded is None or self._reads.done()

    def result(self, timeout: float | None = None) -> LoadReport | None:
        """Waits for the reads, copies the values to the state dict, and returns the report.

        Ends on each rank when all ranks have copied. Later calls return or raise the same.

        Args:
            timeout: Longest wait for the reads, in seconds.

        Raises:
            TimeoutError: The reads are not complete. Call the method again.
            CheckpointError: This process is a forked child, or a signal handler has interrupted
                another call of the future in this thread.
            CancelledError: This rank has cancelled the load.
            RankTimeoutError: Another rank has cancelled the load, or was late, stuck or dead.
            Exception: As :func:`torch_ckpt.load`.
        """
        if self._loaded is not None and not self._reads.done():
            self._reads.exception(timeout)
        if self._loaded is not None:
            with self._exclusive.use("take the result", self._call.timeout_s):
                if self._loaded is not None:  # Another thread may have taken it.
                    self._finish(*self._loaded)
        try:
            if self._error is not None:
                raise self._error
            return self._report
        finally:
            del self  # The traceback of the error refers to this frame.

    def cancel(self) -> bool:
        """Ends the load on all ranks, and frees its host memory. The targets are unchanged.

        Returns ``False`` if the load has already succeeded or failed. Raises CheckpointError in a
        forked child, and in a signal handler that has interrupted another call of the future.
        """
        with self._exclusive.use("cancel the load", self._call.timeout_s):
            if self._loaded is None or (self._reads.done() and self._reads.exception() is not None):
                return False
            (_, planner), self._loaded = self._loaded, None
            self._error = CancelledError(f"{self._what} was cancelled")

        def end(reads: Future[None]) -> None:
            reads.exception()  # It is expected, and so not reported.
            planner.free()

        self._call.fail(self._error)
        self._reads.add_done_callback(end)
        return True

    def _finish(self, objects: StateDicts, planner: _HostPlanner) -> None:
        try:
            self._reads.result()
            with self._call as call:
                call.raise_if_failed()  # Before the first target changes.
                call.begin_last("restoring")
                planner.copy_to_targets()
                objects.restore()
            self._report = planner.report
        except BaseException as error:
            _clear_frames(error)
            self._error = error
        planner.free()
        self._loaded = None
        del self, objects, planner  # The traceback of an error refers to this frame.


def begin_load(
    state_dict: dict[str, Any],
    reader: StorageReader,
    call: Call,
    *,
    what: str,
    strict: bool | None,
) -> LoadFuture:
    """Begins an asynchronous load in a thread. ``what`` it does is for messages.

    The caller must have entered the call. Raises CheckpointError if the system has no more threads,
    and the errors of ``StateDicts``.
    """
    objects = StateDicts(state_dict, for_load=True, copies_all=True)
    planner = _HostPlanner(allow_partial_load=strict is False, strict=strict)

    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if has_cuda else None

    def read() -> None:
        with call:
            if device is not None:  # Tensors on the meta device get memory there.
                torch.cuda.set_device(device)
            try:
                orchestrate.read(objects, reader, planner, call)
            except BaseException as error:
                planner.free()
                _clear_frames(error)
                raise

    future = LoadFuture(call, what, objects, planner)
    future._reads = in_thread(what, call, read, name="torch_ckpt-load")
    return future


def _clear_frames(error: BaseException) -> None:
    """Clears the frames of an error and its causes, which refer to host memory and to targets."""
    causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
    for each in (error, *causes):
        traceback.clear_frames(each.__traceback__)


class _HostPlanner(FastLoadPlanner):
    """Resolves each target to host memory, until :meth:`copy_to_targets`.

    If the engine lists the targets, and they are disjoint, each box has host memory, into which the
    engine reads. Otherwise each item has, because the order in which items are copied matters.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As in the base class."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # Name and offsets of a box, or also of an item in it and in DCP's order of reads -> target,
        # and its elements in host memory.
        self._boxes: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._items: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def use_reads(self, planned: PlannedReads) -> None:
        """Replaces the boxes that the engine reads by host memory."""
        described = map(planned.reads.describe, range(len(planned.reads)))
        wanted = {(fqn, tuple(offsets)) for fqn, _, offsets, *_ in described}
        work = _native.Work(planned.table)
        boxes: list[tuple[int, tuple[str, tuple[int, ...]], torch.Tensor]] = []
        for number, source in enumerate(planned.sources):
            fqn, _, _, offsets, *_ = work.describe(number)
            key = fqn, tuple(offsets)
            if key in wanted and source is not None and _kind(source) != _TORCH_ONLY:
                boxes.append((number, key, source))
        if are_disjoint(source for _, _, source in boxes):
            for number, key, source in boxes:
                self._boxes[key] = self._held(key[0], source)
                planned.sources[number] = self._boxes[key][1]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns host memory for the elements of an item."""
        box = read_item.dest_index.fqn, read_item.dest_index.offset
        if box in self._boxes:
            host = self._boxes[box][1]
            return narrow_tensor_by_index(host, read_item.dest_offsets, read_item.lengths)
        key = *box, read_item.dest_offsets
        if key not in self._items:
            self._items[key] = self._held(box[0], super().resolve_tensor(read_item))
        return self._items[key][1]

    def loads_plainly(self) -> bool:
        """Returns whether the engine may read into the boxes."""
        return bool(self._boxes)

    def _held(self, fqn: str, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a target and host memory for it. The memory of a new CPU tensor is its own."""
        target = target.detach()
        if fqn in self.allocated and target.device.type == "cpu":
            return target, target
        if _kind(target) == _TORCH_ONLY:  # Its layout is unknown: sparse, quantized.
            return target, target.to("cpu", copy=True)
        return target, torch.empty(target.size(), dtype=target.dtype, device="cpu")

    def free(self) -> None:
        """Frees the host memory."""
        self._boxes, self._items = {}, {}
        if self._reads is not None:
            self._reads.sources.clear()  # Tracebacks may refer to the reads.

    def copy_to_targets(self) -> None:
        """Copies all elements to their targets, in DCP's order.

        Raises:
            MismatchError: Torch refuses.
            ValueError: Elements of a target share memory, and need different values.
        """
        copies = Copies()
        for (fqn, *_), (target, host) in itertools.chain(self._boxes.items(), self._items.items()):
            if host is not target:
                copies.copy(fqn, target, host)
        copies.check()
