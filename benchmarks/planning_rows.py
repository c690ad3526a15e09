"""What bench_planning.py measures, each in a process of its own, for memory and caches to be its.

Run by it: `python planning_rows.py ROW JSON`, where ROW is a function below and JSON its arguments;
prints what the function returns, as JSON. Seconds are of CPU unless a name says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import Any
from unittest import mock

from machine import Meter

OURS = "torch-ckpt"
STOCK = "stock DCP"
OURS_UNPLANNED = "torch-ckpt with DCP's planners"


def _fqn(number: int) -> str:
    return f"model.layers.{number // 7}.attention.block.{number % 7}.weight"


class Clock:
    """CPU seconds of parts, by name; those of one name add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds what the body of a `with` block takes."""
        begin = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin


def _peak_rss_nbytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


# The coordinator, of many ranks ----------------------------------------------------------------


def coordinator(contender: str, tensors: int, ranks: int) -> dict[str, Any]:
    """Matrices sharded over all ranks: from what ranks have sent to what they get."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    from torch_ckpt import FastSavePlanner, FastWriter

    fqns = [_fqn(number) for number in range(tensors)]
    plan_of = _fast_plans(fqns, ranks) if contender == OURS else _stock_plans(fqns, ranks)
    clock, plans, wire_nbytes = Clock(), [], 0
    for rank in range(ranks):
        with clock("list"):
            wire = pickle.dumps(plan_of(rank))
        wire_nbytes += len(wire)
        with clock("unpickle"):
            plans.append(pickle.loads(wire))
    planner = FastSavePlanner() if contender == OURS else DefaultSavePlanner()
    planner.set_up_planner({}, FastWriter("").storage_meta(), True)
    with clock("plan"):
        answers, metadata = planner.create_global_plan(plans)
    with clock("pickle"):
        answer_nbytes = sum(len(pickle.dumps(answer)) for answer in answers)
    assert len(metadata.state_dict_metadata) == tensors
    found = {
        "peak_rss": _peak_rss_nbytes(),
        "wire_nbytes": wire_nbytes,
        "answer_nbytes": answer_nbytes,
    }
    if contender == OURS:
        from torch_ckpt._core import _native

        encoded = [plan.items.encoded for plan in plans]
        found["items_nbytes"] = sum(map(len, encoded))
        planner.plan_cache.forget()
        del planner, plans, answers, metadata
        with clock("engine: global plan"):
            plan = _native.GlobalPlan(encoded, 8)
        with clock("engine: assignments"):
            for rank in range(ranks):
                plan.assignment(rank)
    return found | clock.seconds


def _rows(number: int) -> int:
    return 16 + number % 5


def _fast_plans(fqns: list[str], ranks: int) -> Callable[[int], Any]:
    from torch.distributed.checkpoint.planner import SavePlan

    from torch_ckpt._core import _native
    from torch_ckpt.planning.item_views import ColumnItems, PlannedPaths
    from torch_ckpt.planning.plan_cache import digest_of
    from torch_ckpt.planning.replica_check import DIGEST_NBYTES

    paths = _native.encode_paths({fqn: tuple(fqn.split(".")) for fqn in fqns})

    def plan_of(rank: int) -> SavePlan:
        table = _native.ItemTable()
        of_rows = [
            ([rows * ranks, 4096], True, [rows * rank, 0], [rows, 4096]) for rows in range(16, 21)
        ]
        for number, fqn in enumerate(fqns):
            box = of_rows[number % 5]
            table.add_tensor(fqn, "bfloat16", 2, "contiguous_format", True, False, *box)
        encoded = table.encode()
        values = os.urandom(DIGEST_NBYTES * len(fqns))  # Ranks compare replicas by default.
        items: Any = ColumnItems(encoded, paths, digest_of(encoded, paths), values=values)
        return SavePlan(items, planner_data=PlannedPaths([paths]))

    return plan_of


def _stock_plans(fqns: list[str], ranks: int) -> Callable[[int], Any]:
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    def item(rank: int, number: int, fqn: str) -> WriteItem:
        rows = _rows(number)
        chunk = ChunkStorageMetadata(torch.Size([rows * rank, 0]), torch.Size([rows, 4096]))
        properties = TensorProperties(dtype=torch.bfloat16, requires_grad=True)
        data = TensorWriteData(chunk, properties, torch.Size([rows * ranks, 4096]))
        return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def plan_of(rank: int) -> SavePlan:
        items = [item(rank, number, fqn) for number, fqn in enumerate(fqns)]
        return SavePlan(items, planner_data={fqn: tuple(fqn.split(".")) for fqn in fqns})

    return plan_of


# Replicas, end to end --------------------------------------------------------------------------


def replicas(contender: str, tensors: int, ranks: int) -> dict[str, Any]:
    """All that planning a save of replicated tensors costs ``ranks`` ranks together."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner

    from torch_ckpt import FastSavePlanner, FastWriter

    kind: Any = FastSavePlanner if contender == OURS else DefaultSavePlanner
    memory = torch.zeros(tensors * 16)
    state = {
        _fqn(number): memory[number * 16 : number * 16 + 8 + number % 8]
        for number in range(tensors)
    }
    storage_meta = FastWriter("").storage_meta()
    clock = Clock()
    planners = [kind() for _ in range(ranks)]
    with Meter() as meter:
        wires = []
        for rank, planner in enumerate(planners):
            with clock("local plans"):
                planner.set_up_planner(state, storage_meta, rank == 0)
                plan = planner.create_local_plan()
            with clock("wire"):
                wires.append(pickle.dumps(plan))
        with clock("wire"):
            plans = [pickle.loads(wire) for wire in wires]
        with clock("global plan"):
            answers, metadata = planners[0].create_global_plan(plans)
        with clock("wire"):
            pickled = [pickle.dumps(answer) for answer in answers]
        del plans, answers
        written = 0
        for planner, answer in zip(planners, pickled, strict=True):
            with clock("wire"):
                unpickled = pickle.loads(answer)
            with clock("finish"):
                written += len(planner.finish_plan(unpickled).items)
    assert len(metadata.state_dict_metadata) == tensors
    assert written >= tensors
    return {
        "cpu_s": meter.usage.cpu_s,
        "rss": meter.usage.rss_growth,
        "wire_nbytes": sum(map(len, wires)) + sum(map(len, pickled)),
        **clock.seconds,
    }


# Small tensors, saved and loaded ---------------------------------------------------------------


def small(directory: str, tensors: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of saves and loads of tensors of 4 KiB, contenders in turns."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import (
        DefaultLoadPlanner,
        DefaultSavePlanner,
        FileSystemReader,
        FileSystemWriter,
    )

    from torch_ckpt import FastReader, FastSavePlanner, FastWriter
    from torch_ckpt.planning.load_planner import FastLoadPlanner
    from torch_ckpt.planning.plan_cache import plan_cache

    kinds: dict[str, Any] = {
        OURS: (FastWriter, FastSavePlanner, FastReader, FastLoadPlanner),
        OURS_UNPLANNED: (FastWriter, DefaultSavePlanner, FastReader, DefaultLoadPlanner),
        STOCK: (FileSystemWriter, DefaultSavePlanner, FileSystemReader, DefaultLoadPlanner),
    }
    warnings.simplefilter("ignore")
    state = {_fqn(number): torch.full((1024,), float(number)) for number in range(tensors)}
    into = {fqn: torch.zeros(1024) for fqn in state}
    times: dict[str, list[float]] = {}

    def measured(name: str, run: Callable[[], Any]) -> None:
        with Meter() as meter:
            run()
        times.setdefault(name, []).append(meter.usage.cpu_s)

    for number in range(rounds + 1):
        if number == 1:
            times.clear()  # The first warms up.
        for contender, (writer, save_planner, reader, load_planner) in kinds.items():
            path = tempfile.mkdtemp(prefix="small-", dir=directory)

            def save(path: str = path, writer: Any = writer, planner: Any = save_planner) -> None:
                dcp.save(state, storage_writer=writer(path), planner=planner(), no_dist=True)

            def load(path: str = path, reader: Any = reader, planner: Any = load_planner) -> None:
                dcp.load(into, storage_reader=reader(path), planner=planner(), no_dist=True)

            plan_cache().forget()
            measured(f"save {contender}", save)
            if contender == OURS:
                measured("save again", save)
            measured(f"load {contender}", load)
            if number == 0:
                assert all(torch.equal(into[fqn], tensor) for fqn, tensor in state.items())
                for tensor in into.values():
                    tensor.zero_()
            shutil.rmtree(path)
    return times


# Very many tensors in one process --------------------------------------------------------------


def many(directory: str, tensors: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of the parts of `torch_ckpt.save` of tensors of 64 bytes, and of all of it."""
    import torch

    import torch_ckpt
    from torch_ckpt import FastSavePlanner, FastWriter
    from torch_ckpt.planning.plan_cache import plan_cache

    state = {_fqn(number): torch.full((16,), float(number)) for number in range(tensors)}
    times: dict[str, list[float]] = {}
    methods = {
        "list": (FastSavePlanner, ("set_up_planner", "create_local_plan")),
        "plan": (FastSavePlanner, ("create_global_plan", "finish_plan")),
        "write": (FastWriter, ("write_data",)),
        "commit": (FastWriter, ("finish",)),
    }
    for _ in range(rounds):
        plan_cache().forget()
        for number in ("first", "later"):
            path, clock = tempfile.mkdtemp(prefix="many-", dir=directory), Clock()
            with contextlib.ExitStack() as stack:
                for part, (kind, names) in methods.items():
                    for name in names:
                        method = _timed(clock, part, getattr(kind, name))
                        stack.enter_context(mock.patch.object(kind, name, method))
                with clock("all"):
                    torch_ckpt.save(state, checkpoint_id=path)
            shutil.rmtree(path)
            for part, seconds in clock.seconds.items():
                times.setdefault(f"{number} {part}", []).append(seconds)
    return times


def _timed(clock: Clock, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # DCP looks at its parameters.
    def call(*args: Any, **kwargs: Any) -> Any:
        with clock(name):
            return method(*args, **kwargs)

    return call


# Saves that were planned before ----------------------------------------------------------------


def cached(directory: str, tensors: int, dtensors: int, rounds: int) -> list[list[dict[str, Any]]]:
    """What each save has cost each of two gloo ranks, the first of which plans."""
    arguments = (directory, tensors, dtensors, rounds)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        ranks = [executor.submit(_save_again, rank, *arguments) for rank in range(2)]
        return [rank.result() for rank in ranks]


def _save_again(
    rank: int, directory: str, tensors: int, dtensors: int, rounds: int
) -> list[dict[str, Any]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    import torch_ckpt
    from torch_ckpt import FastSavePlanner, FastWriter

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    method = f"file://{directory}/store"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {}
    for number in range(tensors):
        local = torch.zeros(4 + number % 20, 8)
        if number < dtensors:
            state[_fqn(number)] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        else:
            state[_fqn(number)] = local

    class Writer(FastWriter):
        """Notes what the rank sends."""

        def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
            plan = super().prepare_local_plan(plan)
            self.sent_nbytes = len(pickle.dumps(plan))
            return plan

    found = []
    for _ in range(rounds + 1):
        planner, clock = FastSavePlanner(), Clock()
        writer = Writer(f"{directory}/checkpoint", sync_files=False)
        with contextlib.ExitStack() as stack:
            # Of the class: a planner with methods of its own is planned another way.
            for name in (
                "set_up_planner",
                "create_local_plan",
                "create_global_plan",
                "finish_plan",
            ):
                method = _timed(clock, name, getattr(FastSavePlanner, name))
                stack.enter_context(mock.patch.object(FastSavePlanner, name, method))
            torch_ckpt.save({"state": state}, storage_writer=writer, planner=planner)
        cache = planner.plan_cache
        found.append(
            {
                **clock.seconds,
                "sent_nbytes": writer.sent_nbytes,
                "hits": cache.hits,
                "misses": cache.misses,
            }
        )
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    row, arguments = sys.argv[1:]
    print(json.dumps(globals()[row](**json.loads(arguments))))
