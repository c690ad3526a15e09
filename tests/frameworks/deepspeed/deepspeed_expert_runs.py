"""Training with DeepSpeed's expert parallelism on gloo ranks, and with all experts on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_runs import initialized, loaded_whole, prepare, resume_torch, train_step
from torch import nn

ROWS = 16  # In a batch, over all ranks.
STEPS = 3
EXPERTS = 4
LAYERS = 2
PREFIX = "deepspeed_experts."


def is_trained(name: str, frozen: int | None, count: int) -> bool:
    """Whether a parameter is trained.

    Args:
        name: Its FQN.
        frozen: The number of a frozen expert on each rank; ``None`` if there is none.
        count: Number of experts of a rank of the run that froze them.
    """
    _, found, rest = name.partition(PREFIX)
    is_frozen = bool(found) and int(rest.split(".")[0]) % count == frozen
    return not is_frozen and not name.endswith("down.bias")


class Expert(nn.Module):
    """With a parameter and a buffer that the optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


class Layer(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.up = nn.Linear(6, 6)
        # No token is dropped, so a step does not depend on how the rows are spread over ranks.
        options = {"k": 1, "min_capacity": 0, "capacity_factor": float(EXPERTS), "use_rts": False}
        self.moe = MoE(6, Expert(), num_experts=EXPERTS, ep_size=ranks, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(torch.relu(self.up(x)))[0]


class Net(nn.Sequential):
    """A mixture of experts, each different.

    Args:
        ranks: Number of ranks that share the experts of a layer.
    """

    def __init__(self, ranks: int) -> None:
        torch.manual_seed(0)
        super().__init__(*(Layer(ranks) for _ in range(LAYERS)))
        for number, (name, parameter) in enumerate(self.named_parameters()):
            if PREFIX in name:
                parameter.data.mul_(1 + 0.1 * dist.get_rank() + 0.01 * number)


def batch(step: int) -> torch.Tensor:
    """The rows of this rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, 6, generator=generator)
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def trained_parameters(net: nn.Module, frozen: int | None, count: int) -> dict[str, nn.Parameter]:
    """The trained parameters; the others no longer get gradients."""
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(is_trained(name, frozen, count))
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def engine_of(
    stage: int,
    ranks: int,
    *,
    data_first: bool = False,
    frozen: int | None = None,
    universal: bool = False,
) -> Any:
    """An engine with the experts on so many ranks."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    net = Net(ranks)
    trained = list(trained_parameters(net, frozen, EXPERTS // ranks).values())
    return initialized(
        net,
        split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"}),
        {
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-2}},
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "use_data_before_expert_parallelism": data_first,
            "checkpoint": {"load_universal": universal},
        },
    )


def save_experts(
    path: Path, stage: int, ranks: int, data_first: bool, frozen: int | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains and saves with experts on so many ranks.

    Returns:
        The losses of the steps after the save, and the tensors of the model on this rank, by the
        names of the model with all experts.
    """
    from deepspeed.utils import groups

    for kept in vars(groups).values():  # An earlier run had another order of ranks.
        if isinstance(kept, dict) and f"ep_size_{ranks}" in kept:
            kept.clear()
    engine = engine_of(stage, ranks, data_first=data_first, frozen=frozen)
    first = groups._get_expert_parallel_rank(f"ep_size_{ranks}") * EXPERTS // ranks

    def name_of(local: str) -> str:
        prefix, found, rest = local.partition(PREFIX)
        number, _, rest = rest.partition(".")
        return f"{prefix}{PREFIX}{first + int(number)}.{rest}" if found else local

    losses, tensors = [], {}
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(str(path))
            for name, tensor in engine.module.state_dict().items():
                tensors[f"model.{name_of(name)}"] = tensor.clone()
        losses.append(train_step(engine, batch(step)))
    engine.destroy()
    return losses[STEPS:], tensors


def resume_engine(path: Path) -> list[float]:
    """The losses of an engine with all experts on each rank, from a universal folder."""
    engine = engine_of(1, 1, universal=True)
    engine.load_checkpoint(str(path.parent), tag=path.name)
    # DeepSpeed does not load frozen parameters and buffers of a universal folder.
    stored = loaded_whole(path)
    for name, tensor in engine.module.state_dict().items():
        if name.endswith(("down.bias", "scale")):
            tensor.copy_(stored[f"model.{name}"])
    losses = [train_step(engine, batch(step)) for step in range(STEPS, 2 * STEPS)]
    engine.destroy()
    return losses


def resume_on_one_rank(path: Path, ranks: int, frozen: int | None) -> list[float]:
    """The losses of the model with all experts, after a stock ``dcp.load``."""
    prepare()
    net = Net(1)
    for layer in net:
        layer.moe.set_deepspeed_parallelism()
    trained = trained_parameters(net, frozen, EXPERTS // ranks)
    groups = ([p for name, p in trained.items() if (PREFIX in name) == kind] for kind in (0, 1))
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1.0)
    return resume_torch(path, net, optimizer, map(batch, range(STEPS, 2 * STEPS)))[0]
