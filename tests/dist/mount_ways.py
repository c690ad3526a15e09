"""The ways in which this package writes to a directory on a mount."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from support import joint_machines
from support.joint_machines import MACHINES, Machine

import torch_ckpt
from torch_ckpt import FastWriter, IoOptions, Run, SafetensorsWriter
from torch_ckpt.cli.directory_probes import directory
from torch_ckpt.conversion.convert import convert
from torch_ckpt.coordination.group import group_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location

DATA_NBYTES = 1 << 18


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((DATA_NBYTES // 4,), float(step)), "step": torch.tensor(step)}


# ---- The ways to write, each to a directory on the mount ----


def save_new(mount: Path) -> Path:
    torch_ckpt.save(state_of(1), checkpoint_id=mount / "new")
    return mount / "new"


def save_to_existing(mount: Path) -> Path:
    torch_ckpt.save(state_of(1), checkpoint_id=mount / "existing")
    return mount / "existing"


def save_again(mount: Path) -> Path:
    torch_ckpt.save(state_of(1), checkpoint_id=mount / "again")
    return mount / "again"


def save_in_run(mount: Path) -> Path:
    with Run(mount / "run", keep_best=1, monitor="loss") as run:
        run.save(1, state_of(1), metrics={"loss": 1.0})
    return mount / "run" / "step-1"


def save_by_thread(mount: Path) -> Path:
    with Run(mount / "run", asynchronous=True) as run:
        run.save(1, state_of(1))
    return mount / "run" / "step-1"


def save_by_agent(mount: Path) -> Path:
    with Run(mount / "run", asynchronous=True, agent=True) as run:
        run.save(1, state_of(1))
    return mount / "run" / "step-1"


def save_by_machines(disks: str, shared: str) -> Callable[[Path], Path]:
    """Two agents save together, each to its disk or to what they share; there their files are."""

    def save(mount: Path) -> Path:
        folder = mount.parent
        machines = [
            Machine(
                folder,
                number,
                is_apart=bool(disks),
                shared=folder / shared,
                disks=folder / disks,
                state={"other": torch.ones(3)} if number else state_of(1),
                sync=True,
            )
            for number in MACHINES
        ]
        joint_machines.save(machines)
        for machine in machines:
            if machine.error is not None:
                raise machine.error
        return machines[0].step

    return save


def save_a_part(mount: Path) -> Path:
    """The rest is taken from the step before, by links."""
    base = mount / "base"
    torch_ckpt.save(state_of(1), storage_writer=FastWriter(mount / "part", base=base))
    return mount / "part"


def promote(mount: Path) -> Path:
    with tempfile.TemporaryDirectory() as local, Run(mount / "run", local=local) as run:
        run.save(1, state_of(1))
        run.wait(promoted=True)
    return mount / "run" / "step-1"


def save_model(mount: Path) -> Path:
    torch_ckpt.save(state_of(1), storage_writer=SafetensorsWriter(mount / "model"))
    return mount / "model"


def save_shards(mount: Path) -> Path:
    writer = SafetensorsWriter(mount / "model", max_shard_nbytes=4096)
    torch_ckpt.save(state_of(1), storage_writer=writer)
    return mount / "model"


def save_by_deepspeed(mount: Path) -> Path:
    from torch_ckpt.frameworks.deepspeed.engine_checkpoint import DeepSpeedCheckpoint

    path = mount / "tags"
    made = DeepSpeedCheckpoint(group_of(None), path, "tag", True, io=IoOptions(), timeout_s=60)
    made.write(str(path / "tag" / "state.pt"), lambda: (state_of(1), None))
    made.finish()
    return path / "tag" / "state.pt"


def examine(mount: Path) -> Path:
    facts = list(directory(Location(mount)))
    assert len(facts) > 5
    if refused := [means for name, _, means in facts if name == "commit" and means]:
        raise CheckpointError(refused[0])
    return mount / "again"


def convert_to(kind: str) -> Callable[[Path], Path]:
    def write(mount: Path) -> Path:
        convert(Location(mount.parent / "source"), Location(mount / "converted"), kind)
        return mount / "converted"

    return write


WAYS: dict[str, Callable[[Path], Path]] = {
    "new": save_new,
    "existing": save_to_existing,
    "again": save_again,
    "run": save_in_run,
    "thread": save_by_thread,
    "agent": save_by_agent,
    "machines": save_by_machines("", "mount/run"),
    "machines and disks": save_by_machines("mount/disks", "mount/run"),
    "disks of machines": save_by_machines("mount/disks", "elsewhere"),
    "files of agents": save_by_machines("disks", "mount/run"),
    "part": save_a_part,
    "promotion": promote,
    "model": save_model,
    "shards": save_shards,
    "deepspeed": save_by_deepspeed,
    "to dcp": convert_to("dcp"),
    "to torch": convert_to("torch"),
    "to safetensors": convert_to("safetensors"),
    "doctor": examine,
}
