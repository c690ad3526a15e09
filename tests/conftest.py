"""Fixtures that tests of one and of several processes share."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_ckpt.agent.memory import has_agent


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of what a test draws: ``TEST_SEED``, which may be ``random``, or always the test's own."""
    asked = os.environ.get("TEST_SEED", "")
    own = zlib.crc32(request.node.nodeid.encode())
    found = random.SystemRandom().randrange(2**32) if asked == "random" else int(asked or own)
    print(f"TEST_SEED={found}  # repeats {request.node.nodeid}")
    return found


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options, until the test ends."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"tmpfs {len(mounted)}"
        path.mkdir()
        if os.geteuid() != 0:
            pytest.skip("only root may mount a tmpfs")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    try:
        yield mount
    finally:
        for path in mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of this test alone; its agents end with it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-test-"))
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(folder))
    yield folder
    machines = [folder, *folder.glob("machine-*")]
    for lock in (lock for machine in machines for lock in machine.glob("*/*/agent.lock")):
        with contextlib.suppress(OSError):  # For people, where a test has failed.
            print(lock.parent, lock.with_suffix(".log").read_text(), sep="\n")
        with contextlib.suppress(OSError, ValueError):  # It may end meanwhile.
            if has_agent(lock.parent):  # Else the number may be anybody's by now.
                os.kill(int(lock.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)  # An agent may be about to do the same.
