"""The report of a load on several ranks: names of all ranks, and the tensors of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastWriter, Run
from torch_ckpt.planning.load_report import LoadReport

pytestmark = pytest.mark.timeout(150)


def stage(rank: int, **more: Any) -> dict[str, Any]:
    """The state of a pipeline stage: two layers of its own, and what all stages have."""
    layers = {f"{number}": torch.ones(3) for number in range(2 * rank, 2 * rank + 2)}
    return {"model": {**layers, "norm": torch.ones(2), **more}, "step": 0}


@on_ranks(2)
def test_missing_and_unused_names_are_of_all_ranks_and_casts_of_each(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank), checkpoint_id=path)
    state = stage(rank, **{f"fresh{rank}": torch.zeros(1)}, both=torch.zeros(1))
    del state["model"][f"{2 * rank}"]  # Neither rank requests its first layer.
    if rank:
        del state["step"]  # Rank 0 requests it.
        state["model"]["3"] = torch.zeros(3, dtype=torch.float64)
    report = torch_ckpt.load(state, checkpoint_id=path, strict=False)
    assert report is not None
    assert set(report.unused or ()) == {"model.0", "model.2"}
    assert report.missing == ("model.fresh0", "model.both", "model.fresh1")
    assert report.cast == (("model.3",) if rank else ())
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, report)
    assert reports[0].unused == reports[1].unused
    assert state["model"][f"{2 * rank + 1}"].tolist() == [1.0] * 3


@on_ranks(2)
def test_a_sharded_tensor_is_cast_on_the_ranks_that_have_elements(path: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def of(dtype: torch.dtype) -> dict[str, Any]:
        local = torch.ones(1 - rank, 2, dtype=dtype)  # Rank 1 has no rows.
        return {
            "w": DTensor.from_local(local, mesh, [Shard(0)], shape=(1, 2), stride=(2, 1)),
            "x": DTensor.from_local(
                torch.ones(1, dtype=dtype), mesh, [Shard(0)], shape=(2,), stride=(1,)
            ),
        }

    torch_ckpt.save(of(torch.float32), checkpoint_id=path)
    report = torch_ckpt.load(of(torch.bfloat16), checkpoint_id=path)
    assert report == LoadReport(cast=("x",) if rank else ("w", "x"))


@on_ranks(2)
def test_ranks_that_load_alone_report_what_each_leaves(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank), checkpoint_id=path)
    report = torch_ckpt.load(stage(rank), checkpoint_id=path, no_dist=True)
    assert report is not None
    assert set(report.unused or ()) == {f"model.{2 - 2 * rank}", f"model.{3 - 2 * rank}"}


@on_ranks(2)
def test_checkpoints_that_each_rank_saved_alone_have_no_common_unused_names(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(
        stage(rank), storage_writer=FastWriter(path), use_collectives=False, checkpoint_id=path
    )
    state = stage(rank)
    del state["step"]
    report = torch_ckpt.load(state, checkpoint_id=path)
    assert report == LoadReport(unused=None)


@on_ranks(2)
def test_a_rank_with_another_planner_leaves_no_report(path: Path) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    rank = dist.get_rank()
    torch_ckpt.save(stage(rank), checkpoint_id=path)
    planner = DefaultLoadPlanner() if rank else FastLoadPlanner()
    assert torch_ckpt.load(stage(rank), checkpoint_id=path, planner=planner) is None


@on_ranks(2)
def test_a_strictness_of_one_rank_alone_fails_all_or_none(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank), checkpoint_id=path)
    state = stage(rank, fresh=torch.zeros(1))
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.load(state, checkpoint_id=path, strict=False if rank else None, timeout_s=60)
    assert "model.fresh" in str(caught.value.failures[0][0])
    odd: Any = "log_all" if rank else None
    expected = ValueError if rank else torch_ckpt.errors.RankTimeoutError
    with pytest.raises(expected, match="strict='log_all'"):
        torch_ckpt.load(stage(rank), checkpoint_id=path, strict=odd, timeout_s=60)
    assert torch_ckpt.load(stage(rank), checkpoint_id=path) == LoadReport()


@pytest.mark.parametrize("agent", [False, True])
@on_ranks(2)
def test_a_run_keeps_the_report_of_each_rank(path: Path, agent: bool) -> None:
    rank = dist.get_rank()
    options: Any = {"agent": True, "asynchronous": True} if agent else {}
    with Run(path, timeout_s=60, **options) as run:
        run.save(3, stage(rank))
        run.wait()
        state = stage(rank)
        del state["model"]["norm"]
        assert run.restore(state) == 3
        assert run.loaded == LoadReport(unused=("model.norm",))


@on_ranks(2)
def test_a_reader_that_exchanges_reads_reports_casts(path: Path) -> None:
    rank = dist.get_rank()
    large = {"a": torch.ones(8 << 20), "b": torch.ones(4)}  # So large that the ranks exchange.
    torch_ckpt.save(large, checkpoint_id=path)
    dtype = torch.bfloat16 if rank else torch.float32
    state = {"a": torch.zeros(8 << 20, dtype=dtype), "b": torch.zeros(4)}
    report = torch_ckpt.load(state, storage_reader=FastReader(path))
    assert report == LoadReport(cast=("a",) if rank else ())
    assert state["a"].float().eq(1).all()
