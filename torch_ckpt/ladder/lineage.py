"""The lineage of a run: the steps from which its training continues, and the term of this process.

If a training continues from step 300 and saves again, all newer steps, such as step 700, become an
abandoned branch, no matter which job saved them. A restore loads them only by their number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import shlex
import warnings
from collections.abc import Mapping, Sequence

from torch_ckpt.commits.small_files import BRANCH
from torch_ckpt.commits.terms import (
    Term,
    check_directory,
    check_term,
    newest_term,
    other_directory,
    superseded,
    take_term,
    term_at,
)
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import branch_of

__all__ = ["Lineage"]

_LOG = logging.getLogger("torch_ckpt")


class Lineage:
    """The term in which this process saves, and its branch.

    The coordinator of the run decides both; the other ranks :meth:`adopt` the term. ``disks`` are
    the directories of the run: saves go to the first one. The last is the directory of the run
    itself, which contains the terms. The metric of ``retention`` ranks the steps.
    """

    def __init__(self, disks: Sequence[StepDirectories], retention: Retention) -> None:
        self._disks, self._run, self._retention = disks, disks[-1].directory, retention
        self._is_alone = len(disks) == 1  # Whether steps are saved to the run's directory itself.
        self._is_on_disk = self._run.local_path is not None
        may_create = self._is_alone and self._is_on_disk
        here, *above = (may_create and _mounts_at(self._run)) or [0]
        self._above = set(above) - {here}  # It is not below them while its own is mounted.
        self._job = secrets.token_hex(8)  # Stored in the files of its terms.
        self._term: Term | None = None  # From the first save on.
        self._saved: float = 0  # The newest step that was saved in that term.
        self._remaining = math.inf  # The newest step that the discards since that term have left.
        self._committed: int | None = None  # The last step that this process committed.
        self._seen: Term | None = None  # The newest term when this process restored.
        self._place = Term()  # A term that the directory has: the own one, or the newest one found.
        self._restored: dict[int, int] = {}  # Steps that were restored since, with their terms.
        self._at: int | None = None  # The step that this process continues.
        self._root: int | None = None  # The step at which the branch begins.
        self._is_branch = False  # Whether the steps record that.
        self._passed_over: int | None = None  # The newest step that a restore could not load.
        self._has_warned = False

    def restored(
        self, step: int, newest_in_memory: int, term: int, newest: Term, *, is_given: bool
    ) -> None:
        """Records that this process continues a step, which was saved in a term.

        ``newest_in_memory`` is the newest step in memory, or the step itself if that is newer.
        ``newest`` is the newest term at the time when the step was chosen. ``is_given``: whether
        the user gave the step; otherwise it is the newest one that loads.
        """
        after = max(filter(None, (disk.newest_after(step) for disk in self._disks)), default=None)
        self._restored[step], self._seen = term, newest
        self._place = self._term or newest
        self._at = step
        self._take_root_of(step)
        self._has_warned, self._passed_over = False, None
        if not is_given:
            self._passed_over = after
            return
        after = max(after or step, newest_in_memory)
        if after > step:
            self._is_branch, self._root = True, step
            if not self._is_best(step):  # An evaluation restores the best step.
                leaves = f"a save of a step below {after} leaves it"
                self._warn(f"was restored, but step {after} of", step, leaves)

    def saving(self, step: int) -> dict[str, bytes]:
        """Returns the small file, by name, that records the term, job and branch of a step to save.

        Takes a term for the first step, for a step below one that this process has saved, after
        steps were discarded, and if the directory is gone: the save creates it again. Raises
        as :meth:`check`, and CheckpointError if it would be created on the mount above its own,
        which is no longer mounted. With a local directory, a save that takes a term raises it
        if the directory of the run is gone: a new one would not have its id.
        """
        takes_term = self._term is None or step < self._saved
        is_gone = (self._is_alone or takes_term) and self._is_gone()
        if is_gone and not self._is_alone:
            raise self._gone()
        if is_gone:
            if self._above.intersection(_mounts_at(self._run)[:1]):
                raise other_directory(self._run, "it is gone, and its parent is on another mount")
            if self._place.job:
                _LOG.warning("%s is gone; this save creates it again", self._run)
        if takes_term or is_gone:
            self._saved = math.inf  # Even if this fails, the file of the term may exist.
            self._term = self._place = self._next_term(step)
            self._restored.clear()
            self._remaining = math.inf
        else:
            self.check_here()
        newest = self._disks[0].newest_after(step)  # A save does not wait for another storage.
        if newest is not None and newest != self._passed_over:
            if not self._is_branch:
                self._is_branch, self._root = True, self._at
            self._warn(f"is saved, but step {newest} of", step, "this save leaves it")
        self._saved = step
        record: dict[str, int | str | None] = {"term": self.term.number, "job": self._job}
        if self._is_branch:
            record["continued_from"] = self._root
        return {BRANCH: json.dumps(record).encode()}

    @property
    def term(self) -> Term:
        """The term of this process; term 0 before its first save."""
        return self._term or Term()

    def adopt(self, term: int, lineage: Mapping[int, int]) -> None:
        """Continues in the term of the coordinator. Called on the other ranks."""
        self._term = self._place = Term(term, lineage)  # Without a job: only one rank checks it.

    def check(self) -> None:
        """Raises SupersededError if another job has taken a later term than this process.

        On the coordinator, whose term has an id of the job, raises CheckpointError if the path
        leads to another directory now, also if this process has only restored. A URL does not.
        """
        self._check_directory(may_be_gone=True)
        if self._term is not None:
            check_term(self._run, self._term.number)

    def check_place(self) -> None:
        """Raises CheckpointError if the directory that this job has used is not there.

        On the coordinator only, as :meth:`check`: steps in another directory are not of this run.
        Warns once if the last step that this job committed is not there: perhaps an old copy is.
        """
        self._check_directory()
        if self._term is None and self._place.job:
            self._place = newest_term(self._run)  # Files of former terms are removed.
        step, term = self._committed, self.term
        if step is None or not term.job or any(has_checkpoint(d.path(step)) for d in self._disks):
            return
        is_newest = newest_term(self._run).number <= term.number  # Another job may remove steps.
        if is_newest and self._committed == step:  # Else a save was committed meanwhile.
            self._committed = None
            warnings.warn(
                f"step {step}, which this job saved, is not in {self._run} any more: perhaps an "
                "old copy of the directory is there",
                stacklevel=4,
            )

    def is_here(self) -> bool:
        """Returns whether :meth:`check_place` finds the directory."""
        with contextlib.suppress(CheckpointError):
            self._check_directory()
            return True
        return False

    def committed(self, step: int) -> None:
        """Records that a save of this process was committed."""
        self._committed = step

    def check_removal(self) -> None:
        """Raises as :meth:`check_place`, which also warns, and as :meth:`check_since_restore`.

        In another directory, steps of another run would be removed; without one, local copies
        alone.
        """
        self.check_place()
        self.check_since_restore()

    def _check_directory(self, *, may_be_gone: bool = False) -> None:
        place = self._place  # Threads read it.
        if not place.job or not self._is_on_disk:
            return
        if not self._is_gone():
            check_directory(self._run, place.number, place.job)
        elif not may_be_gone:
            raise self._gone()

    def _gone(self) -> CheckpointError:
        otherwise = "; otherwise the next save creates it again" if self._is_alone else ""
        return CheckpointError(
            f"cannot use {self._run}: it is gone, and this job has used it. Move it back{otherwise}"
        )

    def check_since_restore(self) -> None:
        """Raises as :meth:`check`, also if another job took a term since this process restored."""
        self.check()
        if self._term is None and self._seen is not None:
            newest = newest_term(self._run)
            if newest.number > self._seen.number and newest.job != self._job:
                raise superseded(self._run, newest)

    def check_here(self) -> None:
        """Raises as :meth:`check`, for a term that was taken on this machine.

        Saves to a local directory do not wait for the directory of the run. The promotion checks
        that one.
        """
        if self._is_alone:
            self.check()
        elif self._term is not None:
            local = self._disks[0].directory
            if self._term.job:
                check_directory(local, self._term.number, self._term.job, may_be_empty=True)
            check_term(local, self._term.number)

    def _is_gone(self) -> bool:
        """Returns whether nothing is at the path of a run on disk."""
        return self._is_on_disk and self._run.is_missing()

    def newest(self) -> Term:
        """Returns the newest term of the run, whose lineage decides which steps are removed.

        Raises as :meth:`check_since_restore`: only the newest job decides.
        """
        self.check_since_restore()
        return self._term or newest_term(self._run)

    def discarded_after(self, step: int) -> None:
        """Records that the steps after this one were removed, or that this failed."""
        self._has_warned, self._passed_over = False, None
        self._saved = math.inf  # The steps may be in a place that cannot be reached now.
        with contextlib.suppress(CheckpointError):
            if not any(disk.newest_after(step) for disk in self._disks):
                self._remaining = min(self._remaining, step)
                restored = self._restored.items()
                self._restored = {each: term for each, term in restored if each <= step}
        self._committed = None
        if self._at is not None and self._at >= step:
            self._take_root_of(self._at)

    def _next_term(self, step: int) -> Term:
        """Takes a term that continues from the newest restored step up to ``step``."""
        self.check_since_restore()
        former = self._term or newest_term(self._run)
        at = max((each for each in self._restored if each <= step), default=None)
        if at is None:
            lineage = former.before(int(min(step - 1, self._remaining)), former.number)
        else:  # Also that step itself: its new save may fail.
            term = self._restored[at]
            branch = term_at(self._run, term) or former  # It may be an abandoned branch.
            lineage = branch.before(at, term)
        local = None if self._is_alone else self._disks[0].directory
        return take_term(self._run, lineage, local, self._job)

    def _take_root_of(self, step: int) -> None:
        """Continues the branch of a step, which each copy of the step records."""
        records = (branch_of(disk.path(step)) for disk in self._disks)
        record = next((record for record in records if record is not None), None)
        self._is_branch = record is not None
        self._root = None if record is None else record["continued_from"]

    def _is_best(self, step: int) -> bool:
        with contextlib.suppress(CheckpointError):
            return step == self._retention.best(self._disks)
        return False

    def _warn(self, what: str, step: int, leaves: str) -> None:
        """Warns that a step is older than the newest one, and how to remove those after it."""
        if self._has_warned:
            return
        self._has_warned = True
        run = self._disks[0].directory
        warnings.warn(
            f"step {step} {what} {run} is newer: {leaves}, and restore() loads it then only by its "
            f"number. To remove the steps after step {step}, call run.discard_after({step}), or "
            f"run: torch-ckpt rm {shlex.quote(str(run))} --after {step}",
            stacklevel=4,
        )


def _mounts_at(path: Location) -> list[int]:
    """Returns the mounts of a directory on disk and its parents, as far as they exist."""
    found = (each.mount() for each in (path, *path.parents))
    return [mount for mount in found if mount is not None]
