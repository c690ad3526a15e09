"""What any layout saved loads into every other, model and optimizer, bit for bit.

Each layout is a real one, of a model with AdamW, over the first ranks of one world of eight. What a
tensor should hold is reckoned from its name and the place of each element in the unsharded tensor;
what a rank is to load into is filled with NaN first. By one route ranks exchange what they read;
`TORCH_CKPT_TEST_EXCHANGE` in the environment is the option `exchange` of every `FastReader`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix_layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matrix_layouts import LAYOUTS, WORLD, Model, Net
from ranks import Worlds
from states import READERS, WRITERS, full_value, local_part
from support.exchanging import Exchanging
from torch.distributed.tensor import DTensor

import torch_ckpt

pytestmark = pytest.mark.timeout(300)

TIMEOUT_S = 200  # Of a call that takes seconds, on a machine that is busy.
CONFIG = {"epoch": 7, "betas": (0.9, 0.95), "kind": "cosine"}
RATE = ".lr"  # Of each parameter another.

State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Route:
    """By what a checkpoint is saved and loaded."""

    save: Callable[..., Any]
    writer: str
    load: Callable[..., Any]
    reader: str


ROUTES = {
    "stock planners": Route(dcp.save, "fast", dcp.load, "fast"),
    "fast planners": Route(torch_ckpt.save, "fast", torch_ckpt.load, "exchanging"),
    "stock reader": Route(dcp.save, "fast", dcp.load, "stock"),
    "stock writer": Route(dcp.save, "stock", dcp.load, "fast"),
}

BY_NAME = {**READERS, "exchanging": Exchanging}

FEW = [
    *("fsdp_3", "fsdp_4", "hsdp_2x2", "tp_2", "fsdp_tp_2x2", "hsdp_tp_2x2x2"),
    *("grid_2x3", "rows_of_rows_2x2", "replicated_columns_2x2"),
    *("pp_2", "pp_3", "experts_4", "ddp_2"),
]
"""The layouts of a run that is not full: some of each kind, a prime number (`routes_of`)."""


def layouts(full: bool) -> list[str]:
    """The layouts whose pairs are tested."""
    return list(LAYOUTS) if full else FEW


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


# ---- What each tensor holds ----------------------------------------------------------------------


@functools.cache
def unsharded() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors and all objects of a checkpoint, by group and name."""
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {f"config.{key}": value for key, value in CONFIG.items()}
    net = new_net()
    for name, tensor in net.state_dict().items():
        tensors[f"model.{name}"] = full_value(f"model {name}", tuple(tensor.shape), tensor.dtype)
    for name, parameter in net.named_parameters():
        shapes = {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": ()}
        for kind, shape in shapes.items():
            dtype = torch.float32 if kind == "step" else parameter.dtype
            tensors[f"optim.state.{name}.{kind}"] = full_value(
                f"{kind} {name}", tuple(shape), dtype
            )
        objects[f"optim.param_groups.{name}{RATE}"] = matrix_layouts.hyper(name)["lr"]
    return tensors, objects


def new_net() -> Net:
    """A model of several dtypes."""
    net = Net()
    net.embed.to(torch.bfloat16)
    return net


def own_part(name: str, like: torch.Tensor) -> torch.Tensor:
    """What this rank is to hold of the tensor of that name."""
    full = unsharded()[0][name]
    assert (like.shape, like.dtype) == (full.shape, full.dtype), name
    if not isinstance(like, DTensor):
        return full
    return local_part(full, like.device_mesh, like.placements)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# ---- On the ranks --------------------------------------------------------------------------------


@functools.cache
def model_of(layout: str) -> Model:
    return matrix_layouts.build(LAYOUTS[layout], new_net())


def named(state: State) -> dict[str, Any]:
    return {
        f"{group}.{name}": value for group, part in state.items() for name, value in part.items()
    }


@functools.cache
def state_of(layout: str) -> State:
    """This rank's state; of how parameters are updated only what differs between them.

    Its tensors are those of the model, and so the next load may have it again.
    """
    state: State = {**model_of(layout).state_dict(), "config": dict(CONFIG)}
    for name in [name for name in state["optim"] if name.startswith("param_groups.")]:
        if not name.endswith(RATE):
            del state["optim"][name]
    return state


def fill_right(state: State) -> None:
    """Gives all tensors the values that belong there."""
    for name, value in named(state).items():
        if isinstance(value, torch.Tensor):
            local_of(value).copy_(own_part(name, value))


def fill_wrong(state: State) -> None:
    """NaN, -1 and None all over."""
    for part in state.values():
        for name, value in part.items():
            if isinstance(value, torch.Tensor):
                local_of(value).fill_(-1 if value.dtype == torch.int64 else torch.nan)
            else:
                part[name] = None


def differences(state: State) -> list[str]:
    """Names of what this rank holds and should not."""
    objects = unsharded()[1]
    wrong = []
    for name, value in named(state).items():
        if not isinstance(value, torch.Tensor):
            if objects[name] != value:
                wrong.append(f"{name} is {value!r}")
        elif not torch.equal(bits(local_of(value)), bits(own_part(name, value))):
            wrong.append(name)
    return wrong


def save_layouts(folder: Path, full: bool) -> None:
    """Saves every layout, by every way to save."""
    matrix_layouts.meet()
    for layout in layouts(full):
        if dist.get_rank() >= LAYOUTS[layout].ranks:
            continue
        state = state_of(layout)
        fill_right(state)
        for name in ("stock planners", "fast planners", "stock writer"):
            save_by(name, state, layout, folder / name / layout)
    dist.barrier()  # All are committed.


def save_by(route: str, state: State, layout: str, path: Path) -> None:
    way = ROUTES[route]
    group = matrix_layouts.group_of(LAYOUTS[layout])
    way.save(state, storage_writer=WRITERS[way.writer](path), process_group=group)


def load_by(route: str, layout: str, path: Path, options: dict[str, Any]) -> list[str]:
    """Loads and returns what is wrong then, in the state dict and in the model and optimizer."""
    way = ROUTES[route]
    state = state_of(layout)
    fill_wrong(state)
    reader = BY_NAME[way.reader](path, **({} if way.reader == "stock" else options))
    group = matrix_layouts.group_of(LAYOUTS[layout])
    way.load(state, storage_reader=reader, process_group=group)
    wrong = differences(state)
    if "stock" in (way.reader, way.writer):  # And the model takes it over.
        model = model_of(layout)
        whole = model.state_dict()
        whole["optim"].update(state["optim"])
        model.load_state_dict({**whole, "model": state["model"]})
        state_of.cache_clear()
        wrong += [f"{each}, taken over" for each in differences(state_of(layout))]
    return wrong


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
    matrix_layouts.meet()
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
    worlds.run(WORLD, save_layouts, folder, full, timeout_s=TIMEOUT_S)
    return folder


@pytest.mark.thin(*FEW)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_what_a_layout_saved_loads_into_every_layout(
    worlds: Worlds, checkpoints: Path, saved: str, full: bool
) -> None:
    options = reader_options()
    wrong = worlds.run(WORLD, load_row, saved, checkpoints, options, full, timeout_s=TIMEOUT_S)
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
def test_one_wrong_tensor_is_found(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    found = worlds.run(WORLD, load_damaged, kind, tmp_path, reader_options(), timeout_s=TIMEOUT_S)
    name = found[0][0]
    assert {each for _, wrong in found for each in wrong} == {name}
