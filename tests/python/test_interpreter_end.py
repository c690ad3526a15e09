"""The end of the interpreter while daemon threads are in native code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_process_ends_without_its_daemon_threads(tmp_path: Path) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")
