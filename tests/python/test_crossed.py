"""Random states, saved and loaded by one process in every way; ``tests/support/crossed.py``."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from mutations import MUTATIONS, OF_TESTS, ROOT
from support import ways
from support.crossed import PART_TIMEOUT_S, PARTS, Case, campaign, run_case
from support.places import Places
from support.states import Evolving, differences, snapshot

pytestmark = pytest.mark.timeout(PART_TIMEOUT_S)


@pytest.mark.thin("0")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_way_out_gives_what_any_way_in_was_given(
    part: int, seed: int, full: bool, places: Places, memory: Path
) -> None:
    print(campaign(seed, full, places), "cases")


def test_a_state_is_a_function_of_its_seed(seed: int, full: bool) -> None:
    """Ranks make the same one, each for itself."""
    for number in range(seed, seed + (20 if full else 2)):
        one, other = Evolving(number, "any"), Evolving(number, "any")
        for _ in range(5):
            one.change()
            blocks = [torch.full([1 << i], number % 251, dtype=torch.uint8) for i in range(4, 20)]
            del blocks  # Memory that was never written has other bytes by now.
            other.change()
            assert differences(snapshot(one.state), snapshot(other.state)) == [], number


@pytest.mark.thin(1.0)
@pytest.mark.parametrize("name", [*MUTATIONS, *OF_TESTS])
def test_every_past_fault_can_be_put_back(name: str) -> None:
    for mutation in MUTATIONS.get(name) or [OF_TESTS[name][0]]:
        mutation.put_into((ROOT / mutation.file).read_text())


REFUSED = {
    "convert to torch": "AlreadyExistsError: .*a store cannot replace several files",
}


def test_ways_that_are_left_out_on_a_store_are_refused(
    seed: int, places: Places, memory: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    each = 3 if full else 1
    if "store" in places.missing:
        pytest.skip(places.missing["store"])
    is_refused = ways.is_refused
    monkeypatch.setattr(ways, "is_refused", lambda way: False)
    counts: Counter[str] = Counter()
    for number in itertools.count(seed):
        case = Case.of(number, with_ranks=False, place="store")
        kind = case.way["then"] or case.way["writer"]
        if not is_refused(case.way) or counts[kind] == each:
            continue
        counts[kind] += 1
        problems = run_case(case.but(saves=(0, 1), outs=case.outs[:1]), places, None)
        assert len(problems) == 1, f"{case}: {problems}"
        assert re.search(REFUSED[kind], problems[0]), f"{case}: {problems[0]}"
        if counts.keys() == REFUSED.keys() and counts.total() == each * len(REFUSED):
            break
