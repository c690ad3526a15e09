"""Two agents that save to directories of their own, of which either is killed at every moment.

A killed agent changes no file any more. Another one takes its place, or does not.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.joint_machines import MACHINES, MANY_ROUNDS, Killer, Machine, check_whole, save

from torch_ckpt.agent import joint_save
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location

SOON_S = 20.0


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    killer = Killer(monkeypatch)
    killer.arm(0, -1)
    return killer


def moments(folder: Path, killer: Killer, machine: int) -> int:
    """How many there are in a save."""
    folder.mkdir()
    # Each process does it once. It removes what a killed one has left, and no process dies here.
    check_commit(Location(folder), Location(folder), sync=False)
    killer.arm(machine, -1)
    machines = [Machine(folder, m, killer) for m in MACHINES]
    save(machines)
    check_whole(folder, machines)
    return killer.changes


def killed_at_each_moment(
    folder: Path, killer: Killer, machine: int, first: int, step: int
) -> Iterator[tuple[Path, list[Machine]]]:
    """Yields, for each ``step``-th moment, machines of which one dies then, and their folder."""
    for moment in range(first, moments(folder / "first", killer, machine), step):
        at = folder / str(moment)
        at.mkdir()
        machines = [Machine(at, m, killer) for m in MACHINES]
        killer.arm(machine, moment)
        yield at, machines


@pytest.mark.thin(0.5)
@pytest.mark.parametrize("machine", MACHINES)
def test_an_agent_that_is_killed_at_any_moment_is_replaced_and_the_save_completed(
    tmp_path: Path, killer: Killer, machine: int, seed: int, full: bool
) -> None:
    every = (0, 1) if full else (seed % 3, 3)
    for folder, machines in killed_at_each_moment(tmp_path, killer, machine, *every):
        save(machines)
        assert killer.at == -1, f"not killed at {folder.name}"
        check_whole(folder, machines)
        shutil.rmtree(folder)


@pytest.mark.thin(0.5)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_that_does_not_come_back_fails_the_save_and_removes_nothing_committed(
    tmp_path: Path, killer: Killer, machine: int, seed: int, full: bool
) -> None:
    every = (0, 1) if full else (seed % 6, 6)
    for folder, machines in killed_at_each_moment(tmp_path, killer, machine, *every):
        other = machines[1 - machine]
        _save_until_lost(machines)
        for each in machines:
            if each.id is not None:
                names = os.listdir(each.step)
                assert any(name.endswith(".distcp") for name in names), (folder.name, names)
        if other.error is None and machine == 1:  # Machine 0 ends as the last one.
            assert machines[0].id == machines[1].id is not None, folder.name
        # The next save of all machines removes what this one has left.
        killer.arm(machine, -1)
        following = [Machine(folder, m, killer, step=2) for m in MACHINES]
        save(following)
        check_whole(folder, following, step=2)
        shutil.rmtree(folder)


def _save_until_lost(machines: list[Machine]) -> None:
    for _ in range(MANY_ROUNDS):
        for machine in machines:
            machine.go_on(comes_back=False)
    for machine in machines:
        if machine.joint is not None and not machine.has_ended:
            machine.joint._deadline.at = 0.0  # Its time is over.
            machine.go_on()
            assert machine.has_ended


def _fails(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, is_victim: Callable[..., bool]
) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        if is_victim(*args):
            raise StorageError("the disk is full", 28)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)


def test_a_machine_that_cannot_commit_fails_the_save_on_machine_0(
    tmp_path: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        _fails(
            *(CheckpointTransaction, "commit", full),
            lambda transaction, *_: "machine-1" in str(transaction.target),
        )
        machines = [Machine(tmp_path, m, killer) for m in MACHINES]
        save(machines)
    for machine in machines:
        assert isinstance(machine.error, StorageError)
        assert "machine 1 (" in str(machine.error)
        assert "the disk is full" in str(machine.error)
    machines[0].check_files()  # Committed, and not removed.
    assert machines[1].id is None
    again = [Machine(tmp_path, m, killer, step=2) for m in MACHINES]
    save(again)
    check_whole(tmp_path, again, step=2)


def test_only_own_files_are_checked_before_a_commit(tmp_path: Path, killer: Killer) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    while machines[1].joint is None or not machines[1].joint.has_written:
        for machine in machines:
            machine.go_on()
    (lost,) = machines[1].step.glob("__1_0_*.distcp")
    lost.unlink()
    save(machines)
    assert machines[1].error is not None
    assert f"{lost.name} is missing" in str(machines[1].error)
    assert "machine 1 (" in str(machines[0].error)


def test_a_shared_directory_that_cannot_be_read_is_named(
    tmp_path: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    for machine in machines:
        machine.go_on()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")  # In the place of the directory.
    monkeypatch.setattr(joint_save, "SHUTDOWN_WAIT_S", 0.0)
    save(machines)
    for machine in machines:
        assert isinstance(machine.error, StorageError)
        assert str(tmp_path / "run") in str(machine.error)


def test_a_save_does_not_end_while_it_is_unknown_who_has_committed(
    tmp_path: Path, killer: Killer
) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    while machines[0].id is None:
        for machine in reversed(machines):
            machine.go_on()
    assert machines[1].id is None
    machines[0].joint = None  # Another agent, which has no files of its own in mind.
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("")
    for _ in range(3):
        machines[0].go_on()
    assert not machines[0].has_ended
    (tmp_path / "run").unlink()
    (tmp_path / "away").rename(tmp_path / "run")
    save(machines)
    check_whole(tmp_path, machines)


def test_a_save_fails_where_a_machine_has_withdrawn_its_manifest_from_a_commit(
    tmp_path: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    while machines[0].id is None:
        for machine in reversed(machines):
            machine.go_on()
    assert machines[1].id is None
    for machine in machines:
        machine.joint = None  # Another agent.
    with monkeypatch.context() as other:
        _fails(Manifests, "get", other, lambda files, _, kind: (files.node, kind) == (1, "commit"))
        machines[1].go_on()
    assert "the disk is full" in str(machines[1].error)
    save(machines)
    assert "machine 1 (" in str(machines[0].error)
    machines[0].check_files()


def test_a_shared_directory_that_does_not_answer_is_named(
    tmp_path: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    for machine in machines:
        machine.go_on()
    answers = threading.Event()
    names = Location.names

    def silent(directory: Location) -> list[str]:
        if ".agents" in str(directory):
            answers.wait(SOON_S)
        return names(directory)

    monkeypatch.setattr(Location, "names", silent)
    monkeypatch.setattr("torch_ckpt.agent.answers.ANSWER_S", 0.1)
    monkeypatch.setattr(joint_save, "SHUTDOWN_WAIT_S", 0.0)
    began = time.monotonic()
    save(machines)
    assert time.monotonic() - began < SOON_S / 2
    answers.set()
    for machine in machines:
        assert isinstance(machine.error, StorageError)
        assert f"{tmp_path / 'run'}" in str(machine.error)
        assert "does not answer" in str(machine.error)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_local_disk_that_is_missing_on_one_machine_fails_the_save_on_all_at_once(
    tmp_path: Path, killer: Killer, machine: int
) -> None:
    (tmp_path / f"machine-{machine}").symlink_to(tmp_path / "unmounted")
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    (tmp_path / "run").mkdir()
    for each in machines:
        each.go_on()
    for files, facts in machines[machine].unpublished:  # The agent does so once it can.
        files.put("failed", facts)
    save(machines)
    for each in machines:
        assert f"machine {machine} (" in str(each.error)
        assert "unmounted" in str(each.error) or f"machine-{machine}" in str(each.error)


@pytest.mark.parametrize("kind", ["commit", "committed"])
def test_one_error_of_the_shared_directory_does_not_fail_a_committed_save(
    tmp_path: Path, killer: Killer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    put = Manifests.put
    failures = [StorageError("the store is busy", 5)]

    def fails_once(files: Manifests, what: Any, *args: Any) -> None:
        if what == kind and failures:
            raise failures.pop()
        put(files, what, *args)

    monkeypatch.setattr(Manifests, "put", fails_once)
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    save(machines)
    assert not failures
    check_whole(tmp_path, machines)


def test_a_withdrawn_save_that_is_committed_remains(tmp_path: Path, killer: Killer) -> None:
    machines = [Machine(tmp_path, m, killer) for m in MACHINES]
    while machines[0].id is None:
        for machine in machines:
            machine.go_on()
    assert machines[0].joint is not None
    machines[0].joint.withdraw()
    machines[0].check_files()
    machines[1].go_on()
    assert machines[1].id == machines[0].id


def test_files_of_a_live_save_remain(tmp_path: Path, killer: Killer) -> None:
    first = [Machine(tmp_path, m, killer, step=1) for m in MACHINES]
    for machine in first:
        machine.go_on()
    second = [Machine(tmp_path, m, killer, step=2) for m in MACHINES]
    second[0].live = [(b"s" * 16, 1)]
    save(second)
    assert len(list((tmp_path / "run" / ".agents").iterdir())) == 1
    save(first)
    check_whole(tmp_path, first)


def test_folders_of_saves_are_in_order(rng: random.Random) -> None:
    saves = [(rng.randbytes(16), rng.choice([0, 9, 10, 1 << 40])) for _ in range(50)]
    saves += [(saves[0][0], 3), (saves[0][0], 20)]
    place = (Location("step"), Location("run"))
    names = [Manifests(b"r" * 16, *save, 0, 2, *place).directory.name for save in sorted(saves)]
    assert names == sorted(names)
