"""Random histories of several jobs of a run, each from its seed; ``tests/support/histories.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.histories import AGENTS_EVERY, run_history

import torch_ckpt.ladder.promotion
from torch_ckpt.commits.terms import Term, term_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion_attempt import Attempt
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories

pytestmark = pytest.mark.timeout(900)

PARTS, HISTORIES = 40, 50  # A check without --full runs the beginning of the first part.
BEGINNING = 6
MOST = 600  # Histories until a missing protection is noticed.


@pytest.mark.thin("0")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_history_of_jobs_loses_swaps_or_leaves_a_step(
    part: int, seed: int, memory: Path, full: bool
) -> None:
    for number in range(seed, seed + (HISTORIES if full else BEGINNING)):
        problem = history(number, memory)
        assert problem is None, problem


def history(seed: int, memory: Path) -> str | None:
    """What is wrong in the history of a seed."""
    folder = memory / f"{seed}"
    folder.mkdir()
    try:
        return run_history(seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def nothing(*_: object, **__: object) -> None:
    pass


def apply_to_all(self: Retention, *arguments: Any, apply: Any = Retention.apply, **_: Any) -> None:
    apply(self, *arguments)


def term_or_none(step: Location) -> int:
    try:
        return term_of(step)
    except CheckpointError:
        return 0


PROTECTIONS: dict[str, tuple[object, str, Any]] = {
    "a promotion looks for a newer job before it commits": (Attempt, "_check_lineage", nothing),
    "a save and a discard look for a newer job": (Lineage, "check", nothing),
    "a restore passes over the steps of other lineages": (Term, "has", lambda *_: True),
    "retention counts the steps of the lineage": (Retention, "apply", apply_to_all),
    "retention looks how old a step is": (
        StepDirectories,
        "ages",
        lambda _, steps: dict.fromkeys(steps, 1e9),
    ),
    "a term that cannot be read is an error": (
        torch_ckpt.ladder.promotion,
        "term_of",
        term_or_none,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_some_history_notices_that_a_protection_is_missing(
    protection: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PROTECTIONS[protection])
    assert any(history(number, memory) for number in range(MOST) if number % AGENTS_EVERY)
