"""Fixtures of the tests of one process, and the worlds of ranks of the tests of several.

``tests/conftest.py`` imports them, so that the tests of each framework have both.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch.distributed as dist
from ranks import Ranks, Worlds
from torch.distributed.checkpoint.logger import _dcp_logger

__all__ = [
    "canary",
    "engines",
    "pair",
    "quiet_dcp",
    "read_only_disk",
    "recorder",
    "rng",
    "run_new_python",
    "run_python",
    "small_disk",
    "world_of_one",
    "worlds",
]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT_S = 120


@pytest.fixture(autouse=True)
def quiet_dcp(request: pytest.FixtureRequest) -> Iterator[None]:
    """DCP warns of every save without a process group, and logs every missing metadata file."""
    if request.path.parent.name == "dist":  # Ranks are processes of their own.
        yield
        return
    for name in ("torch.distributed.checkpoint", _dcp_logger.name):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*disabled")
        warnings.filterwarnings("ignore", message="torch.distributed is unavailable")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator of the test's seed."""
    return random.Random(seed)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a process that has imported torch and torch_ckpt; returns what it prints."""

    def run(script: str, *arguments: object, **environment: str) -> str:
        script = f"import warnings; warnings.simplefilter('ignore')\n{script}"
        return printed(
            forks.run_python(
                "-c", script, *arguments, folder=tmp_path, timeout_s=SCRIPT_S, **environment
            )
        )

    return run


@pytest.fixture
def run_new_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in an interpreter that has imported nothing; returns what it prints."""

    def run(script: str, *arguments: object, **environment: str) -> str:
        folders = [*map(str, (ROOT, ROOT / "tests", *forks.TEST_FOLDERS))]
        path = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
        return printed(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SCRIPT_S,
            )
        )

    return run


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What a script has printed, which has to succeed."""
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """An initialised gloo group with this process as its only rank."""
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def small_disk(mount_tmpfs: Callable[[str], Path]) -> Path:
    """A tmpfs of 8 MiB."""
    return mount_tmpfs("size=8m")


@pytest.fixture
def read_only_disk(mount_tmpfs: Callable[[str], Path]) -> Path:
    """A tmpfs that was mounted read-only."""
    return mount_tmpfs("ro,size=1m")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that records what is done to a disk: of C++, for tests alone."""
    if not list(ROOT.glob("build/cpp/recorder*.so")):
        pytest.skip("the module recorder is built by tests/check.py")
    monkeypatch.syspath_prepend(ROOT / "build/cpp")
    return importlib.import_module("recorder")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that does not exist; only code that ran creates it."""
    return tmp_path / "canary"


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Worlds of gloo ranks. Each group of a rank has a thread that wakes up 100 times a second."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks of a test alone."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """Four ranks that import DeepSpeed, which no other test should have around."""
    with Ranks(4) as ranks:
        yield ranks
