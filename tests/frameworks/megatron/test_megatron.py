"""Megatron-Core's dist_checkpointing with our strategies, and with its own as the oracle."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from example_runs import output_of
from ranks import Worlds, on_ranks
from states import assert_same, failures_of
from support.commit_files import index_file
from support.process_io import nbytes_read_by
from torch.distributed.checkpoint import CheckpointException

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing as mcore
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron_states import KEYS, entities, expected, on_cpu, shard, whole

import torch_ckpt
from torch_ckpt import CheckpointError, FastReader, FastWriter
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.megatron import strategies as megatron
from torch_ckpt.frameworks.megatron.queues import async_modules
from torch_ckpt.frameworks.megatron.strategies import FastLoadStrategy, FastSaveStrategy
from torch_ckpt.storage import reader

pytestmark = [pytest.mark.framework("megatron"), pytest.mark.timeout(240)]

SAVES: dict[str, Any] = {
    "fast": FastSaveStrategy,
    "stock": lambda **given: torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1, **given),
}
LOADS: dict[str, Any] = {
    "fast": FastLoadStrategy,
    "stock": torch_dist.TorchDistLoadShardedStrategy,
}


def save(path: Path, by: str, axis: int = 0, wrapped: bool = False, **options: Any) -> None:
    path.mkdir(exist_ok=True)
    dist.barrier()
    strategy = SAVES[by](**options)
    if wrapped:
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(strategy)
    with on_cpu():
        mcore.save(
            entities(axis, twice=not wrapped),
            str(path),
            strategy,
            content_metadata={"kind": "test"},
        )


def load(path: Path, by: str, axis: int = 0, wrapped: bool = False, rows: int = 12) -> None:
    """Loads, and compares with what was saved."""
    strategy = LOADS[by]()
    if wrapped:
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(strategy)
    blank, wanted = entities(axis, blank=True, rows=rows), expected(axis, rows=rows)
    patches = [mock.patch.object(fully_parallel, "exchange_by_distribution", exchange_on_cpu)]
    with on_cpu(), contextlib.ExitStack() as stack:
        for patch in patches if wrapped else []:
            stack.enter_context(patch)
        loaded = mcore.load(blank, str(path), strategy)
        assert mcore.load_content_metadata(str(path)) == {"kind": "test"}
    loaded.pop("content_metadata")
    assert_same(loaded, wanted)


def exchange_on_cpu(loaded: Any, unloaded: Any, distribution: Any, group: Any, _: Any) -> Any:
    """Megatron's other algorithms make buffers on CUDA devices."""
    from megatron.core.dist_checkpointing.exchange_utils import (
        exchange_loaded_tensors_gather_object,
    )

    return exchange_loaded_tensors_gather_object(loaded, unloaded, distribution, group)


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of both strategies, of two ranks: `fast` and `stock`."""
    path = tmp_path_factory.mktemp("megatron")
    for by in SAVES:
        worlds.run(2, save, path / by, by, timeout_s=120)
    return path


@pytest.mark.thin(1)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("by", "other"), [("fast", "fast"), ("fast", "stock"), ("stock", "fast")])
@pytest.mark.parametrize("axis", [0, 1])
def test_all_entities_load_along_any_axis(
    worlds: Worlds, saved: Path, by: str, other: str, axis: int, wrapped: bool
) -> None:
    worlds.run(2, load, saved / by, other, axis, wrapped)


def load_keys(path: Path, by: str, axis: int) -> None:
    """Loads on any number of ranks: only tensors can change their sharding."""
    state = {key: shard(key, axis, blank=True) for key in KEYS}
    with on_cpu():
        loaded = mcore.load(state, str(path), LOADS[by]())
    for key in KEYS:
        assert_same(loaded[key], shard(key, axis).data)


@pytest.mark.thin(1)
@pytest.mark.parametrize(("by", "other"), [("fast", "fast"), ("fast", "stock"), ("stock", "fast")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_tensors_load_on_another_number_of_ranks(
    worlds: Worlds, saved: Path, by: str, other: str, ranks: int
) -> None:
    worlds.run(ranks, load_keys, saved / by, other, 1)


@pytest.mark.parametrize("by", ["fast", "stock"])
@pytest.mark.parametrize("rows", [10, 16])
def test_a_tensor_with_another_number_of_rows_loads_what_is_stored_and_zeros(
    worlds: Worlds, saved: Path, by: str, rows: int
) -> None:
    worlds.run(2, load_resized, saved / by, rows)


def load_resized(path: Path, rows: int) -> None:
    rank, stored = dist.get_rank(), whole("embedding")
    wanted = torch.zeros(rows, 6)
    wanted[:12] = stored[:rows]
    part = torch.ones_like(wanted.chunk(2)[rank])
    tensor = ShardedTensor.from_rank_offsets(
        "embedding", part, (0, rank, 2), allow_shape_mismatch=True
    )
    with on_cpu():
        loaded = mcore.load({"e": tensor}, str(path), FastLoadStrategy())
    assert_same(loaded["e"], wanted.chunk(2)[rank])
    assert loaded["e"] is part


@on_ranks(2)
def test_a_tensor_of_another_shape_is_an_error_that_names_it_on_every_rank(path: Path) -> None:
    save(path, "fast")
    tensor = ShardedTensor.from_rank_offsets("rows", torch.zeros(3, 24), (0, dist.get_rank(), 2))
    with on_cpu():
        failures = failures_of(mcore.load, {"rows": tensor}, str(path), FastLoadStrategy())
    assert "'rows'" in failures[0].message or "rows" in failures[0].message


@pytest.mark.parametrize("by", ["fast", "stock"])
@pytest.mark.parametrize("strict", list(StrictHandling))
def test_missing_and_unexpected_keys_are_reported_as_megatron_does(
    worlds: Worlds, saved: Path, by: str, strict: StrictHandling
) -> None:
    ours = worlds.run(2, load_strictly, saved / by, "fast", strict)
    assert ours == worlds.run(2, load_strictly, saved / by, "stock", strict)


def load_strictly(path: Path, by: str, strict: StrictHandling) -> Any:
    """Returns what a load returned or raised, for one key more and many less than are stored."""
    state = {"rows": shard("rows", 0, blank=True), "new": shard("new", 0, blank=True)}
    with on_cpu():
        try:
            answer = mcore.load(state, str(path), LOADS[by](), strict=strict)
        except BaseException as error:  # DCP's CheckpointException is no Exception.
            return "CheckpointException" if "Checkpoint" in repr(error) else type(error).__name__
    loaded, *keys = answer if isinstance(answer, tuple) else (answer,)
    assert_same(loaded["rows"], shard("rows", 0).data)
    return sorted(map(str, loaded)), *map(sorted, keys)


@on_ranks(2)
def test_the_functions_for_tools_read_our_checkpoints(path: Path) -> None:
    save(path, "fast")
    with on_cpu():
        metadata = mcore.load_tensors_metadata(str(path))
        assert {key: tuple(value.global_shape) for key, value in metadata.items()} == {
            **{key: tuple(whole(key).shape) for key in KEYS},
        }
        objects = set(serialization.load_sharded_metadata(str(path))) - set(metadata)
        # Later versions store what is not sharded as an object.
        assert {key for key in objects if not key.startswith("common_state/")} == {
            "extra/shard_0_2",
            "extra/shard_1_2",
            "same/shard_0_1",
        }
        assert mcore.load_common_state_dict(str(path))["step"] == 7
        plain = mcore.load_plain_tensors(str(path))
    assert_same({key: plain[key] for key in KEYS}, {key: whole(key) for key in KEYS})


def remove_all_but_the_last(directory: Location, names: list[str]) -> None:
    remove_files(directory, names[:-1])
    raise KeyboardInterrupt


@on_ranks(2)
def test_keys_with_a_hint_have_files_of_their_own_and_are_removed(path: Path) -> None:
    save(path, "fast", separation_hint="pair", thread_count=2)
    names = sorted(file.name[: -len("_0123456789abcdef.distcp")] for file in path.glob("*.distcp"))
    others = [f"__{rank}_{number}" for rank in range(2) for number in range(2)]
    assert names == sorted([*others, *(f"pair{name}" for name in others)])
    dist.barrier()
    save(path, "fast", separation_hint="pair")  # Replaces all files.
    assert len(list(path.glob("pair__*.distcp"))) == 2
    dist.barrier()
    if dist.get_rank() == 0:
        with (
            mock.patch.object(megatron, "remove_files", remove_all_but_the_last),
            pytest.raises(KeyboardInterrupt),
        ):
            FastLoadStrategy().remove_sharded_tensors(str(path), "pair")
        FastLoadStrategy().remove_sharded_tensors(str(path), "pair")
    dist.barrier()
    assert not list(path.glob("pair*"))
    for by in LOADS:
        state = {"rows": shard("rows", 1, blank=True)}
        with on_cpu():
            loaded = mcore.load(state, str(path), LOADS[by](), strict=StrictHandling.LOG_ALL)
        assert_same(loaded["rows"], shard("rows", 1).data)


@on_ranks(2)
def test_plans_for_megatron_are_those_that_megatron_makes(path: Path) -> None:
    stock, ours = path / "stock", path / "ours"
    for by, folder in (("stock", stock), ("fast", ours)):
        save(folder, by, wrapped=True, cached_metadata=True)
    dist.barrier()
    of_stock, of_ours = (
        torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
        for folder in (stock, ours)
    )
    # With torch 2.11, Megatron itself stores no plans.
    stored = getattr(of_stock, "all_local_plans", of_ours.all_local_plans)
    for theirs, plan in zip(stored, of_ours.all_local_plans, strict=True):
        # Megatron stores layers by torch's own ShardedTensor, which lists other properties.
        assert {item.index.fqn: item for item in plan.items}.keys() == {
            item.index.fqn for item in theirs.items
        }
        both = zip(sorted(plan.items, key=by_name), sorted(theirs.items, key=by_name), strict=True)
        for item, other in both:
            assert item.index == other.index
            if "layers" not in item.index.fqn:
                assert item == other
    load(ours, "stock", wrapped=True)


def by_name(item: Any) -> Any:
    return item.index.fqn, tuple(item.index.offset or ())


@on_ranks(2)
def test_replicas_are_shared_out_by_size(path: Path) -> None:
    replicas = {
        f"w{number}": ShardedTensor.from_rank_offsets(
            f"w{number}", torch.full((256, 1024), number), replica_id=(0, 0, dist.get_rank())
        )
        for number in range(3)
    }
    with on_cpu():
        path.mkdir(exist_ok=True)
        mcore.save(replicas, str(path), FastSaveStrategy())
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) <= 1.02 * sum(sizes) / 2


@on_ranks(2)
def test_a_group_reads_each_stored_byte_once(path: Path) -> None:
    """Replicas of 32 MiB: less would be read by each rank."""
    whole = torch.arange(8 << 20, dtype=torch.float32)
    replicas = {"w": ShardedTensor.from_rank_offsets("w", whole, replica_id=(dist.get_rank(),))}
    path.mkdir(exist_ok=True)
    with on_cpu():
        mcore.save(replicas, str(path), FastSaveStrategy())
    read = {}
    for group in (None, dist.group.WORLD):
        tensor = torch.zeros_like(whole)
        state = {"w": ShardedTensor.from_rank_offsets("w", tensor, replica_id=(dist.get_rank(),))}
        strategy = FastLoadStrategy(exchange_group=group)
        with on_cpu():
            nbytes = nbytes_read_by(mcore.load, state, str(path), strategy)
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, nbytes)
        read[group] = sum(ranks)
        assert torch.equal(tensor, whole)
    assert read[dist.group.WORLD] < 1.05 * whole.nbytes < 1.9 * whole.nbytes < read[None]


@on_ranks(2)
def test_two_loads_of_a_strategy_open_the_checkpoint_once(path: Path) -> None:
    save(path, "fast")
    dist.barrier()
    strategy = FastLoadStrategy()
    opened = 0
    open_stored = reader.open_stored

    def count(*args: Any, **options: Any) -> Any:
        nonlocal opened
        opened += 1
        return open_stored(*args, **options)

    with on_cpu(), mock.patch.object(reader, "open_stored", count):
        for _ in range(2):
            state = mcore.load({"rows": shard("rows", 1, blank=True)}, str(path), strategy)
            assert_same(state["rows"], shard("rows", 1).data)
        assert opened == 1
        dist.barrier()
        save(path, "fast", axis=1)  # Another checkpoint in its place is opened anew.
        state = mcore.load({"rows": shard("rows", 1, blank=True)}, str(path), strategy)
        assert_same(state["rows"], shard("rows", 1).data)
    assert opened == 2


@on_ranks(2)
@pytest.mark.small
def test_megatrons_own_strategies_are_replaced_within_installed(path: Path) -> None:
    parallel_state.initialize_model_parallel()
    try:
        with on_cpu():
            with torch_ckpt.installed():
                path.mkdir(exist_ok=True)
                mcore.save({"rows": shard("rows", 0)}, str(path))
                assert index_file(path).exists()
                state = {"rows": shard("rows", 1, blank=True)}
                with mock.patch.object(FastReader, "read_data", side_effect=OSError("ours")):
                    assert "ours" in failures_of(mcore.load, state, str(path))[0].message
                state["new"] = shard("new", 0, blank=True)
                stock = torch_dist.TorchDistLoadShardedStrategy()
                loaded = mcore.load(state, str(path), stock, strict=StrictHandling.LOG_ALL)
                assert stock.report.missing == ("new",)
            assert_same(loaded["rows"], shard("rows", 1).data)
            dist.barrier()
            with mock.patch.object(FastReader, "read_data", side_effect=AssertionError):
                mcore.load({"rows": shard("rows", 1, blank=True)}, str(path))
    finally:
        parallel_state.destroy_model_parallel()


# ---- Asynchronous saves ----

STRATEGIES = ["mcore", "nvrx"]


def queue_of(strategy: str, persistent: bool) -> Any:
    return async_modules(strategy)["AsyncCallsQueue"](persistent=persistent)


def begin(path: Path, strategy: Any, queue: Any, name: str, state: dict[str, Any]) -> Any:
    """Schedules an asynchronous save as Megatron does."""
    path.mkdir(exist_ok=True)
    options: dict[str, Any] = {"async_sharded_save": True, "content_metadata": {"kind": "test"}}
    with contextlib.ExitStack() as stack:
        if "async_strategy" in inspect.signature(mcore.save).parameters:
            options["async_strategy"] = name
        else:  # 0.16.1 passes no name.
            save = functools.partial(FastSaveStrategy.async_save, strategy, async_strategy=name)
            stack.enter_context(mock.patch.object(strategy, "async_save", save))
        request = mcore.save(state, str(path), strategy, **options)
    queue.schedule_async_request(request)
    return request


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_queue_polls_until_the_commit_and_then_writes_metadata_json(
    worlds: Worlds, tmp_path: Path, name: str, persistent: bool
) -> None:
    if name == "nvrx":
        pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    worlds.run(2, save_asynchronously, tmp_path, name, persistent)
    worlds.run(2, load, tmp_path / "checkpoint", "fast")


def save_asynchronously(folder: Path, name: str, persistent: bool) -> None:
    path = folder / "checkpoint"
    go = folder / "go"
    finish = FastWriter.finish
    started = mock.Mock(side_effect=AssertionError("a process was started"))

    def finish_late(*args: Any) -> None:
        while not go.exists():
            time.sleep(0.01)
        finish(*args)

    state = entities(0)
    with (
        on_cpu(),
        mock.patch.object(FastWriter, "finish", finish_late),
        mock.patch("multiprocessing.process.BaseProcess.start", started),
    ):
        queue = queue_of(name, persistent)
        request = begin(path, FastSaveStrategy(), queue, name, state)
        assert type(request).__module__.startswith(
            "nvidia_resiliency_ext" if name == "nvrx" else "megatron"
        )
        for value in torch.utils._pytree.tree_leaves(state):
            if isinstance(value, ShardedTensor):
                value.data.zero_()  # Training goes on.
        for _ in range(5):
            assert queue.maybe_finalize_async_calls() == []
        assert queue.get_num_unfinalized_calls() == 1
        assert not (path / ".metadata").exists()
        assert not (path / "metadata.json").exists()
        dist.barrier()
        go.touch()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert (path / ".metadata").exists()
        assert json.loads((path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
        queue.close()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_request_that_finalizes_our_save_runs_its_own_function(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    if name == "nvrx":
        pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    worlds.run(2, finalize_with_another, tmp_path, name)


def finalize_with_another(folder: Path, name: str) -> None:
    """As Megatron does with --logits-save-dir."""
    path, other = folder / "checkpoint", folder / f"logits-{dist.get_rank()}"
    path.mkdir(exist_ok=True)
    with on_cpu():
        queue = queue_of(name, False)
        saving = FastSaveStrategy().async_save({"rows": shard("rows", 0)}, path, name)
        finalized = saving.finalize_fns.copy()
        saving.finalize_fns.clear()
        queue.schedule_async_request(saving)
        arguments = {"async_fn": write, "async_fn_args": (other,), "finalize_fns": finalized}
        queue.schedule_async_request(type(saving)(**arguments))
        queue.maybe_finalize_async_calls(blocking=True)
        assert queue.get_num_unfinalized_calls() == 0
        assert (path / ".metadata").exists()
        assert other.read_text() == "written"
        queue.close()


def write(path: Path) -> None:
    path.write_text("written")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_failure_of_a_rank_is_raised_on_every_rank_when_the_save_is_finalized(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    if name == "nvrx":
        pytest.importorskip("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    worlds.run(2, fail_asynchronously, tmp_path, name)


def fail_asynchronously(folder: Path, name: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    strategy = FastSaveStrategy()
    failing = mock.patch.object(FastWriter, "write_data", fail)
    with on_cpu(), contextlib.ExitStack() as stack:
        queue = queue_of(name, False)
        if dist.get_rank() == 1:
            stack.enter_context(failing)
        begin(folder / "failed", strategy, queue, name, {"rows": shard("rows", 0)})
        failures = failures_of(queue.maybe_finalize_async_calls, blocking=True)
        assert list(failures) == [1]
        assert "no space left" in failures[1].message
        assert not (folder / "failed/.metadata").exists()
        assert not (folder / "failed/metadata.json").exists()
        stack.close()
        begin(folder / "next", strategy, queue, name, {"rows": shard("rows", 0)})
        queue.maybe_finalize_async_calls(blocking=True)
        assert (folder / "next/metadata.json").exists()


def fail_in_conversion(path: Path, asynchronous: bool) -> None:
    """One rank has no data to save; the next save succeeds."""
    state = {"rows": shard("rows", 0)}
    if dist.get_rank():
        state["rows"].data = None
    strategy = FastSaveStrategy()
    path.mkdir(exist_ok=True)

    def save_state() -> None:
        if asynchronous:
            for finalize in strategy.async_save(state, path).finalize_fns:
                finalize()
        else:
            strategy.save(state, path)

    with on_cpu():
        # With a cached plan, staging already notices.
        errors = (CheckpointException, CheckpointError, ValueError)
        with pytest.raises(errors, match="cannot save 'rows'"):
            save_state()
        state["rows"] = shard("rows", 0)
        save_state()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_without_data_fails_the_save_on_every_rank(
    worlds: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    worlds.run(2, fail_in_conversion, tmp_path / "checkpoint", asynchronous)


@on_ranks(2)
def test_a_rank_with_a_wrong_value_fails_the_load_on_every_rank(path: Path) -> None:
    save(path, "fast")
    tensor = shard("rows", 0, blank=True)
    if dist.get_rank():
        tensor.data = "no tensor"
    strategy = FastLoadStrategy(exchange_group=dist.group.WORLD, timeout_s=20)
    with on_cpu():
        failures = failures_of(strategy.load, {"rows": tensor}, path)
    assert list(failures) == [1]
    assert "has no attribute" in failures[1].message


@on_ranks(2)
def test_a_replica_may_be_without_data(path: Path) -> None:
    rank = dist.get_rank()
    one = ShardedTensor.from_rank_offsets("one", torch.ones(3), replica_id=(0, 0, rank))
    if rank:
        one.data = None
    FastSaveStrategy().save({"one": one}, path)
    loaded = {"one": torch.zeros(3)}
    torch_ckpt.load(loaded, checkpoint_id=path)
    assert loaded["one"].tolist() == [1.0] * 3


# ---- The example ----


def losses(folder: Path, *runs: tuple[int, str]) -> dict[str, float]:
    """Runs the example on so many ranks with these options; returns the loss of each step."""
    lines = "".join(
        output_of("megatron_gpt.py", f"--dir run {options}", ranks=ranks, folder=folder)
        for ranks, options in runs
    )
    found = re.findall(r"^(step \d+): loss ([\d.]+)$", lines, re.M)
    return {step: float(loss) for step, loss in found}


@pytest.mark.slow
def test_a_gpt_moves_between_tensor_and_pipeline_parallel_ranks(tmp_path: Path) -> None:
    for name in ("one", "moved"):
        (tmp_path / name).mkdir()
    stops = [f"--steps {steps}" for steps in (3, 6, 9)]
    alone = losses(tmp_path / "one", *((1, stop) for stop in stops))
    sizes = [(2, "--tp 2"), (2, "--pp 2"), (1, "")]
    moved = losses(
        tmp_path / "moved",
        *((ranks, f"{size} {stop}") for (ranks, size), stop in zip(sizes, stops, strict=True)),
    )
    assert list(moved) == list(alone) == [f"step {step}" for step in range(1, 10)]
    assert moved == pytest.approx(alone, abs=2e-5)
    assert alone["step 9"] < alone["step 1"] - 0.2


def load_and_report(path: Path, strict: StrictHandling, wrapped: bool) -> Any:
    """Returns the report of a load with one key more and many less than are stored."""
    state = {"rows": shard("rows", 0, blank=True), "new": shard("new", 0, blank=True)}
    fast = FastLoadStrategy()
    strategy: Any = fast
    if wrapped:
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(fast)
    patch = mock.patch.object(fully_parallel, "exchange_by_distribution", exchange_on_cpu)
    with on_cpu(), patch, contextlib.suppress(Exception, CheckpointException):
        mcore.load(state, str(path), strategy, strict=strict)
    return fast.report


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("by", ["fast", "stock"])
@pytest.mark.parametrize("strict", list(StrictHandling))
def test_a_load_reports_the_keys_that_megatron_has_removed(
    worlds: Worlds, saved: Path, by: str, strict: StrictHandling, wrapped: bool
) -> None:
    reports = worlds.run(2, load_and_report, saved / by, strict, wrapped)
    name = strict.name
    if name.startswith("RAISE") or name == "ASSUME_OK_UNEXPECTED":
        assert reports == [None, None]  # The load has failed.
        return
    every = set(dcp.FileSystemReader(saved / by).read_metadata().state_dict_metadata)
    for report in reports:
        assert report.missing == ("new",)
        assert report.unused is not None
        assert "rows" not in report.unused
        assert set(report.unused) < {key.partition("/shard_")[0] for key in every}
        assert len(report.unused) > 3


@on_ranks(2)
def test_a_tensor_of_another_shape_is_reported_as_resized(path: Path) -> None:
    save(path, "fast")
    state = entities(0, blank=True, rows=16)
    strategy = FastLoadStrategy()
    with on_cpu():
        mcore.load(state, str(path), strategy)
    assert strategy.report is not None
    assert strategy.report.resized == ("embedding",)
    assert strategy.report.missing == ()
    assert strategy.report.unused is None  # Megatron has not compared the keys.
