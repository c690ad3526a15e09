"""SaveStaging: the part of a writer that copies state dicts and tracks the copies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt.coordination.group import time_limit_s
from torch_ckpt.planning.item_views import ColumnItems
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.share import LeftOut, Sharing, share_of
from torch_ckpt.staging.staged import Staged
from torch_ckpt.staging.stager import SnapshotStager

__all__ = ["SaveStaging"]


class SaveStaging:
    """Stages the saves of one writer, and registers the thread of each save.

    So the stager can reclaim the memory when that thread ends. If ``stager`` is ``None``, the
    process-wide stager is used.
    """

    def __init__(self, stager: SnapshotStager | None) -> None:
        self.stager = PROCESS.stager if stager is None else stager
        self._staged: Staged | None = None
        self._sharing: Sharing | None = None
        self._ranks: Sequence[int] | None = None  # The ranks that divided the last save.
        self._left_out = LeftOut()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for the save process, which receives the staged state separately.
        return {**self.__dict__, "stager": None, "_staged": None, "_sharing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stager=PROCESS.stager)

    # ---- Before the save ----

    @contextlib.contextmanager
    def sharing(
        self,
        planner: SavePlanner | None,
        decide: Callable[[bytes, Callable[[Sequence[bytes]], bool]], bool],
        ranks: Sequence[int],
    ) -> Iterator[None]:
        """Makes :meth:`stage` copy only this rank's share, if the shares are still valid.

        Either all ranks of the save enter the context, or none. The ranks must plan one checkpoint
        together, and threads must write it. ``decide`` has the same meaning as for
        :class:`Sharing`.
        """
        if type(planner) is FastSavePlanner:
            self._sharing = Sharing(planner, decide, ranks)
        try:
            yield
        finally:
            self._sharing = None

    def stage(self, state_dict: dict[str, Any], path: object) -> Any:
        """Copies this rank's state dict, or within :meth:`sharing` its share, for a save to a path.

        Returns the copy.
        """
        left_out = LeftOut()
        self._ranks = None if self._sharing is None else self._sharing.ranks
        if self._sharing is not None:
            share = self.stager.share if self.stager.blocking else None
            left_out = self._sharing.left_out(state_dict, share)
        state, self._staged = self.stager.begin(
            state_dict,
            left_out=left_out.tensors,
            allow_unstaged=True,
            name=f"the snapshot of {path}",
        )
        self._left_out = dataclasses.replace(left_out, sources=())  # They would remain in memory.
        return state

    def synchronize(self) -> None:
        """Waits until training may change the tensors: when copied, or, if unstaged, written."""
        self.stager.wait_staged()
        if self._staged is not None and self._staged.is_unstaged:
            self._staged.wait_until_written(time_limit_s())

    # ---- In the thread of the save ----

    def begin_save(self) -> None:
        """Registers the thread of a save. Called by the first method that DCP calls in it."""
        if self._staged is not None and not self._staged.begin_save():
            self._staged = None

    @property
    def is_staged(self) -> bool:
        """Whether the present save writes a copy, in the background."""
        return self._staged is not None

    @property
    def blocks_training(self) -> bool:
        """Whether training waits until the present save has written its tensors."""
        return self._staged is None or self._staged.blocks_training

    def set_values(self, items: object) -> None:
        """Sets the values of replicas that were compared when the state dict was staged."""
        known = self._left_out
        if self._staged is None or known.values is None or not isinstance(items, ColumnItems):
            return
        if items.digest == known.digest:
            items.values = known.values

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Ends the wait for unstaged tensors after the block, even if it raises."""
        try:
            yield
        except BaseException:
            self.stager.share = None
            raise
        finally:
            if self._staged is not None:
                self._staged.end_wait()

    def wrote(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Stores the plan of a complete save as this rank's share of the next one."""
        if self._staged is not None:
            ranks = self._ranks
            self.stager.share = None if ranks is None else share_of(plan, planner, ranks)
