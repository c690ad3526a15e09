"""The part of FastWriter that stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from torch_ckpt.options import IoOptions
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.share import Sharing, share_of
from torch_ckpt.staging.staged import Staged
from torch_ckpt.staging.stager import TIMEOUT_S, SnapshotStager

__all__ = ["StagingWriter"]


class StagingWriter(StorageWriter):
    """A writer that is DCP's ``AsyncStager`` as well, and knows when a save has ended.

    Args:
        stager: That of the whole process if ``None``.
    """

    io: IoOptions
    checkpoint_id: Any
    _synchronize_after_execute = True

    def __init__(self, stager: SnapshotStager | None) -> None:
        self.stager = PROCESS.stager if stager is None else stager
        self._staged: Staged | None = None
        self._sharing: Sharing | None = None

    def __getstate__(self) -> dict[str, Any]:
        # To the process that saves. What is staged travels by itself, and the memory stays.
        return {**self.__dict__, "stager": None, "_staged": None, "_sharing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stager=PROCESS.stager)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP is to call :meth:`synchronize_staging` when the save has begun."""
        return self._synchronize_after_execute

    @contextlib.contextmanager
    def sharing(
        self, planner: SavePlanner | None, all_equal: Callable[[bytes], bool]
    ) -> Iterator[None]:
        """Within the block, ranks stage their shares alone where all of them agree.

        All ranks of the save enter it, or none. It is to be planned by all of them together, and
        written by threads.

        Args:
            planner: That of the save.
            all_equal: Returns whether all ranks have called it with the same bytes.
        """
        if type(planner) is FastSavePlanner:
            self._sharing = Sharing(planner, all_equal)
        try:
            yield
        finally:
            self._sharing = None

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies all that this rank has, or within :meth:`sharing` its share."""
        left_out: set[int] = set()
        if self._sharing is not None:
            share = self.stager.share if self.stager.blocking else None
            left_out = self._sharing.left_out(state_dict, share)
        state, self._staged = self.stager.begin(
            state_dict, left_out=left_out, may_leave=True, name=f"that of {self.checkpoint_id}"
        )
        return state

    def synchronize_staging(self) -> None:
        """Returns when what was staged may change: all, or what was written from where it was."""
        self.stager.wait_staged()
        if self._staged is not None and self._staged.has_left:
            self._staged.wait_for_first(TIMEOUT_S)

    def close(self) -> None:
        """Has nothing to let go of: the memory is the stager's."""

    @property
    def _niceness(self) -> int:
        """Of threads that write: staged tensors are written in the background."""
        return 0 if self._staged is None else self.io.background_nice

    def _begin_staged_save(self) -> None:
        """Called in the thread of a save, by the first that DCP asks of a writer there."""
        if self._staged is not None and not self._staged.begin_save():
            self._staged = None

    @property
    def _can_wait(self) -> Callable[[torch.Tensor | None], bool] | None:
        staged = self._staged
        return None if staged is None or not staged.has_left else staged.can_wait

    def _first_are_written(self) -> None:
        if self._staged is not None:
            self._staged.first_are_written()

    def _wrote_share(self, plan: SavePlan, planner: SavePlanner) -> None:
        if self._staged is not None:
            self.stager.share = share_of(plan, planner)

    @contextlib.contextmanager
    def _writing_staged(self) -> Iterator[None]:
        """Ends the wait for what was to be written first, whatever becomes of it."""
        try:
            yield
        except BaseException:
            self.stager.share = None
            raise
        finally:
            self._first_are_written()
