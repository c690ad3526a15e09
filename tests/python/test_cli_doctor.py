"""`torch-ckpt doctor`: a page of facts, which never fails and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from checkpoints import ROOT

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import agent_lock, open_folder, run_of
from torch_ckpt.cli import directory_probes, doctor
from torch_ckpt.cli.main import main

COMMAND = """
import sys
from torch_ckpt.cli import directory_probes
from torch_ckpt.cli.main import main
directory_probes._MAX_NBYTES = 8 << 20
status = main(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of writes and reads that are as short as can be."""
    monkeypatch.setattr(directory_probes, "_MAX_NBYTES", 8 << 20)


def facts_of(capsys: pytest.CaptureFixture[str], path: object) -> dict[str, str]:
    """Each fact of a directory, and what it means."""
    assert main(["doctor", "--json", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    return {fact["name"]: f"{fact['found']}; {fact['means']}" for fact in facts}


def test_each_fact_is_a_line_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    assert main(["doctor", str(tmp_path)]) == 0
    assert time.monotonic() - begin < 20
    lines = {line[:18].strip(): line[18:] for line in capsys.readouterr().out.splitlines()}
    assert not list(tmp_path.iterdir())
    for name in ("torch_ckpt", "torch", "Python", "kernel", "libc", "CPUs", "memory", "open files"):
        assert lines[name]
    for name in ("cgroup memory", "huge pages", "pidfd_open", "io_uring", "CUDA", "agent"):
        assert lines[name]
    for name in ("file system", "space", "rename directory", "RENAME_EXCHANGE", "hard links"):
        assert lines[name]
    for name in ("fsync", "O_DIRECT", "write and sync", "read"):
        assert lines[name]
        assert "not probed" not in lines[name]
    assert re.search(r"GB/s: \d\.00 MiB in", lines["read"])  # Less on a machine that is busy.
    assert facts_of(capsys, tmp_path).keys() == lines.keys()


def test_a_directory_that_cannot_be_probed_is_a_fact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in facts_of(capsys, tmp_path / "file")["writes"]
    absent = facts_of(capsys, tmp_path / "absent" / "run")
    assert f"which does not exist: {tmp_path} is probed" in absent["directory"]
    assert "GB/s" in absent["read"]
    assert "no file system is registered" in facts_of(capsys, "nowhere://x")["directory"]
    assert "no save to this directory can succeed" in facts_of(capsys, "/proc")["writes"]
    assert os.listdir(tmp_path) == ["file"]


def test_a_small_file_system_is_a_fact(
    mount_tmpfs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(capsys, path := mount_tmpfs("size=2m,huge=advise"))
    assert "tmpfs (rw" in facts["file system"]
    assert "huge=advise" in facts["file system"]
    assert "too little for the test" in facts["write and read"]
    assert not list(path.iterdir())


def test_memory_on_a_disk_is_a_fact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no agent starts" not in facts_of(capsys, tmp_path)["/dev/shm"]
    monkeypatch.chdir("/dev/shm")
    monkeypatch.setenv("TORCH_CKPT_MEMORY", ".")
    assert "no agent starts: TORCH_CKPT_MEMORY must be" in facts_of(capsys, tmp_path)["."]
    if _native.is_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(tmp_path))
    means = facts_of(capsys, tmp_path)[str(tmp_path)]
    assert "no agent starts, as this is a disk: set TORCH_CKPT_MEMORY to a tmpfs" in means


def test_the_queue_of_threads_is_a_fact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CKPT_IO", "threads")
    facts = facts_of(capsys, tmp_path)
    assert facts["io_uring"].startswith("not used (TORCH_CKPT_IO=threads is set)")
    assert "threads" in facts["write and sync"]


def test_torch_is_not_needed(run_new_python: Callable[..., str], tmp_path: Path) -> None:
    assert (
        run_new_python(
            f"{COMMAND}print('torch' in sys.modules, status)", "doctor", tmp_path
        ).splitlines()[-1]
        == "False 0"
    )
    assert not list(tmp_path.iterdir())


def test_the_agent_of_the_directory_is_named_and_other_runs_are_counted(
    tmp_path: Path, memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_folder(run_of(tmp_path / "mine"))
    for other in ("secret-project", "another"):
        (open_folder(run_of(tmp_path / other)) / "slot").write_bytes(bytes(1 << 20))
    with agent_lock(folder) as is_ours:
        assert is_ours
        printed = facts_of(capsys, tmp_path / "mine")
    assert printed["agent"].startswith(f"running as process {os.getpid()}, ")
    assert (
        printed["other runs"] == "2 other runs of this user on this machine, 2.00 MiB of memory; "
    )
    assert not any("secret" in text or "another" in text for text in printed.values())
    assert run_of(tmp_path / "secret-project").hex() not in str(printed)
    printed = facts_of(capsys, tmp_path)
    assert printed["agent"].startswith("none is running for this directory")
    assert printed["other runs"].startswith("3 other runs")


def test_a_probe_that_hangs_or_fails_ends_nothing() -> None:
    forever = threading.Event()

    def a_hang() -> Generator[directory_probes.Fact]:
        yield "first", "found", ""
        forever.wait()

    def a_failure() -> Generator[directory_probes.Fact]:
        raise PermissionError("it is forbidden")
        yield

    begin = time.monotonic()
    found = list(doctor._within(begin + 0.2, a_hang))
    assert found[0] == ("first", "found", "")
    assert found[1][:2] == ("a hang", "did not answer within 5.5 s")
    assert list(doctor._within(begin + 9, a_failure)) == [
        ("a failure", "not probed: it is forbidden", "")
    ]
    assert time.monotonic() - begin < 9
    forever.set()


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A control group that limits memory to 3 GiB, of the version that this machine has."""
    base = Path("/sys/fs/cgroup")
    is_v1 = (base / "memory" / "memory.limit_in_bytes").exists()
    group = (base / "memory" if is_v1 else base) / f"torch_ckpt-doctor-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group here: {error}")
    try:
        limit = group / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        if not limit.exists():
            pytest.skip("control groups have no memory controller here")
        limit.write_text(str(3 << 30))
        yield group
    finally:
        group.rmdir()


def facts_in(group: Path, *arguments: str) -> dict[str, str]:
    """What the command finds in a control group."""
    done = subprocess.run(
        [
            *("sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh"),
            *(sys.executable, *arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {fact["name"]: fact["found"] for fact in json.loads(done.stdout)["facts"]}


def test_files_in_memory_do_not_exceed_the_limit_of_a_control_group(
    memory_cgroup: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    """Linux would end the command, and perhaps training in the same container."""
    tmpfs = mount_tmpfs("size=4g")
    limit = memory_cgroup / "memory.limit_in_bytes"
    (limit if limit.exists() else memory_cgroup / "memory.max").write_text(str(384 << 20))
    facts = facts_in(memory_cgroup, "-m", "torch_ckpt", "doctor", "--json", str(tmpfs))
    assert "GB/s" in facts["read"]
    assert not list(tmpfs.iterdir())


def test_the_limit_of_a_control_group_is_a_fact(memory_cgroup: Path, tmp_path: Path) -> None:
    inner = memory_cgroup / "inner"  # Without a limit of its own.
    inner.mkdir()
    try:
        facts = facts_in(inner, "-c", COMMAND, "doctor", "--json", str(tmp_path))
    finally:
        inner.rmdir()
    assert facts["cgroup memory"].startswith(f"at most 3.00 GiB ({memory_cgroup}/")
