"""The example of the data loader consumes each sample once, over two runs on different ranks."""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from example_runs import ROOT, output_of

pytestmark = pytest.mark.timeout(300)

EXAMPLE = ROOT / "examples" / "resume_dataloader.py"


@pytest.mark.slow
def test_each_sample_is_consumed_once_over_two_and_then_three_ranks(tmp_path: Path) -> None:
    # 13 steps, of which the last 3 are lost.
    options = "--samples 600 --save-every 5"
    output_of("resume_dataloader.py", f"{options} --stop-after 13", ranks=2, folder=tmp_path)
    output = output_of("resume_dataloader.py", options, ranks=3, folder=tmp_path)
    resumed = re.search(
        r"resumed from step 10: (\d+) consumed, .* = (\d+) left$", output, re.MULTILINE
    )
    assert resumed, output
    consumed, left = map(int, resumed.groups())
    assert 0 < consumed < 600
    assert consumed + left == 600
    assert "each of 600 samples consumed once" in output


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resume_dataloader", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_dealt_once_and_evenly(seed: int, example: ModuleType) -> None:
    """Over several changes of the number of ranks, each of which had got to another place."""
    draw = random.Random(seed)
    count = draw.randrange(200)
    states = [{"left": [(0, count, 1)]}]
    expected = list(range(count))
    for world_size in draw.choices(range(1, 7), k=4):
        states = [example.deal_again(states, rank, world_size) for rank in range(world_size)]
        shares = [[n for part in state["left"] for n in range(*part)] for state in states]
        assert sorted(n for share in shares for n in share) == expected
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for state in states:  # Each consumes some of its own.
            start, stop, step = state["left"][0]
            state["left"][0] = (min(stop, start + step * draw.randrange(3)), stop, step)
        expected = sorted(n for s in states for part in s["left"] for n in range(*part))
