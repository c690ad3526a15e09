"""Run: the directory of a training run, with its steps: when to save them, which to keep."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist

from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.api import save
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, group_of, why
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.background.agent import backend_for
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.runs.save_interval import SaveSchedule
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_directories import StepDirectories, Verify
from torch_ckpt.runs.step_tiers import StepTiers, the_same
from torch_ckpt.storage.writer import FastWriter

__all__ = ["OnBusy", "Run"]

T = TypeVar("T")
R = TypeVar("R")

OnBusy = Literal["wait", "skip", "error"]


class Run:
    """A directory of checkpoints, one for each step that was saved, and the ranks that save them.

    Step 100 is in ``<directory>/step-100``: a checkpoint like any other, for ``dcp.load`` too.
    There is no file that names the latest one, which a crash could tear or leave behind: which
    steps are whole, the steps themselves say. Names have no leading zeros, so that each
    step has one name.

    Every rank makes the same ``Run`` and calls the same methods in the same order, ``should_save``
    and ``wait`` aside, which concern this rank alone. Whatever the ranks decide is decided once,
    for all of them, over gloo groups of the run's own; no rank waits for another for longer than
    ``timeout_s``, and if one fails, so do the others. One thread may use a run.

    Args:
        directory: Where the steps are, on storage every rank can reach. Made by the first save.
        every: Save each step that is a multiple of it. Otherwise ``max_overhead`` decides.
        max_overhead: Share of training time that saving may take: see :meth:`should_save`.
        keep_last: How many of the newest whole steps to keep; all if ``None``. What is older is
            removed after a save, also what saves that failed have left.
        keep_every: Besides, keep the steps that are multiples of it.
        asynchronous: Whether :meth:`save` returns as soon as the state is copied.
        on_busy: What a save does while the one before goes on in the background: ``"wait"`` for it,
            ``"skip"`` this one, or raise an ``"error"``.
        verify: Whether a step is whole if it opens and its files are as long as they were
            (``"quick"``), or only if all of its bytes are sound (``"full"``). The first rank reads
            them all then, so ``timeout_s`` must allow for that.
        process_group: The ranks; all if ``None``.
        timeout_s: Seconds that one rank waits for another.
        agent: Whether the agent of this machine saves in the background (:class:`SnapshotAgent`),
            and ranks that start again find steps in memory, too. If it cannot, all go on without.
        writer: Arguments for the :class:`FastWriter` of all saves; for an agent ``sync_files``.
        reader: Arguments for each :class:`FastReader`.

    Raises:
        CheckpointError: There is to be an agent, and :class:`SnapshotAgent` says why not.
        ValueError: A number is out of range, or this rank not in the group; or there is to be an
            agent, and saves are not ``asynchronous``.

    Example::

        with torch_ckpt.Run("runs/gpt", keep_last=3, asynchronous=True) as run:
            start = run.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train_step()
                if run.should_save(step):
                    run.save(step, state)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        max_overhead: float = 0.035,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = False,
        on_busy: OnBusy = "wait",
        verify: Verify = "quick",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        agent: bool | AgentOptions = False,
        writer: dict[str, Any] | None = None,
        reader: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")
        if not 0 < max_overhead < 1:
            raise ValueError(f"{max_overhead=} is no share between 0 and 1")
        if on_busy not in get_args(OnBusy):
            raise ValueError(f"{on_busy=} is none of {', '.join(get_args(OnBusy))}")
        if verify not in get_args(Verify):
            raise ValueError(f"{verify=} is none of {', '.join(get_args(Verify))}")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"{timeout_s=} is no positive number of seconds")
        self._location = Location(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.asynchronous = asynchronous
        self.on_busy: OnBusy = on_busy
        self.timeout_s = timeout_s
        self.saved = 0
        """Steps that were committed by this run in this process."""
        self.skipped = 0
        """Steps that were not saved because the save before them went on."""
        self._disk = StepDirectories(self._location, verify=verify, reader=reader)
        self._process_group, self._group = process_group, group_of(process_group).series()
        self._closed = False
        self._writer = FastWriter(directory, **(writer or {}))
        self._backend = backend_for(
            self._group,
            process_group,
            self._writer,
            asynchronous=asynchronous,
            agent=agent,
            timeout_s=timeout_s,
            reader=reader,
        )
        self._is_for_agent = bool(agent)
        memory = [] if self._backend is None else self._backend.tiers
        self._tiers = StepTiers(
            [*memory, self._disk], self._group, process_group, timeout_s, self._location
        )
        self._pending: BackgroundSave | None = None
        self._schedule = SaveSchedule(every, max_overhead)
        self._boundary = StepBoundary()

    @property
    def directory(self) -> str | os.PathLike[str]:
        """Where the steps are: a path of this machine, or else a URL."""
        return self._location.checkpoint_id

    # ---- Saving ----

    def should_save(self, step: int) -> bool:
        """Whether it is time to save; call it after every step.

        With ``every``, steps that are multiples of it are saved. Otherwise, as in CheckFreq (FAST
        '21), steps are saved as often as ``max_overhead`` allows: the interval after a save is so
        long that what it costs is at most that share of the time until the next. What counts are
        the seconds in which training stands still, waiting for the save before included,
        and by how much steps were slower beside the last save in the background; and the
        interval is never shorter than that one took. The first save comes after 10 steps, since
        only saving tells what saving costs, and each one tunes the interval anew.

        This costs no exchange between ranks: each measures for itself, all agree on the next step
        within :meth:`save`, on the longest interval that one of them needs, and until then
        every rank compares numbers.

        Args:
            step: How many steps are done. All ranks count alike.

        Returns:
            The same on every rank. It stays true until a save is tried.
        """
        self._boundary.passed(step)
        return self._schedule.is_due(step, beside_a_save=self._is_busy)

    def reserve(self, state: dict[str, Any]) -> None:
        """Has agents make memory for states like this, so that the first save is fast, too."""
        if self._backend is not None:
            self._backend.reserve(state)

    def save(self, step: int, state: dict[str, Any], *, persist: bool = True) -> bool:
        """Saves a step, and removes those that are not to be kept.

        Args:
            step: How many steps are done. The step's former checkpoint, if there is one, is
                replaced when this one is complete.
            state: What :func:`torch_ckpt.save` takes.
            persist: Whether it is to come to disk. Otherwise the agent keeps it in memory, for
                ranks that start again, and brings it to disk if they do not, or if it can no more.

        Returns:
            Whether it was saved, or begun to be in the background; otherwise it was skipped.

        Raises:
            CheckpointError: The save before, in the background, has failed: the message names its
                step. This one was not begun. Or it goes on, and ``on_busy`` is ``"error"``.
            CheckpointException: A rank raised; maps ranks to their errors. No ``Exception``.
            RankTimeoutError: A rank was late, stuck or gone.
            ValueError: ``step`` is negative, or the ranks are at different steps; or it is for
                memory alone, and there is no agent.
        """
        if step < 0:
            raise ValueError(f"{step=} is negative")
        if not persist and not self._is_for_agent:
            raise ValueError("only an agent keeps a step in memory alone")
        begin = time.monotonic()
        self._boundary.passed(step)
        self._schedule.tried(step)
        if self.asynchronous and self.on_busy != "wait" and self._others_busy():
            if self.on_busy == "error":
                raise CheckpointError(f"step {step} was not saved: the save before it goes on")
            self.skipped += 1
            return False
        self._begin(step, self.timeout_s)
        failure: Exception | None = None
        if self.asynchronous:
            try:
                self._save_in_background(step, state, persist=persist)
            except Exception as error:  # Some ranks may not know of it yet.
                failure = error
        else:
            self._save_now(step, state, self.timeout_s)
        self._tune(step, time.monotonic() - begin, failure)
        return True

    def wait(self) -> None:
        """Returns when no save goes on in the background any more.

        Raises:
            CheckpointError: It has failed, or goes on for longer than ``timeout_s``: the message
                names its step.
        """
        self._settle(self.timeout_s)

    @contextlib.contextmanager
    def saving_on_exception(
        self, state: Callable[[], dict[str, Any]], *, timeout_s: float = 30.0
    ) -> Iterator[None]:
        """Saves the last whole step when training raises.

        The last whole step is that of the last call of :meth:`should_save` or :meth:`save`. It is
        saved unless it was already, or an optimizer of this process has begun a step since then:
        the parameters are of no step in that case, and nothing is saved. What changes within a step
        before the optimizer does (random states, a place in the data, running means) is saved as it
        is then.

        One rank cannot save alone. The others must raise too, as they do when a collective of
        training fails on all of them; if they do not within ``timeout_s``, nothing is saved. In any
        case what was raised is raised, and a note on it says what became of the step. Of what a
        save has raised, nothing is tried again.

        Args:
            state: Returns what to save.
            timeout_s: Seconds that this rank waits for the others.

        Example::

            with run.saving_on_exception(lambda: training.state_dict()):
                for step in range(start + 1, steps + 1):
                    ...
        """
        try:
            with self._boundary.watching_optimizers():
                yield
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            error.add_note(f"torch_ckpt: {self._save_after(error, state, timeout_s)}")
            raise

    # ---- Loading ----

    def latest_step(self) -> int | None:
        """The newest step that is complete and verifies; ``None`` if there is none.

        The newest is looked at first, and the search ends with the first that is whole: a quick
        look at one opens it and asks for the lengths of its files. Of each that was committed
        and is damaged, the first rank warns. A save in the background is waited for.

        Returns:
            The same on every rank.

        Raises:
            CheckpointError: The save in the background has failed: the message names its step.
            StorageError: The directory cannot be read.
            RankTimeoutError: A rank was late, stuck or gone.
        """
        self._check_open()
        return self._tiers.latest(first=self.wait)

    def restore(self, state: dict[str, Any], *, step: int | None = None) -> int | None:
        """Loads the latest step in place.

        If it turns out to be damaged while it is loaded, or is removed just then, all ranks fall
        back to the one before, with a warning.

        Args:
            state: What :func:`torch_ckpt.load` takes.
            step: This one and no other.

        Returns:
            The step that was loaded; ``None`` if none was ever committed, and ``state`` is
            as it was. The same on every rank.

        Raises:
            CheckpointException: A rank raised; maps ranks to their errors. No ``Exception``.
                ``state`` may be loaded in part.
            CorruptionError: Steps were committed, and none of them is whole: training should not
                begin anew without a word.
            RankTimeoutError: A rank was late, stuck or gone.
        """
        self._check_open()
        if step is None:
            found = self._tiers.restore(state, first=self.wait)
        else:
            self._tiers.restore_step(step, state, first=lambda: self._settled(step))
            found = step
        if found is not None:
            self._boundary.at_stored(found)
            self._schedule.restored(found)
        return found

    # ---- The end ----

    def close(self) -> None:
        """Waits for the save in the background, and gives up the groups of the run, and so its use.

        Raises:
            CheckpointError: As :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            saver, self._backend = self._backend, None
            if saver is not None:
                saver.close()
            self._closed = True

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._backend is not None:
            self._backend.leave()  # What is in memory is what the next process goes on from.
        try:
            self.close()
        except CheckpointError as of_save:
            if error is None:
                raise
            error.add_note(str(of_save))

    # ---- What ranks do, and what one does for all ----

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run is closed")

    def _decide(
        self,
        what: str,
        own: Callable[[], T],
        decide: Callable[[list[T]], R],
        timeout_s: float | None = None,
    ) -> R:
        """As :meth:`Group.decide`."""
        self._check_open()
        return self._group.decide(what, own, decide, timeout_s=timeout_s or self.timeout_s)

    @property
    def _is_busy(self) -> bool:
        return self._pending is not None and self._pending.is_going_on

    def _others_busy(self) -> bool:
        """Whether the save before goes on: on the coordinator, which is the last to be done."""
        return self._decide(
            "looking for the save before", lambda: self._is_busy, lambda busy: busy[0]
        )

    def _settle(self, timeout_s: float) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            self._schedule.clock.ended_in_background(pending.settle(timeout_s))
        except CheckpointError:
            self._boundary.stored = None
            raise
        finally:
            if not pending.is_going_on:
                self._pending = None

    def _settled(self, step: int, timeout_s: float | None = None) -> int:
        self._settle(timeout_s or self.timeout_s)
        return step

    def _begin(self, step: int, timeout_s: float) -> None:
        """All ranks are at this step, and the save before is over and has succeeded."""
        self._decide(
            "beginning to save",
            lambda: self._settled(step, timeout_s),
            the_same,
            timeout_s=timeout_s,
        )

    def _save_now(self, step: int, state: dict[str, Any], timeout_s: float) -> None:
        save(
            state,
            checkpoint_id=self._disk.path(step).checkpoint_id,
            storage_writer=self._writer,
            process_group=self._process_group,
            no_dist=self._group.size == 1,
            timeout_s=timeout_s,
        )
        self._boundary.stored = step
        self._committed(step)

    def _save_in_background(self, step: int, state: dict[str, Any], *, persist: bool) -> None:
        assert self._backend is not None
        future = self._backend.save(
            step, state, self._disk.path(step).checkpoint_id, persist=persist
        )
        then = (
            self._committed if persist or not self._backend.can_stay_in_memory else lambda _: None
        )
        self._pending = BackgroundSave(step, future, lambda: then(step))
        self._boundary.stored = step

    def _committed(self, step: int) -> None:
        """Counts a step; on the coordinator, removes what is not to be kept."""
        self.saved += 1
        if not self._group.is_coordinator:
            return
        try:
            self._disk.sweep()
            if self.keep_last is not None:
                self._disk.retain(step, last=self.keep_last, every=self.keep_every)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"old steps were not removed: {error}", stacklevel=2)

    def _tune(self, step: int, stopped_s: float, failure: Exception | None) -> None:
        """Agrees on the next step to save, or on the failure of this save."""
        interval = self._schedule.own_interval(step, stopped_s)

        def own() -> int:
            if failure is not None:
                raise failure
            return interval

        try:
            agreed = self._decide(
                "agreeing on the next save", own, lambda intervals: max(intervals)
            )
        except BaseException:
            with contextlib.suppress(CheckpointError):  # That failed for the same reason.
                self._settle(self.timeout_s)
            raise
        self._schedule.agreed(step, agreed)

    def _save_after(
        self, error: BaseException, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> str:
        """Saves the last step if that is possible; says what became of it."""
        with contextlib.suppress(CheckpointError):  # Then it is not stored, and saved now.
            self._settle(timeout_s)
        reason, step = self._boundary.reason_not_to_save(error), self._boundary.step
        if reason is not None or step is None:
            return reason or "nothing was saved after it"
        try:
            self._begin(step, timeout_s)
            self._save_now(step, state(), timeout_s)
        except BaseException as of_save:  # Even an interrupt: what training raised is what counts.
            return f"step {step} was not saved after it: {why(of_save)}"
        return f"step {step} was saved after it"
