"""Writes a ``torch_dist`` checkpoint with an old megatron-core: ``python golden_megatron.py NAME``.

``tests/golden/megatron-0.15`` is what version 0.15.3 wrote, by 4 ranks with TP 2 and DP 2. Each
optimizer state is a range of a flattened shard there (``flattened_range``), which later versions
can neither write nor read. Needs megatron-core 0.14 or 0.15 on ``PYTHONPATH``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "megatron-0.15"
TP, DP = 2, 2

# Shape, the axis that TP divides, and where DP cuts the flattened shard of each layer. A tensor
# with several cuts has an axis of layers in front.
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None, list[int]]] = {
    "rows": ((8, 5), 0, [13]),
    "columns": ((6, 8), 1, [6]),
    "cube": ((3, 8, 5), 1, [27]),
    "norm": ((10,), None, [3]),
    "layers": ((3, 4, 3), 1, [6, 1, 0]),
}


def full_state() -> dict[str, Any]:
    """The tensors and objects of the checkpoint, unsharded, by their stored names."""
    generator = torch.Generator().manual_seed(23)
    state: dict[str, Any] = {}
    for name, (shape, _, _) in PARAMETERS.items():
        state[name] = torch.randn(shape, generator=generator).bfloat16()
        state[f"optimizer.state.exp_avg.{name}"] = torch.randn(shape, generator=generator)
    for rank in range(TP * DP):
        state[f"rng_state/shard_{rank}_{TP * DP}"] = [{"seed": rank, "name": "cpu"}]
    return state


def sharded_state(rank: int) -> dict[str, Any]:
    """The part of a rank, in Megatron's classes."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    full, state = full_state(), {}
    dp_rank, tp_rank = divmod(rank, TP)
    for name, (shape, axis, cuts) in PARAMETERS.items():
        offsets = [] if axis is None else [(axis, tp_rank, TP)]
        replica = tp_rank if axis is None else 0
        local = slice(None)
        if axis is not None:
            length = shape[axis] // TP
            local = (slice(None),) * axis + (slice(tp_rank * length, (tp_rank + 1) * length),)
        layers = [(0, i, len(cuts)) for i in range(len(cuts))] if len(cuts) > 1 else [None]
        for cut, layer in zip(cuts, layers, strict=True):
            places = [layer, *offsets] if layer else offsets
            common = {"prepend_axis_num": int(layer is not None)}
            of_layer = f"{name}.{layer[1]}" if layer else name
            parts = (full[fqn][local] for fqn in (name, f"optimizer.state.exp_avg.{name}"))
            weight, shard = (part[layer[1]] if layer else part for part in parts)
            state[of_layer] = ShardedTensor.from_rank_offsets(
                name, weight, *places, replica_id=(0, replica, dp_rank), **common
            )
            begin, end = (0, cut) if dp_rank == 0 else (cut, shard.numel())
            if begin < end:
                state[f"exp_avg.{of_layer}"] = ShardedTensor.from_rank_offsets_flat(
                    f"optimizer.state.exp_avg.{name}",
                    shard.flatten()[begin:end].clone(),
                    tuple(shard.shape),
                    *places,
                    flattened_range=slice(begin, end),
                    replica_id=(0, replica, 0),
                    **common,
                )
    (generator,) = full[f"rng_state/shard_{rank}_{TP * DP}"]
    state["rng"] = ShardedObject("rng_state", generator, (TP * DP,), (rank,))
    state["iteration"] = 7
    return state


def _write(rank: int, store: str, path: str) -> None:
    np.product = np.prod  # These versions of Megatron need NumPy 1.
    from megatron.core.dist_checkpointing import save
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    dist.init_process_group(
        "gloo", store=dist.FileStore(store, TP * DP), rank=rank, world_size=TP * DP
    )
    with (
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
    ):
        save(
            sharded_state(rank),
            path,
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            content_metadata={"distrib_optim_sharding_type": "fully_sharded_model_space"},
        )
    dist.destroy_process_group()


def main() -> None:
    """Writes it into a new directory of the current one."""
    path = Path(sys.argv[1])
    path.mkdir()
    torch.set_num_threads(1)
    mp.spawn(_write, args=(f"{path}.store", str(path)), nprocs=TP * DP)
    Path(f"{path}.store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
