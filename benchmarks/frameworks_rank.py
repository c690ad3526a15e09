"""One rank of bench_frameworks.py: holds an FSDP1 model, and saves it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load_rank import Answer, Rank, serve
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

FLAT, GATHERED, STOCK = "flat shards, FastWriter", "all-gather, FastWriter", "all-gather, stock"
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


def _sent_nbytes() -> int:
    """Bytes sent so far on the loopback device, by all processes of this machine."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    serve(FrameworkRank)
