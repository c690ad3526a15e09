"""Leases and removals of one step, in the orders in which two processes may access files."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.interrupts import interrupts
from support.run_steps import state_of

from torch_ckpt import Run
from torch_ckpt.commits import leases
from torch_ckpt.coordination.owner import is_dead, this_process
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems import location
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.removal import discard_after, leased_paths, remove_directories
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories

pytestmark = pytest.mark.timeout(120)

ACCESSES = (
    *(
        "names",
        "directory_names",
        "exists",
        "modified_s",
        "read_range",
        "write",
        "rename",
        "sync",
        "remove",
    ),
    "remove_all",
)


class Remover(threading.Thread):
    """A thread that removes a step, and goes on to its next access of files when it is told to."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._turns, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.has_ended = False

    def run(self) -> None:
        self.before_access()
        with contextlib.suppress(CheckpointError):
            self._work()
        self.has_ended = True
        self._arrived.release()

    def before_access(self) -> None:
        self._arrived.release()
        self._turns.acquire()

    def go_on(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.has_ended:
                self._turns.release()
                self._arrived.acquire()

    def start(self) -> None:
        super().start()
        self._arrived.acquire()

    def end(self) -> None:
        while not self.has_ended:
            self.go_on()
        self.join()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Run(folder, record=False) as run:
        for step in (1, 2):
            run.save(step, state_of(step, 10))
    return folder


def retain(run: Path) -> None:
    Retention(keep_last=1).apply(StepDirectories(Location(run)), 2)


def discard(run: Path) -> None:
    discard_after([Location(run)], 0)


def remove_looking_once(run: Path) -> None:
    """As a removal that has listed leases before."""
    remove_directories([Location(run) / "step-1"], leased=lambda: leased_paths(Location(run)))


REMOVALS = {"retention": retain, "discard_after": discard, "one step": remove_looking_once}


@contextlib.contextmanager
def interleaved(
    remover: Remover, before: Callable[[int], None], *, renames_folders: bool
) -> Iterator[None]:
    """Calls ``before`` each access of this thread to files, with the number of the access."""
    reader, count = threading.get_ident(), 0

    def watch(name: str, method: Any) -> Any:
        def access(location: Location, *arguments: Any, **options: Any) -> Any:
            nonlocal count
            if threading.get_ident() == remover.ident:
                remover.before_access()
            elif threading.get_ident() == reader:
                before(count)
                count += 1
            if name == "rename" and not renames_folders and Path(location.path).is_dir():
                raise StorageError(f"cannot rename the folder {location}")
            return method(location, *arguments, **options)

        return access

    with pytest.MonkeyPatch.context() as patch:
        for name in ACCESSES:
            patch.setattr(Location, name, watch(name, getattr(Location, name)))
        patch.setattr(leases, "_POLL_S", 0.0)
        yield


@pytest.mark.parametrize("renames_folders", [True, False])
@pytest.mark.parametrize("removal", REMOVALS)
def test_a_lease_that_was_entered_has_its_step_until_it_ends(
    removal: str, renames_folders: bool, saved: Path, tmp_path: Path, seed: int, full: bool
) -> None:
    run = tmp_path / "run"
    outcomes = set()

    def attempt(schedule: dict[int, int]) -> str:
        """Enters a lease while a step is removed, ``schedule[n]`` accesses before access n."""
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(saved, run, copy_function=os.link)
        remover = Remover(lambda: REMOVALS[removal](run))
        remover.start()

        def before(access: int) -> None:
            # The lease may wait for the removal.
            remover.go_on(schedule.get(access, 0) if access < 40 else 1)

        def check() -> None:
            assert (run / "step-1/.metadata").exists(), schedule

        with interleaved(remover, before, renames_folders=renames_folders):
            try:
                with leases.lease(Location(run), 1):
                    check()
                    while not remover.has_ended:
                        remover.go_on()
                        check()
            except NotFoundError:
                return "refused"
            finally:
                remover.end()
        return "leased"

    rng = random.Random(seed)
    every = [{at: count} for at in range(12) for count in range(1, 30)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for schedule in rng.sample(every, 100 if full else 50):
            outcomes.add(attempt(schedule))
        for _ in range(100 if full else 50):
            schedule = {at: rng.choice((0, 0, 0, 1, 2, 4, 8)) for at in range(12)}
            outcomes.add(attempt(schedule))
    assert outcomes == {"leased", "refused"}


def test_a_lease_does_not_wait_for_a_removal_whose_process_has_died(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_REMOVAL_S", 0.05)
    shutil.copytree(saved, tmp_path / "run")
    run = Location(tmp_path / "run")
    with contextlib.ExitStack() as died:
        died.enter_context(leases.announced_removal(run, ["step-1"]))
        with leases.lease(run, 2), leases.lease(run, 1) as path:
            assert path.names()


KILLED = """
import os, sys
from torch_ckpt.filesystems import location
from torch_ckpt.filesystems.location import Location
from torch_ckpt.commits import leases
with leases.announced_removal(Location(sys.argv[1]), ["step-1"]):
    os._exit(0)
"""


def test_no_lease_waits_for_a_removal_that_was_killed(
    saved: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """The announcement is of this machine, or of another one and old."""
    shutil.copytree(saved, tmp_path / "run")
    run = Location(tmp_path / "run")

    def announcements() -> list[Path]:
        return list((tmp_path / "run").glob(".pending-removal-*"))

    run_python(KILLED, run)
    (of_this_machine,) = announcements()
    began = time.monotonic()
    with leases.lease(run, 1):
        pass
    of_this_machine.rename(of_this_machine.with_name(".pending-removal-0123456789abcdef"))
    (of_another,) = announcements()
    long_ago = time.time() - 2 * leases._REMOVAL_S
    os.utime(of_another, (long_ago, long_ago))
    with leases.lease(run, 1):
        pass
    assert time.monotonic() - began < leases._REMOVAL_S / 2


KILLED_WHILE_IT_ASKS_THE_TIME = """
import os, sys
from torch_ckpt.filesystems.location import Location
from torch_ckpt.commits import leases
Location.modified_s = lambda _: os._exit(0)
leases.now_s(Location(sys.argv[1]))
"""


@pytest.mark.parametrize("program", [KILLED, KILLED_WHILE_IT_ASKS_THE_TIME])
def test_a_retention_deletes_at_once_what_a_killed_one_has_left(
    program: str, saved: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """Only the owner of a file that is not of this machine may still live."""
    shutil.copytree(saved, tmp_path / "run")
    run_python(program, tmp_path / "run")
    (left,) = (tmp_path / "run").glob(".pending-*")
    of_another = left.with_name(f".pending-0123456789abcdef.{'0' * 8}-12-3")
    of_another.touch()
    with leases.announced_removal(Location(tmp_path / "run"), ["step-2"]):
        (own,) = (tmp_path / "run").glob(f".pending-removal-*.{this_process()}")
        leases.remove_expired_leases(Location(tmp_path / "run"))
        assert set((tmp_path / "run").glob(".pending-*")) == {of_another, own}


@pytest.mark.parametrize(
    "process", ["", "x", "host-a.b-12-3", "{machine}-12", "{machine}-x-3", f"{{machine}}-{9**25}-3"]
)
def test_a_lease_waits_no_longer_for_a_removal_whose_name_is_odd(
    saved: Path, tmp_path: Path, process: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    text = process.format(machine=this_process().split("-")[0])
    odd = tmp_path / "run" / f".pending-removal-0123456789abcdef.{text}"
    odd.write_text('["step-1"]')
    long_ago = time.time() - 2 * leases._REMOVAL_S
    os.utime(odd, (long_ago, long_ago))
    assert is_dead(text) is None
    with leases.lease(Location(tmp_path / "run"), 1) as path:
        assert path.names()


def test_a_step_is_removed_from_a_disk_that_is_full(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved, tmp_path / "run")

    def write(location: Location, *_: object, **__: object) -> None:
        raise StorageError(f"cannot write {location}: no space left")

    monkeypatch.setattr(Location, "write", write)
    retain(tmp_path / "run")
    assert not (tmp_path / "run/step-1").exists()


def test_a_removal_leaves_no_announcement(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    retain(tmp_path / "run")
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith(".")] == []


def test_an_interrupted_removal_lets_no_lease_wait_and_its_file_is_removed_by_the_next(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, record=False)
    for step in (1, 2):
        run.save(step, state_of(step))
    directory, raised = Location(tmp_path), []

    def remove() -> None:
        with leases.announced_removal(directory, ["step-1"]):
            pass

    def announced() -> list[Path]:
        return list(tmp_path.glob(".pending-removal-*"))

    left = 0
    for error in interrupts(remove, [leases, contextlib, location]):
        raised.append(error)  # A program may keep the errors, and so the frames of the calls.
        left += bool(announced())
        begin = time.monotonic()
        with run.lease(1):
            assert time.monotonic() - begin < 5
        remove()
        assert not announced()
    assert left
    assert {type(error) for error in raised} == {KeyboardInterrupt}
