"""Mounts that lack one call: a save works without it, or is refused before its first byte of data.

A seccomp listener plays the mount. Other directories, such as shared memory, have all calls.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from support import joint_machines
from support.joint_machines import MACHINES, Machine
from syscalls import Listener, Stop, can_stop, have_answered, refuse_direct, stop_before_changes

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, IoOptions, Run, SafetensorsWriter
from torch_ckpt.cli.directory_probes import directory
from torch_ckpt.conversion.convert import convert
from torch_ckpt.coordination.group import group_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64"),
]

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


class Lack(NamedTuple):
    """A call that a mount refuses."""

    is_it: Callable[[Stop], bool]
    error: int


def is_directory(path: str) -> bool:
    return os.path.isdir(path)


LACKS = {
    "rename of a directory": Lack(
        lambda s: s.call == "rename" and is_directory(s.old), errno.EPERM
    ),
    "rename of a directory across servers": Lack(
        lambda s: s.call == "rename" and is_directory(s.old), errno.EXDEV
    ),
    "rename of a file": Lack(
        lambda s: s.call == "rename" and not is_directory(s.old), errno.ENOSYS
    ),
    "rename": Lack(lambda s: s.call == "rename", errno.EPERM),
    "exchange": Lack(lambda s: s.call == "exchange", errno.EINVAL),
    "link": Lack(lambda s: s.call == "link", errno.EPERM),
    "link, not known": Lack(lambda s: s.call == "link", errno.EINVAL),
    "fsync of a directory": Lack(
        lambda s: s.call == "fsync" and is_directory(s.path), errno.EINVAL
    ),
    "fsync of a directory, not known": Lack(
        lambda s: s.call == "fsync" and is_directory(s.path), errno.ENOSYS
    ),
    "fsync of a directory, forbidden": Lack(
        lambda s: s.call == "fsync" and is_directory(s.path), errno.EPERM
    ),
    "fsync of a file": Lack(
        lambda s: s.call == "fsync" and not is_directory(s.path), errno.ENOTSUP
    ),
    "unlink": Lack(lambda s: s.call in ("unlink", "rmdir"), errno.EPERM),
    "fallocate": Lack(lambda s: s.call == "fallocate", errno.EOPNOTSUPP),
    "O_DIRECT": Lack(lambda s: False, errno.EINVAL),
}
RECORD = re.compile(r"/(run-id|events\.jsonl)$")
"""What a run writes about itself, whether or not it saves a step."""

LEAVES = {"unlink"}
"""Without these, no program can remove what it has made."""


def write_on_mount(way: str, lack: str, mount: Path) -> tuple[str, str]:
    """Writes; returns the path, and the error if it has failed."""
    os.environ["TORCH_CKPT_IO"] = "threads"  # The filter does not see requests of io_uring.
    is_it, number = LACKS[lack]
    marks = mount.parent / "has data"

    def answer(listener: Listener, stop: Stop) -> None:
        is_here = f"{mount}/" in f"{stop.path}/" or f"{mount}/" in f"{stop.old}/"
        if is_here and stop.nbytes >= DATA_NBYTES // 4:
            marks.touch()
        if is_here and is_it(stop):
            listener.fail(stop, number)
        else:
            listener.let_through(stop)

    if lack == "O_DIRECT":
        refuse_direct(number)
    have_answered(stop_before_changes, answer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(WAYS[way](mount)), ""
        except BaseException as error:
            return "", f"{type(error).__name__}: {error}"


def assert_stored(path: Path) -> None:
    state = state_of(0)
    if path.suffix == ".pt" or path.is_file():
        state = torch.load(path)
    else:
        dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    assert all(torch.equal(value, state_of(1)[name]) for name, value in state.items())


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.thin(1)
@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("way", WAYS)
def test_a_save_works_without_a_call_or_is_refused_before_its_first_byte(
    tmp_path: Path, way: str, lack: str
) -> None:
    mount = tmp_path / "mount"
    for name in ("existing", "tags", "run", "model", "disks/machine-0", "disks/machine-1"):
        (mount / name).mkdir(parents=True)
    for name in ("source", "mount/again", "mount/base"):
        torch_ckpt.save(state_of(1), checkpoint_id=tmp_path / name, no_dist=True)
    before = tree(mount)
    path, error = Forks().call(write_on_mount, way, lack, mount)
    print(way, lack, error or "works")
    if not error:
        assert_stored(Path(path))
        if lack not in LEAVES:
            assert not [name for name in tree(mount) if "/." in f"/{name}" and ".tmp" in name]
            assert not [name for name in tree(mount) if ".partial" in name or ".removed" in name]
        return
    if way != "doctor":  # It measures the rate of writes.
        assert not (tmp_path / "has data").exists(), error
    assert str(mount) in error
    assert "save to the URL of the store" in error
    if lack not in LEAVES:
        left = {name for name in tree(mount).keys() - before if not RECORD.search(name)}
        assert not left, error
