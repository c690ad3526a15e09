"""Parallel layouts of one model with its optimizer, over the first ranks of a world of eight.

By torch's own means: `fully_shard`, `parallelize_module`, DDP, `distribute_tensor`; stages and
experts that are elsewhere are left out. Meshes and groups are made once in a process, by `meet` on
all ranks of the world, for the layouts that are used; `build` is called on the ranks of a layout
only.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORLD = 8
TIMEOUT_S = 200  # A call takes seconds; for a machine that is busy.
VOCABULARY, WIDTH, HEADS, HEAD_WIDTH, INNER, EXPERTS = 37, 27, 4, 5, 36, 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # Names no group by its number.


# ---- The model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention; heads may be fewer where its layers are sharded by columns."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_WIDTH
        self.q = nn.Linear(WIDTH, inner, bias=False)
        self.k = nn.Linear(WIDTH, inner, bias=False)
        self.v = nn.Linear(WIDTH, inner, bias=False)
        self.out = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x).unflatten(-1, (-1, HEAD_WIDTH)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A soft mixture of experts that have each a name, or that lie in one tensor."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)]
        if stacked:
            self.bank = nn.Parameter(torch.stack([each.weight.detach() for each in experts]))
        else:
            self.each = nn.ModuleDict({str(i): each for i, each in enumerate(experts)})
        self.stacked = stacked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        if self.stacked:
            return torch.einsum("btw,eow,bte->bto", x, self.bank, shares)
        parts = [expert(x) * shares[..., int(i), None] for i, expert in self.each.items()]
        return torch.stack(parts).sum(0)


class Block(nn.Module):
    """Experts, after attention or after a layer up and a layer down."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attends = attends
        if attends:
            self.attention = Attention()
        else:
            self.up = nn.Linear(WIDTH, INNER)
            self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.experts = Experts(stacked=not attends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + (self.attention(y) if self.attends else self.down(F.gelu(self.up(y))))
        return x + self.experts(x)


class Net(nn.Module):
    """Two blocks, of sizes that hardly any number of ranks divides.

    What both FSDP and TP cut by rows divides by 4, as `fully_shard` wants it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({"0": Block(attends=True), "1": Block(attends=False)})
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


# ---- Meshes and groups ---------------------------------------------------------------------------

MESHES: dict[tuple[int, ...], tuple[str, ...]] = {
    (1,): ("all",),
    (2,): ("all",),
    (3,): ("all",),
    (4,): ("all",),
    (8,): ("all",),
    (2, 2): ("outer", "inner"),
    (2, 3): ("outer", "inner"),
    (2, 4): ("outer", "inner"),
    (2, 2, 2): ("replicas", "outer", "inner"),
}


# Each has groups, and threads, for as long as the process lives.
_meshes: dict[tuple[int, ...], DeviceMesh] = {}
_groups: dict[int, dist.ProcessGroup] = {}


def meet(layouts: Iterable[str]) -> None:
    """Makes the meshes and groups of these layouts, once; a collective of the world."""
    for shape in sorted({LAYOUTS[layout].shape for layout in layouts}):
        size = math.prod(shape)
        if shape not in _meshes:
            ranks = torch.arange(size).reshape(shape)
            _meshes[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=MESHES[shape])
        if size not in _groups:
            _groups[size] = dist.new_group(range(size))


def group_of(layout: Layout) -> dist.ProcessGroup:
    """The ranks of a layout, in order, as a group."""
    return _groups[layout.ranks]


# ---- Layouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How the model is spread over the first ``ranks`` ranks of the world."""

    shape: tuple[int, ...]  # The mesh's.
    spread: Callable[[Net, DeviceMesh], nn.Module]

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)


def _fsdp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for unit in net.children():
        # Units are of one dtype each; and a list of modules has no forward.
        for each in unit.children() if isinstance(unit, nn.ModuleDict) else (unit,):
            fully_shard(each, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _tp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "head": RowwiseParallel(input_layouts=Replicate()),
    }
    for name in ("attention.q", "attention.k", "attention.v"):
        plan[f"blocks.0.{name}"] = ColwiseParallel()
    plan["blocks.0.attention.out"] = RowwiseParallel()
    plan["blocks.1.up"] = ColwiseParallel()
    plan["blocks.1.down"] = RowwiseParallel()
    return parallelize_module(net, mesh, plan)


def _fsdp_tp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(_tp(net, mesh["inner"]), mesh["outer"])


def _hsdp_tp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _fsdp(_tp(net, mesh["inner"]), mesh["replicas", "outer"])


def _ddp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net, process_group=mesh.get_group())


def _placed(*placements: Placement) -> Callable[[Net, DeviceMesh], nn.Module]:
    """Parameters are DTensors of these placements; those of one dimension are cut only by rows."""

    def spread(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(net.named_parameters()):
            own = (
                Replicate() if isinstance(one, Shard) and one.dim >= parameter.ndim else one
                for one in placements
            )
            _distribute(net, name, mesh, tuple(own))
        return net

    return spread


def _pp(stages: list[list[str]]) -> Callable[[Net, DeviceMesh], nn.Module]:
    def spread(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
        own = stages[mesh.get_local_rank(0)]
        for name in [name for stage in stages for name in stage if name not in own]:
            parent, _, child = name.rpartition(".")
            delattr(net.get_submodule(parent), child)
        return net

    return spread


TWO_STAGES = [["embed", "blocks.0"], ["blocks.1", "norm", "head", "seen"]]
THREE_STAGES = [["embed"], ["blocks.0", "blocks.1", "seen"], ["norm", "head"]]


def _experts(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Experts with names on one rank each, the tensor of experts cut; the rest everywhere."""
    each = net.get_submodule("blocks.0.experts.each")
    for number in range(EXPERTS):
        if number % mesh.size() != mesh.get_local_rank():
            del each[str(number)]
    _distribute(net, "blocks.1.experts.bank", mesh, (Shard(0),))
    return net


def _distribute(
    net: nn.Module, name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    parent, _, child = name.rpartition(".")
    module = net.get_submodule(parent)
    full = getattr(module, child).detach()
    own = distribute_tensor(full, mesh, placements, src_data_rank=None)
    setattr(module, child, nn.Parameter(own))


LAYOUTS: dict[str, Layout] = {
    "fsdp_1": Layout((1,), _fsdp),
    "fsdp_2": Layout((2,), _fsdp),
    "fsdp_3": Layout((3,), _fsdp),
    "fsdp_4": Layout((4,), _fsdp),
    "fsdp_8": Layout((8,), _fsdp),
    "hsdp_2x2": Layout((2, 2), _fsdp),
    "hsdp_2x4": Layout((2, 4), _fsdp),
    "tp_2": Layout((2,), _tp),
    "tp_4": Layout((4,), _tp),
    "fsdp_tp_2x2": Layout((2, 2), _fsdp_tp),
    "hsdp_tp_2x2x2": Layout((2, 2, 2), _hsdp_tp),
    "grid_2x3": Layout((2, 3), _placed(Shard(0), Shard(1))),
    "rows_of_rows_2x2": Layout((2, 2), _placed(Shard(0), Shard(0))),
    "replicated_columns_2x2": Layout((2, 2), _placed(Replicate(), Shard(1))),
    "rows_of_grid_2x2x2": Layout((2, 2, 2), _placed(Shard(0), Shard(1), Shard(0))),
    "pp_2": Layout((2,), _pp(TWO_STAGES)),
    "pp_3": Layout((3,), _pp(THREE_STAGES)),
    "experts_4": Layout((4,), _experts),
    "ddp_2": Layout((2,), _ddp),
}


# ---- A model that is spread ----------------------------------------------------------------------


@dataclass
class Model:
    """This rank's part of the model and of its optimizer."""

    net: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state as ``dcp.save`` takes it and ``dcp.load`` fills it in: no copies."""
        model, optim = get_state_dict(self.net, self.optimizer, options=FLAT)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state that ``dcp.load`` has filled in."""
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=FLAT,
        )


def build(layout: Layout, net: Net) -> Model:
    """Spreads ``net`` over the ranks of the layout, each of which gives one of the same values."""
    spread = layout.spread(net, _meshes[layout.shape])
    wrapped = "module." if isinstance(spread, DistributedDataParallel) else ""
    groups = [
        {"params": [parameter], **hyper(name.removeprefix(wrapped))}
        for name, parameter in spread.named_parameters()
    ]
    return Model(spread, torch.optim.AdamW(groups))


def hyper(name: str) -> dict[str, Any]:
    """How AdamW updates the parameter of that name: at rates that are no other's."""
    number = zlib.crc32(name.encode()) % 10007
    rates = {"lr": (1 + number / 10007) * 1e-3, "weight_decay": number / 100070}
    return {**rates, "betas": (0.9, 0.95), "foreach": False}  # Groups mix tensors and DTensors.
