"""Every option of the writer, every way DCP uses it, and what a writer keeps between saves."""

from __future__ import annotations

import inspect
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import (
    blank,
    data_files,
    differences,
    failure_of,
    load,
    loads,
    random_tensor,
    save,
)
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import _async_process_executor as process_executor
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, IoOptions
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import IoMode
from torch_ckpt.storage.verify import examine

ASYNC_TIMEOUT_S = 60

# A contiguous tensor of odd length that is written from its own memory, then a strided one.
ODD_THEN_STRIDED = {
    "bytes": (torch.uint8, 300_001, lambda: torch.arange(4e6).view(2000, 2000).t()),
    "bfloat16": (torch.bfloat16, 131_073, lambda: torch.arange(1e6).view(1000, 1000).t()),
    "float32": (torch.float32, 131_073, lambda: torch.arange(1e6, dtype=torch.float64)[::2]),
    "float8": (
        torch.float8_e4m3fn,
        262_145,
        lambda: torch.arange(9e5).view(3, 300, 10, 100).to(memory_format=torch.channels_last),
    ),
}


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return _random_state()


def _random_state() -> dict[str, Any]:
    return {
        "model": {f"layer.{i}": random_tensor([257, 100 + i], torch.float32) for i in range(12)},
        "large": random_tensor([3 << 20], torch.uint8),
        "step": int(torch.randint(0, 1000, [1])),
    }


def test_arguments_come_in_the_order_of_the_stock_writer_and_reader() -> None:
    stock = list(inspect.signature(FileSystemWriter.__init__).parameters.values())
    ours = list(inspect.signature(FastWriter.__init__).parameters.values())
    for one, other in zip(ours, stock, strict=False):
        assert (one.name, one.kind, one.default) == (other.name, other.kind, other.default)
    assert {p.kind for p in ours[len(stock) :]} == {inspect.Parameter.KEYWORD_ONLY}
    stock = list(inspect.signature(FileSystemReader.__init__).parameters)
    assert list(inspect.signature(FastReader.__init__).parameters)[: len(stock)] == stock


@pytest.mark.parametrize(
    ("kind", "ours", "stock"),
    [
        (dcp.StorageWriter, FastWriter, FileSystemWriter),
        (dcp.StorageReader, FastReader, FileSystemReader),
    ],
)
def test_methods_can_be_called_as_stock_ones(
    kind: type, ours: type, stock: type, tmp_path: Path
) -> None:
    assert isinstance(ours(tmp_path), AsyncStager) == isinstance(stock(tmp_path), AsyncStager)
    for method in [name for name in dir(kind) if not name.startswith("_")]:
        # DCP probes signatures for the names ``kwargs`` and ``storage_meta``.
        expected = inspect.signature(getattr(stock, method))
        assert list(inspect.signature(getattr(ours, method)).parameters) == list(
            expected.parameters
        ), method


@pytest.mark.parametrize(
    "options",
    [
        {"single_file_per_rank": False},
        {"single_file_per_rank": False, "thread_count": 4},
        {"sync_files": False},
        {"thread_count": 3},
        {"thread_count": 40},
        {"per_thread_copy_ahead": 0},
        {"per_thread_copy_ahead": 1 << 30},
        {"per_thread_copy_ahead": 1, "thread_count": 2},
        {"cache_staged_state_dict": True},
        {"io": IoOptions(direct=False)},
        {"io": IoOptions(buffer_nbytes=512 << 10)},
        {"io": IoOptions(buffer_nbytes=(520 << 10) + 5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", [FastReader, FileSystemReader])
def test_every_option_writes_a_checkpoint_that_loads(
    options: dict[str, Any], reader: type, state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FastWriter(tmp_path, **options))

    assert loads(tmp_path, state, reader) == []


@pytest.mark.parametrize(
    "io",
    [
        IoOptions(buffer_nbytes=512 << 10),
        IoOptions(buffer_nbytes=(520 << 10) + 5),
        IoOptions(direct=False),
    ],
    ids=str,
)
def test_every_tuning_of_the_reader_loads_the_same(
    io: IoOptions, state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FastWriter(tmp_path))

    assert loads(tmp_path, state, io=io) == []
    assert loads(tmp_path, state, io=io, verify=False) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (IoOptions, {"background_nice": 20}),
        (IoOptions, {"background_nice": -1}),
        (IoOptions, {"buffer_nbytes": (512 << 10) - 1}),
        (IoOptions, {"buffer_nbytes": -1}),
        (FastWriter, {"path": "here", "thread_count": 0}),
        (FastWriter, {"path": "here", "per_thread_copy_ahead": -1}),
    ],
    ids=str,
)
def test_impossible_options_are_a_value_error(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(options)[-1]):
        kind(**options)


def test_other_serialization_formats_and_urls_are_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="SAFETENSORS"):
        FastWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(UnsupportedError, match="nowhere://bucket/run"):
        FastWriter("nowhere://bucket/run")


def test_without_single_file_per_rank_every_item_has_its_file(
    state: dict[str, Any], tmp_path: Path
) -> None:
    metadata = save(state, FastWriter(tmp_path, single_file_per_rank=False))

    assert len(data_files(tmp_path)) == len(metadata.storage_data)
    assert len({info.relative_path for info in metadata.storage_data.values()}) == 14


def test_threads_write_a_balanced_file_each(tmp_path: Path, rng: random.Random) -> None:
    state = {str(i): torch.randn(rng.randint(1, 50_000)) for i in range(60)}

    save(state, FastWriter(tmp_path, thread_count=3))

    sizes = [file.stat().st_size for file in data_files(tmp_path)]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 50_000 * 4
    assert loads(tmp_path, state) == []


def test_overwrite_replaces_the_checkpoint_and_removes_its_files(
    state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FastWriter(tmp_path, thread_count=3))
    old = {file.name for file in data_files(tmp_path)}
    (tmp_path / "notes.txt").write_text("somebody's own")
    other = _random_state()

    metadata = save(other, FastWriter(tmp_path))

    (new,) = data_files(tmp_path)
    assert new.name not in old
    assert {info.relative_path for info in metadata.storage_data.values()} == {new.name}
    assert (tmp_path / "notes.txt").read_text() == "somebody's own"
    assert loads(tmp_path, other) == []


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_we_overwrite_a_stock_checkpoint_with_its_files_and_stock_may_overwrite_ours(
    state: dict[str, Any], tmp_path: Path
) -> None:
    save(_random_state(), FileSystemWriter(tmp_path, thread_count=3))
    save(state, FastWriter(tmp_path))
    assert len(data_files(tmp_path)) == 1
    assert loads(tmp_path, state) == []

    other = _random_state()
    save(other, FileSystemWriter(tmp_path))
    assert loads(tmp_path, other) == []
    assert loads(tmp_path, other, FileSystemReader) == []


def test_without_overwrite_an_uncommitted_directory_is_accepted_and_a_committed_one_refused(
    state: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "__0_0_0123456789abcdef.distcp").write_bytes(b"of a save that failed")
    save(state, FastWriter(tmp_path, overwrite=False))
    assert len(data_files(tmp_path)) == 1
    names = sorted(path.name for path in tmp_path.iterdir())

    error = failure_of(save, _random_state(), FastWriter(tmp_path, overwrite=False))

    assert isinstance(error, FileExistsError)
    assert str(tmp_path) in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert loads(tmp_path, state) == []


def test_missing_directories_relative_paths_and_strings_are_directories_too(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state, FastWriter(tmp_path / "a" / "b c" / "ü"))
    monkeypatch.chdir(tmp_path)
    save(state, FastWriter("here"))
    save(state, FastWriter("."))

    for path in (tmp_path / "a" / "b c" / "ü", "here", str(tmp_path)):
        assert loads(path, state) == []


@pytest.mark.parametrize("thread_count", [1, 2])
def test_one_writer_serves_several_saves(
    thread_count: int, tmp_path: Path, rng: random.Random
) -> None:
    writer = FastWriter(tmp_path / "first", thread_count=thread_count)
    states = [_random_state() for _ in range(5)]

    save(states[0], writer)
    assert loads(tmp_path / "first", states[0]) == []
    save(states[1], writer)  # Without an id: the same directory.
    assert loads(tmp_path / "first", states[1]) == []
    save(states[2], writer, checkpoint_id=tmp_path / "second")
    save(states[3], writer)
    save(states[4], writer, checkpoint_id=str(tmp_path / "first"))

    assert loads(tmp_path / "first", states[4]) == []
    assert loads(tmp_path / "second", states[3]) == []
    assert len(data_files(tmp_path / "first")) == thread_count
    assert len(data_files(tmp_path / "second")) == thread_count


def test_a_writer_serves_small_saves_after_large_and_large_after_small(
    tmp_path: Path, rng: random.Random
) -> None:
    writer = FastWriter(tmp_path)
    for numel in (1, 40 << 20, 0, 9 << 20, 100):
        state = {"t": random_tensor([numel], torch.uint8)}
        save(state, writer)
        assert loads(tmp_path, state) == []


def test_save_ids_never_recur(tmp_path: Path) -> None:
    writer = FastWriter(tmp_path)
    ids = set()
    for _ in range(3):
        ids.add(save({"t": torch.ones(1)}, writer).storage_meta.save_id)
        ids.add(save({"t": torch.ones(1)}, writer, checkpoint_id=tmp_path).storage_meta.save_id)
    assert len(ids) == 6


def test_pickled_copies_of_writer_and_reader_work(state: dict[str, Any], tmp_path: Path) -> None:
    writer = FastWriter(
        tmp_path / "1", True, False, 2, cache_staged_state_dict=True, io=IoOptions(direct=False)
    )
    staged = writer.stage(state)
    save(state, writer)
    reader = FastReader(tmp_path / "1", verify=False)
    load(blank(state), reader)

    pickled = pickle.dumps(writer)
    writer_copy = pickle.loads(pickled)
    reader_copy = pickle.loads(pickle.dumps(reader))

    assert len(pickled) < 10_000, "the copy carries buffers or the staged state dict"
    del staged
    for name in ("path", "thread_count", "sync_files", "io", "overwrite", "io_mode"):
        assert getattr(writer_copy, name) == getattr(writer, name)
    assert differences(state, load(blank(state), reader_copy)) == []
    save(state, writer_copy, checkpoint_id=tmp_path / "2")
    save(state, writer)
    assert loads(tmp_path / "1", state) == []
    assert loads(tmp_path / "2", state) == []


def test_io_mode_says_how_the_last_save_was_written(state: dict[str, Any], tmp_path: Path) -> None:
    writer = FastWriter(tmp_path)
    assert writer.io_mode is None
    save(state, writer)
    mode = writer.io_mode

    assert isinstance(mode, IoMode)
    assert mode.queue in ("io_uring", "threads")
    assert re.fullmatch(
        r"(io_uring|threads), (O_DIRECT|page cache)(, registered buffers)?( \(.+\))?", str(mode)
    )
    assert mode.direct or mode.reasons, "a fallback has a reason"
    buffered = FastWriter(tmp_path, io=IoOptions(direct=False))
    save(state, buffered)
    assert not buffered.io_mode.direct
    assert str(IoMode("threads", False, False, ("a", "b"))) == "threads, page cache (a; b)"
    assert str(IoMode("io_uring", True, True)) == "io_uring, O_DIRECT, registered buffers"


SAVE_AND_LOAD = """
import sys, torch
from checkpoints import loads, save
from torch_ckpt import FastWriter
writer = FastWriter(sys.argv[1])
state = {"large": torch.randn(3, 1 << 19), "strided": torch.randn(400, 500).t(), "step": 3}
save(state, writer)
print("differences:", loads(writer.path, state))
print("mode:", writer.io_mode)
"""


def test_threads_take_the_place_of_io_uring_when_asked(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    printed = run_python(SAVE_AND_LOAD, tmp_path / "c", TORCH_CKPT_IO="threads")

    assert "differences: []" in printed
    assert re.search(r"mode: threads, .*TORCH_CKPT_IO=threads is set", printed), printed


def test_a_file_system_without_direct_io_is_written_through_the_page_cache(
    state: dict[str, Any], small_disk: Path
) -> None:
    writer = FastWriter(small_disk)
    save(state, writer)

    assert loads(small_disk, state) == []
    assert loads(small_disk, state, FileSystemReader) == []
    if not writer.io_mode.direct:  # Newer kernels have direct I/O on tmpfs.
        assert any("O_DIRECT" in why or "direct I/O" in why for why in writer.io_mode.reasons)


@pytest.fixture
def fresh_plan_cache() -> Iterator[None]:
    """The plan cache belongs to the classes of planners."""
    caches = [name for name in vars(SavePlanner) if name.startswith("_cached_")]
    assert caches
    for name in caches:
        getattr(SavePlanner, name).clear()
    yield
    for name in caches:
        getattr(SavePlanner, name).clear()


@pytest.mark.parametrize("thread_count", [1, 3])
def test_cached_plans_save_every_time_and_follow_changes(
    thread_count: int, tmp_path: Path, rng: random.Random, fresh_plan_cache: None
) -> None:
    writer = FastWriter(tmp_path / "same", thread_count=thread_count)
    shapes = [[3, 5], [3, 5], [3, 5], [4, 400_000], [4, 400_000], [2]]
    for step, shape in enumerate(shapes):
        state = {"t": random_tensor(shape, torch.float32), "step": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, writer, planner=planner)
        assert loads(tmp_path / "same", state) == []
        save(state, FastWriter(tmp_path / str(step)), planner=planner)

    for step in range(len(shapes)):
        loaded = load({"step": None}, FastReader(tmp_path / str(step)))
        assert loaded["step"] == step


def _async_save(state: dict[str, Any], **options: Any) -> Future[Any]:
    result = dcp.async_save(state, **options)
    return getattr(result, "upload_completion", result)


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_async_save_in_a_thread_saves_what_was_there_when_it_was_called(
    cached: bool, tmp_path: Path, rng: random.Random
) -> None:
    writer = FastWriter(tmp_path, cache_staged_state_dict=cached)
    for step in range(3):
        state = _random_state()
        expected = {**state, "model": {k: t.clone() for k, t in state["model"].items()}}
        try:
            path = tmp_path / str(step)
            future = _async_save(state, storage_writer=writer, checkpoint_id=path, no_dist=True)
        except RuntimeError as error:
            if cached and not torch.accelerator.is_available():
                pytest.skip(f"stock staging cannot pin memory here: {error}")
            raise
        for tensor in state["model"].values():
            tensor.zero_()
        future.result(ASYNC_TIMEOUT_S)
        assert loads(path, expected) == []


def test_async_save_in_a_thread_uses_the_process_group(
    world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    future = _async_save(state, storage_writer=FastWriter(tmp_path))

    assert future.result(ASYNC_TIMEOUT_S).state_dict_metadata.keys() >= {"large", "step"}
    dist.barrier()
    assert loads(tmp_path, state) == []


@pytest.fixture
def background_process(world_of_one: None) -> Iterator[None]:
    """Ends the process that DCP starts for ``async_save`` and keeps for the next."""
    assert process_executor._CHECKPOINT_PROCESS is None
    try:
        yield
    finally:
        process = process_executor._CHECKPOINT_PROCESS
        process_executor._CHECKPOINT_PROCESS = None
        if process is not None:
            process._send(process_executor._CheckpointSaveProcessControlOpts.TERMINATE)
            process._save_process.join(ASYNC_TIMEOUT_S)
            assert process._save_process.exitcode == 0


def test_async_save_in_a_process_saves_fails_and_saves_again(
    background_process: None, state: dict[str, Any], tmp_path: Path
) -> None:
    def save_in_process(state: dict[str, Any], writer: FastWriter, **options: Any) -> Any:
        process = AsyncCheckpointerType.PROCESS
        return _async_save(state, storage_writer=writer, async_checkpointer_type=process, **options)

    writer = FastWriter(tmp_path / "1")
    save(_random_state(), writer)  # Which leaves buffers in it.
    metadata = save_in_process(state, writer).result(ASYNC_TIMEOUT_S)
    assert loads(tmp_path / "1", state) == []
    assert len(data_files(tmp_path / "1")) == 1
    assert metadata.storage_data

    refused = save_in_process(state, FastWriter(tmp_path / "1", overwrite=False))
    error = refused.exception(ASYNC_TIMEOUT_S)
    assert "Checkpoint already exists" in str(error)

    save_in_process(state, writer, checkpoint_id=tmp_path / "2").result(ASYNC_TIMEOUT_S)
    assert loads(tmp_path / "2", state) == []


@pytest.mark.thin("True")
@pytest.mark.parametrize("stock", [False, True])
def test_installed_reaches_the_process_of_async_save(
    stock: bool, background_process: None, state: dict[str, Any], tmp_path: Path
) -> None:
    process = AsyncCheckpointerType.PROCESS
    writer = FileSystemWriter(tmp_path) if stock else None
    with torch_ckpt.installed():
        future = _async_save(
            state, checkpoint_id=tmp_path, storage_writer=writer, async_checkpointer_type=process
        )
    future.result(ASYNC_TIMEOUT_S)

    assert [_is_ours(file) for file in data_files(tmp_path)] == [True]
    assert loads(tmp_path, state) == []


def test_overwriting_a_checkpoint_warns_as_stock_does(
    state: dict[str, Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected an existing")
        save(state, FastWriter(tmp_path))
    for kind in (FileSystemWriter, FastWriter):
        with pytest.warns(UserWarning, match="existing checkpoint in .* since self.overwrite=True"):
            save(state, kind(tmp_path))


def test_programs_find_the_attributes_of_the_stock_reader_and_writer(
    state: dict[str, Any], tmp_path: Path
) -> None:
    found = {}
    for name, reader in (("stock", FileSystemReader(tmp_path)), ("ours", FastReader(tmp_path))):
        save(state, FastWriter(tmp_path, overwrite=True))
        assert dict(reader.storage_data) == {}
        load(blank(state), reader)
        found[name] = {index: info.length for index, info in reader.storage_data.items()}
        assert reader.fs.exists(tmp_path / ".metadata")
    assert found["ours"] == found["stock"]
    assert len(found["ours"]) == 14
    assert FastWriter(tmp_path).fs.ls(tmp_path)


def differs(state: dict[str, Any], path: Path, reader: type = FastReader, **how: Any) -> list[str]:
    """As `loads`, with the process group."""
    loaded = blank(state)
    dcp.load(loaded, storage_reader=reader(path), **how)
    return differences(state, loaded)


def test_saves_without_collectives_load_and_replace_one_another(
    world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    for other in (_random_state(), state):
        dcp.save(other, storage_writer=FastWriter(tmp_path), use_collectives=False)

        names = {path.name for path in tmp_path.iterdir()}
        assert "__0.metadata" in names
        assert ".metadata" not in names
        (file,) = data_files(tmp_path)
        assert re.fullmatch(r"__0_0_[0-9a-f]{16}\.distcp", file.name)
        for reader in (FastReader, FileSystemReader):
            assert differs(other, tmp_path, reader) == []
    writer = FastWriter(tmp_path, thread_count=2)
    for other in (_random_state(), state):
        dcp.save(other, storage_writer=writer, use_collectives=False)
        assert len(data_files(tmp_path)) == 2
        assert differs(other, tmp_path) == []


def test_saves_of_all_ranks_and_of_one_keep_one_index_each(
    world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    """They share a directory: the data of each stays, since the other one may refer to it."""
    for use_collectives in (True, False, True, True, False, False):
        options: Any = {"use_collectives": use_collectives}
        dcp.save(state, storage_writer=FastWriter(tmp_path), **options)
    indexes = sorted(path.name for path in tmp_path.iterdir() if ".index." in path.name)
    assert [name.partition(".")[0] for name in indexes] == ["", "__0"]
    assert differs(state, tmp_path) == []
    assert not examine(Location(tmp_path)).damage


@pytest.mark.parametrize(
    ("writer", "options"),
    [
        (FileSystemWriter, {"use_collectives": False}),
        (FastWriter, {"no_dist": False}),
        (FastWriter, {"no_dist": True}),
    ],
)
def test_checkpoints_of_a_process_group_load(
    writer: type, options: dict[str, Any], world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    dcp.save(state, storage_writer=writer(tmp_path), **options)

    assert differs(state, tmp_path, no_dist=options.get("no_dist", False)) == []


def _is_ours(file: Path) -> bool:
    return re.fullmatch(r"__\d+_\d+_[0-9a-f]{16}\.distcp", file.name) is not None


class _OwnWriter(FileSystemWriter):
    pass


def test_installed_serves_save_async_save_and_load_and_is_undone(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []
    read_data = FastReader.read_data
    monkeypatch.setattr(
        FastReader, "read_data", lambda self, *rest: readers.append(self) or read_data(self, *rest)
    )

    def save_both(name: str) -> list[Path]:
        dcp.save(state, checkpoint_id=tmp_path / f"{name} 1", no_dist=True)
        future = _async_save(state, checkpoint_id=tmp_path / f"{name} 2", no_dist=True)
        future.result(ASYNC_TIMEOUT_S)
        loaded = blank(state)
        dcp.load(loaded, checkpoint_id=tmp_path / f"{name} 1", no_dist=True)
        assert differences(state, loaded) == []
        return [file for i in (1, 2) for file in data_files(tmp_path / f"{name} {i}")]

    with torch_ckpt.installed():
        with torch_ckpt.installed():
            inner = save_both("inner")
        outer = save_both("outer")
        named = tmp_path / "named"
        dcp.save(state, storage_writer=_OwnWriter(named), no_dist=True)
    with pytest.raises(KeyError), torch_ckpt.installed():
        raise KeyError
    after = save_both("after")

    assert [_is_ours(file) for file in inner + outer] == [True] * 4
    assert [_is_ours(file) for file in data_files(named) + after] == [False] * 3
    assert len(readers) == 2


def test_installed_async_save_is_ours_even_if_it_starts_after_the_context(
    state: dict[str, Any], tmp_path: Path
) -> None:
    staging: Future[dict[str, Any]] = Future()

    class LateStager:
        should_synchronize_after_execute = False

        def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
            return staging

        def synchronize_staging(self) -> None: ...

        def close(self) -> None: ...

    with torch_ckpt.installed():
        stager = LateStager()
        future = _async_save(state, checkpoint_id=tmp_path, async_stager=stager, no_dist=True)
    staging.set_result(state)
    future.result(ASYNC_TIMEOUT_S)

    assert [_is_ours(file) for file in data_files(tmp_path)] == [True]
    assert loads(tmp_path, state) == []


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.rand(1).item())
    model(torch.randn(5, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_model_and_optimizer_come_back_through_the_state_dict_functions_or_in_place(
    tmp_path: Path, rng: random.Random
) -> None:
    model, optimizer = _model_and_optimizer()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, FastWriter(tmp_path))

    other, other_optimizer = _model_and_optimizer()
    states = get_state_dict(other, other_optimizer)
    loaded = load({"model": states[0], "optimizer": states[1]}, FastReader(tmp_path))
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )

    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    assert differences(optimizer.state_dict(), other_optimizer.state_dict()) == []


def test_more_files_than_are_open_at_a_time_load(tmp_path: Path, rng: random.Random) -> None:
    state = {str(i): random_tensor([rng.randrange(60_000)], torch.uint8) for i in range(300)}
    writer = FastWriter(tmp_path, single_file_per_rank=False, thread_count=2, sync_files=False)
    save(state, writer)

    assert len(data_files(tmp_path)) == 300
    assert loads(tmp_path, state) == []


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("case", ODD_THEN_STRIDED)
def test_buffered_save_stores_strided_tensors_after_one_of_odd_length(
    case: str, stages: bool, tmp_path: Path
) -> None:
    dtype, numel, strided = ODD_THEN_STRIDED[case]
    state = {"a": random_tensor([numel], dtype), "b": strided()}
    writer = FastWriter(tmp_path, io=IoOptions(direct=False, buffer_nbytes=512 << 10))
    if stages:
        dcp.async_save(state, storage_writer=writer).result(ASYNC_TIMEOUT_S)
    else:
        save(state, writer)
    assert loads(tmp_path, state) == []
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(loaded["b"], state["b"])
