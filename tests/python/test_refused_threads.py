"""Work whose thread the system refuses has failed: it does not run later."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from progress_bars import on_a_terminal
from support.replicating import Machine
from support.run_steps import steps_in
from waits import until

from torch_ckpt import Run, SnapshotStager, load, reading, save
from torch_ckpt.coordination.waiting import OwnFuture, submitted
from torch_ckpt.errors import CheckpointError
from torch_ckpt.storage.copying import CheckpointCopy


@contextmanager
def no_threads(named: str = "") -> Iterator[list[str]]:
    """The system refuses the threads with such a name, which are listed."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith(named):
            return start(thread)
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    with mock.patch.object(threading.Thread, "start", refuse):
        yield refused


class Argument:
    """Something large."""


def test_work_that_was_refused_does_not_run_with_the_next_and_keeps_nothing() -> None:
    ran: list[Any] = []
    argument = Argument()
    there = weakref.ref(argument)
    with ThreadPoolExecutor(2) as executor:
        with no_threads(), pytest.raises(CheckpointError, match="can't start new thread"):
            submitted(executor, ran.append, argument, future=OwnFuture())
        del argument
        gc.collect()
        assert there() is None
        submitted(executor, ran.append, "the next", future=OwnFuture()).result(10)
        submitted(executor, ran.append, "another", future=OwnFuture()).result(10)
    assert sorted(ran) == ["another", "the next"]


def test_a_copy_that_was_refused_does_not_run_and_its_memory_is_free() -> None:
    stager = SnapshotStager(blocking=False)
    copied = []
    copy = SnapshotStager._copy

    def noted(self: SnapshotStager, *args: Any) -> None:
        copied.append(args)
        copy(self, *args)

    state = {"w": torch.ones(1000)}
    with mock.patch.object(SnapshotStager, "_copy", noted):
        with no_threads(), pytest.raises(CheckpointError, match="can't start new thread"):
            stager.stage(state)
        assert not stager.is_busy
        staged: Any = stager.stage(state)
        assert staged.result(10)["w"].eq(1).all()
        stager.wait_staged()
    assert len(copied) == 1
    stager.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_promotion_that_was_refused_fails_and_is_made_later(
    tmp_path: Path, asynchronous: bool
) -> None:
    def save_step(run: Run, step: int) -> None:
        run.save(step, {"w": torch.full((3,), float(step))})
        run.wait()

    with Run(tmp_path / "run", local=tmp_path / "local", asynchronous=asynchronous) as run:
        with no_threads("torch_ckpt-promote") as refused:
            save_step(run, 1)
            assert refused
            with pytest.raises(CheckpointError, match=r"step 1 was not promoted .*new thread"):
                run.wait(promoted=True)
            with pytest.raises(CheckpointError, match=r"step 1 was not promoted .*new thread"):
                save_step(run, 2)
        save_step(run, 3)
        run.wait(promoted=True)
        assert steps_in(tmp_path / "run") == [1, 3]


def test_a_promotion_that_was_refused_once_does_not_end_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_files = CheckpointCopy.copy_files

    def slowly(copy: CheckpointCopy) -> Any:
        time.sleep(2.5)  # As long as close() looks for failures at first.
        return copy_files(copy)

    run = Run(tmp_path / "run", local=tmp_path / "local", on_failure="warn")
    with no_threads("torch_ckpt-promote"):
        run.save(1, {"w": torch.ones(3)})
    monkeypatch.setattr(CheckpointCopy, "copy_files", slowly)
    run.save(2, {"w": torch.ones(3)})
    run.close()
    assert steps_in(tmp_path / "run") == [1, 2]


def test_the_error_of_a_refused_promotion_names_no_step_that_is_promoted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Run(run) as first:
        for step in (10, 20, 30):
            first.save(step, {"w": torch.ones(3)})
    other = Run(run, local=tmp_path / "local")
    with pytest.warns(UserWarning, match="step 30"):
        other.restore({"w": torch.zeros(3)}, step=10)
    with no_threads("torch_ckpt-promote"):
        other.save(15, {"w": torch.ones(3)})
        with pytest.raises(CheckpointError, match=r"^[^0-9]*step 15 was not promoted"):
            other.wait(promoted=True)


def test_a_lease_whose_thread_was_refused_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, {"w": torch.ones(3)})
    leases: list[AbstractContextManager[object]] = [run.lease(1), reading(tmp_path / "step-1")]
    for lease in leases:
        with no_threads(), pytest.raises(CheckpointError, match=r"cannot lease .*new thread"):
            lease.__enter__()
    assert not list(tmp_path.glob("**/.lease-*"))


@pytest.mark.usefixtures("quiet_dcp")
def test_a_save_whose_progress_bar_was_refused_has_none(tmp_path: Path) -> None:
    with on_a_terminal(), no_threads("torch_ckpt-progress") as refused:
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert refused
    loaded = {"w": torch.zeros(3)}
    load(loaded, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert loaded["w"].eq(1).all()


def test_a_buddy_receives_replicas_after_a_thread_was_refused(memory: Path) -> None:
    machines = Machine(memory / "a", 0), Machine(memory / "b", 1)
    listening = [machine.listen() for machine in machines]
    for machine in machines:
        machine.connect(1 - machine.node, listening[1 - machine.node])
    with no_threads("torch_ckpt-replica") as refused:
        sent = machines[1].fill(0)
        until(lambda: "torch_ckpt-replica" in refused)
    until(lambda: machines[0].stored() == [sent])
    for machine in machines:
        machine.close()
