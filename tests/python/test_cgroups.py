"""The memory limits of containers, and what is saved how where they are low."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_ckpt.filesystems.cgroups import memory_limit

MIB = 1 << 20
V1_NONE = 9223372036854771712
"""What cgroup v1 has without a limit."""


def process(tmp_path: Path, groups: str, *mounts: str) -> Path:
    """A directory as of a process in /proc. A mount is its root, its point and its kind."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    lines = []
    for mount in mounts:
        root, point, kind = mount.split()
        where = str(tmp_path / point.lstrip("/")).replace(" ", "\\040")
        options = "rw" if kind == "cgroup2" else "rw,memory"
        lines.append(f"35 31 0:32 {root} {where} rw,nosuid shared:9 - {kind} cgroup {options}\n")
    (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))
    return proc


def group_v1(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache 1\ninactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file {cache}\n"
    )


def group_v2(folder: Path, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file {cache}\n")


def test_the_least_of_all_groups_above_a_process_counts(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/pod/job\n", "/ /sys cgroup2")
    group_v2(tmp_path / "sys/pod", 100 * MIB, 60 * MIB)
    group_v2(tmp_path / "sys/pod/job", 80 * MIB, 30 * MIB)
    group_v2(tmp_path / "sys/other", 1 * MIB, 1 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert (found.nbytes, found.free_nbytes) == (100 * MIB, 40 * MIB)
    assert found.file == tmp_path / "sys/pod/memory.max"
    group_v2(tmp_path / "sys/pod", "max", 60 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert found.free_nbytes == 50 * MIB


def test_page_cache_is_free(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/\n", "/ /sys cgroup2")
    group_v2(tmp_path / "sys", 100 * MIB, 95 * MIB, cache=10 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert found.free_nbytes == 25 * MIB


def test_version_1_beside_version_2_has_the_limit(tmp_path: Path) -> None:
    proc = process(
        tmp_path,
        "4:cpu,memory:/docker/7 f:x\n2:cpuset:/\n0::/\n",
        "/ /sys/unified cgroup2",
        "/docker /sys/memory\\040of cgroup",
    )
    (tmp_path / "sys/unified").mkdir(parents=True)
    group_v1(tmp_path / "sys/memory of/7 f:x", 50 * MIB, 20 * MIB, cache=MIB)
    group_v1(tmp_path / "sys/memory of", V1_NONE, 90 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert (found.nbytes, found.free_nbytes) == (50 * MIB, 32 * MIB)


@pytest.mark.parametrize("group", ["/docker/77", "/../../other", "/"])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path, group: str) -> None:
    proc = process(tmp_path, f"4:memory:{group}\n", "/docker/66 /sys/memory cgroup")
    group_v1(tmp_path / "sys/memory", 50 * MIB, 20 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert found.free_nbytes == 30 * MIB


def test_mounts_without_a_device_or_with_names_of_any_bytes_are_passed_over(tmp_path: Path) -> None:
    """The kernel lists the name of a device as it was passed to it, even if that is empty."""
    proc = process(tmp_path, "0::/pé\n", "/ /sysé cgroup2")
    mounts = (proc / "mountinfo").read_bytes()
    mounts = b"36 1 0:9 / /\xff rw - tmpfs  rw\n37 1 0:9 / /any rw - tmpfs \xff rw\n" + mounts
    (proc / "mountinfo").write_bytes(mounts)
    group_v2(tmp_path / "sysé/pé", 100 * MIB, 60 * MIB)
    found = memory_limit(proc)
    assert found is not None
    assert found.free_nbytes == 40 * MIB


@pytest.mark.parametrize("content", ["", "max\n", "many\n", f"{V1_NONE}\n"])
def test_without_a_readable_limit_there_is_none(tmp_path: Path, content: str) -> None:
    assert memory_limit(tmp_path) is None
    proc = process(tmp_path, "0::/\n", "/ /sys cgroup2")
    assert memory_limit(proc) is None
    group_v2(tmp_path / "sys", content, 0)
    assert memory_limit(proc) is None
