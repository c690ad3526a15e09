"""Two agents in one process, which save together, step by step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torch_ckpt import CheckpointError, FastReader, IoOptions
from torch_ckpt._core import _native
from torch_ckpt.agent import machine_part
from torch_ckpt.agent.client import Member
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.joint_save import JointSave
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Failure
from torch_ckpt.agent.persist import Writing
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, files_in, open_committed
from torch_ckpt.process_state import PROCESS

MACHINES = (0, 1)
SMALL_FILES = {"metrics.json": b'{"loss": 1.0}'}
MANY_ROUNDS = 30


class KilledError(BaseException):
    """In the place of SIGKILL."""


def _begin_commit(
    transaction: CheckpointTransaction, metadata: bytes, index: bytes, files: object
) -> None:
    """What a commit has done just before its rename."""
    directory, save_id = transaction.target.local_path, transaction.save_id
    assert directory is not None
    for name, content in ((f".metadata.{save_id}.tmp", metadata), (f".index.{save_id}", index)):
        (directory / name).write_bytes(content)


class Killer:
    """Kills the agent that is running at its change of a file with this number, before or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.changes = 0
        self.is_killed = False
        self.running = 0
        for name in (
            "write",
            "rename",
            "remove",
            "remove_all",
            "create_directories",
            "link",
            "replace",
        ):
            self._wrap(monkeypatch, Location, name)
        self._wrap(monkeypatch, CheckpointTransaction, "commit")
        self._wrap(monkeypatch, machine_part, "write_shares")

    def arm(self, machine: int, at: int) -> None:
        """Kills the agent of a machine at this moment; never if it is negative."""
        self.victim, self.at, self.changes, self.is_killed = machine, at, 0, False

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def changed(*args: Any, **options: Any) -> Any:
            if self.running != self.victim:
                return real(*args, **options)
            self._die()
            if name == "commit":
                self._die(lambda: _begin_commit(*args))
            result = real(*args, **options)
            self._die()
            return result

        monkeypatch.setattr(owner, name, changed)

    def _die(self, last: Callable[[], None] = lambda: None) -> None:
        if self.changes == self.at:
            last()
        self.is_killed = self.is_killed or self.changes == self.at
        self.changes += 1
        if self.is_killed:
            raise KilledError


def values(machine: int, step: int) -> torch.Tensor:
    return torch.full((1000,), float(10 * step + machine))


class Machine:
    """A machine of one rank, whose agent may be replaced."""

    def __init__(
        self,
        folder: Path,
        number: int,
        killer: Killer | None = None,
        *,
        step: int = 1,
        is_apart: bool = True,
        shared: Path | None = None,
        disks: Path | None = None,
        state: dict[str, Any] | None = None,
        sync: bool = False,
    ) -> None:
        self.number, self.killer = number, killer
        self.shared = shared or folder / "run"
        disk = (disks or folder) / f"machine-{number}" if is_apart else self.shared
        self.step = disk / f"step-{step}"
        target = Destination(
            Location(self.step), Location(self.shared) if is_apart else None, SMALL_FILES
        )
        state = state or {f"w{number}": values(number, step), f"o{number}": [step]}
        contents = SlotContents.of(state)
        table = contents.table(target.encode(), sync=sync)
        path = os.fsencode(folder / f"slot-{number}-{step}")
        self.slot = _native.Slot.create(path, _native.slot_nbytes(len(table), contents.nbytes))
        member = Member(b"r" * 16, b"s" * 16, number, 2, number, 2, [number])
        self.slot.begin(member.header(step, step, persist=True), table, contents.nbytes)
        contents.copy_to(self.slot, _native.Devices())
        self.slot.complete()
        self.joint: JointSave | None = None
        self.has_ended = False
        self.is_lost = False
        self.live: list[Save] = []  # Other saves of this machine.
        self.is_orphan = False
        self.remote_failure: Failure | None = None
        self.unpublished: list[tuple[Manifests, dict[str, Any]]] = []
        self.error: CheckpointError | None = None
        self.probed: set[Any] = set()

    def go_on(self, *, comes_back: bool = True) -> None:
        """Advances the save once."""
        if self.has_ended or self.is_lost:
            return
        if self.killer is not None:
            self.killer.running = self.number
        PROCESS.probed = self.probed  # Each agent probes its file system.
        try:
            if self.joint is None:
                self.joint = JointSave(
                    [self.slot],
                    Writing(IoOptions()),
                    timeout_s=600.0,
                    is_shutting_down=lambda: False,
                    is_orphan=lambda: self.is_orphan,
                    remote_failure=lambda: self.remote_failure,
                    publish_later=lambda files, facts: self.unpublished.append((files, facts)),
                )
                self.joint.begin()
            self.has_ended = self.joint.advance()
            if self.has_ended:
                self.joint.clear_former(self.live)
        except KilledError:
            assert self.killer is not None
            PROCESS.temporaries.clear()  # Its process is dead, and the next one probes again.
            self.probed.clear()
            self.joint = None
            self.killer.is_killed = False
            self.killer.at = -1
            self.is_lost = not comes_back
        except CheckpointError as error:
            self.error, self.has_ended = error, True

    @property
    def id(self) -> str | None:
        return committed_id(Location(self.step)) if self.step.exists() else None

    def check_committed(self) -> None:
        """What is committed has the files of this machine, if anything is committed.

        And the small files of the step, which appear with the commit.
        """
        if self.id is None:
            return
        _, index = open_committed(Location(self.step), "")
        assert index is not None
        own = [(name, n) for name, n in index.files if name.startswith(f"__{self.number}_")]
        assert own
        assert files_in(Location(self.step), own) == {name for name, _ in own}
        for name, content in SMALL_FILES.items():
            assert (self.step / name).read_bytes() == content

    def check_files(self) -> None:
        """What is committed has its files, and nothing is beside it."""
        names = set(os.listdir(self.step))
        assert {".metadata", f".index.{self.id}"} < names
        data = names - {".metadata", f".index.{self.id}", *SMALL_FILES}
        assert data
        assert all(name.startswith(f"__{self.number}_") for name in data), names


def save(machines: list[Machine]) -> None:
    """Saves until all have ended."""
    for _ in range(MANY_ROUNDS):
        for machine in machines:
            machine.go_on()
        if all(machine.has_ended for machine in machines):
            return
    raise AssertionError("the save does not end")


def check_whole(folder: Path, machines: list[Machine], step: int = 1) -> None:
    """All machines have committed one save, and their files together are a checkpoint."""
    for machine in machines:
        assert machine.error is None
        machine.check_committed()
    assert machines[0].id == machines[1].id is not None
    whole = folder / "whole"
    for machine in machines:
        shutil.copytree(machine.step, whole, dirs_exist_ok=True)
    state: dict[str, Any] = {f"w{m}": torch.zeros(1000) for m in MACHINES}
    state |= {f"o{m}": None for m in MACHINES}
    dcp.load(state, storage_reader=FastReader(whole), no_dist=True)
    for m in MACHINES:
        assert torch.equal(state[f"w{m}"], values(m, step))
        assert state[f"o{m}"] == [step]
    shutil.rmtree(whole)
    if machines[0].step == machines[1].step:
        assert not [name for name in os.listdir(machines[0].step) if name.startswith(".agents")]
        return
    for machine in machines:
        machine.check_files()
    assert not any((folder / "run" / ".agents").iterdir())
