"""Random states, saved and loaded by several ranks in every way; ``tests/support/crossed.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Worlds
from support.crossed import PART_TIMEOUT_S, PARTS, campaign
from support.places import Places

pytestmark = pytest.mark.timeout(PART_TIMEOUT_S)


@pytest.mark.thin("0")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_way_out_gives_what_any_way_in_was_given(
    worlds: Worlds, part: int, seed: int, full: bool, places: Places, memory: Path
) -> None:
    print(campaign(seed, full, places, worlds), "cases")
