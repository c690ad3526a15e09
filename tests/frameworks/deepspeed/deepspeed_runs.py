"""Training with DeepSpeed on gloo ranks, and the same training with FSDP2."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.process_io import nbytes_read_by
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_ckpt import FastReader

ROWS = 12  # In a batch, over all ranks.
STEPS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIENT = {"epoch": 3, "nested": {"a": [1, 2]}}


class Net(nn.Module):
    """Odd sizes, two groups, a tied and a frozen layer, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 5)
        self.down = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)
        self.tied = nn.Linear(13, 7, bias=False)
        self.tied.weight = self.down.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((7,), 1.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = torch.relu(self.up(x))
        out = self.norm(self.down(hidden) + self.tied(hidden))
        return out * self.scale.to(x.dtype) + self.frozen(hidden).sum(-1, keepdim=True)


class LoraNet(nn.Module):
    """A frozen layer that a tied one shares, and trained factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.base.weight
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) + self.up(self.down(x)))


class WideNet(nn.Sequential):
    """So large that headers do not matter: 24 MiB with the state of Adam."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(512, 1024, bias=number == 0) for number in range(4)))


NETS: dict[str, type[nn.Module]] = {"net": Net, "lora": LoraNet, "wide": WideNet}


def groups_of(net: nn.Module, *, scale: float = 1.0) -> list[dict[str, Any]]:
    trained = [param for param in net.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "lr": 1e-3 * scale, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "lr": 5e-4 * scale, "weight_decay": 0.0},
    ]


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(ROWS, 7, generator=generator)
        .chunk(dist.get_world_size())[dist.get_rank()]
        .to(dtype)
    )


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def prepare() -> None:
    """Lets DeepSpeed use the ranks of this world."""
    os.environ.update(
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_RANK="0",
        MASTER_PORT="29500",
        DS_ACCELERATOR="cpu",
    )
    import deepspeed

    # It would compile for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def initialized(model: nn.Module, parameters: Any, config: dict[str, Any]) -> Any:
    """A DeepSpeed engine on the ranks of this world."""
    prepare()
    import deepspeed

    return deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        config={"gradient_clipping": 0.0, **config},
        dist_init_required=False,
    )[0]


SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": [1e-5, 3e-5],
        "warmup_max_lr": [1e-2, 4e-3],  # A rate for each group.
        "warmup_num_steps": 2 * STEPS,
        "warmup_type": "linear",
        "total_num_steps": 4 * STEPS,
    },
}


def engine_of(
    stage: int,
    dtype: str,
    net: str = "net",
    optimizer: Any = None,
    *,
    universal: bool = False,
    schedules: bool = False,
    **changed: Any,
) -> Any:
    """An engine of one of the nets. ``changed`` replaces parts of the configuration."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "optimizer": optimizer or {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
        "checkpoint": {"load_universal": universal},
        # Several flat groups for each parameter group.
        "zero_optimization": {"stage": stage, **({"sub_group_size": 40} if stage == 3 else {})},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if schedules:
        config["scheduler"] = SCHEDULER
    torch.manual_seed(0)
    model = NETS[net]()
    return initialized(model, groups_of(model), {**config, **changed})


def train_step(engine: Any, rows: torch.Tensor) -> float:
    """Trains one step; returns the mean loss of all ranks."""
    loss = loss_of(engine(rows))
    engine.backward(loss)
    engine.step()
    return mean(loss)


def train_engine(engine: Any, first: int, dtype: str) -> list[float]:
    return [train_step(engine, batch(step, DTYPES[dtype])) for step in range(first, first + STEPS)]


def resume_torch(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
    **client: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Loads by a stock ``dcp.load``, and trains; returns the losses, and what was loaded."""
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, **client}
    dcp.load(state, storage_reader=FastReader(path))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    losses = []
    for rows in batches:
        loss = loss_of(net(rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses, state


def save_engine(
    path: Path, stage: int, dtype: str, net: str = "net", optimizer: Any = None
) -> None:
    """Trains and saves."""
    engine = engine_of(stage, dtype, net, optimizer)
    if net == "wide":
        engine.backward(sum(layer(torch.ones(2, 512)).mean() for layer in engine.module))
        engine.step()
    else:
        train_engine(engine, 0, dtype)
    engine.save_checkpoint(
        str(path),
        client_state={**CLIENT, "rng": torch.arange(9)},
        exclude_frozen_parameters=net == "lora",
    )
    engine.destroy()


def resume_engine(
    path: Path, stage: int, dtype: str, universal: bool = False
) -> tuple[list[float], list[tuple[float, float]], dict[str, Any]]:
    """DeepSpeed's own resume: losses, rate and decay of each group, and the client's state."""
    engine = engine_of(stage, dtype, universal=universal)
    _, client = engine.load_checkpoint(str(path))
    for state in engine.optimizer.optimizer.state.values() if universal and stage == 3 else ():
        # DeepSpeed gives all flat groups one tensor, which Adam then increments for each of them.
        state["step"] = state["step"].clone()
    losses = train_engine(engine, STEPS, dtype)
    assert engine.global_steps == 2 * STEPS
    options = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    engine.destroy()
    return losses, options, {name: client[name] for name in CLIENT}


def resume_fsdp(path: Path) -> tuple[list[float], list[tuple[float, float]]]:
    """The losses of FSDP2 after a stock ``dcp.load``, and rate and decay of each group."""
    torch.manual_seed(dist.get_rank() + 1)
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(net, scale=7))
    batches = map(batch, range(STEPS, 2 * STEPS))
    losses, state = resume_torch(path, net, optimizer, batches, epoch=0, nested={"a": []})
    assert {name: state[name] for name in CLIENT} == CLIENT
    return losses, [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def save_schedule(path: Path, stage: int) -> list[float]:
    """Trains with a scheduler, and saves; returns the losses of the next steps."""
    engine = engine_of(stage, "fp32", schedules=True)
    train_engine(engine, 0, "fp32")
    engine.save_checkpoint(str(path))
    losses = train_engine(engine, STEPS, "fp32")
    engine.destroy()
    return losses


def resume_schedule(path: Path, stage: int, restore: str = "") -> list[float]:
    """Losses after a resume from a universal folder, and after the line of a user's script."""
    engine = engine_of(stage, "fp32", universal=True, schedules=True)
    engine.load_checkpoint(str(path))
    exec(restore, {"engine": engine, "torch": torch})
    for state in engine.optimizer.optimizer.state.values() if stage == 3 else ():
        state["step"] = state["step"].clone()  # See above.
    losses = train_engine(engine, STEPS, "fp32")
    engine.destroy()
    return losses


def merged_by_deepspeed(path: Path) -> dict[str, torch.Tensor]:
    """Weights as ``zero_to_fp32`` gives them, and the optimizer's shards merged directly."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(path))
    folder = path / (path / "latest").read_text()
    stored = torch.load(min(folder.glob("*model_states.pt")), weights_only=False)
    for fqn, tensor in stored["module"].items():  # DeepSpeed forgets frozen ones at stage 1.
        if tensor.numel():
            weights.setdefault(fqn, tensor)
    merged = {f"model.{fqn}": tensor for fqn, tensor in weights.items()}
    shapes = stored["param_shapes"]
    files = sorted(folder.glob("*optim_states.pt"))
    ranks = [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]
    is_zero3 = "fp32_flat_groups" in ranks[0]
    for group, sizes in enumerate(shapes):
        base = [
            one["optimizer_state_dict" if is_zero3 else "base_optimizer_state"] for one in ranks
        ]
        for state in base[0]["state"][group]:
            flats = [one["state"][group][state] for one in base]
            start = 0
            for fqn, size in sizes.items():
                if not flats[0].ndim:
                    whole = flats[0]
                elif is_zero3:
                    length = -(-size.numel() // len(ranks))
                    whole = torch.cat([flat[start : start + length] for flat in flats])
                    whole = whole[: size.numel()].view(size)
                    start += length
                else:
                    parts = [
                        flat[at.start : at.start + at.numel]
                        for flat, one in zip(flats, ranks, strict=True)
                        if (at := one["param_slice_mappings"][group].get(fqn)) is not None
                    ]
                    whole = torch.cat(parts).view(size)
                merged[f"optim.state.{fqn}.{state}"] = whole
    return merged


def loaded_whole(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, loaded by one process."""
    metadata = FastReader(path).read_metadata().state_dict_metadata
    state = {
        fqn: torch.empty(stored.size, dtype=stored.properties.dtype)
        for fqn, stored in metadata.items()
        if hasattr(stored, "chunks")
    }
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    return state


def convert(source: Path, target: Path) -> None:
    """DeepSpeed's own conversion to a universal folder, on rank 0."""
    if dist.get_rank() == 0:
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed.checkpoint import ds_to_universal

        options = SimpleNamespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        ds_to_universal.main(options)
    dist.barrier()


def wide_numel() -> int:
    return sum(math.prod(param.shape) for param in WideNet().parameters())


def load_quarter(path: Path) -> tuple[int, int]:
    """Bytes that this rank reads to load its shards, and those of all tensors."""
    net = fully_shard(WideNet(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(net))
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim}
    FastReader(path).read_metadata()  # Imports what opens these files: that is read, too.
    nbytes = nbytes_read_by(dcp.load, state, storage_reader=FastReader(path))
    return nbytes, 3 * 4 * wide_numel()


def has_deepspeed() -> bool:
    """Whether DeepSpeed has been imported here."""
    return "deepspeed" in sys.modules
