"""`installed` and DCP's Hugging Face writer and reader: the files are those of a consolidation."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, differences, failure_of
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.safetensors_files import INDEX, load_model
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt.commits.model import ModelTransaction
from torch_ckpt.errors import MismatchError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.layout import ModelLayout
from torch_ckpt.integrations.hugging_face_storage import model_writer
from torch_ckpt.process_state import PROCESS

ASYNC_TIMEOUT_S = 60
NUMBERS = {"up": 1, "down": 2, "norm": 2, "table": 4}  # No tensor has file 3.
CONSOLIDATED = {"save_distributed": True, "enable_consolidation": True}
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def state_of(version: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {
        "up": torch.randn(33, 20),
        "down": torch.randn(20, 33).to(torch.bfloat16),
        "norm": torch.randn(7),
        "table": torch.randn(5, 3, 2),
    }


def save(path: Path, state: dict[str, Any], *, ours: bool = True, **options: Any) -> None:
    writer = HuggingFaceStorageWriter(str(path), **options)
    if ours:
        with torch_ckpt.installed():
            dcp.save(state, storage_writer=writer)
    else:
        path.mkdir(exist_ok=True)  # Where DCP puts the consolidated files.
        dcp.save(state, storage_writer=writer)


def load(path: Path, *, ours: bool = True) -> list[str]:
    """The differences to a state that was saved as version 0."""
    loaded = blank(state_of())
    reader = HuggingFaceStorageReader(str(path), thread_count=2)
    if ours:
        with torch_ckpt.installed():
            dcp.load(loaded, storage_reader=reader)
        assert set(reader.storage_data)
    else:
        dcp.load(loaded, storage_reader=reader)
    return differences(state_of(), loaded)


def names_in(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if file.is_file()}


@pytest.fixture
def stocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods of DCP's classes that wrote or read."""
    used: list[str] = []
    for kind, name in (
        (HuggingFaceStorageWriter, "write_data"),
        (HuggingFaceStorageReader, "read_data"),
    ):
        method = getattr(kind, name)

        def note(self: Any, *rest: Any, name: str = name, method: Any = method) -> Any:
            used.append(name)
            return method(self, *rest)

        monkeypatch.setattr(kind, name, note)
    return used


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["one file", "files"])
@pytest.mark.parametrize("options", [{}, CONSOLIDATED], ids=["rank 0", "consolidated"])
def test_the_files_and_the_index_are_those_of_stock(
    options: dict[str, Any], numbers: dict[str, int] | None, stocks: list[str], tmp_path: Path
) -> None:
    threads = {"thread_count": 2, "thread_count_consolidation": 3}
    options = {**options, **threads, "fqn_to_index_mapping": numbers}
    save(tmp_path / "stock", state_of(), ours=False, **options)
    stocks.clear()
    save(tmp_path / "ours", state_of(), **options)
    assert stocks == []
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "stock")
    assert not (tmp_path / "ours" / "sharded").exists()
    ours, stock = (json.loads((tmp_path / n / INDEX).read_bytes()) for n in ("ours", "stock"))
    assert ours["weight_map"] == stock["weight_map"]
    if options.get("enable_consolidation"):
        assert ours == stock
    for name in set(ours["weight_map"].values()):
        files = [load_file(tmp_path / n / name) for n in ("ours", "stock")]
        assert differences(*files) == []
    assert differences(load_model(tmp_path / "ours"), state_of()) == []
    for of in ("ours", "stock"):
        assert load(tmp_path / of) == []
        assert load(tmp_path / of, ours=False) == []


@pytest.mark.parametrize("numbers", [None, NUMBERS], ids=["one file", "files"])
def test_a_distributed_save_is_one_for_stock(
    numbers: dict[str, int] | None, stocks: list[str], tmp_path: Path
) -> None:
    save(tmp_path / "ours", state_of(), save_distributed=True, fqn_to_index_mapping=numbers)
    save(
        *(tmp_path / "stock", state_of()),
        ours=False,
        save_distributed=True,
        fqn_to_index_mapping=numbers,
    )
    assert stocks == ["write_data"]
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "stock")
    for name in names_in(tmp_path / "ours"):
        with (
            safe_open(tmp_path / "ours" / name, "pt") as ours,
            safe_open(tmp_path / "stock" / name, "pt") as stock,
        ):
            facts, others = ours.metadata(), stock.metadata()
            assert facts.keys() == others.keys()
            boxes, other_boxes = (json.loads(f.pop("DCP_SHARDING_INFO")) for f in (facts, others))
            assert (facts, boxes) == (others, other_boxes)
    assert load(tmp_path / "ours", ours=False) == load(tmp_path / "stock") == []

    merged = [tmp_path / "merged of ours", tmp_path / "merged of stock"]
    for folder, source in zip(merged, ("ours", "stock"), strict=True):
        folder.mkdir()
        consolidate_safetensors_files(
            str(tmp_path / source), str(folder), numbers or {}.fromkeys(state_of(), 1)
        )
        assert load(folder) == []
    assert names_in(merged[0]) == names_in(merged[1])


def test_a_tensor_without_a_number_is_refused_by_name(tmp_path: Path) -> None:
    numbers = {"up": 1, "norm": 1, "table": 1}
    with torch_ckpt.installed():
        writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=numbers)
        error = failure_of(dcp.save, state_of(), storage_writer=writer)
    assert isinstance(error, MismatchError)
    assert "fqn_to_index_mapping has no number for 'down'" in str(error)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("options", [{}, CONSOLIDATED], ids=["rank 0", "consolidated"])
def test_a_number_of_a_name_that_no_rank_saves_makes_no_file_and_is_named(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    numbers = {**dict.fromkeys(state_of(), 1), "absent": 4}
    save(tmp_path / "ours", state_of(), fqn_to_index_mapping=numbers, **options)
    file = "model-00001-of-00004.safetensors"
    assert names_in(tmp_path / "ours") == {file, INDEX}
    assert "has 1 names that no rank saves: 'absent'" in caplog.text
    save(tmp_path / "stock", state_of(), ours=False, fqn_to_index_mapping=numbers, **options)
    assert file in names_in(tmp_path / "stock")
    stock = tmp_path / "stock" / "model-00004-of-00004.safetensors"
    if stock.exists():  # No library can read it: stock gives the name an empty dtype.
        with pytest.raises(SafetensorError):
            load_file(stock)


def test_names_of_one_tensor_are_stored_each_as_by_stock(tmp_path: Path) -> None:
    state = state_of()
    state["tied"] = state["up"]
    save(tmp_path, state, **CONSOLIDATED)
    assert differences(load_model(tmp_path), state) == []


@pytest.mark.parametrize("options", [CONSOLIDATED, {"save_distributed": True}], ids=str)
@pytest.mark.parametrize("before", ["consolidated", "distributed", "stock", "writer"])
def test_a_save_replaces_the_model_that_was_there(
    before: str, options: dict[str, Any], tmp_path: Path
) -> None:
    old = state_of(1)
    if before == "writer":
        torch_ckpt.save(old, storage_writer=SafetensorsWriter(tmp_path, max_shard_nbytes=4500))
    elif before == "stock":  # Of more ranks.
        save(tmp_path, old, ours=False, save_distributed=True)
        shutil.copy(tmp_path / SHARD, tmp_path / SHARD.replace("00001", "00002", 1))
    else:
        more = CONSOLIDATED if before == "consolidated" else {"save_distributed": True}
        save(tmp_path, old, fqn_to_index_mapping=NUMBERS, **more)
    save(tmp_path, state_of(), **options)
    assert load(tmp_path) == []
    assert load(tmp_path, ours=False) == []
    if "enable_consolidation" in options:
        assert len(names_in(tmp_path)) == 2
        assert differences(load_model(tmp_path), state_of()) == []
    else:
        assert names_in(tmp_path) == {SHARD}


def test_an_asynchronous_save_writes_the_same_files(stocks: list[str], tmp_path: Path) -> None:
    state = state_of()
    writer = HuggingFaceStorageWriter(str(tmp_path / "1"), **CONSOLIDATED)  # type: ignore[arg-type]
    with torch_ckpt.installed():
        future = dcp.async_save(state, storage_writer=writer, no_dist=True)
        meta = future.result(ASYNC_TIMEOUT_S).storage_meta
        for tensor in state.values():
            tensor.zero_()
        until(lambda: writer.save_id == meta.save_id)
    assert names_in(tmp_path / "1") == {"model-00001-of-00001.safetensors", INDEX}
    assert load(tmp_path / "1") == []
    assert "write_data" not in stocks


def test_a_checkpoint_id_moves_the_writer_and_the_reader(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "1"), save_distributed=True)
    loaded = blank(state_of())
    reader = HuggingFaceStorageReader(str(tmp_path / "1"))
    with torch_ckpt.installed():
        for number in "12":
            save_to = str(tmp_path / number)
            dcp.save(state_of(), checkpoint_id=save_to, storage_writer=writer)
            assert names_in(tmp_path / number) == {SHARD}
        shutil.rmtree(tmp_path / "1")
        dcp.load(loaded, checkpoint_id=str(tmp_path / "2"), storage_reader=reader)
    assert differences(state_of(), loaded) == []


def test_the_reader_takes_the_model_of_a_folder_with_other_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, state_of(), **CONSOLIDATED)
    dcp.save({"up": torch.zeros(33, 20), "step": 3}, checkpoint_id=tmp_path)
    assert (tmp_path / ".metadata").exists()
    assert load(tmp_path) == []


@pytest.mark.parametrize("kind", [HuggingFaceStorageReader, FastReader])
def test_files_of_a_distributed_save_precede_an_index(kind: Any, tmp_path: Path) -> None:
    """As transformers does. The index may be that of a consolidation of an older save."""
    save(tmp_path, state_of(1), **CONSOLIDATED)
    save(tmp_path, state_of(), ours=False, save_distributed=True)
    loaded = blank(state_of())
    with torch_ckpt.installed():
        dcp.load(loaded, storage_reader=kind(str(tmp_path)))
    assert differences(state_of(), loaded) == []


@pytest.mark.parametrize("most", [2000, 10**6])
def test_a_newer_model_precedes_files_of_an_older_distributed_save(
    tmp_path: Path, most: int
) -> None:
    save(tmp_path, state_of(), save_distributed=True)
    remains = tmp_path.with_name(f"{tmp_path.name}-remains")
    shutil.copytree(tmp_path, remains)
    torch_ckpt.save(state_of(1), storage_writer=SafetensorsWriter(remains, max_shard_nbytes=most))
    shutil.copy2(tmp_path / SHARD, remains / SHARD)  # As if a crash had left it.
    for path, version in ((tmp_path, 0), (remains, 1)):
        found = blank(state_of())
        torch_ckpt.load(found, storage_reader=FastReader(path))
        assert not differences(found, state_of(version))


def test_a_reader_casts_and_leaves_out_as_stock_does(tmp_path: Path) -> None:
    save_file(state_of(), tmp_path / "any.safetensors")
    found = []
    for ours in (True, False):
        state = {"up": torch.zeros(33, 20, dtype=torch.float16), "absent": torch.ones(2)}
        reader = HuggingFaceStorageReader(str(tmp_path))
        planner = DefaultLoadPlanner(allow_partial_load=True)
        if ours:
            with torch_ckpt.installed():
                dcp.load(state, storage_reader=reader, planner=planner)
        else:
            dcp.load(state, storage_reader=reader, planner=planner)
        found.append(state)
    assert differences(*found) == []


class OwnWriter(HuggingFaceStorageWriter):
    """A program's own writer."""


class OwnReader(QuantizedHuggingFaceStorageReader):
    """A program's own reader."""


def test_subclasses_and_unknown_arguments_are_left_to_stock_with_one_warning(
    stocks: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "unreplaced", set())
    construct = HuggingFaceStorageWriter.__init__

    def newer(self: Any, path: str, *, compression: str = "", **options: Any) -> None:
        construct(self, path, **options)

    with torch_ckpt.installed():
        dcp.save(state_of(), storage_writer=OwnWriter(str(tmp_path / "own")))
        dcp.load(blank(state_of()), storage_reader=OwnReader(str(tmp_path / "own")))
        monkeypatch.setattr(HuggingFaceStorageWriter, "__init__", newer)
        for number in "12":
            save(tmp_path / number, state_of(), save_distributed=True)
    assert stocks == ["write_data", "read_data", "write_data", "write_data"]
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [message.split(" is used")[0].rpartition(".")[2] for message in warned] == [
        "OwnWriter",
        "OwnReader",
        "HuggingFaceStorageWriter",
    ]


def test_a_save_that_another_one_has_ended_publishes_no_file(tmp_path: Path) -> None:
    directory, save_id, names = Location(tmp_path), "0123456789abcdef", [f"{n}.x" for n in "12"]
    transaction = ModelTransaction(directory, save_id)
    transaction.begin(2, usual=names, states_boxes=True)
    (tmp_path / f".model.safetensors.index.json.{save_id}.tmp").unlink()
    with pytest.raises(StorageError, match="files of this save are gone"):
        transaction.commit(ModelLayout.of([], max_shard_nbytes=1))
    assert names_in(tmp_path).isdisjoint(names)


def test_a_store_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedError, match=r"use torch_ckpt\.SafetensorsWriter"):
        model_writer("memory://tests/model")
