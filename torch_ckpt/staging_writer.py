"""The part of FastWriter that stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from torch_ckpt import _native
from torch_ckpt.options import IoOptions
from torch_ckpt.own_part import not_needed, part_of
from torch_ckpt.staged import Staged
from torch_ckpt.staging import STAGER, SnapshotStager

__all__ = ["StagingWriter"]


class StagingWriter(StorageWriter):
    """A writer that is DCP's ``AsyncStager`` as well, and knows when a save has ended.

    Args:
        stager: That of the whole process if ``None``.
    """

    io: IoOptions
    _synchronize_after_execute = True

    def __init__(self, stager: SnapshotStager | None) -> None:
        self.stager = STAGER if stager is None else stager
        self._staged: Staged | None = None

    def __getstate__(self) -> dict[str, Any]:
        # To the process that saves, whose plans are not known here. What is staged travels by
        # itself, and the memory stays.
        self.stager.planned = None
        return {**self.__dict__, "stager": None, "_staged": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stager=STAGER)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP is to call :meth:`synchronize_staging` when the save has begun."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies what this rank will write; all that it has unless that is known.

        It is known where :class:`FastSavePlanner` has planned the same state in the asynchronous
        save before, and the stager blocks. See :meth:`SnapshotStager.stage`.
        """
        part = self.stager.planned if self.stager.blocking else None
        left_out = set() if part is None else not_needed(state_dict, part)
        state, self._staged = self.stager.begin(state_dict, left_out=left_out, may_leave=True)
        return state

    def synchronize_staging(self) -> None:
        """Returns when what was staged may change: all, or what was written from where it was."""
        self.stager.wait_staged()
        if self._staged is not None:
            self._staged.wait_for_begin()
            if self._staged.has_left:
                with _native.Haste():  # Training stands still.
                    self._staged.wait_for_first(self.stager.timeout_s)

    def close(self) -> None:
        """Has nothing to let go of: the memory is the stager's."""

    @property
    def _background(self) -> tuple[int, float]:
        """How far threads that write step back: what was staged is written in the background."""
        if self._staged is None:
            return 0, 1.0
        return self.io.background_nice, self.io.background_share

    def _begin_staged_save(self) -> None:
        """Called in the thread of a save, by the first that DCP asks of a writer there."""
        if self._staged is not None and not self._staged.begin_save():
            self._staged = None

    @property
    def _can_wait(self) -> Callable[[torch.Tensor | None], bool] | None:
        staged = self._staged
        is_whole = staged is None or not (staged.has_left or staged.has_left_out)
        return None if is_whole or staged is None else staged.can_wait

    def _first_are_written(self) -> None:
        if self._staged is not None:
            self._staged.first_are_written()

    def _wrote_part(self, plan: SavePlan, planner: SavePlanner) -> None:
        if self._staged is not None:
            self.stager.planned = part_of(plan, planner)

    @contextlib.contextmanager
    def _writing_staged(self) -> Iterator[None]:
        """Ends the wait for what was to be written first, whatever becomes of it."""
        try:
            yield
        except BaseException:
            self.stager.planned = None
            raise
        finally:
            self._first_are_written()
