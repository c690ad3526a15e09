"""benchmarks/all.py: its rows, its figures, and the regressions that it reports."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT

sys.path.append(str(ROOT / "benchmarks"))
everything = importlib.import_module("all")


def test_rows_are_those_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| workload |"))
    labels = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        labels.append(line.split("|")[1].strip())
    assert labels == [row.label for row in everything.ROWS]


def test_figures_are_medians_of_rounds_that_have_both_contenders() -> None:
    samples = [
        {"contender": name, "round": number, "phase": "save", "total_seconds": seconds}
        for name, rounds in (("torch-ckpt", (1.0, 2.0, 1.0, 9.0)), ("dcp-1t", (3.0, 4.0, 5.0)))
        for number, seconds in enumerate(rounds)
    ]
    row = next(row for row in everything.ROWS if row.label == "save 2 GiB until durable")
    assert everything.figures(row.pairs({"samples": samples})) == {
        "faster": 3.0,
        "ours_s": [1.0, 1.0],
        "other_s": [3.0, 4.0],
        "rounds": 3,
    }


def _line(version: str, faster: float, machine: str = "two cores") -> dict[str, Any]:
    return {"version": version, "machine": machine, "rows": {"save": {"faster": faster}}}


def test_a_row_is_slower_if_it_loses_a_tenth_on_the_same_machine() -> None:
    lines = [_line("0.1.0", 9.0), _line("0.2.0", 3.0), _line("0.2.0", 9.0, "another")]
    history = [json.dumps(line) for line in lines]
    assert everything.regressions(history, _line("0.3.0", 2.75)) == []
    assert everything.regressions(history, _line("0.3.0", 2.6)) == ["save: 2.6x, and 3.0x in 0.2.0"]
    assert everything.regressions(history, _line("0.3.0", 2.6, "a third")) == []


@pytest.mark.slow
def test_a_small_run_has_figures_of_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, replicas = everything.RUNS["checkpoint"], everything.RUNS["replicas"]
    small = {
        name: everything.Run(run.program, (*run.arguments, "--gib", "0.03"), 1, 1)
        for name, run in (("checkpoint", checkpoint), ("async", everything.RUNS["async"]))
    }
    small["replicas"] = everything.Run("no_such_program.py", replicas.arguments, 1, 1)
    for name in ("async cuda", "checkpoint cuda", "convert"):
        small[name] = everything.Run("-", (), 1, 1, package="no_such_package")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(everything, "RUNS", small)
    found = everything.measure(tmp_path, quick=True)
    measured = {label for label, row in found.items() if isinstance(row, dict)}
    assert measured == {row.label for row in everything.ROWS if row.run in ("checkpoint", "async")}
    assert found["8 replicas load 1 GiB, storage of 200 MB/s"] == "no_such_program.py failed"
    assert found[everything.ROWS[4].label] == "no_such_package is not installed"
    assert not list(tmp_path.iterdir())
