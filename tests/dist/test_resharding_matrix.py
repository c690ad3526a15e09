"""What any layout saved loads into every other, model and optimizer, bit for bit.

Each layout is a real one, of a model with AdamW, over the first ranks of one world of eight,
or of four if a run is not full
(`matrix_layouts.py`); `matrix_states.py` has the right values. By one route ranks exchange reads;
`TORCH_CKPT_TEST_EXCHANGE` in the environment is the option `exchange` of every `FastReader`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matrix_layouts
import pytest
import torch.distributed as dist
from matrix_layouts import LAYOUTS, TIMEOUT_S, WORLD
from matrix_states import (
    State,
    bits,
    fill_right,
    load_by,
    local_of,
    named,
    save_by,
    state_of,
    unsharded,
)
from ranks import Worlds

import torch_ckpt

pytestmark = pytest.mark.timeout(300)

FEW = ["fsdp_3", "fsdp_tp_2x2", "experts_4"]
"""The layouts of a run that is not full, a prime number (`routes_of`), of four ranks at most."""


def layouts(full: bool) -> list[str]:
    """The layouts whose pairs are tested."""
    return list(LAYOUTS) if full else FEW


def world(full: bool) -> int:
    """The number of ranks that these layouts need."""
    return WORLD if full else 4


def routes_of(saved: str, loaded: str, full: bool) -> list[str]:
    """The routes by which a pair is tested.

    In full, stock's planners load all pairs, and ours every third. Else every layout is saved and
    loaded once by each route.
    """
    names = layouts(full)
    row, column = names.index(saved), names.index(loaded)
    routes = []
    if full or column == (2 * row + 3) % len(names):
        routes.append("stock planners")
    if (row + column) % 3 == 0 if full else column == (8 * row + 4) % len(names):
        routes.append("fast planners")
    if column == (4 * row + 1) % len(names):
        routes.append("stock reader")
    if column == (7 * row + 2) % len(names):
        routes.append("stock writer")
    return routes


def reader_options() -> dict[str, str]:
    """Options of every FastReader, as the environment has them."""
    exchange = os.environ.get("TORCH_CKPT_TEST_EXCHANGE")
    return {"exchange": exchange} if exchange else {}


# ---- On the ranks --------------------------------------------------------------------------------


def save_layouts(folder: Path, full: bool) -> None:
    """Saves every layout, by every way to save."""
    matrix_layouts.meet(layouts(full))
    for layout in layouts(full):
        if dist.get_rank() >= LAYOUTS[layout].ranks:
            continue
        state = state_of(layout)
        fill_right(state)
        for name in ("stock planners", "fast planners", "stock writer"):
            save_by(name, state, layout, folder / name / layout)
    dist.barrier()  # All are committed.


def damage(kind: str, state: State) -> str:
    """Spoils one tensor of what `fsdp_4` holds, as an engine at fault might; returns its name."""
    rank = dist.get_rank()
    if kind == "one bit":
        name = "optim.state.blocks.1.up.weight.exp_avg_sq"
        if rank == 2:
            bits(local_of(named(state)[name]))[-1] ^= 1
        return name
    name = "model.head.weight"  # Of 37 rows: ranks 0 to 2 hold 10 each.
    rows = local_of(named(state)[name])
    if rank < 2:
        full = unsharded()[0][name]
        rows.copy_(full[10 * (1 - rank) :][:10])
    return name


def load_damaged(kind: str, folder: Path, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Has `fsdp_4` save something wrong; returns what that is, and what is found by `tp_2`."""
    matrix_layouts.meet(["fsdp_4", "tp_2"])
    name, found = "", []
    if dist.get_rank() < 4:
        state = state_of("fsdp_4")
        fill_right(state)
        name = damage(kind, state)
        save_by("stock planners", state, "fsdp_4", folder)
    dist.barrier()
    if dist.get_rank() < 2:
        found = load_by("stock planners", "tp_2", folder, options)
    return name, found


def load_row(saved: str, folder: Path, options: dict[str, Any], full: bool) -> list[str]:
    """Loads what one layout saved into every layout; returns what this rank found wrong."""
    wrong = []
    for layout in layouts(full):
        if dist.get_rank() >= LAYOUTS[layout].ranks:
            continue
        for route in routes_of(saved, layout, full):
            path = folder / ("stock planners" if route == "stock reader" else route) / saved
            try:
                found = load_by(route, layout, path, options)
            except BaseException as error:
                error.add_note(f"loading what {saved} saved as {layout}, by {route}")
                raise
            wrong += [f"{layout}, {route}, rank {dist.get_rank()}: {each}" for each in found]
    return wrong


# ---- Tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(
    worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """One checkpoint of each layout, in a folder for each way to save."""
    folder = tmp_path_factory.mktemp("checkpoints")
    full = bool(request.config.getoption("full"))
    worlds.run(world(full), save_layouts, folder, full, timeout_s=TIMEOUT_S)
    return folder


@pytest.mark.thin(*FEW)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_what_a_layout_saved_loads_into_every_layout(
    worlds: Worlds, checkpoints: Path, saved: str, full: bool
) -> None:
    options = reader_options()
    wrong = worlds.run(
        world(full), load_row, saved, checkpoints, options, full, timeout_s=TIMEOUT_S
    )
    assert [each for rank in wrong for each in rank] == []


@pytest.mark.parametrize("route", ["stock planners", "fast planners", "stock writer"])
def test_checkpoints_of_all_layouts_have_the_same_names(
    checkpoints: Path, route: str, full: bool
) -> None:
    tensors, objects = unsharded()
    for layout in layouts(full):
        metadata = torch_ckpt.FastReader(checkpoints / route / layout).read_metadata()
        assert metadata.state_dict_metadata.keys() == tensors.keys() | objects.keys(), layout


@pytest.mark.parametrize("kind", ["one bit", "swapped shards"])
def test_one_wrong_tensor_is_found(worlds: Worlds, tmp_path: Path, kind: str, full: bool) -> None:
    arguments = load_damaged, kind, tmp_path, reader_options()
    found = worlds.run(world(full), *arguments, timeout_s=TIMEOUT_S)
    name = found[0][0]
    assert {each for _, wrong in found for each in wrong} == {name}
