"""Run: the directory of a training run: saves, restores and retains its steps."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.coordination.exclusive import Exclusive, exclusive
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, group_of
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

__all__ = ["Run"]


class Run(Saver, StepLoads):
    """A directory of checkpoints, one for each saved step of a training run.

    Step 100 is the checkpoint ``<directory>/step-100``, which ``dcp.load`` can load too. Names have
    no leading zeros, so each step has one name. No separate file names the latest step: a crash
    could tear such a file or leave it stale. A step's own files determine whether it is whole.

    Every rank makes the same ``Run`` and calls the same methods in the same order, except
    :meth:`wait` and, outside of :meth:`saving_on_signal`, :meth:`should_save`: these are local. The
    ranks make each decision together, over connections of the run's own. No rank waits for another
    longer than ``timeout_s``. If one rank fails, all fail. Calls of several threads wait for each
    other. A call in a signal handler raises if it has interrupted another call.

    Args:
        directory: Directory of the steps, on storage that every rank can access. The first save
            creates it. Links in the path are resolved now: a run stays in one directory.
        local: A faster directory, such as one on a local disk. Saves commit there, and the agent,
            or else a thread of the first rank, promotes the steps: copies them to ``directory``.
        keep_local: Number of newest steps to retain in ``local``. A step that is to be retained
            also remains there until it is promoted.
        promote_bytes_per_s: Most bytes that each machine promotes in a second; ``None``: no limit.
        every: Save each step that is a multiple of this number. If ``None``, ``max_overhead``
            determines the interval.
        max_overhead: Largest share of training time that saving may cost; see :meth:`should_save`.
        keep_last: Number of newest whole steps to retain, up to the saved one; all if ``None``.
            After each save, older steps and the remains of failed saves are removed.
        keep_every: Also retain the steps that are multiples of this number. No effect without
            ``keep_last`` or ``keep_best``, since all steps then remain.
        keep_best: Also retain this number of steps with the best value of ``monitor``. If
            ``keep_last`` is ``None``, only the newest step is retained besides.
        monitor: Name of the metric that ranks steps; see :meth:`save`. Required by ``keep_best``.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) value is the best.
        asynchronous: Whether :meth:`save` returns as soon as the state is copied.
        on_busy: Behavior of a save while the previous save is in progress in the background:
            ``"wait"`` for it, ``"skip"`` the new save, or raise an ``"error"``.
        on_failure: Behavior of :meth:`save` if storage made a save fail, this one or the previous
            one in the background: ``"raise"``, or ``"warn"`` and let training go on. The former
            step remains, and the next due step is saved.
        max_failures: Number of failures in a row after which :meth:`save` raises in any case.
            Failed promotions must also have lasted half an hour.
        verify: Condition for a whole step. ``"quick"``: it opens, and its files have the right
            lengths. ``"full"``: all of its bytes are also sound. With ``"full"`` the first rank
            reads all bytes, so ``timeout_s`` must be long enough.
        reuse: ``"auto"``: tensors that are equal to those of the step before are not written again;
            see ``base`` of :class:`FastWriter`. ``"off"``: each step is written whole.
        process_group: The ranks; all if ``None``.
        timeout_s: Seconds that one rank waits for another.
        agent: Whether the agent of this machine saves in the background (:class:`SnapshotAgent`),
            so that restarted ranks also find steps in memory; or the options of the agent. Requires
            ``asynchronous``. If the agent has too little memory or cannot save a state, all ranks
            continue without it.
        writer: Arguments for the :class:`FastWriter` of all saves. An agent uses only
            ``sync_files`` and, unless it has options of its own, ``check_replicas``.
        reader: Arguments for each :class:`FastReader`.
        record: Whether ``events.jsonl`` records saves and loads, for ``torch-ckpt report``.

    Raises:
        CheckpointError: The agent cannot be started; see :class:`SnapshotAgent`.
        TypeError: A number of steps or bytes is no integer.
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
        self.timeout_s, self._closed = timeout_s, False
        self.retention: Retention
        """Which steps remain after a save."""
        self.asynchronous = asynchronous
        self.on_busy: OnBusy = on_busy
        self.skipped, self._has_agent = 0, bool(agent)
        self._preemption: Preemption | None = None  # Within a block of saving_on_signal.
        self._boundary = StepBoundary()
        with self._group.method("open the run", timeout_s), contextlib.ExitStack() as undo:
            self.retention = Retention(keep_last, keep_every, keep_best, monitor, mode)
            self._schedule = SaveSchedule(every, max_overhead)
            self._location = Location(directory).resolved()  # Once: a link in the path may move.
            self._failures = Failures(on_failure, max_failures)
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
            self._log = EventLog(self._location) if record and self._group.is_coordinator else None
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
            self._ladder = Ladder(rungs, *ranks, self._location, lineage, self._saves.settle)
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
        """Number of saves that storage made fail, and after which training went on.

        On the first rank, failed promotions count as well.
        """
        return self._failures.count + self._promotion.count

    @property
    def unpromoted(self) -> int:
        """Number of steps that were not promoted because newer ones had arrived meanwhile.

        Counted on the first rank; 0 on the others.
        """
        return self._promotion.skipped

    # ---- Saving ----

    def should_save(self, step: int) -> bool:
        """Returns whether to save now; call it after every step.

        With ``every``, a save is due at each multiple. Otherwise the interval follows CheckFreq
        (FAST '21): it is the shortest for which saving costs at most ``max_overhead`` of the time.
        The cost is the time for which training stops, also for the previous save, plus the slowdown
        of steps during a background save. The interval is never shorter than the last background
        save. The first save is due after 10 steps, because only a save can measure the cost.

        The method needs no communication, except within :meth:`saving_on_signal`. Each rank
        measures its own cost, and the ranks agree on the longest interval within :meth:`save`.

        Args:
            step: Number of completed steps, equal on all ranks.

        Returns:
            The same value on every rank; remains ``True`` until the next call of :meth:`save`.
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
        """Allocates the agent's memory in advance, if there is an agent. All ranks call it.

        Args:
            state: A state with the same tensors as the states to save.

        Raises:
            Exception: The agent cannot save the state of a rank; raised on all ranks.
            RankTimeoutError: A rank was late, stuck or gone.
        """
        self._check_open()
        self._backend.reserve(state)

    def wait(self, *, promoted: bool = False) -> None:
        """Waits for the background save.

        Args:
            promoted: Whether to wait also until all steps are in the directory of the run, if they
                are saved to ``local`` first. All ranks must then call the method.

        Raises:
            CheckpointError: The save or a promotion failed, or is still in progress after
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
        """Returns the whole step with the best value of ``monitor``; ``None`` if there is none.

        It first waits for the background save. Steps that the run has left, without the metric or
        with a NaN do not count. Of equal values, that of the earlier step is the best.

        Raises:
            CheckpointError: The background save failed; the message names its step.
            RankTimeoutError: A rank was late, stuck or gone.
            StorageError: The directory cannot be read.
            ValueError: The run has no ``monitor``.
        """
        if self.retention.monitor is None:
            raise ValueError("best_step() needs the name of a metric: pass monitor to the run")
        self._check_open()
        what, settle, timeout_s = "choosing the best step", self._saves.settle, self.timeout_s
        choose = self._ladder.reading(lambda _: self.retention.best(self._disks))
        return self._group.decide(what, settle, choose, timeout_s=timeout_s)

    @exclusive("discard steps")
    def discard_after(self, step: int) -> list[int]:
        """Removes all steps that are newer than a step, also from the memory of agents.

        For a run that goes back to an older step. The newest step is removed first. All ranks call
        the method. Memory is freed on the machines of the ranks, also without an agent.

        Args:
            step: The newest step to retain.

        Returns:
            The steps that were removed from the directory.

        Raises:
            CheckpointError: The background save failed, or another process reads a newer step under
                a lease. Nothing was removed. Or a step cannot be removed. All others were.
            CorruptionError: No step would remain that is whole. Nothing was removed.
            NotFoundError: No step would remain. Nothing was removed.
            RankTimeoutError: A rank was late, stuck or gone.
            SupersededError: A newer job of the run saves. Nothing was removed.
            ValueError: The ranks give different steps.

        Example::

            run.discard_after(300)
            run.restore(state)  # Loads step 300.
        """
        self._check_open()
        return self._saves.discard_after(step)

    # ---- The record ----

    def on_event(self, listener: Callable[[Event], None]) -> None:
        """Calls a function with each :class:`Event` that has ended, from now on, on the first rank.

        A thread of the run calls it, and logs its exceptions. ``close`` waits 5 s for it at most.

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

        The agent first writes a last step of ``persist=False``. With ``local``, all ranks wait for
        promotions while bytes arrive. Leases last until their blocks end. In a forked child: no-op.

        Raises:
            CheckpointError: The background save or a promotion failed, or no bytes arrived for
                ``timeout_s``, on all ranks. The next run promotes the steps in ``local``.
            RankTimeoutError: With ``local``: a rank left its block by an error, is late or gone.
        """
        if self._exclusive.is_forked:
            return
        with self._exclusive.use_by_all("close the run", self._group, self.timeout_s):
            try:
                self._saves.close(is_again=self._closed)
            finally:
                self._closed = True
                if self._log is not None:
                    self._log.close()

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
