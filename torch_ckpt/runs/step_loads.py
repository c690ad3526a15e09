"""StepLoads: the methods of a run that choose, lease and load a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch_ckpt.coordination.exclusive import exclusive
from torch_ckpt.ladder.ladder import Ladder
from torch_ckpt.ladder.step_files import lease, step_number
from torch_ckpt.runs.ending import Ending
from torch_ckpt.runs.save_interval import SaveSchedule

__all__ = ["StepLoads"]


class StepLoads(Ending):
    """The part of :class:`~torch_ckpt.runs.run.Run` that reads its steps."""

    _ladder: Ladder
    _schedule: SaveSchedule

    @exclusive("choose a step")
    def latest_step(self) -> int | None:
        """Returns the step that :meth:`restore` would load; ``None`` if none was committed.

        The method first waits for the background save. The first rank then checks the steps as
        ``verify`` requires, from the newest to the oldest, and warns of each committed step that is
        damaged.

        Raises:
            CheckpointError: The background save failed; the message names its step.
            CorruptionError: There are committed steps, but none that this run continues is whole.
                Do not start training over.
            StorageError: The directory cannot be read.
            RankTimeoutError: A rank was late, stuck or dead.
        """
        self._check_open()
        return self._ladder.latest()

    @contextlib.contextmanager
    def lease(self, step: int) -> Iterator[str | os.PathLike[str]]:
        """Protects a step from removal within the block.

        For jobs that read a step while training continues, on this or another machine. The step is
        removed by the first save after the block instead. If the process dies, its lease expires
        after 300 s. A new save of the same step still replaces it.

        Args:
            step: A committed step.

        Yields:
            The directory of the step.

        Raises:
            NotFoundError: The step is not committed, or is being removed.
            StorageError: The lease, a file in the directory of the run, cannot be written.

        Example::

            run = torch_ckpt.Run("runs/gpt")
            with run.lease(100) as path:
                dcp.load(state, storage_reader=FastReader(path))
        """
        step = step_number(step)
        self._check_open()
        *local, run = self._disks
        has_step = (disk for disk in local if disk.has_whole(step))
        with lease(next(has_step, run).directory, step) as path:
            yield path.checkpoint_id

    @exclusive("restore a step")
    def restore(
        self, state: dict[str, Any], *, step: int | None = None, strict: bool | None = None
    ) -> int | None:
        """Loads the newest whole step, or a given step, in place.

        If the newest step turns out to be damaged, or is removed during the load, all ranks load
        the next older one, with a warning. Steps that the run abandoned when it went back to an
        older step are skipped. If ``step`` is given and newer steps exist, a warning is logged,
        unless it is the best step.

        Args:
            state: State dict, as for :func:`torch_ckpt.load`.
            step: Step to load; the newest whole step if ``None``.
            strict: What to do if the step contains names that ``state`` lacks: raise an error
                (``True``), log a warning on the coordinator (``None``), or nothing (``False``).

        Returns:
            The loaded step, the same on every rank; ``None`` if none was committed.

        Raises:
            CheckpointError: The background save failed; the message names its step.
            CheckpointException: A rank raised an error; ``failures`` maps ranks to their errors. It
                does not derive from ``Exception``. ``state`` may be partly loaded, unless
                ``strict`` was the reason.
            CorruptionError: There are committed steps, but none that this run continues is whole.
                Do not start training over.
            RankTimeoutError: A rank was late, stuck or dead.
            ValueError: ``step`` or ``strict`` differs between ranks.
        """
        self._check_open()
        self._saves.set_base(None)  # Until a step has proved sound.
        found: int | None
        with self._saves.recording("load", step if type(step) is int else None) as record:
            if step is None:
                found = self._ladder.restore(state, strict)
            else:
                found = self._ladder.restore_step(state, step, strict)
            if record is not None:
                record.step = found
        self._saves.set_base(found)
        if found is not None:
            self._boundary.restored(found)
            self._schedule.restored(found)
        return found
