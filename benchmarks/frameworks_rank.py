"""One rank of bench_frameworks.py: saves an FSDP1 model, or flattened buffers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load_rank import Answer, Rank, serve
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

FLAT, GATHERED, STOCK = "flat shards, FastWriter", "all-gather, FastWriter", "all-gather, stock"
CUT, WHOLE = "ranges", "whole tensors"
WIDTH = 1024
LAYER_NBYTES = 12 * WIDTH * WIDTH * 4 * 3  # Weights, and two moments of AdamW.


class FrameworkRank(Rank):
    """What one process keeps between calls: its model and optimizer."""

    def prepare(self, gib: float, use_orig_params: bool) -> int:
        """Makes the model; returns the bytes of all ranks."""
        torch.manual_seed(0)
        options: Any = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        layers = [
            FullyShardedDataParallel(
                torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH), **options
            )
            for _ in range(max(round(gib * (1 << 30) / LAYER_NBYTES), 1))
        ]
        self.model = FullyShardedDataParallel(torch.nn.Sequential(*layers), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        return len(layers) * LAYER_NBYTES

    def prepare_buffers(self, buffers: int, tensors: int, shape: list[int]) -> int:
        """Makes flattened buffers of equal tensors. The ranks cut each buffer into equal ranges.

        Args:
            buffers: Number of buffers, such as layers that FSDP1 wraps.
            tensors: Number of tensors of each.
            shape: Sizes of each tensor.

        Returns:
            The bytes of all ranks.
        """
        numel = math.prod(shape)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        cuts = [numel * tensors * number // ranks for number in range(ranks + 1)]
        whole = [round(cut / numel) * numel for cut in cuts]  # The nearest ends of tensors.
        self.shards = {
            contender: {
                f"{buffer}.{name}": shard
                for buffer in range(buffers)
                for name, shard in _ranges(ends[rank], ends[rank + 1], tensors, shape)
            }
            for contender, ends in ((CUT, cuts), (WHOLE, whole))
        }
        return buffers * tensors * numel * 4

    def save_buffers(self, contender: str, folder: str) -> Answer:
        """Returns the seconds of the save, and the number of boxes of all ranks."""
        from torch_ckpt import FastSavePlanner, FastWriter

        dist.barrier()
        begin = time.perf_counter()
        writer = FastWriter(self.directory / folder)
        dcp.save(self.shards[contender], storage_writer=writer, planner=FastSavePlanner())
        seconds = time.perf_counter() - begin
        boxes = torch.tensor(sum(len(each.boxes) for each in self.shards[contender].values()))
        dist.all_reduce(boxes)
        return {"total_s": seconds, "boxes": boxes.item()}

    def save_by(self, contender: str, folder: str) -> Answer:
        """Returns the seconds of the state dicts and of the save, and the bytes sent on lo."""
        import torch_ckpt

        path = self.directory / folder
        dist.barrier()
        sent, begin = _sent_nbytes(), time.perf_counter()
        if contender == FLAT:
            model, optim = torch_ckpt.fsdp1_state_dict(self.model, self.optimizer)
        else:
            model, optim = get_state_dict(self.model, self.optimizer)
        made = time.perf_counter()
        dist.barrier()
        wire = _sent_nbytes() - sent
        resumed = time.perf_counter()
        state = {"model": model, "optim": optim}
        if contender == STOCK:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
        else:
            dcp.save(state, storage_writer=torch_ckpt.FastWriter(path))
        state_s, save_s = made - begin, time.perf_counter() - resumed
        return {"state_s": state_s, "save_s": save_s, "total_s": state_s + save_s, "wire": wire}


def _ranges(begin: int, end: int, tensors: int, shape: list[int]) -> Iterator[tuple[str, Any]]:
    """What a rank has of a buffer of equal tensors."""
    from torch_ckpt import FlatShard

    numel = math.prod(shape)
    for number in range(begin // numel, min(-(-end // numel), tensors)):
        first, last = max(begin - number * numel, 0), min(end - number * numel, numel)
        yield str(number), FlatShard(torch.randn(last - first), str(number), shape, first)


def _sent_nbytes() -> int:
    """Bytes sent so far on the loopback device, by all processes of this machine."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    serve(FrameworkRank)
