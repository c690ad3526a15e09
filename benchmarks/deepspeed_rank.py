"""One rank of bench_deepspeed.py: has DeepSpeed engines, and saves them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from load_rank import Answer, Rank, serve
from machine import files_in
from torch import nn

OURS, DEEPSPEEDS = "ours", "DeepSpeed's own"
_WIDTH = 1024


class Layers(nn.Sequential):
    """Square matrices."""

    def __init__(self, count: int) -> None:
        super().__init__(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))


class DeepSpeedRank(Rank):
    """What one process keeps between calls: an engine for each contender."""

    def prepare(self, stage: int, gib: float) -> int:
        """Makes the engines, with the state of Adam; returns the bytes of a checkpoint."""
        os.environ.update(
            RANK=str(dist.get_rank()),
            WORLD_SIZE=str(dist.get_world_size()),
            LOCAL_RANK="0",
            MASTER_PORT="29500",
            DS_ACCELERATOR="cpu",
        )
        import deepspeed

        from torch_ckpt.frameworks.deepspeed.engine import attach

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # It would be compiled.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        copies = 16 if stage < 3 else 12  # Bytes for each parameter.
        count = max(1, int(gib * 2**30 / copies / _WIDTH**2))
        self._engines: dict[str, Any] = {}
        for name in (OURS, DEEPSPEEDS):
            torch.manual_seed(0)
            net = Layers(count)
            engine = self._engines[name] = deepspeed.initialize(
                model=net,
                model_parameters=net.parameters(),
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
                    "zero_optimization": {"stage": stage},
                },
                dist_init_required=False,
            )[0]
            engine.backward(engine(torch.ones(1, _WIDTH)).sum())
            engine.step()
        self._attached = attach(self._engines[OURS])
        return copies * count * _WIDTH**2

    def save_by(self, contender: str, folder: str) -> Answer:
        """Returns the seconds of a save, until it is durable."""
        path = self.directory / folder
        self._attached.asynchronous = False
        dist.barrier()
        begin = time.perf_counter()
        self._engines[contender].save_checkpoint(str(path))
        returned = time.perf_counter() - begin
        if contender == DEEPSPEEDS:
            for file in self._share(path):
                _sync(file)
            dist.barrier()
            if dist.get_rank() == 0:
                for directory in (*filter(Path.is_dir, path.iterdir()), path, path.parent):
                    _sync(directory)
        dist.barrier()
        return {"wall_s": time.perf_counter() - begin, "returned_s": returned}

    def save_asynchronously(self, folder: str) -> Answer:
        """Returns the seconds for which training stops, and until the checkpoint is committed."""
        path = self.directory / folder
        self._attached.asynchronous = True
        dist.barrier()
        begin = time.perf_counter()
        self._engines[OURS].save_checkpoint(str(path))
        stop = time.perf_counter() - begin
        self._attached.wait()
        return {"stop_s": stop, "wall_s": time.perf_counter() - begin}

    def copy(self, folder: str) -> Answer:
        """Returns the seconds of copying what this rank saves, to memory that is mapped."""
        own = f"zero_pp_rank_{dist.get_rank()}_mp_rank_00"
        files = [file for file in files_in(self.directory / folder) if file.suffix == ".pt"]
        names = (own, "mp_rank_00") if dist.get_rank() == 0 else (own,)
        nbytes = sum(file.stat().st_size for file in files if file.name.startswith(names))
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        return {"copy_s": time.perf_counter() - begin}

    def _share(self, path: Path) -> list[Path]:
        return files_in(path)[dist.get_rank() :: dist.get_world_size()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    serve(DeepSpeedRank)
