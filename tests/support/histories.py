"""Random histories of the jobs of a run, each from a seed, and the model that they must agree with.

Several jobs on several machines begin, restore, save, promote, discard, die, or are believed dead
and go on. Steps and machines are lost, storage fails, directories are copied and moved, and one job
works in the middle of a file call of another one. After each operation, the directories are
compared with what they had before: :mod:`support.history_model` says what may have changed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import random
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.history_model import (
    Disks,
    Job,
    Place,
    Save,
    World,
    allowed_names,
    is_known,
    replaced_by_older,
)
from torch.distributed.checkpoint import CheckpointException

from torch_ckpt import CheckpointError, Run
from torch_ckpt._core import _native
from torch_ckpt.agent.memory import has_agent
from torch_ckpt.commits import leases
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location

COMMAND = "python tests/histories.py"
TIMEOUT_S = 30.0  # Of each call of a run.
LATE_S = 0.002
AGENTS_EVERY = 20  # Every such history has agents.
CALLS = ("write", "rename", "names", "read_range", "discard", "link", "remove_all", "sync")
KINDS: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


class Wrong(AssertionError):
    """What the model forbids."""


def values(number: int) -> dict[str, Any]:
    """The state of a save, whose number no other save of the history has."""
    return {"w": torch.arange(40, dtype=torch.float64) + number, "number": number}


def number_in(state: dict[str, Any]) -> int:
    """The number of the save that a state has, whose values must all be of that save."""
    number = int(state["number"])
    if not torch.equal(state["w"], values(number)["w"]):
        raise Wrong(f"values of several saves: {state}")
    return number


class History:
    """One history. ``said`` has its operations, for people."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(f"history {seed}")
        self.folder, self.said = folder, [f"{COMMAND} --seed {seed}"]
        self.has_agents = seed % AGENTS_EVERY == 0
        self.disks = Disks()
        self.worlds = [World(self.disks.place(folder / "run", "run"))]
        self.machines = ["m0", "m1", "m2"][: self.rng.choice([1, 2, 2, 3])]
        self.locals: dict[str, Place] = {}
        self.jobs: list[Job] = []
        self.numbers = itertools.count(1)
        self._within_thread: int | None = None  # Where a job works within a call of another one.
        self._is_paused = False  # Whether file calls are those of the history itself.
        self._calls = self._due = 0  # File calls of the operation, and the one that is special.
        self._then: Callable[[], None] | None = None  # What another job does at that call.
        self._failing: tuple[Place, str, float] | None = None  # Where and how calls fail.
        self._was_struck = False
        self._have_worked: list[Job] = []  # Within the operation of another one.

    # ---- Running ----

    def run(self, count: int) -> None:
        """Runs so many operations, and then checks what is left."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(self._end)
            for name in CALLS:
                stack.enter_context(self._watched(Location, name))
            stack.enter_context(self._watched(CheckpointTransaction, "_publish"))
            stack.enter_context(mock.patch.object(_native, "MetadataFile", self._opened))
            self._begin()
            for _ in range(count):
                self._step()
            self._last()

    def _watched(self, kind: type, name: str) -> Any:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(subject: Any, *arguments: Any, **options: Any) -> Any:
            where = subject if isinstance(subject, Location) else subject.target
            lost = self._at_call(name, str(where))
            result = real(subject, *arguments, **options)
            if lost is not None:
                raise lost
            return result

        return mock.patch.object(kind, name, call)

    def _opened(
        self, fs: Any, path: Path, real: Any = _native.MetadataFile
    ) -> _native.MetadataFile:
        self._at_call("open", str(path))
        return real(fs, path)

    def _at_call(self, name: str, path: str) -> StorageError | None:
        """What happens at a file call; returns the error if it is made, and its answer is lost."""
        is_own = self._is_paused or self._within_thread is not None
        if is_own or not path.startswith(str(self.folder)):
            return None
        self._calls += 1
        if self._then is not None and self._calls >= self._due:
            then, self._then = self._then, None
            then()
        if self._failing is None or not path.startswith(str(self._failing[0].path)):
            return None
        _, how, share = self._failing
        if self.rng.random() > share:
            return None
        self._was_struck = True
        if how == "late":
            time.sleep(LATE_S)
            return None
        error = StorageError(f"{name} of {path}: refused by the history", errno.EIO)
        if how == "lost" and name in ("write", "rename"):
            return error
        raise error

    @property
    def is_within(self) -> bool:
        """Whether this thread is within a file call of another job."""
        return self._within_thread == threading.get_ident()

    def _step(self) -> None:
        """One operation, perhaps with another one at one of its file calls."""
        self._calls, self._then, self._failing = 0, None, None
        chosen = self.rng.random()
        if chosen < 0.25 and len(self.jobs) > 1:
            self._due = self.rng.randrange(1, 60)
            self._then = self._within
        elif chosen < 0.4:
            places = [self.worlds[-1].place, *self.locals.values()]
            how = self.rng.choice(["fails", "fails", "lost", "late"])
            self._failing = self.rng.choice(places), how, self.rng.choice([0.02, 0.1, 1.0])
        self._operate(self.rng.choice(OPERATIONS), self._choose_job())
        self._then = self._failing = None

    def _within(self) -> None:
        """An operation of another job, while the first is in a file call."""
        outer = self.current
        # Saves in threads of one process wait for each other.
        others = [each for each in self.jobs if each is not outer and each.kind != "thread"]
        if not others:
            return
        outer.was_disturbed = True
        self.outer, self._within_thread = outer, threading.get_ident()
        try:
            self.disks.observe_terms(outer)
            name = self.rng.choice(["save", "save", "save", "restore", "discard", "promote"])
            self._operate(name, self.rng.choice(others))
        finally:
            self._within_thread, self.current = None, outer
            os.environ["TORCH_CKPT_MEMORY"] = str(self._memory_of(outer))

    def _choose_job(self) -> Job | None:
        return self.rng.choice(self.jobs) if self.jobs else None

    def _operate(self, name: str, job: Job | None) -> None:
        """Runs an operation, and checks what has become of the directories."""
        if job is None or name == "begin":
            if len(self.jobs) < 4:
                self._begin()
            return
        self._let_work(job)
        self.said.append(f"{'  within: ' * self.is_within}{job}: {name}")
        line = len(self.said) - 1
        before = self.disks.seen()
        began = time.monotonic()
        outcome = "done"
        if not self.is_within:
            self._was_struck = False
        try:
            getattr(self, f"_{name}")(job)
        except (CheckpointError, CheckpointException) as error:
            outcome = f"{type(error).__name__}: {str(error)[:150]}"
            self._check_may_fail(job, error)
        took = time.monotonic() - began
        if self._was_struck:  # A promotion may have failed, which the next save reports.
            for each in self.jobs:
                each.is_excused = True
        elif name == "save" and outcome == "done":
            job.is_excused = False
        failing = "" if self._failing is None else f" [{self._failing[1]} {self._failing[2]}]"
        self.said[line] += f"{job.detail}{failing}: {outcome}"
        if took > 2:
            self.said[line] += f" ({took:.1f} s)"
        if took > TIMEOUT_S:
            raise Wrong(f"took {took:.0f} s")
        self._settle_promotions()
        self._compare(job, before)

    def _let_work(self, job: Job) -> None:
        """Begins an operation of a job, on its machine."""
        self.current = job
        job.begin_operation()
        memory = self._memory_of(job)
        memory.mkdir(exist_ok=True)
        os.environ["TORCH_CKPT_MEMORY"] = str(memory)

    def _memory_of(self, job: Job) -> Path:
        return self.folder / f"memory-{job.machine}"

    def _check_may_fail(self, job: Job, error: BaseException) -> None:
        """Checks that an operation had a reason to fail."""
        excused = job.is_excused or self._was_struck or job.was_disturbed
        if job.local is not None:  # It is damaged, or another run uses it now.
            excused |= bool(job.local.damaged) or job.local.world is not job.world
        if not excused and not job.was_superseded and not job.lacks_steps:
            raise Wrong(f"failed without a reason: {error}") from error

    def _settle_promotions(self) -> None:
        for job in self.jobs:
            if job.promotion is not None and not (self.is_within and job is self.outer):
                assert not job.promotion.progress(TIMEOUT_S)[0], "a promotion does not end"

    def _compare(self, job: Job, before: Any) -> None:
        self.disks.observe_terms(job)
        if self.is_within:
            self._have_worked.append(job)
            self.disks.seen()  # Learns new saves.
            return
        self._failing = None
        workers = [job, *self._have_worked]
        self._have_worked.clear()
        after = self.disks.seen()
        problem = replaced_by_older(after, workers) or self.disks.lost(before, after, workers)
        if problem:
            raise Wrong(problem)
        for world in self.worlds:
            self._check_reader(world, after)

    def _check_reader(self, world: World, seen: Any) -> None:
        """Checks what a fresh reader restores."""
        self._is_paused = True
        try:
            found, error = None, None
            state = values(-1)
            try:
                found = Run(world.place.path, record=False, timeout_s=TIMEOUT_S).restore(state)
            except (CheckpointError, CheckpointException) as failure:
                error = failure
        finally:
            self._is_paused = False
        expected = world.newest(seen, [world.place])
        if expected is None:
            if found is not None:
                raise Wrong(f"a reader restores {found} of no lineage, {number_in(state)}")
            return
        if error is not None:
            raise Wrong(f"a reader of {world} does not find {expected}: {error}") from error
        if (found, number_in(state)) != (expected.step, expected.number):
            raise Wrong(
                f"a reader of {world} restores step {found}, save {number_in(state)}, and not "
                f"{expected}"
            )

    # ---- Operations ----

    def _begin(self) -> None:
        """Begins a job, which restores, with a few random options."""
        rng, machine = self.rng, self.rng.choice(self.machines)
        world = rng.choice(self.worlds)
        # One process has one agent. It names the run at its first save, as a local directory does.
        has_one = any(job.kind == "agent" for job in self.jobs)
        may_have_agent = self.has_agents and bool(world.terms) and not has_one
        kind = rng.choice(["direct", "direct", "thread", *["agent"] * 3 * may_have_agent])
        options: dict[str, Any] = {"keep_last": rng.choice([None, 1, 2, 2, 3])}
        if rng.random() < 0.2:
            options["keep_every"] = 3
        if rng.random() < 0.2:
            options |= {"keep_best": 1, "monitor": "loss"}
        if rng.random() < 0.2:
            options["keep_for"] = "1h"
        if rng.random() < 0.3:
            options["on_failure"] = "warn"
        local = None
        if rng.random() < 0.6:
            local = self.locals.setdefault(
                machine, self.disks.place(self.folder / machine, machine, world)
            )
        is_foreign = local is not None and local.world is not world
        job = Job(next(self.numbers), machine, world, local, kind, options)
        self.said.append(f"{job}: begins, {options}")
        before = self.disks.seen()
        self._let_work(job)
        self._was_struck = False

        def has_foreign_steps() -> bool:
            return is_foreign and any(local.path.glob("step-*/.metadata"))

        has_steps = has_foreign_steps()
        try:
            job.run = Run(
                world.place.path,
                local=None if local is None else local.path,
                timeout_s=TIMEOUT_S,
                record=False,
                **KINDS[kind],
                **options,
            )
        except CheckpointError as error:
            self.said[-1] += f": {error}"
            for each in self.jobs:
                each.is_excused = each.is_excused or self._was_struck
            # Another job may have saved there within.
            excused = self._was_struck or self._failing
            if not (has_steps or has_foreign_steps() or excused):
                raise Wrong("a job cannot begin") from error
            return
        if has_steps:
            raise Wrong(f"{job} uses steps of another run in {local}")
        if local is not None:
            local.world = world
        self.jobs.append(job)
        self._settle_promotions()
        if self._was_struck:  # Its promotion may have failed.
            job.is_excused = True
        self._compare(job, before)
        if rng.random() < 0.9:
            self._operate("restore", job)

    def _restore(self, job: Job) -> None:
        seen = self.disks.seen()
        places = job.places
        given = None
        steps = sorted({step for place in places for step in seen[place]})
        if steps and self.rng.random() < 0.3:
            given = self.rng.choice(steps)
        expected = job.world.newest(seen, places)
        job.lacks_steps = given is None and expected is None
        job.detail = "" if given is None else f" {given}"
        state = values(-1)
        found = job.run.restore(state, step=given)
        job.detail += f" -> {found}"
        if found is None:
            if given is not None or (expected is not None and not job.was_disturbed):
                raise Wrong(f"{job} restores nothing, and not {expected}")
            return
        save = self.disks.saves.get(number_in(state))
        job.detail += f" {save}"
        if save is None or save.step != found:
            raise Wrong(f"{job} restores for step {found} the values of {save}")
        job.restored(save)
        if given is not None or job.was_disturbed:
            return
        if not job.world.has(save):
            raise Wrong(f"{job} restores {save}, which is of no lineage")
        is_older = expected is not None and (save.step, save.number) < expected.key
        if is_older and not self._was_struck:
            raise Wrong(f"{job} restores {save}, and not {expected}")

    def _save(self, job: Job) -> None:
        step = (job.at or 0) + self.rng.choice([1, 1, 2])
        if self.is_within and self.outer.saves and self.rng.random() < 0.8:
            step = max(step, self.outer.saves[-1].step)  # Often that of the other job.
        loss = float(self.rng.randrange(5))
        save = Save(next(self.numbers), step, job.number, loss, job.world)
        job.detail = f" {save}"
        self.disks.saves[save.number] = save
        job.saving(save)
        with_metrics = {"loss": loss}
        done = job.run.save(step, values(save.number), metrics=with_metrics)
        job.run.wait()
        self._settle_promotions()
        self.disks.observe_terms(job)
        if not done:
            job.detail += " -> False"
            if not self._was_struck and not job.is_excused and not job.was_disturbed:
                raise Wrong(f"{job} did not save {step}")
            return
        job.at = step
        if problem := job.saved(save):
            raise Wrong(problem)
        found = self.disks.seen()[job.places[0]].get(step)
        save.has_returned = found is save
        if found is not save and not job.was_disturbed and not job.was_superseded:
            raise Wrong(f"{save} has returned, and {job.places[0]} has {found}")
        if job.was_superseded and not job.was_disturbed and len(job.places) == 1:
            raise Wrong(f"{job} saves, although a newer job does")

    def _promote(self, job: Job) -> None:
        job.run.wait(promoted=True)
        self._check_promoted(job)

    def _check_promoted(self, job: Job) -> None:
        seen = self.disks.seen()
        newest = job.world.newest(seen, job.places)
        if newest is None or job.was_disturbed or newest.term is not job.term:
            return
        run = job.world.place
        if seen[run].get(newest.step) is not newest and not is_known(run, newest):
            raise Wrong(f"{newest} is not promoted, and {job} has waited for it")

    def _close(self, job: Job) -> None:
        self._remove_job(job)
        job.run.close()
        self._check_promoted(job)

    def _leave(self, job: Job) -> None:
        """The job ends by an error, and does not wait for its promotions."""
        self._remove_job(job)
        with contextlib.suppress(ZeroDivisionError), job.run:
            raise ZeroDivisionError

    def _remove_job(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def _discard(self, job: Job) -> None:
        seen = self.disks.seen()
        steps = sorted({step for place in job.places for step in seen[place]})
        step = self.rng.choice([*steps[-3:], 0])
        job.detail = f" after {step}"
        live = [save for p in job.places for save in seen[p].values() if job.world.has(save)]
        job.lacks_steps = not any(save.step <= step for save in live)
        job.discards(step)
        job.run.discard_after(step)
        if job.was_superseded:
            raise Wrong(f"{job} discards steps, although a newer job saves")
        if job.at is not None and job.at > step:
            job.at = step

    def _damage(self, job: Job) -> None:
        """Loses a data file, or the metadata, of a step."""
        seen = self.disks.seen()
        place = self.rng.choice([job.world.place, *self.locals.values()])
        if not seen[place]:
            return
        step = self.rng.choice(sorted(seen[place]))
        folder = place.path / f"step-{step}"
        data = sorted(folder.glob("*.distcp"))
        file = folder / ".metadata" if self.rng.random() < 0.3 or not data else data[0]
        job.detail = f" {place} {step} {'metadata' if file.name == '.metadata' else 'data'}"
        file.unlink()
        self.disks.damaged(place, step, lost_metadata=file.name == ".metadata")
        for each in self.jobs:
            each.is_excused = True

    def _grow_old(self, job: Job) -> None:
        """Time passes for a step in the directory of a run."""
        run = job.world.place
        found = self.disks.seen()[run]
        if found:
            step = self.rng.choice(sorted(found))
            job.detail = f" {step}"
            _date_back(run.path / f"step-{step}")
            run.aged.add(found[step])

    def _lose_machine(self, job: Job) -> None:
        """A machine with its jobs, its memory and its local directory is gone."""
        job.detail = f" {job.machine}"
        for other in [each for each in self.jobs if each.machine == job.machine]:
            self._kill(other)
        end_agents(self._memory_of(job))
        shutil.rmtree(self._memory_of(job), ignore_errors=True)
        if (place := self.locals.pop(job.machine, None)) is not None:
            shutil.rmtree(place.path, ignore_errors=True)
            self.disks.forget(place)

    def _kill(self, job: Job) -> None:
        """The job ends at once. What it has of this process goes on in nothing."""
        self._remove_job(job)
        if job.promotion is not None:
            job.promotion.cancel(TIMEOUT_S)

    def _copy(self, job: Job) -> None:
        terms = job.world.terms
        if len(self.worlds) > 1 or not terms or terms[-1].path != job.world.place.path:
            return  # The newest term would not name the original.
        copied = self.folder / "copy"
        shutil.copytree(job.world.place.path, copied)
        self.worlds.append(self.disks.copy_world(job.world, copied))

    def _move(self, job: Job) -> None:
        """The directory gets another name, while no job is in progress."""
        if len(self.worlds) > 1:
            return
        for other in list(self.jobs):
            self._leave(other)
        if self.has_agents:
            for memory in self.folder.glob("memory-*"):
                end_agents(memory)
        place = job.world.place
        if not place.path.is_dir():
            return
        moved = place.path.with_name(f"{place.path.name}x")
        place.path.rename(moved)
        place.path = moved

    # ---- The end ----

    def _last(self) -> None:
        """A last save with ``keep_last=1`` or ``keep_for`` leaves nothing else."""
        for job in list(self.jobs):
            self._operate("close", job)
        gc.collect()  # Tracebacks of errors keep temporaries in use.
        rng = self.rng
        for world in self.worlds:
            machines = [m for m, place in self.locals.items() if place.world is world]
            for machine in [None, *machines]:
                place = None if machine is None else self.locals[machine]
                options: dict[str, Any] = {"keep_last": 1}
                if place is None and rng.random() < 0.5:  # What is promoted is young in the run.
                    options = {"keep_for": "1h"}
                job = Job(next(self.numbers), machine or "m0", world, place, "direct", options)
                self.said.append(f"{job}: saves last, {options}")
                for each in filter(None, [world.place, place]):
                    _date_back(each.path)
                    each.aged.update(self.disks.seen()[each].values())
                with mock.patch.object(leases, "LEASE_S", 0.0):
                    self._save_last(job, rng)

    def _save_last(self, job: Job, rng: random.Random) -> None:
        self._failing = self._then = None
        self._let_work(job)
        local = None if job.local is None else job.local.path
        job.run = Run(
            job.world.place.path,
            local=local,
            record=False,
            timeout_s=TIMEOUT_S,
            **job.options,
        )
        with contextlib.suppress(CheckpointError):
            self._restore(job)
        job.at = max([job.at or 0, *(s.step for s in self.disks.saves.values())])
        before = self.disks.seen()
        self._save(job)
        job.run.close()
        self._compare(job, before)
        for place in job.places:
            if names := allowed_names(place, job.at or 0):
                raise Wrong(f"{place} still has {names}")

    def _end(self) -> None:
        self._failing = self._then = None
        for job in list(self.jobs):
            with contextlib.suppress(CheckpointError, CheckpointException):
                self._kill(job)
        for memory in self.folder.glob("memory-*"):
            end_agents(memory)


OPERATIONS = [
    *["save"] * 12,
    *["restore"] * 4,
    *["begin"] * 4,
    *["promote"] * 2,
    *["close"] * 2,
    *["leave"] * 2,
    *["discard"] * 2,
    *["damage"] * 2,
    *["grow_old"] * 2,
    "lose_machine",
    "copy",
    "move",
]


def _date_back(directory: Path) -> None:
    """Dates everything in a directory two days back."""
    old = time.time() - 2 * 24 * 3600
    for path in [directory, *directory.rglob("*")]:
        with contextlib.suppress(OSError):
            os.utime(path, (old, old))


def end_agents(memory: Path) -> None:
    """Kills the agents of a machine, which this process has started."""
    for lock in memory.glob("*/*/agent.lock"):
        with contextlib.suppress(OSError, ValueError):
            if has_agent(lock.parent):
                pid = int(lock.read_text())
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def run_history(seed: int, folder: Path, count: int | None = None) -> str | None:
    """Runs the history of a seed; returns its operations and what was wrong, if anything was."""
    history = History(seed, folder)
    if count is None:
        count = history.rng.choice([8, 12, 16, 24])
    try:
        history.run(count)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tail = traceback.format_exception(error)[-12:]
        return "\n".join([*history.said, *(f"{error!r}", *tail)])
    return None
