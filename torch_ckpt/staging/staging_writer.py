"""The staging methods of FastWriter."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from torch_ckpt.coordination.group import time_limit_s
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.item_views import ColumnItems
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.save_directory import SaveDirectory
from torch_ckpt.staging.share import LeftOut, Sharing, share_of
from torch_ckpt.staging.staged import Staged
from torch_ckpt.staging.stager import SnapshotStager

__all__ = ["StagingWriter"]


class StagingWriter(StorageWriter):
    """A storage writer that also implements DCP's ``AsyncStager``.

    It registers the thread of each save, so that the stager can reclaim the memory when the thread
    ends. The stager is the process-wide one if ``None``.
    """

    io: IoOptions
    checkpoint_id: Any
    _synchronize_after_execute = True

    def __init__(self, path: str | os.PathLike[str], stager: SnapshotStager | None) -> None:
        self._directory = SaveDirectory(path)
        self.stager = PROCESS.stager if stager is None else stager
        self._staged: Staged | None = None
        self._sharing: Sharing | None = None
        self._staged_ranks: Sequence[int] | None = None  # The ranks that shared out the last save.
        self._left_out = LeftOut()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for the save process, which receives the staged state separately.
        return {**self.__dict__, "stager": None, "_staged": None, "_sharing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stager=PROCESS.stager)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP must call :meth:`synchronize_staging` after it has started the save."""
        return self._synchronize_after_execute

    @contextlib.contextmanager
    def sharing(
        self,
        planner: SavePlanner | None,
        decide: Callable[[bytes, Callable[[Sequence[bytes]], bool]], bool],
        ranks: Sequence[int],
    ) -> Iterator[None]:
        """Makes :meth:`stage` copy only this rank's share, if the shares are still valid.

        All ranks of the save enter the context, or none does. The ranks must plan one checkpoint
        together, and threads must write it. ``decide`` is as for :class:`Sharing`.
        """
        if type(planner) is FastSavePlanner:
            self._sharing = Sharing(planner, decide, ranks)
        try:
            yield
        finally:
            self._sharing = None

    def begin_in_background(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Resolves links in the path of a save that another thread or process will carry out.

        The save then writes to this directory alone, wherever the links lead meanwhile. It is
        ``checkpoint_id`` if the save resets the writer to it.
        """
        self._directory.begin(checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies this rank's state dict, or within :meth:`sharing` its share."""
        left_out = LeftOut()
        self._staged_ranks = None if self._sharing is None else self._sharing.ranks
        if self._sharing is not None:
            share = self.stager.share if self.stager.blocking else None
            left_out = self._sharing.left_out(state_dict, share)
        state, self._staged = self.stager.begin(
            state_dict,
            left_out=left_out.tensors,
            allow_unstaged=True,
            name=f"the snapshot of {self.checkpoint_id}",
        )
        self._left_out = dataclasses.replace(left_out, sources=())  # Which would stay in memory.
        self.begin_in_background()
        return state

    def synchronize_staging(self) -> None:
        """Waits until training may change the tensors: they are copied, or written if unstaged."""
        self.stager.wait_staged()
        if self._staged is not None and self._staged.is_unstaged:
            self._staged.wait_until_written(time_limit_s())

    def close(self) -> None:
        """Does nothing, because the stager owns the memory."""

    @property
    def _niceness(self) -> int:
        """Niceness of the threads that write. Training does not wait for staged tensors."""
        if self._staged is None or self._staged.blocks_training:
            return 0
        return self.io.background_nice

    def _begin_staged_save(self) -> None:
        """Registers the thread of a save. Called by the first method that DCP calls there."""
        if self._staged is not None and not self._staged.begin_save():
            self._staged = None

    def _set_values(self, items: object) -> None:
        """Sets the values of replicas that were compared when the state dict was staged."""
        known = self._left_out
        if self._staged is None or known.values is None or not isinstance(items, ColumnItems):
            return
        if items.digest == known.digest:
            items.values = known.values

    def _wrote_share(self, plan: SavePlan, planner: SavePlanner) -> None:
        if self._staged is not None:
            ranks = self._staged_ranks
            self.stager.share = None if ranks is None else share_of(plan, planner, ranks)

    @contextlib.contextmanager
    def _writing_staged(self) -> Iterator[None]:
        """Ends the wait for unstaged tensors after the block, even if it raises."""
        try:
            yield
        except BaseException:
            self.stager.share = None
            raise
        finally:
            if self._staged is not None:
                self._staged.end_wait()
