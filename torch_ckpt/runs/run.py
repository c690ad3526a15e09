"""Run: the directory of a training run: saves, restores and retains its steps."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.coordination.exclusive import Exclusive, exclusive
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, group_of
from torch_ckpt.coordination.methods import make_no_more_calls
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.failures import Failures, OnFailure, PromotionFailures
from torch_ckpt.ladder.ladder import Ladder, Rung
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.local_directory import directories_of, promotion_for
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import Mode, Verify
from torch_ckpt.ladder.step_files import step_number
from torch_ckpt.options import OnBusy
from torch_ckpt.records.event import Event
from torch_ckpt.records.event_log import EventLog
from torch_ckpt.records.record import Recorder
from torch_ckpt.runs.arguments import check_arguments, check_local
from torch_ckpt.runs.background.agent import backend_for
from torch_ckpt.runs.preemption import Preemption
from torch_ckpt.runs.save_interval import SaveSchedule
from torch_ckpt.runs.saver import Saver
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_loads import StepLoads
from torch_ckpt.runs.step_saves import Reuse, StepSaves
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Run"]


class Run(Saver, StepLoads):
    """A directory of checkpoints, one for each saved step of a training run.

    Step 100 is the checkpoint ``<directory>/step-100``, which ``dcp.load`` can load too. Step
    numbers have no leading zeros. No separate file records the latest step, because a crash could
    tear it or leave it stale; the files of a step alone determine whether the step is whole.

    Every rank creates the same ``Run`` and calls the same methods in the same order. Exceptions are
    :meth:`wait` without ``promoted`` and, outside :meth:`saving_on_signal`, :meth:`should_save`,
    which are local. The ranks decide everything together, over separate connections. If one rank
    fails, all fail, and no rank waits for another longer than ``timeout_s``. Calls from several
    threads wait for each other. A call in a signal handler raises an error if it interrupted
    another call.

    Args:
        directory: Directory of the steps, on storage that every rank can access. The first save
            creates it. Symbolic links in the path are resolved when the run is created.
        local: A faster directory for saves, such as one on a local disk. The agent, or a thread of
            the first rank if no agent runs, promotes the steps: it copies them to ``directory``.
        keep_local: Number of newest steps to retain in ``local``. A step that ``directory`` is to
            retain also remains in ``local`` until it is promoted.
        promote_bytes_per_s: Most bytes per second that each machine promotes; ``None``: no limit.
        every: Save each step that is a multiple of this number. If ``None``, ``max_overhead``
            determines the interval.
        max_overhead: Largest share of training time that saving may cost; see :meth:`should_save`.
        keep_last: Number of newest whole steps to retain, up to the saved one; all if ``None``.
            After each save, older steps and the remains of failed saves are removed.
        keep_every: Also retain the steps that are multiples of this number. No effect without
            ``keep_last``, ``keep_for`` or ``keep_best``, because all steps are then retained.
        keep_for: Also retain younger steps than this, such as ``"90min"``, ``"24h"``, ``"7d"`` or a
            ``timedelta``. The newest step is retained at any age. Without ``keep_last``, older
            steps are removed.
        keep_best: Also retain this number of steps with the best value of ``monitor``. If
            ``keep_last`` is ``None``, the newest step is retained as well.
        monitor: Name of the metric that ranks steps; see :meth:`save`. Required by ``keep_best``.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) value is the best.
        asynchronous: Whether :meth:`save` returns as soon as the state is copied.
        on_busy: What a save does if the previous save is still in progress in the background:
            ``"wait"`` for it, ``"skip"`` the new save, or raise an ``"error"``.
        on_failure: What :meth:`save` does if this save, or the previous one in the background,
            failed because of storage: ``"raise"``, or ``"warn"`` and let training continue. The
            previous step remains, and the next due step is saved.
        max_failures: Number of consecutive failures after which :meth:`save` raises in any case.
            Failures of promotion must also have lasted for half an hour.
        verify: When a step counts as whole. ``"quick"``: it opens, and its files have the right
            lengths. ``"full"``: all of its bytes also match their checksums. The first rank then
            reads all bytes, so ``timeout_s`` must be long enough. Steps in local directories of
            several machines are verified only while they are loaded or promoted.
        reuse: ``"auto"``: tensors that have not changed since the previous step are not written
            again; see ``base`` of :class:`FastWriter`. ``"off"``: each step is written whole.
        process_group: The ranks of the run; all if ``None``.
        timeout_s: Longest time that one rank waits for another, in seconds.
        agent: Whether the agent of this machine (:class:`SnapshotAgent`) saves in the background,
            so that restarted ranks find steps in memory; or its options. Needs ``asynchronous``. If
            the agent has too little memory or cannot save a state, all ranks continue without it.
        writer: Arguments for the :class:`FastWriter` of all saves. An agent uses only
            ``sync_files`` and, unless the options of the agent are given, ``check_replicas``.
        reader: Arguments for each :class:`FastReader`.
        record: Whether saves and loads are recorded in ``events.jsonl``, for ``torch-ckpt report``.

    Raises:
        CheckpointError: The agent cannot be started; see :class:`SnapshotAgent`.
        TypeError: A number of steps or bytes is not an integer, or ``keep_for`` not an age.
        ValueError: An argument is out of range or differs between ranks, this rank is not in the
            group, or ``agent`` is given and saves are not ``asynchronous``.

    Example::

        with torch_ckpt.Run("runs/gpt", keep_last=3, asynchronous=True) as run:
            start = run.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train_step()
                if run.should_save(step) or step == steps:
                    run.save(step, state)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        keep_local: int = 1,
        promote_bytes_per_s: int | None = None,
        every: int | None = None,
        max_overhead: float = 0.035,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_for: str | timedelta | None = None,
        keep_best: int | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        asynchronous: bool = False,
        on_busy: OnBusy = "wait",
        on_failure: OnFailure = "raise",
        max_failures: int = 3,
        verify: Verify = "quick",
        reuse: Reuse = "auto",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        agent: bool | AgentOptions = False,
        writer: dict[str, Any] | None = None,
        reader: dict[str, Any] | None = None,
        record: bool = True,
    ) -> None:
        self._group = group_of(process_group).series()
        self._exclusive = Exclusive(f"the run {directory}")
        self._closed = False
        self.retention: Retention
        """Which steps remain after a save."""
        self.asynchronous = asynchronous
        self.on_busy: OnBusy = on_busy
        self.skipped, self._has_agent = 0, bool(agent)
        self._preemption: Preemption | None = None  # Within a block of saving_on_signal.
        self._boundary = StepBoundary()
        with self._group.method("open the run", timeout_s), contextlib.ExitStack() as undo:
            self.timeout_s = timeout_s = duration("timeout_s", timeout_s)
            self.retention = Retention(keep_last, keep_every, keep_best, monitor, mode, keep_for)
            self._schedule = SaveSchedule(every, max_overhead)
            self._location = Location(directory).resolved()  # Once: a link in the path may move.
            self._failures = Failures(on_failure, max_failures)
            FastWriter(self.directory, **(writer or {}))  # Raises before the ranks compare, as all
            FastReader(self.directory, **(reader or {}))  # that may raise on one rank alone.
            check_arguments(
                *(self._group, timeout_s),
                vars(self.retention)
                | {"on_busy": on_busy, "verify": verify, "on_failure": on_failure, "reuse": reuse}
                | {"every": every, "max_overhead": max_overhead, "max_failures": max_failures}
                | {"asynchronous": asynchronous, "agent is given": bool(agent)}
                | {"local is given": local is not None, "keep_local": keep_local},
            )
            if local is not None:
                check_local(keep_local, promote_bytes_per_s)
            how: dict[str, Any] = {"reader": reader, "timeout_s": timeout_s}
            self._disks, places = directories_of(
                self._group, self._location, local, verify=verify, **how
            )
            writes = self._disks[0].writer(writer or {})
            lineage = Lineage(self._disks, self.retention)
            self._promotion = promotion_for(
                *(self._group, places, self._disks, lineage, self.retention),
                PromotionFailures(self._location, on_failure, max_failures),
                keep=keep_local,
                has_agent=bool(agent),
                timeout_s=timeout_s,
            )
            backend = self._backend = backend_for(
                *(self._group, process_group, writes),
                asynchronous=asynchronous,
                agent=agent,
                run=self._location,
                places=places,
                reuses=reuse == "auto",
                **how,
            )
            undo.callback(backend.leave)
            undo.callback(self._promotion.cancel)
            self._log = None
            if record and self._group.is_coordinator:
                self._log = EventLog(self._location, lineage.is_here)
            rank = self._group.names[self._group.rank]
            self._recorder = Recorder(rank, self._log) if record else None
            self._saves = StepSaves(
                *(self._disks, self._promotion, self._group, process_group, writes, backend),
                monitor=self.retention.monitor,
                lineage=lineage,
                boundary=self._boundary,
                clock=self._schedule.clock,
                timeout_s=timeout_s,
                reuses=reuse == "auto",
                recorder=self._recorder,
            )
            rungs: list[Rung] = [*backend.rungs, *self._disks]
            ranks = self._group, process_group, timeout_s
            self._ladder = Ladder(rungs, *ranks, self._location, lineage, self._saves.ready)
            open_copy = functools.partial(
                backend.copy,
                nbytes_per_s=promote_bytes_per_s or 0,
                niceness=writes.io.background_nice,
            )
            self._promotion.start(open_copy, self._recorder)
            undo.pop_all()

    def __repr__(self) -> str:
        local = f", local={str(self._disks[0].directory)!r}" if len(self._disks) > 1 else ""
        closed = " (closed)" if self._closed else ""
        return f"{type(self).__name__}({str(self._location)!r}{local}){closed}"

    @property
    def directory(self) -> str | os.PathLike[str]:
        """The directory of the steps: an absolute path on this machine, or a URL."""
        return self._location.checkpoint_id

    @property
    def saved(self) -> int:
        """Number of steps that this run committed in this process."""
        return self._saves.saved

    @property
    def failures(self) -> int:
        """Number of saves that failed because of storage, and did not stop training.

        On the first rank of each local directory, failed promotions of its files count as well.
        """
        return self._failures.count + self._promotion.count

    @property
    def unpromoted(self) -> int:
        """Number of steps that were not promoted because newer steps superseded them.

        Counted on the first rank; 0 on the others.
        """
        return self._promotion.skipped

    # ---- Saving ----

    def should_save(self, step: int) -> bool:
        """Returns whether to save now. Call it after every step.

        With ``every``, a save is due at each multiple. Otherwise the interval follows CheckFreq
        (FAST '21): it is the shortest one for which saving costs at most ``max_overhead`` of the
        time. The cost is the time for which training stops, including waits for the previous save,
        plus the slowdown of steps during a background save. The interval is never shorter than a
        background save. The first save is due after 10 steps, since only a save shows its cost.

        Only within :meth:`saving_on_signal` does the method communicate. Each rank measures its
        cost, and :meth:`save` lets the ranks agree on the longest interval.

        Args:
            step: Number of completed steps, equal on all ranks.

        Returns:
            The same value on every rank; ``True`` until the next call of :meth:`save`.
        """
        step = step_number(step)
        self._check_open()
        self._boundary.step_ended(step)
        if self._preemption is not None:
            with self._exclusive.use("check for a signal", self.timeout_s):
                self._check_open()
                self._end_if_signalled(self._preemption)
        return self._schedule.is_due(step, during_save=self._saves.is_busy)

    @exclusive("reserve memory")
    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates the agent's memory in advance, if there is an agent. All ranks must call it.

        Args:
            state: A state with the same tensors as the states to save.

        Raises:
            Exception: The agent cannot save the state of a rank; raised on all ranks.
            RankTimeoutError: A rank was late, stuck or dead.
        """
        self._check_open()
        self._backend.reserve(state)

    def wait(self, *, promoted: bool = False) -> None:
        """Waits for the background save.

        Args:
            promoted: Whether to wait also until all steps in ``local`` are promoted. All ranks must
                then call the method.

        Raises:
            CheckpointError: The save or a promotion failed, or was not complete after
                ``timeout_s``; the message names its step.
        """
        if promoted:
            with self._exclusive.use_by_all("wait for promotion", self._group, self.timeout_s):
                self._check_open()
                self._saves.wait_for_promotion(self.timeout_s)
        else:
            with self._exclusive.use("wait for the background save", self.timeout_s):
                self._check_open()
                self._saves.settle()

    # ---- Loading ----

    @exclusive("choose a step")
    def best_step(self) -> int | None:
        """Returns the whole step with the best value of ``monitor``; ``None`` without such a step.

        First waits for the background save. Ignores steps without the metric, steps whose metric is
        NaN, and steps that the run abandoned when it went back. If values are equal, the earliest
        step is the best.

        Raises:
            CheckpointError: The background save failed; the message names its step. Or the
                directory that this run has used is no longer at its path.
            RankTimeoutError: A rank was late, stuck or dead.
            StorageError: The directory cannot be read, or the metrics of a step there.
            ValueError: The run has no ``monitor``.
        """
        self._check_open()
        if self.retention.monitor is None:
            raise ValueError("best_step() needs the name of a metric: pass monitor to the run")

        def own() -> Any:
            self._saves.ready()
            return self._disks[0].report()

        choose = functools.partial(self.retention.best, self._disks)
        what, reading = "choosing the best step", self._ladder.reading(choose)
        return self._group.decide(what, own, reading, timeout_s=self.timeout_s)

    @exclusive("discard steps")
    def discard_after(self, step: int) -> list[int]:
        """Removes all steps that are newer than a given step, also from the memory of agents.

        Use it to go back to an older step. All ranks must call the method. It removes the newest
        step first. It frees the memory on the machines of the ranks even if this run has no agent.

        Args:
            step: The newest step to retain.

        Returns:
            The steps that were removed from the directory.

        Raises:
            CheckpointError: The background save failed, another process reads a newer step under a
                lease, or the directory in which this run has saved, or from which it has restored,
                is no longer at its path; nothing was removed. Or a step could not be removed; all
                others were.
            CorruptionError: No whole step would remain. Nothing was removed.
            NotFoundError: No step would remain. Nothing was removed.
            RankTimeoutError: A rank was late, stuck or dead.
            SupersededError: A newer job of the run saves. Nothing was removed.
            ValueError: The ranks passed different steps.

        Example::

            run.discard_after(300)
            run.restore(state)  # Loads step 300.
        """
        self._check_open()
        return self._saves.discard_after(step)

    # ---- The record ----

    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Calls a function with each :class:`Event` from now on, once it has ended.

        Only the first rank calls it, in a thread that logs its exceptions. ``close`` waits for it
        for at most 5 s.

        Args:
            listener: The function.

        Raises:
            ValueError: The run has ``record=False``.
        """
        self._check_open()
        if self._recorder is None:
            raise ValueError("on_event() needs the record: this run has record=False")
        self._recorder.listeners.append(listener)

    # ---- Ending ----

    def close(self) -> None:
        """Waits for the background save and ends the run; other methods then raise RuntimeError.

        If the last step was saved with ``persist=False``, the agent writes it first. With
        ``local``, all ranks wait for promotions as long as these make progress. Leases last until
        their blocks end. In a forked child, the method does nothing.

        Raises:
            CheckpointError: The background save or a promotion failed, or a promotion made no
                progress for ``timeout_s``. Raised on all ranks. The next run promotes the steps
                that are left in ``local``.
            RankTimeoutError: With ``local``: a rank was late, dead, or left its block by an error.
        """
        if self._exclusive.is_forked:
            return
        with self._exclusive.use_by_all("close the run", self._group, self.timeout_s):
            try:
                self._saves.close()
                make_no_more_calls(self._group.connections, "close the run")
            finally:
                self._closed = True
                if self._log is not None:
                    self._log.close(waits=not self._saves.promotions.are_stuck)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._exclusive.is_forked:
            self._saves.leave(error)
        try:
            self.close()
        except CheckpointError as save_error:
            if error is None:
                raise
            error.add_note(str(save_error))
