"""benchmarks/bench_options.py, on a workload that is small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import ROOT


@pytest.mark.slow
def test_all_tables_are_printed(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "bench_options.py")),
            *("--gib", "0.05", "--rounds", "1", "--dir", str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    tables = [part for part in done.stdout.split("\n\n") if part.startswith("|")]
    assert [table.strip().count("\n") for table in tables] == [9, 5]
    assert not list(tmp_path.iterdir())
