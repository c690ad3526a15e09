"""One rank of bench_async.py: saves asynchronously, and trains meanwhile."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_contenders import (
    FROM_DISK,
    FROM_MEMORY,
    OURS,
    OURS_AGENT,
    OURS_AGENT_RESERVED,
    OURS_OVERLAPPED,
    OURS_PLUGIN,
    OURS_RESERVED,
    OURS_SYNC,
    STOCK_CACHED,
    STOCK_FROM_DISK,
    STOCK_PROCESS,
    STOCK_THREAD,
    TORCH_SAVE,
)
from load_contenders import ROWS
from load_rank import Answer, Rank, serve
from machine import sync_tree
from rank_loads import empty as empty_state
from rank_loads import fill, local_rows
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

SAVE_TIMEOUT_S = 300

Saving = Future[Any] | AsyncSaveResponse | None


class AsyncRank(Rank):
    """What one process keeps between calls: its tensors, buffers and stagers."""

    def start(self) -> None:
        """Joins the others; saves have a group of their own."""
        super().start()
        self.group = dist.new_group(backend="gloo")
        self._cached = DefaultStager(StagingOptions(False, False, False, False))
        self._shared = DefaultStager(StagingOptions(False, True, False, False))

    def prepare(self, gib: float) -> int:
        """Makes this rank's shards; returns their bytes."""
        cuda = self.options["cuda"]
        tensors = empty_state(ROWS, gib, cuda=cuda)
        fill(tensors)
        self.state = {"model": tensors, "step": 1}  # DCP takes its time for each key at the top.
        self.parts = [local_rows(tensor)[0] for tensor in tensors.values()]
        self.buffers = [
            torch.empty_like(part, device="cpu", pin_memory=cuda).copy_(part) for part in self.parts
        ]
        self._model = _model(cuda=cuda)
        return sum(part.nbytes for part in self.parts)

    def _synchronize(self) -> None:
        if self.options["cuda"]:
            torch.cuda.synchronize()

    def memcpy(self) -> Answer:
        """Copies all of it into buffers that are there, from a GPU into pinned ones."""
        self._synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for part, buffer in zip(self.parts, self.buffers, strict=True):
            if self.options["cuda"]:
                buffer.copy_(part, non_blocking=True)
            else:
                ctypes.memmove(buffer.data_ptr(), part.data_ptr(), part.nbytes)
        self._synchronize()
        return {"call_s": time.perf_counter() - begin}

    @functools.cached_property
    def agent(self) -> Any:
        """That of this machine, for a run in the folder."""
        from torch_ckpt.agent import SnapshotAgent

        return SnapshotAgent(self.directory / "run", process_group=self.group)

    @functools.cached_property
    def _not_blocking(self) -> Any:
        from torch_ckpt import SnapshotStager

        return SnapshotStager(blocking=False)

    def reserve(self, contender: str) -> None:
        """Has the memory for staging made."""
        from torch_ckpt import FastWriter  # Now: names are imported lazily.

        by_agent = contender in (OURS_AGENT, OURS_AGENT_RESERVED)
        (self.agent if by_agent else FastWriter(self.directory).stager).reserve(self.state)

    def leave(self) -> None:
        """Ends the agent."""
        self.agent.close(drop=True)

    def restore(self, contender: str, folder: str) -> Answer:
        """Loads what is in memory, or on disk; requires the bits to be as saved."""
        from torch_ckpt import load  # Now: names are imported lazily.
        from torch_ckpt.agent import SnapshotReader  # Now: names are imported lazily.

        for part in self.parts:
            part.zero_()
        self.state["step"] = 0
        agent = self.agent
        self._synchronize()
        dist.barrier()
        begin = time.perf_counter()
        path = self.directory / folder
        if contender == STOCK_FROM_DISK:
            dcp.load(self.state, storage_reader=FileSystemReader(path))
        elif contender == FROM_DISK:
            load(self.state, checkpoint_id=path)
        else:
            assert contender == FROM_MEMORY
            load(self.state, storage_reader=SnapshotReader(agent.newest()))
        self._synchronize()
        seconds = time.perf_counter() - begin
        assert self.state["step"] == 1
        for part, buffer in zip(self.parts, self.buffers, strict=True):
            saved = buffer.to(part.device).view(torch.uint8)
            assert torch.equal(part.view(torch.uint8), saved), "other bits than were saved"
        return {"restore_s": seconds}

    def save_by(self, contender: str, folder: str) -> Answer:
        """Saves; returns when the call returned, all was copied, and all was on disk.

        Each counts from the start of the call.
        """
        begin_save, path = self._saver(contender), self.directory / folder
        self._synchronize()
        dist.barrier()
        cpu = time.process_time()
        begin = time.perf_counter()
        saving = begin_save(path)
        returned = time.perf_counter()
        staging, future = _futures(saving)
        if staging is not None:
            staging.result(SAVE_TIMEOUT_S)
        staged = time.perf_counter()
        if future is not None:
            future.result(SAVE_TIMEOUT_S)
        done = time.perf_counter()
        return {
            "call_s": returned - begin,
            "staged_s": staged - begin,
            "durable_s": done - begin,
            "cpu_s": time.process_time() - cpu,
        }

    def train(self, contender: str, folder: str, base_s: float) -> Answer:
        """Trains, alone and then while a save goes on; returns both rates."""
        begin_save, path = self._saver(contender), self.directory / folder
        dist.barrier()
        base = self._rate(lambda spent: spent > base_s)
        _, future = _futures(begin_save(path))
        assert future is not None
        during = self._rate(lambda _: future.done())
        future.result(SAVE_TIMEOUT_S)
        return {"base": base[0], "during": during[0], "seconds": during[1]}

    def _rate(self, is_over: Callable[[float], bool]) -> tuple[float, float]:
        """Steps a second, and for how long, until it is over on all ranks."""
        begin = time.perf_counter()
        for steps in itertools.count(1):
            _step(self._model)
            self._synchronize()
            spent = time.perf_counter() - begin
            over = torch.tensor([float(is_over(spent))])
            dist.all_reduce(over)  # As gradients are: ranks go on in step.
            if over.item() == dist.get_world_size():
                return steps / spent, spent
        raise AssertionError

    def _saver(self, contender: str) -> Callable[[Path], Saving]:
        import torch_ckpt
        from torch_ckpt import FastWriter
        from torch_ckpt import async_save as our_async_save  # Now: names are imported lazily.

        def save_ours(path: Path) -> Any:
            return our_async_save(self.state, checkpoint_id=path, process_group=self.group)

        def save_overlapped(path: Path) -> Any:
            writer = FastWriter(path, stager=self._not_blocking)
            return our_async_save(self.state, storage_writer=writer, process_group=self.group)

        def save_by_agent(path: Path) -> Any:
            return self.agent.async_save(self.state, path, step=1)

        def save_async(writer: Any, **options: Any) -> Any:
            return async_save(
                self.state, storage_writer=writer, process_group=self.group, **options
            )

        shared = {
            "async_stager": self._shared,
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
        }
        savers: dict[str, Callable[[Path], Saving]] = {
            OURS: save_ours,
            OURS_AGENT: save_by_agent,
            OURS_AGENT_RESERVED: save_by_agent,
            OURS_OVERLAPPED: save_overlapped,
            OURS_PLUGIN: lambda path: save_async(FastWriter(path)),
            OURS_RESERVED: save_ours,
            OURS_SYNC: lambda path: _none(torch_ckpt.save(self.state, checkpoint_id=path)),
            STOCK_THREAD: lambda path: save_async(FileSystemWriter(path)),
            STOCK_CACHED: lambda path: save_async(
                FileSystemWriter(path), async_stager=self._cached
            ),
            STOCK_PROCESS: lambda path: save_async(FileSystemWriter(path), **shared),
            TORCH_SAVE: self._torch_save,
        }
        return savers[contender]

    def _torch_save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        torch.save(self.parts, path / f"{self.options['rank']}.pt")
        sync_tree(path)


def _none(_: Any) -> None:
    return None


def _futures(saving: Saving) -> tuple[Future[Any] | None, Future[Any] | None]:
    """That of the copy, where it goes on after the call, and that of the save."""
    if isinstance(saving, AsyncSaveResponse):
        return saving.staging_completion, saving.upload_completion
    return None, saving


def _model(*, cuda: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A step takes a few ms: on the CPU, or on a GPU, which is busy meanwhile."""
    torch.manual_seed(0)
    width, batch = (4096, 2048) if cuda else (256, 64)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16} if cuda else {}
    layers = [torch.nn.Linear(width, width, **options) for _ in range(6)]
    model = torch.nn.Sequential(*itertools.chain(*((layer, torch.nn.ReLU()) for layer in layers)))
    inputs = torch.randn(batch, width, **options)
    return model, torch.optim.SGD(model.parameters(), 1e-6), inputs


def _step(training: tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]) -> None:
    model, optimizer, batch = training
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")  # Where the checkpoint process meets.
    serve(AsyncRank)
