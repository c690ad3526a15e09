"""Writes of agents to the directory that machines share, which fail, or seem to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from support.joint_machines import MACHINES, MANY_ROUNDS, Machine, check_whole, save

from torch_ckpt.agent import joint_save
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location

Fault = Literal["fails", "lands, then raises", "raises, then lands", "all fail from then on"]
FAULTS: tuple[Fault, ...] = (
    "fails",
    "lands, then raises",
    "raises, then lands",
    "all fail from then on",
)


class Writes:
    """The writes of one machine, of which the one with this number goes wrong.

    The other machine goes on between a write that lands and its error. If a write lands after its
    error, the next one fails as well.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.victim = self.at = -1
        self.count = 0
        self.fault: Fault = "fails"
        self.meanwhile: Callable[[], None] = lambda: None
        self._late: list[Callable[[], None]] = []
        self._put = Manifests._put
        writes = self

        def put(files: Manifests, *args: Any) -> None:
            writes.write(files, *args)

        monkeypatch.setattr(Manifests, "_put", put)

    def arm(self, victim: int, at: int, fault: Fault) -> None:
        self.victim, self.at, self.fault, self.count = victim, at, fault, 0
        self._late = []

    def write(self, files: Manifests, *args: Any) -> None:
        if files.node != self.victim:
            self._put(files, *args)
            return
        number, self.count = self.count, self.count + 1
        most = {"raises, then lands": 2, "all fail from then on": MANY_ROUNDS}.get(self.fault, 1)
        if self.at < 0 or not self.at <= number < self.at + most:
            self._put(files, *args)
            return
        if self.fault == "lands, then raises":
            self._put(files, *args)
            self.meanwhile()
        if self.fault == "raises, then lands" and number == self.at:
            self._late.append(lambda: self._put(files, *args))
        raise StorageError("the answer is lost", 110)

    def land(self) -> None:
        """Lets late writes arrive."""
        while self._late:
            self._late.pop(0)()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def _machines(folder: Path, *, is_apart: bool) -> list[Machine]:
    folder.mkdir()
    return [Machine(folder, number, is_apart=is_apart) for number in MACHINES]


def _advance(machines: list[Machine], writes: Writes) -> bool:
    """Advances all, until all have ended or nothing more happens; returns whether all have."""
    writes.meanwhile = machines[1 - writes.victim].go_on
    for _ in range(MANY_ROUNDS):
        for machine in machines:
            machine.go_on()
        if all(machine.has_ended for machine in machines):
            break
        writes.land()
    writes.land()
    return all(machine.has_ended for machine in machines)


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("is_apart", [True, False], ids=["local", "shared"])
@pytest.mark.parametrize("victim", MACHINES)
@pytest.mark.parametrize("fault", FAULTS[:3])
def test_a_write_whose_outcome_is_unknown_leaves_every_committed_checkpoint_its_files(
    tmp_path: Path, writes: Writes, fault: Fault, victim: int, is_apart: bool
) -> None:
    writes.arm(victim, -1, fault)
    machines = _machines(tmp_path / "first", is_apart=is_apart)
    save(machines)
    check_whole(tmp_path / "first", machines)
    for at in range(writes.count):
        folder = tmp_path / str(at)
        writes.arm(victim, at, fault)
        machines = _machines(folder, is_apart=is_apart)
        has_ended = _advance(machines, writes)
        for machine in machines:
            machine.check_committed()
        assert has_ended, f"nothing happens after write {at}"
        check_whole(folder, machines)
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_apart", [True, False], ids=["local", "shared"])
def test_a_save_that_is_discarded_before_the_commit_is_not_committed(
    tmp_path: Path, is_apart: bool
) -> None:
    machines = _machines(tmp_path / "run", is_apart=is_apart)
    for machine in reversed(machines):
        machine.go_on()
    assert machines[0].joint is not None
    assert machines[0].joint.has_written  # It waits for the manifest of the other.
    machines[0].slot.clear()
    save(machines)
    for machine in machines:
        assert machine.id is None
        assert "machine 0 (" in str(machine.error)


@pytest.mark.parametrize("is_apart", [True, False], ids=["local", "shared"])
@pytest.mark.parametrize("victim", MACHINES)
def test_a_machine_that_cannot_publish_any_more_fails_the_save_on_all_once_it_can(
    tmp_path: Path,
    writes: Writes,
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    is_apart: bool,
) -> None:
    monkeypatch.setattr(joint_save, "SHUTDOWN_WAIT_S", 0.0)
    writes.arm(victim, -1, "fails")
    save(_machines(tmp_path / "first", is_apart=is_apart))
    for at in range(writes.count):
        folder = tmp_path / str(at)
        writes.arm(victim, at, "all fail from then on")
        machines = _machines(folder, is_apart=is_apart)
        _advance(machines, writes)
        assert machines[victim].has_ended
        writes.arm(victim, -1, "fails")  # The directory can be written again.
        for files, facts in machines[victim].unpublished:
            if files.has_files():
                files.put("failed", facts)
        assert _advance(machines, writes), f"nothing happens after write {at}"
        for machine in machines:
            machine.check_committed()
            assert isinstance(machine.error, StorageError)
            assert f"machine {victim} (" in str(machine.error)
        following = [Machine(folder, number, step=2, is_apart=is_apart) for number in MACHINES]
        save(following)
        check_whole(folder, following, step=2)
        shutil.rmtree(folder)


@pytest.mark.parametrize("folder", ["", "step-1", ".agents"])
def test_a_directory_that_is_gone_within_a_save_is_a_failure_of_storage_on_all(
    tmp_path: Path, folder: str
) -> None:
    machines = _machines(tmp_path / "run", is_apart=folder == ".agents")
    for machine in machines:
        machine.go_on()
    gone, away = tmp_path / "run" / "run" / folder, tmp_path / "away"
    gone.rename(away)
    machines[0].go_on()
    away.rename(gone)
    for files, facts in machines[0].unpublished:
        files.put("failed", facts)
    save(machines)
    for machine in machines:
        assert isinstance(machine.error, StorageError)
        assert "machine 0 (" in str(machine.error)
        assert "No such file or directory" in str(machine.error)


@pytest.mark.parametrize("is_apart", [True, False], ids=["local", "shared"])
@pytest.mark.parametrize("victim", MACHINES)
def test_a_machine_that_once_cannot_read_whether_a_save_is_committed_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, is_apart: bool
) -> None:
    real, failing, calls = Manifests.is_committed, -1, 0

    def is_committed(files: Manifests) -> bool:
        nonlocal calls
        calls += (is_of_victim := files.node == victim)
        if is_of_victim and calls == failing:
            raise StorageError("the answer broke off", 110)
        return real(files)

    monkeypatch.setattr(Manifests, "is_committed", is_committed)
    save(_machines(tmp_path / "first", is_apart=is_apart))
    for failing in range(2 if is_apart else 1, calls + 1):  # 1: before the directory is created.
        calls = 0
        machines = _machines(tmp_path / str(failing), is_apart=is_apart)
        save(machines)
        check_whole(tmp_path / str(failing), machines)


class _KilledError(BaseException):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("is_apart", [True, False], ids=["local", "shared"])
@pytest.mark.parametrize("victim", MACHINES)
def test_a_manifest_of_a_killed_agent_that_lands_late_is_committed_with_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, is_apart: bool
) -> None:
    put, late = Manifests._put, list[Callable[[], None]]()

    def puts(files: Manifests, path: Location, *args: Any) -> None:
        if files.node != victim or not path.name.endswith(".manifest"):
            put(files, path, *args)
        elif not late:
            late.append(lambda: put(files, path, *args))
            raise _KilledError
        else:  # That of the agent that has taken its place, and has written other files.
            put(files, path, *args)
            late[0]()

    monkeypatch.setattr(Manifests, "_put", puts)
    machines = _machines(tmp_path / "run", is_apart=is_apart)
    while not late:
        for machine in machines:
            try:
                machine.go_on()
            except _KilledError:
                machine.joint = None
    save(machines)
    check_whole(tmp_path / "run", machines)


def _until_committed(machines: list[Machine]) -> None:
    while machines[0].id is None:
        for machine in reversed(machines):
            machine.go_on()
    assert machines[1].id is None


def test_a_machine_commits_what_machine_0_has_committed_although_that_waits_no_longer(
    tmp_path: Path,
) -> None:
    machines = _machines(tmp_path / "run", is_apart=True)
    _until_committed(machines)
    assert machines[0].joint is not None
    machines[0].joint._deadline.at = 0.0
    machines[0].go_on()
    assert "no response from machine 1" in str(machines[0].error)
    machines[1].go_on()
    assert machines[1].id == machines[0].id
    machines[0].joint, machines[0].error, machines[0].has_ended = None, None, False
    save(machines)  # The ranks of machine 0 ask for the save again.
    check_whole(tmp_path / "run", machines)


def test_the_next_agent_of_a_machine_does_not_withdraw_what_machine_0_may_commit(
    tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_save, "SHUTDOWN_WAIT_S", 0.0)
    writes.arm(1, -1, "fails")
    machines = _machines(tmp_path / "run", is_apart=True)
    _until_committed(machines)
    machines[1].joint = None
    writes.arm(1, 0, "all fail from then on")
    machines[1].go_on()
    assert machines[1].has_ended
    writes.arm(1, -1, "fails")  # Its ranks ask for the save again.
    machines[1].joint, machines[1].error, machines[1].has_ended = None, None, False
    save(machines)
    check_whole(tmp_path / "run", machines)


def test_a_manifest_of_a_former_agent_and_epoch_gives_way_to_the_present_one(
    tmp_path: Path,
) -> None:
    machines = _machines(tmp_path / "run", is_apart=True)
    machines[0].go_on()
    for _ in range(2):
        machines[1].go_on()  # It has published its manifest.
    for machine in machines:
        machine.joint = None
    (pending,) = machines[0].step.glob(".metadata.*.tmp")
    pending.unlink()  # So the next agent of machine 0 begins another epoch.
    save(machines)
    check_whole(tmp_path / "run", machines)
