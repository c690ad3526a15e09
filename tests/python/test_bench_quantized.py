"""benchmarks/bench_quantized.py, on a model that is small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_small_run_compares_the_values_and_prints_the_tables(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_quantized.py", "--dir", str(tmp_path)]
    command += ["--gib", "0.016", "--cold-gib", "0.016", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "in MXFP4, with 1 MiB of scales" in done.stdout
    assert "from the page cache, one process" in done.stdout
    assert "into bf16 shards, 2 ranks" in done.stdout
