"""Random states, saved and loaded by one process in every way; ``tests/support/crossed.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.crossed import FULL_S, PART_S, PART_TIMEOUT_S, PARTS, campaign
from support.ways import Places

pytestmark = pytest.mark.timeout(PART_TIMEOUT_S)


@pytest.mark.thin("0", "1", "2")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_way_out_gives_what_any_way_in_was_given(
    part: int, seed: int, full: bool, tmp_path: Path, memory: Path
) -> None:
    with Places(tmp_path) as places:
        print(f"without {places.missing}")
        print(campaign(seed, FULL_S if full else PART_S, places), "cases")
