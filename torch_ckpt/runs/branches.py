"""Branches of a run: steps that were saved after the run went back to an older step.

A run that goes back to step 300 and saves again leaves its newer steps, such as step 700, as an
abandoned branch. The steps of the new branch record the step at which it begins.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping

from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.step_files import BRANCH, branch_of, newest_committed

__all__ = ["Branches"]


class Branches:
    """The branch on which this process saves. Owned by the coordinator of the run.

    Args:
        directory: Directory of the run.
        is_best: Returns whether a step has the best metric.
    """

    def __init__(self, directory: Location, is_best: Callable[[int], bool]) -> None:
        self._directory, self._is_best = directory, is_best
        self._at: int | None = None  # The step that this process continues.
        self._newest: int | None = None  # The newest step, as this process began to continue.
        self._is_known = False  # Whether that was looked up.
        self._record: Mapping[str, int | None] | None = None  # For the steps of this branch.
        self._has_warned = False

    def restored(self, step: int, newest: int, *, is_given: bool) -> None:
        """Records that this process continues a step.

        Args:
            step: The step.
            newest: The newest step, as far as it is not on disk.
            is_given: Whether the user gave the step. Otherwise it is the newest whole one.
        """
        if is_given:
            newest = max(newest, self._find_newest() or newest)
        self._at, self._newest, self._is_known = step, newest, True
        self._record = branch_of(self._directory / f"step-{step}")
        self._has_warned = False
        if newest > step:
            self._record = {"continued_from": step}
            if not self._is_best(step):  # An evaluation restores the best step.
                self._warn(f"step {step} was restored")

    def saving(self, step: int) -> dict[str, bytes]:
        """Returns the file that records the branch of a step that is saved, by name, if any."""
        if not self._is_known:  # A process that has restored nothing.
            self._is_known = True
            self._newest = self._find_newest()
            if self._newest is not None and self._newest > step:
                self._record = {"continued_from": None}
        if self._newest is not None and step < self._newest:
            self._warn(f"step {step} is saved")
        return {} if self._record is None else {BRANCH: json.dumps(self._record).encode()}

    def discarded_after(self, step: int) -> None:
        """Records that the steps after this one were removed."""
        if self._newest is None or self._newest <= step:
            return
        self._newest = step
        if self._at is not None and self._at >= step:
            self._record = branch_of(self._directory / f"step-{self._at}")

    def _find_newest(self) -> int | None:
        """Returns the newest step on disk. A branch is no reason to fail a save or a restore."""
        with contextlib.suppress(CheckpointError):
            return newest_committed(self._directory)
        return None

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        at = "STEP" if self._at is None else self._at
        warnings.warn(
            f"{what}, but step {self._newest} of {self._directory} is newer: the next restore() "
            f"without a step loads step {self._newest}. To remove the newer steps, call "
            f"run.discard_after({at}), or run: torch-ckpt rm {self._directory} --after {at}",
            stacklevel=4,
        )
