"""The state of each layout of the matrix: its right values, and saves and loads of it.

The right value of a tensor follows from its name and the place of each element in the unsharded
tensor. Values that a rank loads into are NaN before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matrix_layouts
import torch
import torch.distributed.checkpoint as dcp
from matrix_layouts import LAYOUTS, Model, Net
from states import READERS, WRITERS, full_value, local_part
from support.exchanging import Exchanging
from torch.distributed.tensor import DTensor

import torch_ckpt

CONFIG = {"epoch": 7, "betas": (0.9, 0.95), "kind": "cosine"}
RATE = ".lr"  # Each parameter has another.
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


@functools.cache
def model_of(layout: str) -> Model:
    """A model whose optimizer has a state.

    DCP would have it make a step for that, in which DTensor takes seconds to place its results.
    """
    model = matrix_layouts.build(LAYOUTS[layout], new_net())
    for parameter in model.net.parameters():
        model.optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return model


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
