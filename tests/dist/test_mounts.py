"""Mounts that lack one call: a save works without it, or is refused before its first byte of data.

A seccomp listener plays the mount. Other directories, such as shared memory, have all calls.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from mount_ways import DATA_NBYTES, WAYS, state_of
from syscalls import Listener, Stop, can_stop, have_answered, refuse_direct, stop_before_changes

import torch_ckpt
from torch_ckpt import FastReader

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64"),
]


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
