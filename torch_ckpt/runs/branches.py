"""Branches of a run: steps that were saved after the run went back to an older step.

A run that goes back to step 300 and saves again leaves its newer steps, such as step 700, as an
abandoned branch. The steps of the new branch record the step at which it begins.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import warnings
from collections.abc import Mapping, Sequence

from torch_ckpt.commits.small_files import BRANCH
from torch_ckpt.errors import CheckpointError
from torch_ckpt.runs.retention import Retention
from torch_ckpt.runs.step_directories import StepDirectories
from torch_ckpt.runs.step_files import branch_of

__all__ = ["Branches"]


class Branches:
    """The branch on which this process saves. Owned by the coordinator of the run.

    ``disks`` are the directories of the run, the one that saves go to first. The metric of
    ``retention`` ranks the steps.
    """

    def __init__(self, disks: Sequence[StepDirectories], retention: Retention) -> None:
        self._disks, self._retention = disks, retention
        self._at: int | None = None  # The step that this process continues.
        self._record: Mapping[str, int | None] | None = None  # For the steps of this branch.
        self._passed_over: int | None = None  # The newest step that a restore could not load.
        self._has_warned = False

    def restored(self, step: int, newest_in_memory: int, *, is_given: bool) -> None:
        """Records that this process continues a step.

        ``newest_in_memory`` is the step itself if that is newer. ``is_given`` says that the user
        gave the step. Otherwise it is the newest that loads.
        """
        newest = max(filter(None, (disk.newest_after(step) for disk in self._disks)), default=None)
        self._at, self._record = step, self._branch_of(step)
        self._has_warned, self._passed_over = False, None
        if not is_given:
            self._passed_over = newest
            return
        newest = max(newest or step, newest_in_memory)
        if newest > step:
            self._record = {"continued_from": step}
            if not self._is_best(step):  # An evaluation restores the best step.
                self._warn("was restored", step, newest)

    def saving(self, step: int) -> dict[str, bytes]:
        """Returns the file that records the branch of a step that is saved, by name, if any."""
        newest = self._disks[0].newest_after(step)  # A save does not wait for another storage.
        if newest is not None and newest != self._passed_over:
            self._record = self._record or {"continued_from": self._at}
            self._warn("is saved", step, newest)
        return {} if self._record is None else {BRANCH: json.dumps(self._record).encode()}

    def discarded_after(self, step: int) -> None:
        """Records that the steps after this one were removed."""
        self._has_warned, self._passed_over = False, None
        if self._at is not None and self._at >= step:
            self._record = self._branch_of(self._at)

    def _branch_of(self, step: int) -> Mapping[str, int | None] | None:
        """Returns the record of a step, which each copy of the step has."""
        records = (branch_of(disk.path(step)) for disk in self._disks)
        return next((record for record in records if record is not None), None)

    def _is_best(self, step: int) -> bool:
        with contextlib.suppress(CheckpointError):
            return step in self._retention.best(self._disks)
        return False

    def _warn(self, what: str, step: int, newest: int) -> None:
        """Warns that a step is older than the newest one, and how to remove those after it."""
        if self._has_warned:
            return
        self._has_warned = True
        run = self._disks[0].directory
        warnings.warn(
            f"step {step} {what}, but step {newest} of {run} is newer: the next restore() without "
            f"a step loads step {newest}. To remove the steps after step {step}, call "
            f"run.discard_after({step}), or run: "
            f"torch-ckpt rm {shlex.quote(str(run))} --after {step}",
            stacklevel=4,
        )
