"""Which save of a step counts if the machines of a run have parts of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from torch_ckpt.commits.terms import Term, take_term
from torch_ckpt.errors import CorruptionError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.machine_directories import (
    MachineDirectories,
    Part,
    WholeSave,
    whole_saves,
)
from torch_ckpt.ladder.places import Places

Reports = Sequence[dict[int, Part] | None]


def part(save_id: str, term: int, present: str, files: str = "ab") -> Part:
    return Part(save_id, term, frozenset(files), frozenset(present))


OLD_A, OLD_B, OLD_AB = part("old", 1, "a"), part("old", 1, "b"), part("old", 1, "ab")
NEW_A, NEW_B, NEW_AB = part("new", 2, "a"), part("new", 2, "b"), part("new", 2, "ab")


def left() -> Term:
    """A term that builds on step 7 of term 1, and on no step of term 2."""
    return Term(3, {1: 7})


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([OLD_A, OLD_B], ("old", 1, (0, 1))),
        ([OLD_A, None, OLD_B], ("old", 1, (0, 2))),
        ([NEW_A, NEW_B, OLD_A], ("new", 2, (0, 1))),
        ([OLD_A, NEW_A, NEW_B], ("new", 2, (1, 2))),
        ([NEW_A, OLD_A, OLD_B], ("old", 1, (1, 2))),
        ([OLD_A, NEW_B], None),
        ([OLD_A, OLD_A], None),
        ([OLD_AB, NEW_AB], ("new", 2, (1,))),
        ([part("first", 2, "ab"), NEW_AB], ("first", 2, (0,))),
    ],
)
def test_the_whole_save_of_the_latest_term_counts(
    parts: list[Part | None], expected: tuple[str, int, tuple[int, ...]] | None
) -> None:
    reports: Reports = [None if each is None else {7: each} for each in parts]
    whole = whole_saves(reports, lambda: Term(2, {1: 7}))
    assert whole == ({} if expected is None else {7: WholeSave(*expected)})


def test_a_save_on_the_lineage_counts_before_one_of_a_later_term() -> None:
    reports: Reports = [{7: NEW_AB, 8: NEW_AB}, {7: OLD_AB}]
    whole = whole_saves(reports, left)
    assert whole == {8: WholeSave("new", 2, (0,)), 7: WholeSave("old", 1, (1,))}
    assert list(whole) == [8, 7]


@pytest.fixture(name="machines")
def _machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineDirectories:
    """The coordinator's directory, of three; the run is in term 2, which builds on step 7."""
    run = Location(tmp_path / "run")
    monkeypatch.setattr(time, "time", lambda: 0.0)  # Terms are counted from 1.
    take_term(run, {0: 0})
    assert take_term(run, {1: 7}).number == 2
    return MachineDirectories(Location(tmp_path / "local"), Places((0, 1, 2), 0), run)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([NEW_A, NEW_B, None], False),
        ([NEW_A, NEW_B, NEW_A], False),
        ([None, NEW_A, NEW_B], True),
        ([OLD_B, NEW_A, NEW_B], True),
        ([NEW_A, NEW_B, OLD_A], True),
        ([NEW_A, OLD_A, OLD_B], False),  # Its other machines may return.
        ([None, OLD_A, OLD_B], True),
        ([None, NEW_A, None], False),
    ],
)
def test_steps_that_are_spread_when_a_run_opens(
    machines: MachineDirectories, parts: list[Part | None], expected: bool
) -> None:
    reports: Reports = [{} if each is None else {7: each} for each in parts]
    whole = machines.whole(reports)
    assert machines.incomplete(reports, whole) == ([7] if expected else [])
    # Term 2 has left this step.
    reports = [{8: each[7]} if each else {} for each in reports]
    is_left = any(each and each[8].term == 1 for each in reports) and not any(
        each and each[8].term == 2 for each in reports
    )
    expected = expected and not is_left
    assert machines.incomplete(reports, machines.whole(reports)) == ([8] if expected else [])


def test_a_step_of_which_the_first_machine_has_another_save_is_not_whole_there(
    machines: MachineDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "check", lambda _: None)
    reports: Reports = [{6: OLD_A, 7: NEW_A}, {6: OLD_B, 7: OLD_A}, {7: OLD_B}]
    assert list(machines.steps(reports)) == [7, 6]
    assert [machines.term_of(step, reports) for step in (7, 6)] == [1, 1]
    check = machines.check_by(reports)
    check(machines.path(6))
    with pytest.raises(CorruptionError, match=r"do not have all files of \S*step-7"):
        check(machines.path(7))
