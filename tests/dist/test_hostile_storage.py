"""Storage that is full, read-only, linked or holds what is no file: typed errors and no harm."""

from __future__ import annotations

import errno
import os
import pickle
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from ranks import Worlds, on_ranks
from states import READERS, Failure, assert_same, assert_stored, data_files, failures_of, full_value
from support.commit_files import index_file

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.commits import late_names

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

HANG_S = 30
NOBODY = 65534
SHAPE = (64, 33)


def file_of(failure: Failure) -> str:
    """Whose the message names: data, index or metadata."""
    named = re.search(r"/(?:\.(index|metadata)|__\d+_\d+_\w+\.distcp)", failure.message)
    assert named, failure.message
    return named[1] or "data"


def part_of(version: int, rank: int) -> dict[str, Any]:
    """What a rank saves: a tensor of its own, and what all ranks have."""
    return {f"of {rank}": value_of(version, rank), "version": version}


def value_of(version: int, rank: int) -> torch.Tensor:
    return full_value(f"{rank} {version}", SHAPE, torch.float32)


def assert_holds(path: Path, version: int, world_size: int = 1) -> None:
    expected = {f"of {rank}": value_of(version, rank) for rank in range(world_size)}
    assert_stored(path, expected | {"version": version}, no_dist=True)


def save_alone(path: Path, version: int) -> None:
    dcp.save(part_of(version, 0), storage_writer=FastWriter(path), no_dist=True)


def save_by_rank(path: Path, version: int) -> dict[int, Failure]:
    state = part_of(version, dist.get_rank())
    return failures_of(dcp.save, state, storage_writer=FastWriter(path))


def leave_blocks(disk: Path, count: int) -> None:
    """Has a file of ballast take all the room but so many blocks."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    room = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (room.f_bavail - count) * room.f_bsize)
    assert os.statvfs(disk).f_bavail == count


def leave_inodes(disk: Path, count: int) -> None:
    """Has empty files take all inodes but so many."""
    for file in disk.glob("ballast*"):
        file.unlink()
    for number in range(os.statvfs(disk).f_favail - count):
        (disk / f"ballast {number}").touch()
    assert os.statvfs(disk).f_favail == count


ROOM = {"blocks": ("size=2m", leave_blocks), "inodes": ("size=2m,nr_inodes=100", leave_inodes)}


def save_with_ever_more_room(
    disk: Path, leave: Callable[[Path, int], None]
) -> list[dict[int, Failure]]:
    """Saves until there is room for it; returns how each save before has failed."""
    path = disk / "checkpoint"
    seen: list[dict[int, Failure]] = []
    assert not save_by_rank(path, 0)
    before = data_files(path)
    while True:
        version = len(seen) + 1
        if dist.get_rank() == 0:
            leave(disk, len(seen))
        dist.barrier()
        failures = save_by_rank(path, version)
        dist.barrier()
        assert_holds(path, version if not failures else 0, world_size=2)
        if not failures:
            return seen
        if file_of(failures[min(failures)]) != "data":
            assert not data_files(path) - before, "what the commit has failed for is left behind"
        dist.barrier()
        if dist.get_rank() == 0:  # What one rank has written while the other has failed.
            for name in data_files(path) - before:
                (path / name).unlink()
        seen.append(failures)


@pytest.mark.parametrize("what", ROOM)
def test_every_way_to_run_out_of_room_fails_every_rank_and_keeps_the_old_checkpoint(
    worlds: Worlds, mount_tmpfs: Callable[[str], Path], what: str
) -> None:
    options, leave = ROOM[what]
    ranks = worlds.run(2, save_with_ever_more_room, mount_tmpfs(options), leave)
    assert ranks[0] == ranks[1]
    failures = [failure for failed in ranks[0] for failure in failed.values()]
    assert {(failure.kind, failure.errno) for failure in failures} == {
        ("StorageError", errno.ENOSPC)
    }
    found = [file_of(failed[min(failed)]) for failed in ranks[0]]
    # The file of the metadata is made first, and written last.
    order = ["data", "index", "metadata"] if what == "blocks" else ["metadata", "data", "index"]
    assert list(dict.fromkeys(found)) == order, found


def test_read_only_disk_fails_a_save_on_every_rank_and_loads(
    worlds: Worlds, mount_tmpfs: Callable[[str], Path]
) -> None:
    disk = mount_tmpfs("size=1m")
    assert worlds.run(2, save_by_rank, disk, 1) == [{}, {}]
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    seen = worlds.agree(2, save_by_rank, disk, 2)
    assert {failure[:2] for failure in seen.values()} == {("StorageError", errno.EROFS)}
    assert seen.keys() == {0}  # The coordinator makes the first file.
    assert_holds(disk, 1, world_size=2)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert worlds.run(2, save_by_rank, disk, 3) == [{}, {}]
    assert_holds(disk, 3, world_size=2)


@pytest.fixture(scope="module")
def forks() -> Forks:
    return Forks()


def save_and_load_as_nobody(path: Path) -> dict[int, Failure]:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    failures = failures_of(save_alone, path, 2)
    assert_holds(path, 1)
    return failures


def test_directory_that_may_only_be_read_fails_a_save_and_loads(forks: Forks) -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to other users.
        path = Path(folder, "checkpoint")
        save_alone(path, 1)
        Path(folder).chmod(0o755)
        path.chmod(0o555)
        failures = forks.call(save_and_load_as_nobody, path)
    assert failures[0].kind == "StorageError"
    assert failures[0].errno == errno.EACCES
    assert str(path) in failures[0].message


def test_directory_behind_a_link_is_saved_to_and_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for version in (1, 2):
        save_alone(link, version)
        assert_holds(link, version)
        assert_holds(tmp_path / "real", version)
    assert link.is_symlink()
    assert len(data_files(link)) == 1, "files of the version before are left"


@on_ranks(2)
def test_ranks_that_a_link_leads_to_different_directories_fail_and_lose_nothing(path: Path) -> None:
    """It moves after the first rank has begun the save, and before the other does."""
    link, rank = path / "latest", dist.get_rank()
    if rank == 0:
        save_alone(path / "a", 1)
        save_alone(path / "b", 2)
        link.symlink_to("a")
    group = dist.new_group(backend="gloo")
    for turn in (0, 1):
        dist.barrier()
        if rank == turn:
            state, writer = part_of(3, rank), FastWriter(link)
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
            (path / "pending").symlink_to("b")
            (path / "pending").replace(link)
    with mock.patch.object(late_names, "APPEARS_S", 0.3):
        failures = failures_of(future.result)
    assert {failure.kind for failure in failures.values()} == {"StorageError"}
    assert all("directory on all hosts" in failure.message for failure in failures.values())
    dist.barrier()
    assert_holds(path / "a", 1)
    assert_holds(path / "b", 2)
    dist.barrier()
    assert not save_by_rank(link, 4)
    assert_holds(path / "a", 1)
    assert_holds(path / "b", 4, world_size=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of version 1, saved by one process."""
    save_alone(tmp_path / "saved", 1)
    return tmp_path / "saved"


@pytest.fixture
def linked(saved: Path) -> Path:
    """The same with all of its files elsewhere, behind links, as a cache of models keeps them."""
    blobs = saved.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(saved.iterdir())):
        file.rename(blobs / f"{number}")
        file.symlink_to(Path("../blobs", f"{number}"))
    return saved


def test_files_behind_links_load(linked: Path) -> None:
    assert_holds(linked, 1)


def test_a_save_replaces_links_and_leaves_alone_what_they_lead_to(linked: Path) -> None:
    blobs = {file: file.read_bytes() for file in (linked.parent / "blobs").iterdir()}
    save_alone(linked, 2)
    assert_holds(linked, 2)
    assert len(blobs) == 3
    assert {file: file.read_bytes() for file in blobs} == blobs
    assert len(data_files(linked)) == 1
    assert not any(file.is_symlink() for file in linked.iterdir())


def load_over_ones(path: Path, verify: bool = True) -> Failure:
    """The error of a load, which has touched no target."""
    state = {"of 0": torch.ones(SHAPE), "version": -1}
    reader = FastReader(path, verify=verify)
    failures = failures_of(dcp.load, state, storage_reader=reader, no_dist=True)
    assert_same(state, {"of 0": torch.ones(SHAPE), "version": -1})
    return failures[0]


def test_link_to_nowhere_is_not_found_and_named(linked: Path) -> None:
    (data,) = data_files(linked)
    (linked / data).resolve().unlink()
    failure = load_over_ones(linked)
    assert (failure.kind, failure.errno) == ("NotFoundError", errno.ENOENT)
    assert data in failure.message


# What it is in the file's place, how it is made, and what the error says.
NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO"),
    "socket": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "ENXIO"),
    "device": (lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)), "a device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "ELOOP"),
    "link to a FIFO": (
        lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
        "it is a FIFO",
    ),
    "folder": (os.mkdir, "EISDIR"),
}


def put_in_place(path: Path, file: str, kind: str) -> tuple[str, str]:
    """Puts what is no file in place of one; returns that one's name and what to expect."""
    name = file if file != "data" else data_files(path).pop()
    (path / name).unlink()
    make, says = NO_FILES[kind]
    try:
        make(path / name)
    except PermissionError:
        pytest.skip(f"may not make a {kind} here")
    return name, says


def assert_refused(forks: Forks, path: Path, file: str, kind: str, expected: str) -> None:
    name, says = put_in_place(path, file, kind)
    failure = forks.call(load_over_ones, path, timeout_s=HANG_S)
    assert failure.kind == expected
    assert name in failure.message
    assert says in failure.message


@pytest.mark.thin(1)
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("file", [".metadata", "data"])
def test_what_is_no_file_is_a_storage_error_at_once_and_named(
    forks: Forks, saved: Path, file: str, kind: str
) -> None:
    assert_refused(forks, saved, file, kind, "StorageError")


@pytest.mark.thin("FIFO", "folder")
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_in_place_of_the_index_is_as_good_as_a_lost_index(
    forks: Forks, saved: Path, kind: str
) -> None:
    assert_refused(forks, saved, index_file(saved).name, kind, "CorruptionError")

    forks.call(save_alone, saved, 2, timeout_s=HANG_S)
    forks.call(assert_holds, saved, 2, timeout_s=HANG_S)  # Where it stays, from its other name.


def load_by_rank(path: Path) -> dict[int, Failure]:
    """The errors of a load of everything by every rank; no rank's targets are touched."""
    ranks = range(dist.get_world_size())
    state: dict[str, Any] = {f"of {rank}": torch.ones(SHAPE) for rank in ranks} | {"version": -1}
    failures = failures_of(dcp.load, state, storage_reader=FastReader(path))
    expected = {f"of {rank}": torch.ones(SHAPE) for rank in ranks} | {"version": -1}
    assert_same(state, expected)
    return failures


@pytest.mark.parametrize("damage", ["torn", "empty", "garbage", "a file that never was"])
def test_damaged_metadata_fail_every_rank_and_touch_no_target(
    worlds: Worlds, tmp_path: Path, damage: str
) -> None:
    worlds.run(2, save_by_rank, tmp_path, 1)
    path, expected = tmp_path / ".metadata", ("CorruptionError", str(tmp_path / ".metadata"))
    whole = path.read_bytes()
    damaged = {"torn": whole[: len(whole) // 2], "empty": b"", "garbage": b"?"}
    if damage == "a file that never was":
        metadata, expected = pickle.loads(whole), ("NotFoundError", "__7_0.distcp")
        metadata.storage_meta.modules = []
        for index, info in metadata.storage_data.items():
            if index.fqn == "of 1":
                info.relative_path = "__7_0.distcp"
        damaged[damage] = pickle.dumps(metadata)
        index_file(tmp_path).unlink()
    path.write_bytes(damaged[damage])
    seen = worlds.agree(2, load_by_rank, tmp_path, timeout_s=HANG_S)
    assert seen.keys() == {0, 1}
    for failure in seen.values():
        assert failure.kind == expected[0]
        assert expected[1] in failure.message


def bare_state(kind: str, rank: int, *, blank: bool) -> dict[str, Any]:
    if kind == "empty" or (kind == "rank 1 empty" and rank == 1):
        return {}
    fill = torch.zeros if blank else torch.ones
    if kind == "0 elements":
        return {"none": fill(0), f"of {rank}": fill(3, 0, 2)}
    return {"of 0": fill(5, 3), "step": 0 if blank else 7}


@pytest.mark.parametrize("kind", ["empty", "0 elements", "rank 1 empty"])
@on_ranks(2)
def test_ranks_with_next_to_nothing_save_and_load(path: Path, kind: str) -> None:
    rank = dist.get_rank()
    state = bare_state(kind, rank, blank=False)
    for _ in range(2):  # The second replaces the first.
        dcp.save(state, storage_writer=FastWriter(path, thread_count=2))
        for reader in READERS.values():
            loaded = bare_state(kind, rank, blank=True)
            dcp.load(loaded, storage_reader=reader(path))
            assert_same(loaded, state)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    assert data_files(path) == {i.relative_path for i in metadata.storage_data.values()}
