"""The end of the interpreter while daemon threads are in native code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from torch_ckpt.filesystems.location import Location

def write(number):
    file = Location(sys.argv[1]) / str(number)
    while True:
        file.replace(bytes(10_000), sync=True)
        file.read()

for number in range(4):
    threading.Thread(target=write, args=(number,), daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("storage", ["directory", "store"])
def test_a_process_ends_without_its_daemon_threads(tmp_path: Path, storage: str) -> None:
    place = str(tmp_path) if storage == "directory" else "memory://bucket/run"
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, place], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
