"""A lease is of the process that has entered it, whatever its clock and its children do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.run_steps import save_steps, state_of, steps_in

from torch_ckpt import Run
from torch_ckpt.commits import leases

pytestmark = pytest.mark.timeout(60)


def in_a_forked_child(work: Callable[[], None]) -> None:
    """Forks a process, which leaves the blocks of its parent by the exception of ``work``."""
    if (pid := os.fork()) == 0:
        work()
        raise SystemExit
    os.waitpid(pid, 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return save_steps(tmp_path / "run", 1, keep_last=1)


def lease_files(run: Run) -> list[Path]:
    return list(Path(run.directory).glob(".lease-*"))


def test_a_forked_child_that_leaves_the_block_does_not_end_the_lease(run: Run) -> None:
    parent = os.getpid()
    try:
        with run.lease(1):
            in_a_forked_child(lambda: None)
            run.save(2, state_of(2))
            assert steps_in(Path(run.directory)) == [1, 2]
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert lease_files(run) == []


def test_a_forked_child_that_raises_saves_nothing_in_the_name_of_its_parent(run: Run) -> None:
    parent = os.getpid()

    def fail() -> None:
        raise ZeroDivisionError

    try:
        with run.saving_on_exception(lambda: state_of(2)):
            run.should_save(2)
            in_a_forked_child(fail)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert steps_in(Path(run.directory)) == [1]


@pytest.mark.parametrize("by_s", [-400.0, 400.0])
def test_a_lease_of_a_process_that_lives_protects_whatever_the_clock_is_set_to(
    by_s: float, run: Run
) -> None:
    with run.lease(1):
        [file] = lease_files(run)
        then = time.time() - by_s  # As if the clock had been set since.
        os.utime(file, (then, then))
        run.save(2, state_of(2))
        assert steps_in(Path(run.directory)) == [1, 2]


def test_a_lease_of_another_machine_ends_by_the_clock(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.lease(1):
        [file] = lease_files(run)
        long_ago = time.time() - 400
        os.utime(file, (long_ago, long_ago))
        monkeypatch.setattr(leases, "is_dead", lambda _: None)
        run.save(2, state_of(2))
        assert steps_in(Path(run.directory)) == [2]
