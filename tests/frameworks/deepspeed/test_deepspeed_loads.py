"""All ranks raise the error of one rank in a load of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deepspeed_load_runs import (
    fail_to_load_of_another_layout,
    fail_to_load_on_one_rank,
    fail_to_load_universal,
)
from ranks import Worlds

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]


@pytest.mark.parametrize("stage", [1, 3])
def test_no_rank_waits_in_a_collective_of_deepspeed_for_one_that_cannot_load(
    worlds: Worlds, tmp_path: Path, stage: int
) -> None:
    for took in worlds.run(2, fail_to_load_on_one_rank, tmp_path / "run", stage):
        print({where: round(seconds, 2) for where, seconds in took.items()})
        assert max(took.values()) < 10, took


@pytest.mark.parametrize("fail", [fail_to_load_universal, fail_to_load_of_another_layout])
def test_ranks_that_exchange_what_they_have_read_raise_the_error_of_one(
    worlds: Worlds, tmp_path: Path, fail: Callable[[Path], float]
) -> None:
    assert max(worlds.run(2, fail, tmp_path / "run")) < 10
