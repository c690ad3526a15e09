"""Switches training between parallel layouts and frameworks in mid-run, and plots the losses.

Trains a small GPT, or a small mixture of experts, for some steps under each layout, saves, and
continues from that checkpoint under other layouts. The losses must be those of training without an
interruption. Layouts: DDP, FSDP1, FSDP2, tensor parallelism, and ZeRO-1, ZeRO-2 and ZeRO-3 of
DeepSpeed. Nothing is converted but for DeepSpeed as the target, which needs a universal folder::

    torchrun --nproc-per-node 2 examples/loss_curves.py --plot curves.svg
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torch_ckpt import FastReader, FastWriter, fsdp1_state_dict, load_fsdp1_state_dict
from torch_ckpt.cli.main import main as torch_ckpt_command

VOCABULARY, WIDTH, HEADS, LENGTH, EXPERTS, BATCH = 64, 32, 4, 24, 4, 8
LAYOUTS = ("ddp", "fsdp1", "fsdp2", "tp", "zero1", "zero2", "zero3")
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token goes through the two experts that the router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        chosen = scores >= scores.topk(2).values[..., -1:]
        weights = scores * chosen
        return sum(
            w.unsqueeze(-1) * e(x) for w, e in zip(weights.unbind(-1), self.experts, strict=True)
        )


class Block(nn.Module):
    def __init__(self, feed_forward: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed_forward = feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = [
            linear(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        feed_forward = {"gpt": Mlp, "moe": Experts}[kind]
        self.blocks = nn.ModuleList(Block(feed_forward) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    """The rows of a rank: sequences in which most tokens follow from the one before."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        noise = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        keep = torch.rand(BATCH, generator=generator) < 0.8
        tokens.append(torch.where(keep, (tokens[-1] * 5 + 1) % VOCABULARY, noise))
    return torch.stack(tokens, 1).chunk(ranks)[rank]


class Training:
    """A model and an optimizer under a layout of torch."""

    def __init__(self, layout: str, kind: str) -> None:
        torch.manual_seed(0)
        self.layout, net = layout, Gpt(kind)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model: nn.Module = net
        if layout == "ddp":
            self.model = DistributedDataParallel(net)
        elif layout == "fsdp1":
            self.model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        elif layout == "fsdp2":
            for block in net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
        else:
            plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in "qkv"}
            for mlp in ("feed_forward", "feed_forward.experts.*"):
                plan[f"blocks.*.{mlp}.up"] = ColwiseParallel()
                plan[f"blocks.*.{mlp}.down"] = RowwiseParallel()
            plan["blocks.*.o"] = RowwiseParallel()
            parallelize_module(net, mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)

    def _state(self) -> dict[str, Any]:
        if self.layout == "fsdp1":
            model, optim = fsdp1_state_dict(self.model, self.optimizer)
        else:
            model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def save(self, path: Path) -> None:
        dcp.save(self._state(), storage_writer=FastWriter(path))

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, storage_reader=FastReader(path))
        if self.layout == "fsdp1":
            load_fsdp1_state_dict(self.model, self.optimizer, state["model"], state["optim"])
        else:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model(tokens[:, :-1]), tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def close(self) -> None: ...


class DeepSpeedTraining:
    """An engine of DeepSpeed."""

    def __init__(self, layout: str, kind: str) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # It would be compiled.
        torch.manual_seed(0)
        net = Gpt(kind)
        config = {
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, **OPTIONS}},
            "zero_optimization": {"stage": int(layout[-1])},
            "checkpoint": {"load_universal": True},
        }
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        self.engine = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=config, dist_init_required=False
        )[0]

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        """Loads a universal folder, which the first rank writes."""
        folder = path.with_name(f"{path.name}-for-deepspeed")
        if dist.get_rank() == 0:
            arguments = ["convert", str(path), str(folder / "universal"), "--to", "universal"]
            assert torch_ckpt_command([*arguments, "--overwrite"]) == 0
        dist.barrier()
        self.engine.load_checkpoint(str(folder))
        dist.barrier()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.engine(tokens[:, :-1]), tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def close(self) -> None:
        self.engine.destroy()


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    layout: str,
    kind: str,
    steps: range,
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> list[float]:
    """Trains under a layout; returns the mean loss of the ranks in each step."""
    make = DeepSpeedTraining if layout.startswith("zero") else Training
    training: Any = make(layout, kind)
    if load is not None:
        training.load(load)
    # All tensor-parallel ranks train on the same rows.
    rank, ranks = (0, 1) if layout == "tp" else (dist.get_rank(), dist.get_world_size())
    losses = []
    for step in steps:
        loss = training.step(batch(step, rank, ranks)).detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    if save is not None:
        training.save(save)
    training.close()
    return losses


def pairs(layouts: list[str], hub: str) -> Iterator[tuple[str, str]]:
    """From one layout to all others, and from all others to it."""
    return itertools.chain(((hub, one) for one in layouts), ((one, hub) for one in layouts))


def plot(curves: dict[str, dict[str, list[float]]], switch: int, file: Path) -> None:
    """Draws, for each model, the losses without interruption and after each switch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False)
    for axis, (kind, found) in zip(axes[0], curves.items(), strict=True):
        whole = found["uninterrupted"]
        axis.plot(range(len(whole)), whole, color="0.7", linewidth=5, label="uninterrupted")
        for name, losses in found.items():
            if name != "uninterrupted":
                axis.plot(range(switch, len(whole)), losses, linewidth=1, label=name)
        axis.axvline(switch, color="0.5", linestyle=":")
        axis.set(title=kind, xlabel="step", ylabel="loss")
        axis.legend(fontsize=6, ncols=2)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=["gpt", "moe"], help="repeatable")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="comma-separated")
    parser.add_argument("--hub", default="fsdp2", help="the layout of one side of each switch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of each loss, absolute")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses there")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    layouts, switch = args.layouts.split(","), args.steps // 2
    directory = args.dir / "loss-curves"
    curves: dict[str, dict[str, list[float]]] = {}
    for kind in args.model or ["gpt", "moe"]:
        found = {"uninterrupted": train("ddp", kind, range(args.steps))}
        if dist.get_rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        for layout in dict.fromkeys([*layouts, args.hub]):
            train(layout, kind, range(switch), save=directory / layout)
        for source, target in dict.fromkeys(pairs(layouts, args.hub)):
            losses = train(target, kind, range(switch, args.steps), load=directory / source)
            found[f"{source} to {target}"] = losses
            largest = max(
                abs(a - b) for a, b in zip(losses, found["uninterrupted"][switch:], strict=True)
            )
            if dist.get_rank() == 0:
                print(f"{kind}: {source} to {target}: losses differ by {largest:.1e} at most")
            assert largest <= args.tolerance, (kind, source, target, largest)
        curves[kind] = found
    if args.plot is not None and dist.get_rank() == 0:
        plot(curves, switch, args.plot)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
        print("all losses are those of uninterrupted training")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
