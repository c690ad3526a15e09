"""The report's first sentence names what makes a save slow: a rank, a disk, a store, the network.

Each is slow for real.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from record_states import Slow, state_of
from support.store_proxy import Fault, StoreProxy

from torch_ckpt import IoOptions, Run
from torch_ckpt.cli.main import main

pytestmark = pytest.mark.timeout(240)

BLKIO = Path("/sys/fs/cgroup/blkio")


def first_sentence(run: Path | str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out.partition("\n\n")[0].replace("\n", " ")
    print(text)
    return text


def save_with_a_slow_rank(folder: Path, slow: int) -> None:
    rank = dist.get_rank()
    with Run(folder, timeout_s=60) as run:
        run.save(1, state_of() | ({f"of {rank}": Slow(1.5)} if rank == slow else {}))


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank(
    worlds: Worlds, tmp_path: Path, slow: int, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds.run(3, save_with_a_slow_rank, tmp_path / "run", slow)
    found = first_sentence(tmp_path / "run", capsys)
    assert found.startswith(f"Rank {slow} on ")
    assert "wrote" in found
    assert re.search(r"did not wait for storage|waited for storage \d %", found)


class SlowDisk:
    """A cgroup whose processes write, or read, so many bytes a second on the disk of a folder.

    Raises OSError where that is not possible.
    """

    def __init__(self, folder: Path, nbytes_per_s: int, *, reads: bool = False) -> None:
        device = os.stat(folder).st_dev
        self._group = BLKIO / f"test-slow-disk-{os.getpid()}"
        self._group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {nbytes_per_s}\n"
        try:
            kind = "read" if reads else "write"
            (self._group / f"blkio.throttle.{kind}_bps_device").write_text(limit)
        except OSError:
            self._group.rmdir()
            raise

    @contextlib.contextmanager
    def used_here(self) -> Iterator[None]:
        """Limits this process within the block."""
        (self._group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (BLKIO / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        self._group.rmdir()


def skip_unless_limited(folder: Path, nbytes_per_s: int, *, reads: bool = False) -> None:
    try:
        SlowDisk(folder, nbytes_per_s, reads=reads).close()
    except OSError as error:
        pytest.skip(f"cannot limit a disk here: {error}")


def save_on_a_slow_disk(folder: Path, slow: int) -> None:
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == slow:
            disk = SlowDisk(folder, 4 << 20)
            stack.callback(disk.close)
            stack.enter_context(disk.used_here())
        with Run(folder / "run", timeout_s=60, writer={"io": IoOptions(direct=True)}) as run:
            run.save(1, state_of())


def test_the_slow_disk_of_a_rank(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_unless_limited(tmp_path, 4 << 20)
    worlds.run(2, save_on_a_slow_disk, tmp_path, 1)
    found = first_sentence(tmp_path / "run", capsys)
    assert found.startswith("Rank 1 on ")
    assert "wrote at" in found
    assert re.search(r"it waited for storage ([6-9]\d|100) %", found)


def load_from_a_slow_disk(folder: Path, slow: int) -> None:
    """Loads what both ranks want, so that each reads a half, and sends it to the other."""
    state = {"replicated": torch.ones(16 << 20)}
    reader = {"io": IoOptions(direct=True)}
    with contextlib.ExitStack() as stack, Run(folder / "run", timeout_s=60, reader=reader) as run:
        run.save(1, state)
        if dist.get_rank() == slow:
            disk = SlowDisk(folder, 16 << 20, reads=True)
            stack.callback(disk.close)
            stack.enter_context(disk.used_here())
        run.restore(state)


def test_the_slow_disk_of_a_rank_that_reads_for_others(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_unless_limited(tmp_path, 16 << 20, reads=True)
    worlds.run(2, load_from_a_slow_disk, tmp_path, 1)
    found = first_sentence(tmp_path / "run", capsys)
    assert found.startswith("Rank 1 on ")
    assert "the other" in found
    assert "and then waited for it" in found
    assert re.search(r"it waited for storage ([6-9]\d|100) %", found)


def save_to_a_store(url: str) -> None:
    with Run(url, timeout_s=60) as run:
        run.save(1, state_of())


def test_a_slow_store(
    worlds: Worlds, store_proxy: StoreProxy, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_proxy.add(Fault("delay", requests=("put", "part", "create", "complete"), seconds=0.4))
    run = f"{store_url}/run"
    environment = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
    worlds.run(2, save_to_a_store_of, run, environment)
    store_proxy.forget()
    found = first_sentence(run, capsys)
    assert "waited for storage" in found
    assert "did not wait" not in found


def save_to_a_store_of(url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    save_to_a_store(url)


STALLED = {
    "save": "Messages of rank 1 on ",
    "load": r"Reading took \d+ % of the load: all ranks waited for bytes from other ranks",
}


@pytest.mark.slow
@pytest.mark.parametrize("call", STALLED)
def test_a_network_that_stalls(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("only root can stall a network, with unshare and ip")
    script = Path(__file__).with_name("stalled_network.py")
    command = ["unshare", "--net", sys.executable, str(script), call, str(tmp_path / "run"), "3"]
    path = os.pathsep.join(sys.path)
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "PYTHONPATH": path})
    found = first_sentence(tmp_path / "run", capsys)
    assert re.match(STALLED[call], found), found
