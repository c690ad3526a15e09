"""One rank of bench_megatron.py: has the sharded state of a GPT, and saves and loads it."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from load_rank import Answer, Rank, serve
from machine import read_files
from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

OURS, ALONE, MEGATRONS = "ours", "ours, without a group", "Megatron's own"


class MegatronRank(Rank):
    """What one process keeps between calls: its tensors and strategies."""

    def prepare(self, hidden: int, layers: int) -> int:
        """Makes the tensors; returns the bytes of the checkpoint.

        Weights are replicated on all ranks. Their fp32 copies and two moments are cut along the
        first dimension, as the fully reshardable state of a distributed optimizer is.
        """
        for name in ("synchronize", "set_device"):
            mock.patch(f"torch.cuda.{name}").start()
        mock.patch("torch.cuda.current_device", return_value="cpu").start()
        rank, size = dist.get_rank(), dist.get_world_size()
        shapes = {"embedding": (8192, hidden)}
        for layer in range(layers):
            shapes |= {
                f"layers.{layer}.qkv": (3 * hidden, hidden),
                f"layers.{layer}.proj": (hidden, hidden),
                f"layers.{layer}.fc1": (4 * hidden, hidden),
                f"layers.{layer}.fc2": (hidden, 4 * hidden),
                f"layers.{layer}.norm": (hidden,),
            }
        self.tensors: dict[str, torch.Tensor] = {}
        nbytes = 0
        for key, shape in shapes.items():
            weight = torch.randn(shape, dtype=torch.bfloat16)
            self.tensors[f"model.{key}"] = weight
            nbytes += weight.nbytes
            for name in ("param", "exp_avg", "exp_avg_sq"):
                part = torch.randn(shape[0] // size, *shape[1:])
                self.tensors[f"optimizer.{name}.{key}"] = part
                nbytes += size * part.nbytes
        self._rank, self._size = rank, size
        self._strategies: dict[str, Any] = {}
        return nbytes

    def _state(self) -> dict[str, Any]:
        """The sharded state dict, which Megatron makes anew for each save and load."""
        state: dict[str, Any] = {}
        for key, tensor in self.tensors.items():
            if key.startswith("model."):
                state[key] = ShardedTensor.from_rank_offsets(
                    key, tensor, replica_id=(0, 0, self._rank)
                )
            else:
                state[key] = ShardedTensor.from_rank_offsets(
                    key, tensor, (0, self._rank, self._size)
                )
        return state

    def _saver(self, contender: str) -> Any:
        if contender not in self._strategies:
            from torch_ckpt.frameworks.megatron.strategies import FastSaveStrategy

            ours = contender == OURS
            inner = FastSaveStrategy() if ours else TorchDistSaveShardedStrategy("torch_dist", 1)
            wrapped = FullyParallelSaveStrategyWrapper(inner, None, True)
            self._strategies[contender] = (inner, wrapped)
        return self._strategies[contender]

    def save_by(self, contender: str, folder: str) -> Answer:
        """Returns the seconds of a save, and of the CPU of this process and its children."""
        path = self._folder(folder)
        begin, used = time.perf_counter(), _cpu_s()
        mcore.save(self._state(), str(path), self._saver(contender)[1])
        return {"wall_s": time.perf_counter() - begin, "cpu_s": _cpu_s() - used}

    def load_by(self, contender: str, folder: str) -> Answer:
        """Returns the seconds of a load."""
        from torch_ckpt.frameworks.megatron.strategies import FastLoadStrategy

        if contender == MEGATRONS:
            strategy = TorchDistLoadShardedStrategy()
        else:
            group = dist.group.WORLD if contender == OURS else None
            strategy = FastLoadStrategy(exchange_group=group)
        state = self._state()
        dist.barrier()
        begin = time.perf_counter()
        mcore.load(state, str(self.directory / folder), strategy)
        return {"wall_s": time.perf_counter() - begin}

    def read(self, folder: str) -> Answer:
        """Returns the seconds in which the ranks read each data file once, and keep nothing."""
        files = sorted((self.directory / folder).glob("*.distcp"))[self._rank :: self._size]
        dist.barrier()
        begin = time.perf_counter()
        read_files(files)
        dist.barrier()
        return {"wall_s": time.perf_counter() - begin}

    def save_asynchronously(self, contender: str, folder: str, reserve: bool) -> Answer:
        """Returns the seconds of the stop, of the longest poll, and of copying as many bytes."""
        inner, strategy = self._saver(contender)
        if reserve and contender == OURS:
            state = self._state()
            strategy.apply_saving_parallelization(state)
            inner.reserve(state)
        path = self._folder(folder)
        queue = AsyncCallsQueue()
        stop = 0.0
        save = inner.async_save

        def timed(*arguments: Any) -> Any:
            nonlocal stop
            begin = time.perf_counter()
            request = save(*arguments)
            stop = time.perf_counter() - begin
            return request

        with mock.patch.object(inner, "async_save", timed):
            begin = time.perf_counter()
            request = mcore.save(self._state(), str(path), strategy, async_sharded_save=True)
            queue.schedule_async_request(request)
            whole = time.perf_counter() - begin
        polls = []
        while True:
            begin = time.perf_counter()
            ended = queue.maybe_finalize_async_calls()
            polls.append(time.perf_counter() - begin)
            if ended:
                break
            time.sleep(0.05)
        return {"stop_s": stop, "schedule_s": whole, "poll_s": max(polls[:-1], default=0.0)}

    def copy(self) -> Answer:
        """Returns the seconds of copying what this rank writes to memory that is mapped."""
        share = [
            tensor[self._rank :: self._size] if key.startswith("model.layers") else tensor
            for key, tensor in self.tensors.items()
            if not key.startswith("model.") or "layers" in key
        ]
        copies = [torch.ones_like(tensor) for tensor in share]
        dist.barrier()
        begin = time.perf_counter()
        for copy, tensor in zip(copies, share, strict=True):
            copy.copy_(tensor)
        return {"copy_s": time.perf_counter() - begin}

    def _folder(self, folder: str) -> Path:
        path = self.directory / folder
        path.mkdir(exist_ok=True)
        dist.barrier()
        return path


def _cpu_s() -> float:
    """Seconds of CPU of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    serve(MegatronRank)
