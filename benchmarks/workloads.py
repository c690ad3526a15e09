"""The named workloads: what is saved and loaded, in which order, and what is kept of it.

In every round all contenders take a turn, each round starting with the next one, so that what the
machine does meanwhile falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from contenders import Contender, SafetensorsContender, Share, State
from machine import (
    GIB,
    MIB,
    Fio,
    Meter,
    Usage,
    files_in,
    make_cold,
    make_warm,
    remove_tree,
    resident_fraction,
    sync_tree,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

FIO = "fio"
SAVE, COLD, WARM = "save", "cold load", "warm load"
ALL_SLICES, ONE_SLICE = "64 slices cold", "1 slice cold"

SMALL_COUNT = 10_000
SLICE_COUNT = 64


@dataclass
class Sample:
    """One measured call.

    Attributes:
        workload: Name of the workload.
        phase: What was done: `SAVE`, `COLD`, `WARM`, `ALL_SLICES` or `ONE_SLICE`.
        contender: Who did it; in loads the name of the loader.
        round: Counts from 0.
        nbytes: Bytes of the tensors saved or wanted.
        usage: For a save, `seconds` ends when the call returns and `total_seconds` when an fsync of
            all files and of the directory has returned as well.
        share_cpu_s: CPU time of the storage object's own methods, where counted.
        file_bytes: Size of all files of the checkpoint.
        resident: Share of the files in the page cache before a load, where known.
        load_average: The machine's, over the last minute.
    """

    workload: str
    phase: str
    contender: str
    round: int
    nbytes: int
    usage: Usage
    share_cpu_s: float | None = None
    file_bytes: int = 0
    resident: float | None = None
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def read_bytes(self) -> int:
        """Bytes read: from the device or through read calls, whichever is more."""
        return max(self.usage.device_read, self.usage.syscall_read)


@dataclass
class Bench:
    """One run: its options, and the samples measured so far.

    Attributes:
        directory: An empty directory of the run's own.
        contenders: Who takes part.
        rounds: Turns of each contender.
        gib: Size of the large workloads, in GiB.
        fio: The device's ceiling, measured once per round of `large-bf16`; None to leave it out.
        device: Where the tensors are that are saved, and loaded into: "cpu" or "cuda".
    """

    directory: Path
    contenders: list[Contender]
    rounds: int
    gib: float
    fio: Fio | None
    device: str = "cpu"
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Keeps `sample` and shows progress on stderr."""
        self.samples.append(sample)
        print(
            f"{sample.workload} round {sample.round} {sample.phase} {sample.contender}: "
            f"{sample.usage.total_seconds:.3f} s (load {sample.load_average:.1f})",
            file=sys.stderr,
            flush=True,
        )

    def turns(self) -> Iterator[tuple[int, Contender | None]]:
        """Yields (round, contender), interleaved and rotated; None stands for fio's turn."""
        field_of_round: list[Contender | None] = [*self.contenders]
        if self.fio is not None:
            field_of_round.append(None)
        for round_number in range(self.rounds):
            shift = round_number % len(field_of_round)
            for contender in field_of_round[shift:] + field_of_round[:shift]:
                yield round_number, contender


# State dicts -----------------------------------------------------------------------------------


def _random_bf16(*shape: int) -> torch.Tensor:
    words = torch.empty(shape, dtype=torch.int16)
    words.view(torch.int64).random_()
    return words.view(torch.bfloat16)


def _zeros_bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def large_state(gib: float, *, zeros: bool = False) -> State:
    """Returns `gib` GiB of bf16 as tensors of 32 MiB, and 200 small ones: random bits, or zeros."""
    torch.manual_seed(0)
    make = _zeros_bf16 if zeros else _random_bf16
    count = max(1, round(gib * GIB / (32 * MIB)))
    state = {f"layers.{i}.weight": make(4096, 4096) for i in range(count)}
    state |= {f"layers.{i}.bias": make(2048) for i in range(100)}
    return state | {f"layers.{i}.scale": make(64) for i in range(100)}


def small_state() -> State:
    """Returns 10,000 random bf16 tensors of 4 KiB."""
    torch.manual_seed(0)
    return {f"blocks.{i}.scale": _random_bf16(2048) for i in range(SMALL_COUNT)}


def transposed_state() -> State:
    """Returns 128 MiB of transposed matrices of each element size, and of NHWC in NCHW order."""
    torch.manual_seed(0)
    state = {
        "bf16": _random_bf16(4096, 4096).t(),
        "fp32": torch.rand(2896, 2896).t(),
        "uint8": torch.randint(256, (5792, 5792), dtype=torch.uint8).t(),
    }
    return state | {"channels_last": torch.rand(128, 32, 32, 64).permute(0, 3, 1, 2)}


def like(state: State) -> State:
    """Returns zeros shaped like `state`, their pages already touched."""
    return {name: torch.zeros_like(tensor).fill_(0) for name, tensor in state.items()}


def on(device: str, state: State) -> State:
    """Returns `state` on a device, the tensors strided alike."""
    return {name: tensor.to(device) for name, tensor in state.items()}


def synchronize() -> None:
    """Waits until the GPU has done what it was told, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def nbytes_of(state: State) -> int:
    """Returns the bytes of all tensors of `state`."""
    return sum(tensor.nbytes for tensor in state.values())


def require_equal(state: State, loaded: State, who: str) -> None:
    """Raises SystemExit unless both hold the same bits; `who` names the culprit."""
    for name, tensor in state.items():
        bits, loaded_bits = (t.contiguous().view(torch.uint8) for t in (tensor, loaded[name]))
        if not torch.equal(bits, loaded_bits):
            raise SystemExit(f"{who} loaded other bits than were saved: {name}")


# Saving and loading whole state dicts ----------------------------------------------------------


def _fresh(directory: Path) -> Path:
    os.sync()
    remove_tree(directory)
    directory.mkdir()
    return directory


def measure_save(contender: Contender, state: State, directory: Path) -> tuple[Usage, Share | None]:
    """Saves into a new `directory`, then syncs it, so that "durable" means the same for all.

    Where the contender has synced everything itself, the second time costs next to nothing.
    """
    share = Share() if contender.counts_share else None
    _fresh(directory)
    synchronize()
    with Meter() as meter:
        contender.save(state, directory, share=share)
        meter.lap()
        sync_tree(directory)
    return meter.usage, share


def _measure_loads(
    bench: Bench, workload: str, round_number: int, contender: Contender, state: State, into: State
) -> None:
    directory = bench.directory / contender.name
    for loader in contender.loaders:
        for phase in (COLD, WARM):
            if round_number == 0:
                for tensor in into.values():
                    tensor.zero_()
            make_cold(directory)
            if phase == WARM:
                make_warm(directory)
            resident = resident_fraction(directory)
            share = Share() if contender.counts_share else None
            synchronize()
            with Meter() as meter:
                contender.load(loader, into, directory, share=share)
                synchronize()
            if round_number == 0:
                require_equal(state, into, f"{loader} ({phase})")
            sample = Sample(workload, phase, loader, round_number, nbytes_of(state), meter.usage)
            sample.share_cpu_s = share.cpu_s if share else None
            sample.resident = resident
            bench.add(sample)


def _measure_fio(bench: Bench, workload: str, round_number: int, nbytes: int) -> None:
    assert bench.fio is not None
    path = bench.directory / "ceiling"
    os.sync()
    try:
        for phase in (SAVE, COLD):
            usage = bench.fio.measure(path, nbytes, write=phase == SAVE)
            bench.add(Sample(workload, phase, FIO, round_number, nbytes, usage))
    finally:
        path.unlink(missing_ok=True)
        os.sync()


def _warm_up(bench: Bench) -> None:
    """Runs every contender once on a tiny state, so that no round pays for lazy imports."""
    state = on(bench.device, {"a": torch.rand(1000), "b": torch.rand(10)})
    for contender in bench.contenders:
        directory = _fresh(bench.directory / contender.name)
        contender.save(state, directory)
        for loader in contender.loaders:
            contender.load(loader, like(state), directory)
        remove_tree(directory)


def _save_and_load(bench: Bench, workload: str, state: State) -> None:
    _warm_up(bench)
    state = on(bench.device, state)
    into, nbytes = like(state), nbytes_of(state)
    for round_number, contender in bench.turns():
        if contender is None:
            if workload == "large-bf16":
                _measure_fio(bench, workload, round_number, nbytes)
            continue
        directory = bench.directory / contender.name
        usage, share = measure_save(contender, state, directory)
        sample = Sample(workload, SAVE, contender.name, round_number, nbytes, usage)
        sample.share_cpu_s = share.cpu_s if share else None
        sample.file_bytes = sum(path.stat().st_size for path in files_in(directory))
        bench.add(sample)
        _measure_loads(bench, workload, round_number, contender, state, into)
        remove_tree(directory)


def run_large_bf16(bench: Bench) -> None:
    """Saves and loads a few large tensors: the disk's speed is what counts."""
    _save_and_load(bench, "large-bf16", large_state(bench.gib))


def run_transposed(bench: Bench) -> None:
    """Saves and loads tensors that are transposed in memory: the CPU time of copies counts.

    The safetensors package rejects such tensors.
    """
    contenders = [c for c in bench.contenders if not isinstance(c, SafetensorsContender)]
    _save_and_load(
        replace(bench, contenders=contenders, fio=None), "transposed", transposed_state()
    )


def run_small_4k(bench: Bench) -> None:
    """Saves and loads 10,000 tensors of 4 KiB: the cost per tensor is what counts."""
    _save_and_load(bench, "small-4k", small_state())


# Row slices of one chunk -----------------------------------------------------------------------


class SlicePlanner(DefaultLoadPlanner):
    """Loads rows of one stored tensor into the tensors of a state dict, one read item for each.

    Args:
        fqn: Name of the stored tensor; it must be stored as one chunk.
        starts: For each name in the state dict, the first row it wants; its shape says how many.
    """

    def __init__(self, fqn: str, starts: dict[str, int]) -> None:
        super().__init__()
        self.fqn = fqn
        self.starts = starts

    def create_local_plan(self) -> LoadPlan:
        """Returns one read item per slice, against the only stored chunk."""
        assert isinstance(self.metadata, Metadata)
        stored = self.metadata.state_dict_metadata[self.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert len(stored.chunks) == 1, f"{self.fqn} is stored as {len(stored.chunks)} chunks"
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name),
                    dest_offsets=torch.Size([0, 0]),
                    storage_index=MetadataIndex(self.fqn, stored.chunks[0].offsets, 0),
                    storage_offsets=torch.Size([row, 0]),
                    lengths=self.state_dict[name].shape,
                )
                for name, row in self.starts.items()
            ]
        )


def run_row_slices(bench: Bench) -> None:
    """Reads 64 row slices of one stored chunk of 64 MiB, and one slice alone: bytes read count."""
    rows = 1024 // SLICE_COUNT
    torch.manual_seed(0)
    state = on(bench.device, {"weight": torch.rand(1024, 16384)})
    starts = {f"slice.{i:02}": i * rows for i in range(SLICE_COUNT)}
    wanted = {name: state["weight"][row : row + rows] for name, row in starts.items()}
    middle = f"slice.{SLICE_COUNT // 2:02}"
    phases = {ALL_SLICES: list(wanted), ONE_SLICE: [middle]}
    _warm_up(bench)
    for round_number, contender in bench.turns():
        if contender is None or not (contender.reads_slices and contender.loaders):
            continue
        directory = _fresh(bench.directory / contender.name)
        contender.save(state, directory)
        for phase, names in phases.items():
            some = {name: wanted[name] for name in names}
            into = like(some)
            planner = SlicePlanner("weight", {name: starts[name] for name in names})
            make_cold(directory)
            resident = resident_fraction(directory)
            synchronize()
            with Meter() as meter:
                contender.load(contender.loaders[0], into, directory, planner=planner)
                synchronize()
            require_equal(some, into, f"{contender.name} ({phase})")
            sample = Sample(
                "row-slices", phase, contender.name, round_number, nbytes_of(some), meter.usage
            )
            sample.resident = resident
            bench.add(sample)
        remove_tree(directory)


# Peak memory -----------------------------------------------------------------------------------


def _in_fresh_process(contender: str, loader: str, phase: str, bench: Bench) -> Usage:
    program = Path(__file__).with_name("peak_rss.py")
    directory = bench.directory / contender
    command = [sys.executable, str(program), contender, loader, phase, str(directory)]
    done = subprocess.run(
        [*command, str(bench.gib)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{contender} {phase} failed in its own process: see above")
    return Usage(**json.loads(done.stdout.splitlines()[-1]))


def run_rss(bench: Bench) -> None:
    """Measures peak memory of the first save or load of a process, in a process of its own.

    Memory does not depend on the machine's mood, so one round is enough; nor does it depend on an
    fsync, so contenders that differ from another one only there are left out.
    """
    nbytes = nbytes_of(large_state(bench.gib, zeros=True))
    for contender in (contender for contender in bench.contenders if contender.loaders):
        directory = _fresh(bench.directory / contender.name)
        usage = _in_fresh_process(contender.name, "-", SAVE, bench)
        bench.add(Sample("rss", SAVE, contender.name, 0, nbytes, usage))
        for loader in contender.loaders:
            for phase in (COLD, WARM):
                usage = _in_fresh_process(contender.name, loader, phase, bench)
                bench.add(Sample("rss", phase, loader, 0, nbytes, usage))
        remove_tree(directory)


ON_CPU = ("rss",)
WORKLOADS = {
    "large-bf16": run_large_bf16,
    "transposed": run_transposed,
    "small-4k": run_small_4k,
    "row-slices": run_row_slices,
    "rss": run_rss,
}


def run(names: Sequence[str], bench: Bench) -> None:
    """Runs the workloads called `names` one after another into `bench.samples`."""
    for name in names:
        WORKLOADS[name](bench)


def as_json(sample: Sample) -> dict[str, object]:
    """Returns `sample` as plain values, its usage flattened into them."""
    values = asdict(sample)
    usage = values.pop("usage")
    return {**values, **usage}
