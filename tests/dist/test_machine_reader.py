"""Checkpoints whose data files lie on several machines, each of which its own ranks alone reach."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Worlds, run_ranks
from states import (
    LOAD_PLANNERS,
    Failure,
    assert_same,
    data_files,
    failures_of,
    full_value,
    shards_of,
    tensors_of,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import Replicate, Shard

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastWriter, IoOptions
from torch_ckpt.errors import RankTimeoutError
from torch_ckpt.storage.exchange import pack_names, unpack_names
from torch_ckpt.storage.machine_reader import MachineReader

pytestmark = pytest.mark.timeout(180)

TINY = IoOptions(buffer_nbytes=1 << 20, exchange_nbytes=4 << 20)
SHAPES = {"a": (1031, 1033), "b": (7, 5), "c": (300, 257, 4), "d": (), "e": (0, 3)}
SPLIT = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}
SAVED_BY = 4  # Ranks.
PROMPT_S = 30.0  # Within which a failure of one rank must have reached the others.


class Subclass(torch.Tensor):
    """A tensor that only torch stores and reads, and has a dtype of the engine."""


torch.serialization.add_safe_globals([Subclass])


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors that only torch reads."""
    values = full_value("odd", (9,), torch.float32).nan_to_num(0, 0, 0)
    return {
        "quantized": torch.quantize_per_tensor(values, 0.1, 0, torch.quint8),
        "subclass": full_value("subclass", (300, 300), torch.float32).as_subclass(Subclass),
    }


def state_of(version: str, placement: Any) -> dict[str, Any]:
    """Shards, replicas and objects; ranks load each of them from files of others."""
    is_saved = version == "saved"
    return {
        "sharded": shards_of(SPLIT, version, placement),
        "replicated": tensors_of(SHAPES, f"r {version}"),
        "objects": {"step": 7 if is_saved else 0, "names": ["x"] * 1000 if is_saved else []},
    }


def save(path: Path, single_file: bool) -> None:
    writer = FastWriter(path, single_file_per_rank=single_file)
    dcp.save(state_of("saved", Shard(0)), storage_writer=writer)


def spread(path: Path, machines: int, copies: int = 1) -> list[Path]:
    """Moves the data files to directories of machines, each to as many of them; returns these."""
    folders = [path.parent / f"{path.name} of machine {number}" for number in range(machines)]
    for folder in folders:
        folder.mkdir()
        for file in path.iterdir():
            if file.suffix != ".distcp":
                shutil.copy(file, folder)
    for number, name in enumerate(sorted(data_files(path))):
        for copy in range(copies):
            shutil.copy(path / name, folders[(number + copy) % machines])
    shutil.rmtree(path)
    return folders


def own(folders: Sequence[Path]) -> Path:
    """The directory of this rank's machine: neighbours are on the same one."""
    return folders[dist.get_rank() * len(folders) // dist.get_world_size()]


def machine_of(folders: Sequence[Path]) -> Any:
    """Gives each rank the name of its machine, as if there were several."""
    name = str(own(folders))
    return unittest.mock.patch.object(torch_ckpt.storage.reader, "this_machine", return_value=name)


def load_all(
    folders: Sequence[Path], planner: type[DefaultLoadPlanner], placement: Any, pays: bool = False
) -> None:
    """Loads, and exchanges what any ranks want in common if that pays, or else what they lack."""
    state = state_of("none", placement)
    exchange = unittest.mock.patch.object(torch_ckpt.storage.exchange, "pays", return_value=pays)
    with machine_of(folders), exchange:
        reader = MachineReader(own(folders), io=TINY)
        dcp.load(state, storage_reader=reader, planner=planner())
    assert_same(state, state_of("saved", placement))


@pytest.fixture
def saved(worlds: Worlds, tmp_path: Path) -> Path:
    worlds.run(SAVED_BY, save, tmp_path / "step", True)
    return tmp_path / "step"


@pytest.mark.thin(0.5)
@pytest.mark.parametrize("planner", LOAD_PLANNERS)
@pytest.mark.parametrize(
    ("machines", "ranks", "placement", "pays"),
    [
        (2, SAVED_BY, Shard(0), False),  # Some files are in the right place.
        (4, SAVED_BY, Shard(1), False),
        (2, 2, Replicate(), False),
        (3, 3, Shard(0), True),
        (4, SAVED_BY, Replicate(), True),
    ],
)
def test_ranks_load_what_lies_on_other_machines(
    worlds: Worlds, saved: Path, machines: int, ranks: int, placement: Any, pays: bool, planner: Any
) -> None:
    worlds.run(ranks, load_all, spread(saved, machines), planner, placement, pays)


@pytest.mark.parametrize("exchange", ["auto", "off"])
def test_a_directory_that_has_all_files_is_loaded_as_ever(
    worlds: Worlds, saved: Path, exchange: Any
) -> None:
    failures, _ = failures_on(worlds, [saved], dict(enumerate([{"exchange": exchange}] * 4)))
    assert not failures


def test_names_of_files_take_few_bytes() -> None:
    names = {f"__{rank}_{file}_{rank:016x}.distcp" for rank in range(8) for file in range(500)}
    packed = pack_names(names)
    assert set(unpack_names(packed)) == names
    assert len(packed) < 4 * len(names)
    assert unpack_names(pack_names([])) == []


def test_many_files_of_which_two_machines_have_copies_each(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(SAVED_BY, save, tmp_path / "step", False)
    folders = spread(tmp_path / "step", 3, copies=2)
    worlds.run(3, load_all, folders, FastLoadPlanner, Shard(1))


def load_some(folders: Sequence[Path], names_of: Mapping[int, Sequence[str]], planner: Any) -> None:
    """Loads these tensors on each rank, and nothing on the other ranks."""
    names = names_of.get(dist.get_rank(), [])
    whole = tensors_of(SHAPES, "r saved")
    state: dict[str, Any] = {"replicated": {n: torch.zeros_like(whole[n]) for n in names}}
    if not names:
        state = {}
    with machine_of(folders):
        dcp.load(state, storage_reader=MachineReader(own(folders), io=TINY), planner=planner())
    if names:
        assert_same(state["replicated"], {name: whole[name] for name in names})


@pytest.mark.thin(1)
@pytest.mark.parametrize("planner", LOAD_PLANNERS)
@pytest.mark.parametrize(
    "names_of",
    [
        {0: ["a", "b"], 1: ["b", "c"], 3: ["d", "e"]},
        {0: list(SHAPES)},
        {3: list(SHAPES)},
        {2: ["c"]},
    ],
)
def test_ranks_that_want_little_or_nothing_read_for_others(
    worlds: Worlds, saved: Path, names_of: Mapping[int, Sequence[str]], planner: Any
) -> None:
    worlds.run(4, load_some, spread(saved, 4), names_of, planner)


def load_oddly(folders: Sequence[Path], planner: Any) -> None:
    """Targets that share memory, of another dtype, strided, or of a class of torch's own."""
    saved = tensors_of(SHAPES, "r saved")
    strided = torch.zeros(14, 10)
    storage = torch.zeros(saved["a"].numel() + 35)
    tied, tail = storage[:-35].view(SHAPES["a"]), storage[-35:].view(7, 5)
    state = {
        "a": tied,
        "b": strided[::2, ::2],
        "c": torch.zeros(SHAPES["c"], dtype=torch.float64),
        "same a": tied,
        "tail": tail,  # It waits for the one before it, whose storage it has.
        "quantized": torch.quantize_per_tensor(torch.zeros(9), 0.1, 0, torch.quint8),
        "subclass": torch.zeros(300, 300),
    }
    with machine_of(folders):
        dcp.load(state, storage_reader=MachineReader(own(folders), io=TINY), planner=planner())
    assert_same(tied, saved["a"])
    assert_same(tail, full_value("tail", (7, 5), torch.float32))
    assert_same(strided[::2, ::2], saved["b"])
    torch.testing.assert_close(state["c"], saved["c"].double(), rtol=0, atol=0, equal_nan=True)
    odd = odd_tensors()
    assert torch.equal(state["quantized"].int_repr(), odd["quantized"].int_repr())
    assert_same(state["subclass"], odd["subclass"].as_subclass(torch.Tensor))


def save_oddly(path: Path) -> None:
    saved = tensors_of(SHAPES, "r saved")
    tail = full_value("tail", (7, 5), torch.float32)
    state = {**saved, "same a": saved["a"].clone(), "tail": tail, **odd_tensors()}
    dcp.save(state, storage_writer=FastWriter(path, single_file_per_rank=False), no_dist=True)


@pytest.mark.parametrize("planner", LOAD_PLANNERS)
def test_targets_that_need_copies_or_torch_are_sent_as_well(
    worlds: Worlds, tmp_path: Path, planner: Any
) -> None:
    save_oddly(tmp_path / "step")
    worlds.run(3, load_oddly, spread(tmp_path / "step", 3), planner)


class Temporary(DefaultLoadPlanner):
    """Resolves tensors as copies, which it commits."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item).clone()

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


def load_by_temporaries(folders: Sequence[Path]) -> None:
    with unittest.mock.patch.object(
        torch_ckpt.storage.loading, "retained_nbytes_limit", return_value=1
    ):
        load_all(folders, Temporary, Shard(0))


def test_temporaries_of_a_planner_do_not_end_the_exchange(worlds: Worlds, saved: Path) -> None:
    worlds.run(4, load_by_temporaries, spread(saved, 4))


def load_and_fail(
    folders: Sequence[Path], options: Mapping[int, Any]
) -> tuple[dict[int, Failure], float, bool]:
    """Returns the failures, after how long, and whether no tensor has changed."""
    began = time.monotonic()
    state = state_of("none", Shard(0))
    with machine_of(folders):
        given = {"reader": MachineReader, **options.get(dist.get_rank(), {})}
        reader = given.pop("reader")(own(folders), io=TINY, **given)
        failures = failures_of(dcp.load, state, storage_reader=reader)
    took_s = time.monotonic() - began
    try:
        assert_same(state, state_of("none", Shard(0)))
    except AssertionError:
        return failures, took_s, False
    return failures, took_s, True


def failures_on(
    worlds: Worlds,
    folders: Sequence[Path],
    options: Mapping[int, Any] | None = None,
    load: Callable[..., Any] = load_and_fail,
) -> tuple[dict[int, Failure], bool]:
    """Loads on 4 ranks; returns the failures, which are the same on all, and if none has loaded."""
    found = worlds.run(4, load, folders, options or {})
    assert all(took_s < PROMPT_S for _, took_s, _ in found)
    assert all(failures == found[0][0] for failures, _, _ in found)
    return found[0][0], all(unchanged for _, _, unchanged in found)


def test_a_file_that_no_machine_has_is_named_on_all_ranks_before_anything_is_read(
    worlds: Worlds, saved: Path
) -> None:
    folders = spread(saved, 4)
    (missing,) = sorted(data_files(folders[2]))
    (folders[2] / missing).unlink()
    failures, unchanged = failures_on(worlds, folders)
    assert unchanged
    assert [failure.kind for failure in failures.values()] == ["NotFoundError"]
    (failure,) = failures.values()
    assert f"cannot load {folders[0]}: no rank of the load can read {missing}" in failure.message
    assert "of which rank 2 is to load" in failure.message or "of which ranks" in failure.message


class CutOff(MachineReader):
    """Finds its own data files cut off when it begins to read."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        folder = Path(self.path)
        for name in data_files(folder):
            os.truncate(folder / name, 70000)
        return super().read_data(plan, planner)


@pytest.mark.parametrize("how", ["a bit", "the end"])
def test_damage_that_one_rank_reads_fails_all_and_is_named(
    worlds: Worlds, saved: Path, how: str
) -> None:
    folders = spread(saved, 4)
    # A rank of another machine loads the shard of this file.
    (name,) = data_files(folders[1])
    folders = [folders[0], folders[2], folders[3], folders[1]]
    file = folders[3] / name
    if how == "a bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    failures, _ = failures_on(worlds, folders, {3: {"reader": CutOff}} if how == "the end" else {})
    failure = failures.pop(3)
    assert failure.kind == "CorruptionError"
    assert name in failure.message
    assert re.search(r" at [0-9]+ of | at offset [0-9]+", failure.message), failure.message
    assert {other.kind for other in failures.values()} <= {"CancelledError"}


def test_a_file_that_is_too_short_on_one_machine_is_read_on_another(
    worlds: Worlds, saved: Path
) -> None:
    folders = spread(saved, 4, copies=2)
    cut_off = [(folders[1], min(data_files(folders[1]))), (folders[2], max(data_files(folders[2])))]
    for folder, name in cut_off:
        os.truncate(folder / name, 1000)
    worlds.run(4, load_all, folders, FastLoadPlanner, Replicate())
    for folder in folders:
        for name in data_files(folder) & {cut_off[0][1]}:
            os.truncate(folder / name, 1000)
    failures, unchanged = failures_on(worlds, folders)
    assert unchanged
    (failure,) = failures.values()
    assert failure.kind == "NotFoundError"
    assert cut_off[0][1] in failure.message


def test_ranks_that_may_not_exchange_are_refused_before_they_read(
    worlds: Worlds, saved: Path
) -> None:
    folders = spread(saved, 4)
    options = {rank: {"exchange": "off"} for rank in range(4)}
    failures, unchanged = failures_on(worlds, folders, options)
    assert unchanged
    assert {failure.kind for failure in failures.values()} == {"NotFoundError"}
    for failure in failures.values():
        assert 'exchange="off" lets no other rank read it' in failure.message
        assert ".distcp" in failure.message


def test_a_rank_that_verifies_gets_no_bytes_of_one_that_does_not(
    worlds: Worlds, saved: Path
) -> None:
    failures, unchanged = failures_on(worlds, spread(saved, 4), {2: {"verify": False}})
    assert unchanged
    (failure,) = failures.values()
    assert failure.kind == "CheckpointError"
    assert "rank 2 is to load without verification" in failure.message


def load_without_verification(folders: Sequence[Path]) -> None:
    state = state_of("none", Shard(0))
    with machine_of(folders):
        dcp.load(state, storage_reader=MachineReader(own(folders), io=TINY, verify=False))
    assert_same(state, state_of("saved", Shard(0)))


def test_ranks_that_all_do_without_verification_exchange(worlds: Worlds, saved: Path) -> None:
    worlds.run(4, load_without_verification, spread(saved, 4))


def load_as_too_many(folders: Sequence[Path], options: Mapping[int, Any]) -> Any:
    with unittest.mock.patch.object(torch_ckpt.storage.exchange, "_MAX_RANKS", 3):
        return load_and_fail(folders, options)


def test_more_ranks_than_can_exchange_are_told(worlds: Worlds, saved: Path) -> None:
    failures, unchanged = failures_on(worlds, spread(saved, 4), load=load_as_too_many)
    assert unchanged
    (failure,) = failures.values()
    assert failure.kind == "CheckpointError"
    assert "4 ranks would have to exchange" in failure.message


def test_a_load_by_one_process_needs_all_files(saved: Path) -> None:
    folders = spread(saved, 2)
    state = {"replicated": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    failures = failures_of(dcp.load, state, storage_reader=MachineReader(folders[0]), no_dist=True)
    (failure,) = failures.values()
    assert failure.kind == "NotFoundError"
    assert "there is no other rank to read it" in failure.message
    for name in data_files(folders[1]):
        shutil.copy(folders[1] / name, folders[0])
    dcp.load(state, storage_reader=MachineReader(folders[0]), no_dist=True)
    assert_same(state["replicated"], tensors_of(SHAPES, "r saved"))


class Deadly(MachineReader):
    """Kills its process when it is connected and is to read."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        connect = torch_ckpt.storage.exchange._connect

        def connect_and_die(*args: Any) -> Any:
            connected = connect(*args)
            time.sleep(0.5)  # Others may be about to connect.
            os.kill(os.getpid(), signal.SIGKILL)
            return connected

        with unittest.mock.patch.object(torch_ckpt.storage.exchange, "_connect", connect_and_die):
            return super().read_data(plan, planner)


def survive(folders: Sequence[Path]) -> None:
    """Wants all on rank 0. Rank 3 holds a file of it, and dies."""
    rank = dist.get_rank()
    state: dict[str, Any] = {}
    if rank == 0:
        state = {"replicated": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    began = time.monotonic()
    with machine_of(folders):
        reader = (Deadly if rank == 3 else MachineReader)(own(folders), io=TINY)
        with pytest.raises((CheckpointException, RankTimeoutError)):
            torch_ckpt.load(state, storage_reader=reader, timeout_s=20)
    (folders[0] / f"survived {rank}").write_text(str(time.monotonic() - began))


def test_a_holder_that_dies_fails_the_others_soon(worlds: Worlds, saved: Path) -> None:
    folders = spread(saved, 4)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(4, survive, folders, grace_s=PROMPT_S)
    for rank in range(3):
        assert float((folders[0] / f"survived {rank}").read_text()) < PROMPT_S


class InTurn(DefaultLoadPlanner):
    """Has state between the resolve and the commit of a tensor, so each is committed in turn."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


def load_into_one_memory(
    path: Path, folders: Sequence[Path], planner: type[DefaultLoadPlanner]
) -> None:
    """Compares what remains with what the stock reader leaves, which reads all files."""
    memory, wanted = torch.zeros(4), torch.zeros(4)
    reader = dcp.FileSystemReader(path)
    dcp.load(dict.fromkeys("abc", wanted), storage_reader=reader, no_dist=True)
    with machine_of(folders):
        reader = MachineReader(own(folders))
        dcp.load(dict.fromkeys("abc", memory), storage_reader=reader, planner=planner())
    assert torch.equal(memory, wanted)


@pytest.mark.parametrize("planner", [*LOAD_PLANNERS, InTurn])
def test_the_last_of_several_tensors_in_one_memory_remains_wherever_its_file_is(
    worlds: Worlds, tmp_path: Path, planner: type[DefaultLoadPlanner]
) -> None:
    path = tmp_path / "step"
    state = {name: torch.full((4,), float(ord(name))) for name in "abc"}
    writer = FastWriter(path, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(data_files(path)) == len(state)
    for absent in data_files(path):
        folders = [tmp_path / f"without {absent}", tmp_path / f"beside {absent}"]
        for folder in folders:
            shutil.copytree(path, folder)
        (folders[0] / absent).unlink()
        worlds.run(2, load_into_one_memory, path, folders, planner)
