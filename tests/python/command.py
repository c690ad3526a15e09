"""The command ``torch-ckpt``: how it exits and what it prints."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

from checkpoints import ROOT

from torch_ckpt.cli.main import main

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
MODULE = [sys.executable, "-m", "torch_ckpt.cli.main"]


def run_command(*arguments: object, command: list[str] | None = None) -> tuple[int, str]:
    """How the command exits, and what it prints: in this process, or as one of its own."""
    words = [str(argument) for argument in arguments]
    if command is None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                return main(words), printed.getvalue()
            except SystemExit as ended:
                return int(ended.code or 0), printed.getvalue()
    done = subprocess.run(
        [*command, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout
