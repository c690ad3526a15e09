"""Training with DeepSpeed's tensor and pipeline parallelism on gloo ranks, and with FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_runs import initialized, prepare, resume_torch, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS = 4  # In a batch, over all data-parallel ranks.
STEPS = 3
TENSOR_RANKS = 2


class Layer(nn.Module):
    """Attention-like, with a fused QKV of grouped heads, and a fused gate and up projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 16)
        self.o = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.gate_up = nn.Linear(6, 20, bias=False)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        size = qkv.shape[-1] // 4
        q, k, v = qkv.split([2 * size, size, size], -1)
        q = q.unflatten(-1, (-1, 2, 2))  # Heads of size 2; two of them for each one of k and v.
        k, v = k.unflatten(-1, (-1, 1, 2)), v.unflatten(-1, (-1, 1, 2))
        x = x + self.o((q * torch.tanh(k) + v).flatten(-3))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.relu(gate) * up)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


SPECS = [
    {
        "patterns": [r".*\.qkv\.(weight|bias)$"],
        "partition_type": "column",
        "shape": [[8, 4, 4], -1],
        "partition_dim": 0,
    },
    {
        "patterns": [r".*\.gate_up\.weight$"],
        "partition_type": "column",
        "shape": [2, -1],
        "partition_dim": 0,
    },
    {"patterns": [r".*\.(o|down)\.weight$"], "partition_type": "row"},
]


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 6, generator=generator).chunk(ranks)[rank]


ADAM = {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-2}}


def engine_of(stage: int, tensor_ranks: int, *, universal: bool = False) -> Any:
    """An engine with AutoTP on so many ranks."""
    torch.manual_seed(0)
    net = Net()
    return initialized(
        net,
        net.parameters(),
        {
            "optimizer": ADAM,
            "train_micro_batch_size_per_gpu": ROWS * tensor_ranks // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": universal},
            "tensor_parallel": {
                "autotp_size": tensor_ranks,
                "partition_config": {"use_default_specs": False, "layer_specs": SPECS},
            },
        },
    )


def train(engine: Any, tensor_ranks: int, step: int) -> float:
    ranks = dist.get_world_size() // tensor_ranks
    return train_step(engine, batch(step, dist.get_rank() // tensor_ranks, ranks))


def save_tensor_parallel(path: Path, stage: int) -> list[float]:
    """Trains and saves with AutoTP on 2 of 4 ranks; returns the losses of the steps after it."""
    engine = engine_of(stage, TENSOR_RANKS)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(str(path))
        losses.append(train(engine, TENSOR_RANKS, step))
    engine.destroy()
    return losses[STEPS:]


def resume_tensor_parallel(path: Path, stage: int, tensor_ranks: int) -> list[float]:
    """The losses of an engine that resumes from a universal folder."""
    engine = engine_of(stage, tensor_ranks, universal=True)
    engine.load_checkpoint(str(path.parent), tag=path.name)
    losses = [train(engine, tensor_ranks, step) for step in range(STEPS, 2 * STEPS)]
    engine.destroy()
    return losses


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x)) * self.scale


def pipeline_engine(stages: int, *, universal: bool = False) -> Any:
    """An engine with so many pipeline stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    prepare()
    torch.manual_seed(0)
    net = PipelineModule(
        layers=[LayerSpec(Block) for _ in range(5)],
        num_stages=stages,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
    )
    config = {
        "optimizer": ADAM,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ROWS * stages // dist.get_world_size(),
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": universal},
    }
    return initialized(net, net.parameters(), config)


def train_pipeline(engine: Any, stages: int, step: int) -> float:
    ranks = dist.get_world_size() // stages
    rows = batch(step, 0, 1)[dist.get_rank() % ranks :: ranks].split(1)
    return float(engine.train_batch(iter([(row, row / 2) for row in rows])))


def save_pipeline(path: Path) -> list[float]:
    """Trains and saves with 2 stages of 2 ranks; returns the losses of the steps after it."""
    engine = pipeline_engine(2)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(str(path))
        losses.append(train_pipeline(engine, 2, step))
    return losses[STEPS:]


def resume_pipeline(path: Path, stages: int) -> list[float]:
    """The losses of an engine that resumes from a universal folder."""
    engine = pipeline_engine(stages, universal=True)
    engine.load_checkpoint(str(path.parent), tag=path.name)
    return [train_pipeline(engine, stages, step) for step in range(STEPS, 2 * STEPS)]


def resume_fsdp(path: Path) -> list[float]:
    """The losses of FSDP2 after a stock ``dcp.load``."""
    torch.manual_seed(dist.get_rank() + 1)
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters())
    ranks = dist.get_world_size()
    batches = (batch(step, dist.get_rank(), ranks) for step in range(STEPS, 2 * STEPS))
    return resume_torch(path, net, optimizer, batches)[0]
