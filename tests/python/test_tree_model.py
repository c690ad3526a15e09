"""The page on the cost of the tree: its tables are what the formula and simulation give."""

from __future__ import annotations

import functools
import re
import sys

import pytest
from checkpoints import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import bench_tree
from bench_tree import MODEL_FAN_OUTS, MODEL_TABLES, model_rows
from tree_model import Cost, Costs, World, reckon, simulate

PAGE = ROOT / "docs" / "decisions" / "cost-model.md"


@functools.cache
def both(world: World) -> tuple[Cost, Cost]:
    return reckon(world, Costs()), simulate(world, Costs())


WORLDS = [
    World(ranks, fan_out=fan_out, nbytes=nbytes)
    for nbytes, sizes in MODEL_TABLES.items()
    for ranks in sizes
    for fan_out in MODEL_FAN_OUTS
]


def test_formula_is_at_most_4_percent_above_the_simulation_and_9_for_256_ranks() -> None:
    for world in WORLDS:
        reckoned, simulated = both(world)
        most = 1.09 if world.ranks == 256 else 1.04
        assert 0.9999 < reckoned.gather_s / simulated.gather_s < most, world
        assert 0.9999 < reckoned.scatter_s / simulated.scatter_s < most, world


def test_formula_and_simulation_agree_on_the_coordinator_and_on_the_rank_below_it() -> None:
    for world in WORLDS:
        reckoned, simulated = both(world)
        assert reckoned.coordinator.peers == simulated.coordinator.peers
        assert reckoned.coordinator.nbytes == simulated.coordinator.nbytes
        assert reckoned.coordinator.seconds == pytest.approx(simulated.coordinator.seconds, 0.01)
        assert reckoned.inner.peers == simulated.inner.peers
        assert reckoned.inner.nbytes == simulated.inner.nbytes
        assert reckoned.inner.seconds == pytest.approx(simulated.inner.seconds, 0.02)


def test_coordinator_meets_few_ranks_however_many_there_are() -> None:
    for world in WORLDS:
        if world.fan_out is not None:
            assert both(world)[1].coordinator.peers <= world.fan_out + 7


def test_default_fan_out_is_within_5_percent_of_the_best_for_16384_ranks() -> None:
    for nbytes in MODEL_TABLES:
        found = {
            fan_out: reckon(World(16_384, fan_out=fan_out, nbytes=nbytes), Costs()).gather_s
            for fan_out in MODEL_FAN_OUTS
        }
        assert found[16] < 1.05 * min(found.values())


def test_tables_of_the_page_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in re.findall(r"^\|.*$", PAGE.read_text(), re.M)
    ]
    monkeypatch.setattr(bench_tree, "reckon", lambda world, _: both(world)[0])
    monkeypatch.setattr(bench_tree, "simulate", lambda world, _: both(world)[1])
    for nbytes in MODEL_TABLES:
        header, *expected = model_rows(Costs(), nbytes)
        assert header in rows
        for row in expected:
            assert row in rows


def test_ranks_of_a_node_that_are_more_than_the_fan_out_are_a_tree_too() -> None:
    world = World(64, per_node=32, fan_out=4, nbytes=2_000)
    reckoned, simulated = both(world)
    assert reckoned.gather_s == pytest.approx(simulated.gather_s, 0.25)
    assert simulated.coordinator.peers == 5
