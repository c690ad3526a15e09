"""StepLoads: the methods of a run that choose, lease and load a step."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from torch_ckpt.agent.memory import folder_of, has_agent, is_stopped, run_of
from torch_ckpt.agent.slot_reports import unread_steps
from torch_ckpt.commits.leases import lease
from torch_ckpt.coordination.exclusive import exclusive
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ladder.ladder import Ladder
from torch_ckpt.ladder.step_directories import step_at
from torch_ckpt.ladder.step_files import step_number
from torch_ckpt.ladder.times import time_s
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.runs.ending import Ending
from torch_ckpt.runs.save_interval import SaveSchedule

__all__ = ["StepLoads"]

_LOG = logging.getLogger("torch_ckpt")


class StepLoads(Ending):
    """The part of :class:`~torch_ckpt.runs.run.Run` that reads its steps."""

    _backend: ThreadBackend
    _ladder: Ladder
    _schedule: SaveSchedule

    @exclusive("choose a step")
    def latest_step(self) -> int | None:
        """Returns the step that :meth:`restore` would load; ``None`` if none was committed.

        The method first waits for the background save. The first rank then checks the steps as
        ``verify`` requires, from the newest to the oldest, and warns of each committed step that is
        damaged.

        Raises:
            CheckpointError: The background save failed; the message names its step. Or the
                directory that this run has used is no longer at its path.
            CorruptionError: There are committed steps, but none that this run continues is whole.
                Do not start training over.
            StorageError: The directory cannot be read.
            RankTimeoutError: A rank was late, stuck or dead.
        """
        self._check_open()
        return self._ladder.latest()

    @exclusive("choose a step")
    def step_at(self, time: str | datetime) -> int:
        """Returns the step that the run had at a time.

        That is the newest whole step that was committed by then, except steps that the run has
        left. The time of a step is that of its file ``.metadata``: ``cp -a`` retains it, and ``cp
        -r`` does not. In a directory to which steps are promoted, it is the time of the promotion.

        Args:
            time: A ``datetime``, or text such as ``"2026-11-28 14:30"`` (ISO 8601). Without a time
                zone, it is local time.

        Raises:
            CheckpointError: The background save failed; the message names its step. Or the
                directory that this run has used is no longer at its path.
            NotFoundError: There was no step at that time, or it was removed since.
            RankTimeoutError: A rank was late, stuck or dead.
            StorageError: The directory cannot be read.
            TypeError: ``time`` is neither a ``datetime`` nor text.
            ValueError: ``time`` is no time, or differs between ranks.

        Example::

            run.restore(state, step=run.step_at("2026-11-28 14:30"))  # Before the loss spike.
        """
        self._check_open()

        def own() -> tuple[float, Any]:
            self._saves.ready()
            return time_s(time), self._disks[0].report()

        def choose(answers: list[tuple[float, Any]]) -> int:
            return step_at(self._disks, answers[0][0], [report for _, report in answers])

        what, reading = "choosing the step at a time", self._ladder.reading(choose)
        return self._group.decide(
            what, own, reading, timeout_s=self.timeout_s, equal={"time": time}
        )

    @contextlib.contextmanager
    def lease(self, step: int) -> Iterator[str | os.PathLike[str]]:
        """Protects a step from removal within the block.

        For jobs that read a step while training continues, on this or another machine. The step is
        removed by the first save after the block instead. If the process dies, its lease ends: on
        its machine at once, elsewhere 300 s after its last renewal. A new save of the same step
        still replaces it. :func:`torch_ckpt.reading` does the same without a run.

        Args:
            step: A committed step.

        Yields:
            The directory of the step.

        Raises:
            CheckpointError: Another run has taken over the local directory, the directory that this
                run has used is no longer at its path, or the system has no more threads.
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
        self._saves.check_owner()
        disk = next((disk for disk in local if disk.has_whole(step)), run)
        if disk is run:
            self._saves.lineage.check_place()
        with lease(disk.directory, step) as path:
            yield path.checkpoint_id

    @property
    def loaded(self) -> LoadReport | None:
        """What the last :meth:`restore` did, as for :func:`torch_ckpt.load`.

        ``None`` before, and if it loaded nothing. ``missing`` is empty, because a restore raises an
        error if the step lacks a value of the state.
        """
        return self._ladder.loaded

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
                :attr:`loaded` lists them afterwards.

        Returns:
            The loaded step, the same on every rank; ``None`` if none was committed.

        Raises:
            CheckpointError: The background save failed; the message names its step. Or the
                directory that this run has used is no longer at its path.
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
        found: int | None = None
        with self._saves.recording("load", step if type(step) is int else None) as record:
            try:
                if step is None:
                    found = self._ladder.restore(state, strict)
                else:
                    found = self._ladder.restore_step(state, step, strict)
            finally:
                self._saves.damaged = self._ladder.damaged_on(self._disks[0])
            if record is not None:
                record.step = found
        self._saves.set_base(found)
        if found is not None:
            self._boundary.restored(found)
            self._schedule.restored(found)
        if step is None and self._group.is_coordinator and not self._backend.rungs:
            self._warn_of_memory(found)
        return found

    def _warn_of_memory(self, restored: int | None) -> None:
        """Warns of newer steps in the memory of this machine, from which this job restores none.

        Logs it: as an error, a warning would be raised on one rank only. Not while an agent runs
        that is not stopped: it writes the steps of a training that is in progress or has died.
        """
        run = self._disks[-1].directory
        folder = folder_of(run_of(run))
        if has_agent(folder) and not is_stopped(folder):
            return
        try:
            steps, why = unread_steps(run, restored), ""
        except CheckpointError as error:
            steps, why = [], f", and may be newer: {error}"
        if not steps and not why:
            return
        which = f" ({', '.join(map(str, steps))})" if steps else ""
        _LOG.warning(
            "%s has steps%s in the shared memory of this machine, which are not restored%s. To "
            "continue from them, end this job before it saves, and begin one with agent=True",
            *(run, which, why),
        )
