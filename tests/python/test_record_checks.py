"""Records of ``torch.save`` are checked by their CRC-32, also where a load needs only parts."""

from __future__ import annotations

import io
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_checkpoints as deepspeed
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, differences, failure_of, load, random_tensor
from command import DAMAGED, FAILED
from golden_megatron import GOLDEN, full_state
from support.process_io import nbytes_read_by
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torch_ckpt import FastReader
from torch_ckpt.cli.main import main
from torch_ckpt.errors import CorruptionError

State = dict[str, torch.Tensor]


def write_torch_save(path: Path) -> State:
    """Tensors, a view of a part of a storage, and two views of one storage."""
    flat = random_tensor([900], torch.float32)
    state = {
        "alone": random_tensor([40, 50], torch.bfloat16),
        "part": random_tensor([64, 64], torch.float32)[8:40],
        "first": flat[:300].view(30, 10),
        "second": flat[300:880].view(58, 10),
        "turned": random_tensor([30, 40], torch.float64).t(),
    }
    torch.save(state, path)
    return state


def write_deepspeed(path: Path, stage: int) -> State:
    deepspeed.write(path, stage)
    return deepspeed.values()


def write_shards(path: Path) -> State:
    """Tensor-parallel ranks, whose shards are boxes, averaged and compared."""
    parts = [{"row": torch.randn(6, 5), "mean": torch.full((4,), 2.0)} for _ in range(2)]
    same = torch.randn(7)
    info = {
        "parameter_with_row_parallelism_patterns": ["row"],
        "parameter_to_average_patterns": ["mean"],
        "tp_replicated_parameter_patterns": ["same"],
    }
    deepspeed.write_shards(path, [{**part, "same": same} for part in parts], info=info)
    weights = {"row": torch.cat([one["row"] for one in parts], 1), "mean": parts[0]["mean"]}
    weights["same"] = same
    return {
        name: tensor
        for fqn, weight in weights.items()
        for name, tensor in {
            f"model.{fqn}": weight,
            f"optim.state.{fqn}.exp_avg": weight * 2,
        }.items()
    }


def write_torch_checkpointing(path: Path) -> State:
    """Both ranks have equal values: a tensor of its own record, and two of one record."""
    path.mkdir()
    flat = torch.randn(90)
    state = {"own": torch.randn(4, 7), "low": flat[:40], "high": flat[40:]}
    for rank in range(2):
        torch.save(state, path / f"model_{rank}.pt")
    return {f"model.{name}": tensor for name, tensor in state.items()}


def write_stock(path: Path) -> State:
    state = {"long": random_tensor([300, 500], torch.float32), "short": torch.randn(30)}
    dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=1), no_dist=True)
    return state


WRITERS: dict[str, Callable[[Path], State]] = {
    "torch.save": write_torch_save,
    "ZeRO-2": lambda path: write_deepspeed(path, 2),
    "ZeRO-3": lambda path: write_deepspeed(path, 3),
    "tensor parallel": write_shards,
    "torch_checkpointing": write_torch_checkpointing,
    "stock DCP": write_stock,
}


def records(path: Path) -> list[tuple[Path, int, int]]:
    """File, offset and length of each record of elements."""
    found = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        data = file.read_bytes()
        at = 0  # A data file of DCP has one archive after the other.
        while (end := data.find(b"PK\5\6", at)) >= 0 and at < len(data):
            end += 22
            with zipfile.ZipFile(io.BytesIO(data[at:end])) as archive:
                for record in archive.infolist():
                    if "/data/" not in record.filename or not record.file_size:
                        continue
                    header = at + record.header_offset
                    names = int.from_bytes(data[header + 26 : header + 28], "little")
                    extra = int.from_bytes(data[header + 28 : header + 30], "little")
                    found.append((file, header + 30 + names + extra, record.file_size))
            at = end
    return found


def flipped(record: tuple[Path, int, int], rng: random.Random) -> Callable[[], None]:
    """Flips a bit of a record; returns what flips it back."""
    file, offset, nbytes = record
    at, bit = offset + rng.randrange(nbytes), 1 << rng.randrange(8)

    def flip() -> None:
        with open(file, "r+b") as stream:
            byte = os.pread(stream.fileno(), 1, at)[0]
            os.pwrite(stream.fileno(), bytes([byte ^ bit]), at)

    flip()
    return flip


@pytest.fixture(params=WRITERS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, State]:
    path = tmp_path / "saved"
    return path, WRITERS[request.param](path)


@pytest.mark.parametrize("verify", [True, "full"])
def test_a_load_of_everything_never_gives_a_damaged_value(
    saved: tuple[Path, State], rng: random.Random, full: bool, verify: Any
) -> None:
    path, state = saved
    refused = 0
    found = records(path)
    for record in found if full else rng.sample(found, min(len(found), 15)):
        unflip = flipped(record, rng)
        try:
            loaded = load(blank(state), FastReader(path, verify=verify))
        except dcp.CheckpointException as failed:
            (error, _) = failed.failures[0]
            assert isinstance(error, CorruptionError), error
            refused += 1
        else:
            assert differences(state, loaded) == [], record
        unflip()
    assert refused
    assert differences(state, load(blank(state), FastReader(path, verify=verify))) == []


def test_a_part_of_a_record_is_never_damaged_with_full_verification(
    saved: tuple[Path, State], rng: random.Random, full: bool
) -> None:
    path, state = saved
    wrong = refused = 0
    found = records(path)
    for record in found if full else rng.sample(found, min(len(found), 2)):
        unflip = flipped(record, rng)
        for fqn, tensor in state.items():
            try:
                loaded = load({fqn: blank(tensor)}, FastReader(path, verify="full"))
            except dcp.CheckpointException as failed:
                (error, _) = failed.failures[0]
                assert isinstance(error, CorruptionError), error
                assert record[0].name in str(error)
                refused += 1
            else:
                assert differences({fqn: tensor}, loaded) == [], (record, fqn)
        unflip()
        loaded = load(blank(state), FastReader(path, verify="full"))
        wrong += len(differences(state, loaded))
    assert refused > wrong == 0


def test_a_record_is_read_whole_once_for_each_open_checkpoint(
    tmp_path: Path, rng: random.Random
) -> None:
    """So conversions and comparisons, which load many pieces, read it at most twice."""
    path = tmp_path / "a.pt"
    state = {"w": random_tensor([1 << 20], torch.float32)}
    torch.save(state, path)
    reader = FastReader(path, verify="full")
    metadata = reader.read_metadata()

    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return target

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    reader.set_up_storage_reader(metadata, True)
    index = MetadataIndex("w", torch.Size([0]), 0)

    def read(item: ReadItem) -> None:
        reader.read_data(LoadPlan([item]), Planner()).wait()

    nbytes = []
    for begin in range(0, 1 << 20, 1 << 18):
        target = torch.empty(1 << 10)
        lengths = torch.Size([1 << 10])
        item = ReadItem(
            LoadItemType.TENSOR, index, torch.Size([0]), index, torch.Size([begin]), lengths
        )
        nbytes.append(nbytes_read_by(read, item))
        assert differences({"w": state["w"][begin : begin + (1 << 10)]}, {"w": target}) == []
    assert nbytes[0] > 4 << 20
    assert all(later < 1 << 20 for later in nbytes[1:]), nbytes


OBJECTS: dict[str, Callable[[], Any]] = {
    "in a tuple": lambda: (torch.randn(5), {"x": torch.randn(3)}),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OBJECTS)
def test_tensors_that_torch_reads_are_checked(
    tmp_path: Path, rng: random.Random, kind: str
) -> None:
    """Torch maps them into memory, and checks nothing."""
    path = tmp_path / "a.pt"
    torch.save({"odd": OBJECTS[kind](), "plain": torch.randn(9)}, path)
    target = torch.zeros(3, dtype=torch.complex64) if kind == "conjugate" else None
    load({"odd": target}, FastReader(path))
    *own, plain = records(path)
    for record in own:
        unflip = flipped(record, rng)
        error = failure_of(load, {"odd": target}, FastReader(path))
        assert isinstance(error, CorruptionError)
        assert "fail their checksum" in str(error) or kind in ("sparse", "nested")
        unflip()
    flipped(plain, rng)
    load({"odd": target}, FastReader(path))


def test_conversions_and_comparisons_find_damage_in_long_records(
    tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": random_tensor([5 << 20], torch.float32)}, path)
    (tmp_path / "b.pt").write_bytes(path.read_bytes())
    assert main(["diff", str(path), str(tmp_path / "b.pt")]) == 0
    flipped(records(path)[0], rng)
    for command in (
        ["convert", str(path), str(tmp_path / "converted"), "--to", "dcp"],
        ["diff", str(path), str(tmp_path / "b.pt")],
    ):
        assert main(command) in (DAMAGED, FAILED)
        assert "checksum does not match" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()


def test_without_a_checksum_full_verification_loads_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(9.0)}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert load({"w": torch.zeros(9)}, FastReader(path, verify="full"))["w"].tolist() == [*range(9)]


def test_another_verification_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="verify='whole' is not True, False or 'full'"):
        FastReader(tmp_path, verify="whole")  # type: ignore[arg-type]


def test_ranges_of_flattened_megatron_tensors_are_checked(
    tmp_path: Path, rng: random.Random, full: bool
) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "copy"))
    state = {fqn: value for fqn, value in full_state().items() if isinstance(value, torch.Tensor)}
    fqns = [fqn for fqn in state if fqn.startswith("optimizer.state.exp_avg.")]
    refused = 0
    for record in records(path)[:: 1 if full else 8]:
        unflip = flipped(record, rng)
        for fqn in fqns:
            try:
                loaded = load({fqn: blank(state[fqn])}, FastReader(path, verify="full"))
            except dcp.CheckpointException as failed:
                (error, _) = failed.failures[0]
                assert isinstance(error, CorruptionError), error
                refused += 1
            else:
                assert differences({fqn: state[fqn]}, loaded) == []
        unflip()
    assert refused
