"""benchmarks/bench_load.py: its throttled disk, its ranks, and a small run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from rank_group import RankError, RankGroup
from throttled_disk import ThrottledDisk, missing

pytestmark = pytest.mark.slow

MIB = 1 << 20
RATE = 20_000_000
RAW = "raw: O_DIRECT, each byte once"

# Two nodes read everything, one through the page cache; each prints what it found.
NODE = """
import hashlib, mmap, os, sys
from pathlib import Path
from throttled_disk import mount_node

device, processes, point, flags = sys.argv[1:]
Path(processes).write_text(str(os.getpid()))
mount_node(device, Path(point))
fd = os.open(Path(point) / "data", os.O_RDONLY | int(flags))
buffer, digest = mmap.mmap(-1, 1 << 20), hashlib.sha256()
while nbytes := os.preadv(fd, [buffer], os.lseek(fd, 0, os.SEEK_CUR)):
    digest.update(buffer[:nbytes])
    os.lseek(fd, nbytes, os.SEEK_CUR)
print(digest.hexdigest())
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ThrottledDisk]:
    if (why := missing()) is not None:
        pytest.skip(why)
    contents = tmp_path / "contents"
    contents.mkdir()
    (contents / "data").write_bytes(os.urandom(8 * MIB))
    (tmp_path / "node").mkdir()
    try:
        throttled = ThrottledDisk(contents, tmp_path / "disk.img", RATE)
    except (OSError, RuntimeError) as error:
        pytest.skip(str(error))
    try:
        yield throttled
    finally:
        throttled.close()


def node(disk: ThrottledDisk, *, flags: int) -> subprocess.Popen[str]:
    """A process that reads everything from a mount of its own."""
    point = disk.image.with_name("node")
    return subprocess.Popen(
        [
            *("unshare", "--mount", "--propagation", "private", sys.executable, "-c", NODE),
            *(disk.device, str(disk.limit.processes), str(point), str(flags)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_nodes_share_the_speed_of_a_throttled_disk_but_no_page_cache(disk: ThrottledDisk) -> None:
    begin = time.monotonic()
    nodes = [node(disk, flags=flags) for flags in (0, os.O_DIRECT)]
    found = [one.communicate(timeout=60)[0] for one in nodes]
    seconds = time.monotonic() - begin
    assert found[0] == found[1]
    assert found[0].strip()
    # Each has fetched everything, and some of what the file system keeps beside it.
    assert 16 * MIB <= disk.limit.read_nbytes() <= 18 * MIB
    assert seconds >= 0.8 * disk.limit.read_nbytes() / RATE


def test_nothing_is_left_of_a_throttled_disk_whose_node_was_killed(disk: ThrottledDisk) -> None:
    killed = node(disk, flags=0)
    while disk.limit.read_nbytes() < MIB:  # It has mounted it, and reads.
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate(timeout=60)
    disk.close()
    devices = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    assert str(disk.image) not in devices
    assert not disk.limit.folder.exists()
    assert not disk.image.exists()


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_fails_ends_all_and_says_why(tmp_path: Path) -> None:
    with RankGroup(1, tmp_path, timeout_s=100) as ranks:
        pids = [process.pid for process in ranks._processes]
        what = {"kind": "replicated", "gib": 0.001, "folder": "none", "check": True}
        with pytest.raises(RankError, match=r"load on rank 0: FileNotFoundError: .*state\.pt"):
            ranks.call("load", loader="torch.load", **what)
        assert ended(pids)


def test_ranks_that_are_late_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []
    start = RankGroup._start

    def noted(*arguments: Any) -> subprocess.Popen[str]:
        process = start(*arguments)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(RankGroup, "_start", noted)
    with pytest.raises(RankError, match=r"start on ranks \[0, 1\]: no end in 0.1 s"):
        RankGroup(2, tmp_path, timeout_s=0.1)
    assert len(pids) == 2
    assert ended(pids)


def test_small_run_prints_its_tables_and_leaves_nothing(tmp_path: Path) -> None:
    scenario = "replicas" if missing() is None else "local"
    result = tmp_path / "result.json"
    directory = tmp_path / "data"
    directory.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "bench_load.py"), "--gib", "0.004"),
            *("--rounds", "1", "--replicas", "2", "--contenders", "torch-ckpt,dcp"),
            *("--only", scenario, "--dir", str(directory)),
            *("--json", str(result)),
        ],
        check=False,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    samples = json.loads(result.read_text())["samples"]
    contenders = [(sample["scenario"], sample["contender"]) for sample in samples]
    assert contenders == [(scenario, name) for name in (RAW, "torch-ckpt", "dcp")]
    model = samples[0]["nbytes"]
    if scenario == "replicas":
        raw, _, stock = (sample["read_nbytes"] for sample in samples)
        assert model <= raw < 1.5 * model  # Frames count if tensors are tiny.
        assert stock >= 2 * model
    assert f"| {'throttled' if scenario == 'replicas' else 'local'} |" in done.stdout
    assert "not measured" in done.stdout
    assert not list(directory.iterdir())
