"""One rank of bench_load.py: does what it is told on stdin, a JSON line each, until that ends.

Run by `RankGroup`: `python load_rank.py JSON`. Each line names a function below and its arguments;
what it returns is printed as a JSON line.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from contenders import silence
from load_contenders import nbytes_of
from machine import MIB, Meter
from rank_loads import LOADERS, State, empty, first_difference, save, takes_exchange
from throttled_disk import mount_node

_PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


class Rank:
    """What one process keeps between calls: its place, and the tensors that it loads into."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.directory = Path(options["directory"])
        self._states: dict[tuple[str, float], State] = {}
        if options["cuda"]:
            torch.cuda.set_device(options["rank"] % torch.cuda.device_count())

    def start(self) -> None:
        """Joins the others."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.options['meeting']}",
            rank=self.options["rank"],
            world_size=self.options["count"],
            timeout=timedelta(seconds=self.options["timeout_s"]),
        )
        self.mount()

    def mount(self) -> None:
        """Empties this node's page cache of the disk, if it has one."""
        gc.collect()
        if self.options["device"]:
            mount_node(self.options["device"], self.directory)

    def takes_exchange(self) -> bool:
        """Whether FastReader can be told not to exchange what it reads."""
        return takes_exchange()

    def save(self, saved: str, kind: str, gib: float, folder: str) -> None:
        """Saves with the others."""
        save(saved, kind, gib, self.directory / folder)

    def load(self, loader: str, kind: str, gib: float, folder: str, check: bool) -> Answer:
        """Loads into tensors that are kept; with `check`, requires the bits to be as saved."""
        if (kind, gib) not in self._states:
            self._states = {(kind, gib): empty(kind, gib, cuda=self.options["cuda"])}
        state = self._states[kind, gib]
        if check:
            for tensor in state.values():
                tensor.zero_()
        path = self.directory / folder
        return self._measure(lambda: LOADERS[loader](state, path), state if check else {})

    def load_new(self, loader: str, kind: str, gib: float, folder: str) -> Answer:
        """Loads into tensors that are made for it, whose memory counts; checks their bits."""
        state: State = {}

        def run() -> None:
            state.update(empty(kind, gib, cuda=self.options["cuda"]))
            LOADERS[loader](state, self.directory / folder)

        return self._measure(run, state)

    def read_data(self, kind: str, gib: float, folder: str) -> Answer:
        """What comes of a load after all ranks have planned it."""
        return self._measure_read_data(self._states[kind, gib], folder)

    def read_share(self, kind: str, gib: float, folder: str) -> Answer:
        """Likewise of this rank's share of the tensors, as large as the others', and no more."""
        state = self._states[kind, gib]
        names = list(state)[self.options["rank"] :: self.options["count"]]
        share = {name: state[name] for name in names}
        options = {"exchange": "off"} if takes_exchange() else {}
        return self._measure_read_data(share, folder, no_dist=True, **options)

    def _measure_read_data(
        self, state: State, folder: str, *, no_dist: bool = False, **options: Any
    ) -> Answer:
        import torch.distributed.checkpoint as dcp

        from torch_ckpt import FastReader

        measure = self._measure

        class MeasuredReader(FastReader):
            answer: Answer

            def read_data(self, *arguments: Any) -> Any:
                done: list[Any] = []
                self.answer = measure(
                    lambda: done.append(super(MeasuredReader, self).read_data(*arguments))
                )
                return done[0]

        reader = MeasuredReader(self.directory / folder, **options)
        dcp.load(state, storage_reader=reader, no_dist=no_dist)
        return reader.answer

    def transfer(self, kind: str, gib: float, piece_mib: float) -> Answer:
        """Passes as many bytes around a ring as replicas do that each read a share of them."""
        rank, count = self.options["rank"], self.options["count"]
        piece = int(piece_mib * MIB)
        pieces = -(-nbytes_of(kind, gib) // count // piece) * (count - 1)
        sent = [torch.ones(piece, dtype=torch.uint8) for _ in range(8)]
        received = [torch.ones(piece, dtype=torch.uint8) for _ in range(8)]

        def run() -> None:
            works: list[list[Any]] = [[] for _ in sent]
            for number in range(pieces):
                slot = number % len(works)
                for work in works[slot]:
                    work.wait()
                sent[slot], received[slot] = received[slot], sent[slot]
                works[slot] = [
                    dist.irecv(received[slot], (rank - 1) % count),
                    dist.isend(sent[slot], (rank + 1) % count),
                ]
            for work in itertools.chain.from_iterable(works):
                work.wait()

        return self._measure(run)

    def unpack(self, kind: str, gib: float, piece_mib: float) -> Answer:
        """Copies as many bytes as the tensors have into them, out of a ring of buffers."""
        state = self._states[kind, gib]
        piece = int(piece_mib * MIB)
        buffers = torch.ones(16, piece, dtype=torch.uint8)

        def run() -> None:
            number = 0
            for tensor in state.values():
                flat = tensor.view(torch.uint8).flatten()
                for begin in range(0, flat.numel(), piece):
                    part = flat[begin : begin + piece]
                    part.copy_(buffers[number % 16, : part.numel()])
                    number += 1

        return self._measure(run)

    def read_raw(self, folder: str) -> Answer:
        """Reads this rank's part of all files of a folder, past the page cache."""
        rank, count, block = self.options["rank"], self.options["count"], 4 * MIB
        files = {
            os.open(path, os.O_RDONLY | os.O_DIRECT): path.stat().st_size
            for path in (self.directory / folder).iterdir()
        }
        blocks = [(fd, begin) for fd, size in files.items() for begin in range(0, size, block)]
        buffer = mmap.mmap(-1, block)

        def run() -> None:
            for fd, begin in blocks[rank::count]:
                os.preadv(fd, [buffer], begin)

        try:
            return self._measure(run)
        finally:
            for fd in files:
                os.close(fd)

    def _measure(self, run: Callable[[], None], check: State | None = None) -> Answer:
        finish = torch.cuda.synchronize if self.options["cuda"] else lambda: None
        finish()
        with Meter() as meter:
            dist.barrier()
            begin = time.perf_counter()
            run()
            finish()
            end = time.perf_counter()
        different = first_difference(check) if check else None
        if different is not None:
            raise ValueError(f"other bits than were saved: {different}")
        return {"begin": begin, "end": end, **asdict(meter.usage)}


def _answer(rank: Rank, line: str) -> Answer:
    try:
        asked = json.loads(line)
        return {"value": getattr(rank, asked["function"])(**asked["arguments"])}
    # Also what DCP raises, which is no Exception.
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".strip()[:1000]}


def serve(make: Callable[[dict[str, Any]], Rank]) -> None:
    """Answers until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    silence()
    options = json.loads(sys.argv[1])
    if options["cgroup"]:
        Path(options["cgroup"]).write_text(f"{os.getpid()}\n")
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    rank = make(options)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(rank, line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Rank)
