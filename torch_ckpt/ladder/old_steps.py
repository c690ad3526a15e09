"""OldSteps: removes the steps that need not remain in the two directories of a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from torch_ckpt.agent.identity import id_in_directory
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion_steps import PromotionSteps
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps, listed_steps
from torch_ckpt.storage.copying import is_of_another_save, is_whole_copy

__all__ = ["OldSteps"]

_LOG = logging.getLogger("torch_ckpt")


class OldSteps:
    """Removes local steps, and those of the run, while others are promoted.

    The ``keep`` newest local steps remain. ``changed`` protects ``steps``, and ``run_id`` is the id
    that both directories must have. All methods are thread-safe.
    """

    def __init__(
        self,
        local: StepDirectories,
        run: StepDirectories,
        lineage: Lineage,
        retention: Retention,
        steps: PromotionSteps,
        changed: threading.Condition,
        *,
        keep: int,
        run_id: str | None,
    ) -> None:
        self._local, self._run, self._lineage = local, run, lineage
        self._retention, self._steps, self._changed = retention, steps, changed
        self._keep, self._run_id = keep, run_id
        self._removing = threading.Lock()

    def check_ids(self, *disks: StepDirectories) -> None:
        """Raises CheckpointError if one of the directories is not of this run any more."""
        for disk in disks:
            if self._run_id is None or (found := id_in_directory(disk.directory)) == self._run_id:
                continue
            now = "was removed or moved" if found is None else f"belongs to run {found} now"
            raise CheckpointError(
                f"cannot use {disk.directory}: it {now}, and this run has the id {self._run_id}"
            )

    def whole_in_run(self) -> set[int]:
        """Returns which promoted steps of those that need not remain the run has whole.

        The others are promoted again. Called by the thread: the storage of the run may not answer.
        """
        with self._changed:
            local = committed_steps(self._local.directory)
            promoted = self._steps.promoted_beyond(local, self._keep)
        whole = set()
        for step in promoted:
            source, target = self._local.path(step), self._run.path(step)
            try:
                self.check_ids(self._local, self._run)
                if is_whole_copy(source, target):
                    whole.add(step)
                    continue
                is_other = is_of_another_save(source, target)
            except CheckpointError:  # It is unknown now.
                continue
            what = "is of another save now" if is_other else "has lost files, which are sent again"
            _LOG.warning("%s %s: %s remains", target, what, source)
            with self._changed:
                self._steps.lost_in_run(step, is_other=is_other)
        return whole

    def remove_here(self, in_use: Callable[[], int | None], whole: Collection[int] = ()) -> None:
        """Removes local steps that need not remain, of promoted ones those ``whole`` in the run.

        ``in_use`` returns the step that is being promoted.
        """
        with self._removing:
            directory = self._local.directory
            try:
                self._lineage.check_here()
                with self._changed:
                    removable = self._steps.removable(
                        *(committed_steps(directory), listed_steps(directory)),
                        keep=self._keep,
                        in_use=in_use(),
                        whole=whole,
                    )
                self._local.sweep()
                self._local.remove(removable)
            except CheckpointError as error:
                _LOG.warning("old steps were not removed from %s: %s", directory, error)

    def remove_in_run(self, newest: int, wanted: Collection[int]) -> None:
        """Removes the steps of the run that are not to be retained.

        Some files of the ``wanted`` steps, which are to be promoted, may have arrived.
        """
        try:
            lineage = self._lineage.newest()
            self._retention.apply(self._run, newest, wanted, lineage=lineage)
            steps = listed_steps(self._run.directory)
        except CheckpointError as error:
            _LOG.warning("old steps were not removed from %s: %s", self._run.directory, error)
        else:
            with self._changed:
                self._steps.remain_in_run(steps)
