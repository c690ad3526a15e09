"""benchmarks/bench_planning.py, on workloads that are small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload", ["small", "many", "coordinator", "replicas", "cached", "million"]
)
def test_every_workload_runs_and_prints_its_tables(workload: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "bench_planning.py"), "--quick"),
            *("--rounds", "1", "--dir", str(tmp_path), "--workload", workload),
        ],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    parts = [part for part in done.stdout.split("\n\n") if part.startswith("|")]
    table, bars = parts[-2:]
    assert "torch-ckpt" in table or workload in ("many", "cached", "million")
    assert "at most" in bars or "at least" in bars
    assert not list(tmp_path.iterdir())
