"""What several ranks hold is shared out among them, under stock DCP's own planner."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from replicated_states import MIB, STATES, replicated, written_nbytes
from states import READERS, assert_stored, failures_of, full_value
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.cli.main import main

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


def save_and_load(name: str, path: Path, options: dict[str, Any]) -> None:
    dcp.save(STATES[name](), storage_writer=FastWriter(path, **options))
    assert_stored(path, STATES[name]())


@pytest.mark.parametrize("name", STATES)
def test_all_ranks_write_about_as_much_and_both_readers_find_it(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    worlds.run(4, save_and_load, name, tmp_path, {})
    per_rank = written_nbytes(tmp_path, 4)
    assert max(per_rank) <= 1.02 * sum(per_rank) / 4 + MIB, per_rank
    assert main(["verify", str(tmp_path)]) == 0


def test_the_planner_decides_where_sharing_is_off(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, save_and_load, "replicated", tmp_path, {"share_replicas": False})
    metadata = FastReader(tmp_path).read_metadata()
    assert {
        len(entry.chunks)
        for entry in metadata.state_dict_metadata.values()
        if hasattr(entry, "chunks")
    } == {1}
    per_rank = written_nbytes(tmp_path, 4)
    assert max(per_rank) > 1.02 * sum(per_rank) / 4 + MIB


@pytest.mark.thin("a file for each")
@pytest.mark.parametrize(
    "options",
    [{"thread_count": 2}, {"single_file_per_rank": False}, {"_extensions": [ZStandard()]}],
    ids=["files", "a file for each", "transforms"],
)
def test_every_way_to_write_has_cut_tensors_too(
    worlds: Worlds, tmp_path: Path, options: dict[str, Any]
) -> None:
    if "_extensions" in options and not ZStandard.is_available():
        pytest.skip("there is no zstd")
    worlds.run(3, save_and_load, "replicated", tmp_path, options)
    stored = FastReader(tmp_path).read_metadata().state_dict_metadata
    assert len(stored["model.embedding"].chunks) > 1
    assert len(stored["model.layer.3"].chunks) == 1


@on_ranks(2)
def test_what_only_torch_can_store_is_not_cut(path: Path) -> None:
    torch.manual_seed(1)
    values = torch.randn(1500, 2000)
    state = {"q": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "w": values}
    dcp.save(state, storage_writer=FastWriter(path))
    for reader in READERS.values():
        loaded = {
            "q": torch.quantize_per_tensor(torch.zeros(1500, 2000), 0.1, 0, torch.qint8),
            "w": torch.zeros(1500, 2000),
        }
        dcp.load(loaded, storage_reader=reader(path))
        assert torch.equal(loaded["q"].int_repr(), state["q"].int_repr())
        assert torch.equal(loaded["w"], values)
    chunks = FastReader(path).read_metadata().state_dict_metadata
    assert (len(chunks["q"].chunks), len(chunks["w"].chunks)) == (1, 2)


def why_not(state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> str:
    """Why a save fails on whatever rank."""
    writer = FastWriter(path, **options)
    failures = failures_of(dcp.save, state, storage_writer=writer, planner=planner)
    return "; ".join({f"{failure.kind}: {failure.message}" for failure in failures.values()})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("sizes", "rank 0 and rank 2 disagree on its sizes: [3, 5] and [4, 5]"),
        ("dtype", "rank 0 and rank 1 disagree on its dtype: uint8 and int8"),
    ],
)
@on_ranks(3)
def test_ranks_that_disagree_on_a_tensor_all_learn_which(
    path: Path, key: str, message: str
) -> None:
    rank = dist.get_rank()
    model = {
        "same": torch.zeros(4),
        "sizes": torch.zeros(3 + (key == "sizes" and rank == 2), 5),
        "dtype": torch.zeros(4, dtype=torch.int8 if key == "dtype" and rank else torch.uint8),
    }
    said = why_not({"model": model}, path)
    assert said.startswith(f"MismatchError: cannot plan 'model.{key}': {message}")


def cached_steps() -> list[dict[str, Any]]:
    """What ranks hold of five steps: the same, then more, or less, on one rank or on all."""
    rank = dist.get_rank()
    steps: list[dict[str, Any]] = []
    for step in range(6):
        names = ["a", "b", "c", "d", "e"]
        if step >= 2 and rank == 1:
            names.append("of one rank")
        if step >= 3 and rank == 2:
            names.remove("b")
        if step >= 4:
            names.remove("a")
        steps.append({n: full_value(f"{n} {step}", (700, 1500), torch.float32) for n in names})
    return steps


@on_ranks(3)
def test_plans_that_stocks_planner_keeps_lose_nothing(path: Path) -> None:
    """Saves with one planner after another, which keep plans from save to save."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step, state in enumerate(cached_steps()):
        folder = path / str(step)
        # Stock's writer meets what ours has left in the cache, and the other way round.
        writer = FileSystemWriter if step in (1, 3) else FastWriter
        dcp.save(state, storage_writer=writer(folder), planner=planner)
        assert_stored(folder, state)
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
        SavePlanner._cached_final_save_plan,
    ):
        cache.clear()


class TrimmingPlanner(DefaultSavePlanner):
    """Forgets an item when it is told the final plan."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(dataclasses.replace(new_plan, items=new_plan.items[:-1]))


@on_ranks(2)
def test_what_the_plan_has_and_nobody_writes_is_not_committed(path: Path) -> None:
    said = why_not(replicated(), path, TrimmingPlanner())
    assert "its planner has changed it since" in said
    said = why_not(replicated(), path, TrimmingPlanner(), share_replicas=False)
    assert re.search(r"no rank has written '[a-z0-9.]+'.*, which is in the plan", said)
    dist.barrier()
    # Plain DCP tells no other rank, which may still look for the pending file.
    assert [file for file in path.iterdir() if file.suffix != ".tmp"] == []


@on_ranks(2)
def test_rows_that_do_not_make_up_a_tensor_are_not_committed(path: Path) -> None:
    # Rank 0 has the values, others know the tensor's form only.
    device = "cpu" if dist.get_rank() == 0 else "meta"
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    state = {"w": torch.ones(4000, 500, device=device)}
    said = why_not(state, path, planner, check_replicas="off")  # Else it is not cut.
    assert "the rows that the ranks wrote do not cover the tensor" in said
    assert "FastWriter(share_replicas=False)" in said
    dist.barrier()
    assert list(path.iterdir()) == []
