"""Checkpoints in DeepSpeed's formats, written without DeepSpeed, with known values."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch

RANKS = 3
ALIGNMENT = 4  # ZeRO-1 and ZeRO-2 pad a group to a multiple of this, times the ranks.
GROUPS = [
    {"up.weight": (5, 7), "cube": (3, 2, 5), "empty": (0, 4)},
    {"up.bias": (5,), "scalar": ()},
]
OPTIONS = [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 5e-4, "weight_decay": 0.0}]
STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class FragmentAddress:
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 4.0


class ZeroStageEnum(int, Enum):
    one = 1
    two = 2
    three = 3


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Modules with the classes that DeepSpeed pickles."""
    classes = {
        "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
        "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStageEnum,
    }
    modules: dict[str, types.ModuleType] = {}
    for path, cls in classes.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            modules.setdefault(name, types.ModuleType(name))
        cls.__module__, cls.__qualname__ = ".".join(parts[:-1]), parts[-1]
        setattr(modules[cls.__module__], parts[-1], cls)
    with mock.patch.dict(sys.modules, modules):
        yield


def values() -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint, by their FQNs."""
    generator = torch.Generator().manual_seed(0)
    out = {"model.buffer": torch.arange(3.0), "model.frozen": torch.arange(11).bfloat16()}
    for sizes in GROUPS:
        for fqn, size in sizes.items():
            out[f"model.{fqn}"] = torch.randn(size, generator=generator)
            for state in STATES:
                out[f"optim.state.{fqn}.{state}"] = torch.randn(size, generator=generator)
            out[f"optim.state.{fqn}.step"] = torch.tensor(9.0)
    return out


def write(
    folder: Path,
    stage: int,
    change: Callable[[int, dict[str, Any]], Any] | None = None,
    change_model: Callable[[int, dict[str, Any]], Any] | None = None,
) -> None:
    """Writes a checkpoint of :data:`RANKS` ranks.

    Args:
        folder: The folder.
        stage: The stage of ZeRO.
        change: May edit the optimizer of a rank.
        change_model: May edit the model file of a rank.
    """
    folder.mkdir(parents=True)
    whole = values()
    with deepspeed_classes():
        for rank in range(RANKS):
            optim = zero3_partition(whole, rank) if stage == 3 else _zero12(whole, rank)
            optim["loss_scaler"] = LossScaler()
            optim["zero_stage"] = ZeroStageEnum(stage)
            if change is not None:
                change(rank, optim)
            name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optim}, folder / name)
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                model = _model(whole, stage, rank)
                if change_model is not None:
                    change_model(rank, model)
                torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")


def _model(whole: dict[str, torch.Tensor], stage: int, rank: int) -> dict[str, Any]:
    frozen = whole["model.frozen"]
    module = {"buffer": whole["model.buffer"], "frozen": frozen}
    for sizes in GROUPS:
        module.update({fqn: whole[f"model.{fqn}"].bfloat16() for fqn in sizes})
    state: dict[str, Any] = {
        "buffer_names": ["buffer"],
        "param_shapes": [
            OrderedDict((fqn, torch.Size(size)) for fqn, size in sizes.items()) for sizes in GROUPS
        ],
        "shared_params": {"tied": "up.weight"} if rank == 0 else {},
        "dp_world_size": RANKS,
        "global_steps": 9,
        "lr_scheduler": {"last_epoch": 8},
        "model": "a client's",
    }
    if stage == 3:
        for fqn in set(module) - {"buffer"}:
            module[fqn] = torch.empty(0, dtype=torch.bfloat16)
        length = math.ceil(frozen.numel() / RANKS)
        padded = torch.cat([frozen, frozen.new_zeros(length * RANKS - frozen.numel())])
        state["frozen_param_shapes"] = {"frozen": frozen.size()}
        state["frozen_param_fragments"] = {"frozen": padded.chunk(RANKS)[rank].clone()}
    return {"module": module, **state}


def _groups() -> list[dict[str, Any]]:
    return [{**options, "params": [number]} for number, options in enumerate(OPTIONS)]


def zero3_partition(whole: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """The optimizer of a rank at stage 3."""

    def flat(names: list[str]) -> torch.Tensor:
        parts = []
        for name in names:
            tensor = whole[name].reshape(-1)
            length = -(-tensor.numel() // RANKS)
            padded = torch.cat([tensor, tensor.new_full((length * RANKS - tensor.numel(),), 99)])
            parts.append(padded[rank * length : (rank + 1) * length])
        return torch.cat(parts)

    state = {
        number: {
            "step": torch.tensor(9.0),
            **{name: flat([f"optim.state.{fqn}.{name}" for fqn in sizes]) for name in STATES},
        }
        for number, sizes in enumerate(GROUPS)
    }
    return {
        "partition_count": RANKS,
        "fp32_flat_groups": [flat([f"model.{fqn}" for fqn in sizes]) for sizes in GROUPS],
        "optimizer_state_dict": {"state": state, "param_groups": _groups()},
    }


def _zero12(whole: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    weights, state, mappings = [], {}, []
    for number, sizes in enumerate(GROUPS):
        order = list(sizes)[::-1]  # Not that of param_shapes, as with round_robin_gradients.
        numel = sum(whole[f"model.{fqn}"].numel() for fqn in order)
        length = -(-numel // (ALIGNMENT * RANKS)) * ALIGNMENT
        begin, end = rank * length, (rank + 1) * length

        def flat(prefix: str, suffix: str = "", order: list[str] = order) -> torch.Tensor:
            return torch.cat([whole[f"{prefix}{fqn}{suffix}"].reshape(-1) for fqn in order])

        def padded(tensor: torch.Tensor, total: int = length * RANKS) -> torch.Tensor:
            return torch.cat([tensor, tensor.new_full((total - tensor.numel(),), 99)])

        weights.append(flat("model.")[begin:end].clone())  # Without the padding.
        state[number] = {
            "step": 9,
            **{
                name: padded(flat("optim.state.", f".{name}"))[begin:end].clone() for name in STATES
            },
        }
        mapping, at = OrderedDict(), 0
        for fqn in order:
            first, last = max(at, begin), min(at + whole[f"model.{fqn}"].numel(), end)
            if first < last:
                mapping[fqn] = FragmentAddress(last - first, first - begin)
            at += whole[f"model.{fqn}"].numel()
        mappings.append(mapping)
    return {
        "partition_count": [RANKS, RANKS],
        "single_partition_of_fp32_groups": weights,
        "base_optimizer_state": {"state": state, "param_groups": _groups()},
        "param_slice_mappings": mappings,
    }


def write_shards(
    folder: Path,
    shards: list[dict[str, torch.Tensor]],
    *,
    info: dict[str, Any] | None = None,
    stages: int = 1,
    buffers: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes a checkpoint of ZeRO-1 with 2 ranks for each model-parallel rank.

    Args:
        folder: The folder.
        shards: The parameters of each model-parallel rank. ``exp_avg`` is twice the weight.
        info: The ``universal_checkpoint_info``.
        stages: Number of pipeline stages.
        buffers: Buffers that all ranks have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard, tensors in enumerate(shards):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        length = -(-flat.numel() // 2)
        for rank in range(2):
            begin, end, at = rank * length, min((rank + 1) * length, flat.numel()), 0
            mapping: OrderedDict[str, FragmentAddress] = OrderedDict()
            for fqn, tensor in tensors.items():
                first, last = max(at, begin), min(at + tensor.numel(), end)
                if first < last:
                    mapping[fqn] = FragmentAddress(last - first, first - begin)
                at += tensor.numel()
            part = flat[begin:end].clone()
            optim = {
                "partition_count": [2],
                "single_partition_of_fp32_groups": [part],
                "base_optimizer_state": {
                    "state": {0: {"step": torch.tensor(9.0), "exp_avg": part * 2}},
                    "param_groups": [{"lr": 0.1, "params": [0]}],
                },
                "param_slice_mappings": [mapping],
            }
            with deepspeed_classes():
                name = f"zero_pp_rank_{rank}_mp_rank_{shard:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": optim}, folder / name)
        sizes = OrderedDict((fqn, tensor.size()) for fqn, tensor in tensors.items())
        model: dict[str, Any] = {
            "module": {**tensors, **(buffers or {})},
            "buffer_names": list(buffers or {}),
            "param_shapes": [sizes],
            "global_steps": 9,
            "checkpoint_parallel_dimensions": {
                "pp_degree": stages,
                "tp_degree": len(shards) // stages,
            },
        }
        if info is not None:
            model["universal_checkpoint_info"] = info
        torch.save(model, folder / f"mp_rank_{shard:02d}_model_states.pt")
