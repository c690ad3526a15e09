"""Training with DeepSpeed's AutoEP on gloo ranks, and with the same experts on one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_runs import initialized, resume_torch, train_step
from torch import nn

ROWS = 16  # In a batch, over all ranks.
STEPS = 3
EXPERTS, HIDDEN, INNER = 4, 6, 10
LAYERS = 2
FROZEN = "layers.1.mlp.experts.down_proj"


class Experts(nn.Module):
    """As Hugging Face stores them: gate and up in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.3)


class Moe(nn.Module):
    """What AutoEP replaces, and never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))


class PlainMoe(nn.Module):
    """The layer that AutoEP makes, by the same names, with all experts on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = Stacked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router.gate(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen, scores)
        weights = weights / weights.sum(-1, keepdim=True)
        inner = nn.functional.silu(torch.einsum("...h,eih->...ei", x, self.experts.w1))
        inner = inner * torch.einsum("...h,eih->...ei", x, self.experts.w3)
        return torch.einsum("...ei,ehi,...e->...h", inner, self.experts.w2, weights)


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(torch.relu(self.up(x)))
        return x + (out[0] if isinstance(out, tuple) else out)


class Net(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(mlp()) for _ in range(LAYERS))
        self.config = SimpleNamespace(num_experts=EXPERTS, num_experts_per_tok=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(step: int) -> torch.Tensor:
    """The rows of this rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, 3, HIDDEN, generator=generator)
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def engine_of(
    stage: int,
    ranks: int,
    *,
    data_first: bool = False,
    frozen: bool = False,
    universal: bool = False,
) -> Any:
    """An engine with the experts on so many ranks."""
    from deepspeed.utils import groups

    for kept in vars(groups).values():  # An earlier run had another order of ranks.
        if isinstance(kept, dict) and any("ep_size" in str(key) for key in kept):
            kept.clear()
    net = Net(Moe)
    if frozen:
        net.get_parameter(FROZEN).requires_grad_(False)
    experts = {
        "enabled": True,
        "autoep_size": ranks,
        "moe_layer_pattern": r"layers\.\d+\.mlp",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_up_proj",
        "expert_w2": "down_proj",
        "expert_w3": None,
        "num_experts_attr": "num_experts",
        "top_k_attr": "num_experts_per_tok",
        "has_shared_experts": False,
        "score_func": "softmax",
        "route_norm": True,
        "use_grouped_mm": False,
    }
    return initialized(
        net,
        [parameter for parameter in net.parameters() if parameter.requires_grad],
        {
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-2}},
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "use_data_before_expert_parallelism": data_first,
            "checkpoint": {"load_universal": universal},
            "expert_parallel": experts,
        },
    )


def save(path: Path, stage: int, ranks: int, data_first: bool, frozen: bool) -> list[float]:
    """Trains and saves; returns the losses of the steps after the save."""
    engine = engine_of(stage, ranks, data_first=data_first, frozen=frozen)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(str(path))
        losses.append(train_step(engine, batch(step)))
    engine.destroy()
    return losses[STEPS:]


def resume_engine(path: Path, stage: int, ranks: int) -> list[float]:
    """The losses of an engine that resumes from a universal folder."""
    engine = engine_of(stage, ranks, universal=True)
    engine.load_checkpoint(str(path.parent), tag=path.name)
    losses = [train_step(engine, batch(step)) for step in range(STEPS, 2 * STEPS)]
    engine.destroy()
    return losses


def resume_plain(path: Path) -> list[float]:
    """The losses of a model with all experts on this rank, after a stock ``dcp.load``."""
    net = Net(PlainMoe)
    dense = [p for name, p in net.named_parameters() if ".experts." not in name]
    experts = [p for name, p in net.named_parameters() if ".experts." in name]
    optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts}], lr=1.0)
    return resume_torch(path, net, optimizer, map(batch, range(STEPS, 2 * STEPS)))[0]
