"""Checks of all ranks are about a second apart, and at most 16 steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_ckpt.runs import spacing
from torch_ckpt.runs.spacing import Spacing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which a test sets."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(spacing, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def checked_steps(
    checks: Spacing, clock: SimpleNamespace, steps: range, step_s: float
) -> list[int]:
    """The steps after which a check was due, and made."""
    made = []
    for step in steps:
        clock.now += step_s
        if checks.is_due(step):
            checks.checked(step, checks.steps(step))
            made.append(step)
    return made


@pytest.mark.parametrize(
    ("step_s", "most_steps", "expected"),
    [
        (2.0, 16, [1, 2, 3, 4, 5, 6, 7, 8]),
        (0.3, 16, [1, 2, 5, 8]),
        (0.0, 16, [1, 2]),  # The next one is at step 18.
        (0.0, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_checks_are_a_second_apart(
    clock: SimpleNamespace, step_s: float, most_steps: int, expected: list[int]
) -> None:
    assert checked_steps(Spacing(most_steps), clock, range(1, 9), step_s) == expected


def test_no_more_than_16_steps_lie_between_two_checks(clock: SimpleNamespace) -> None:
    assert checked_steps(Spacing(), clock, range(1, 40), 0.0) == [1, 2, 18, 34]


def test_steps_that_become_slower_are_checked_each_from_the_next_check_on(
    clock: SimpleNamespace,
) -> None:
    checks = Spacing()
    assert checked_steps(checks, clock, range(1, 10), 0.25) == [1, 2, 6]
    assert checked_steps(checks, clock, range(10, 14), 5.0) == [10, 11, 12, 13]


def test_a_run_that_goes_back_is_checked_at_once(clock: SimpleNamespace) -> None:
    checks = Spacing()
    checked_steps(checks, clock, range(1, 6), 0.1)
    assert checks.is_due(1)
    assert checks.steps(1) == 1
    assert not checks.is_due(7)
