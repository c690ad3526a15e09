"""Ways to save a state whose replicas may differ, for tests of what is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, Run
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.process_state import PROCESS

SIZES = (1024, 1024)  # 4 MiB of float32.
SAVE_TIMEOUT_S = 60


def fresh() -> None:
    """Forgets what this process has planned, and has warned of."""
    plan_cache().forget()
    getattr(PROCESS, "warned_replicas", set()).clear()


def by_stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FastWriter(path))


def by_stocks_async_save(state: dict[str, Any], path: Path) -> None:
    dcp.async_save(state, storage_writer=FastWriter(path)).result(SAVE_TIMEOUT_S)


def by_columns(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FastWriter(path), planner=FastSavePlanner())


def by_columns_with_stocks_writer(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=FastSavePlanner())


def by_this_package(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path)


def by_a_process(state: dict[str, Any], path: Path) -> None:
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    torch_ckpt.async_save(state, checkpoint_id=path, async_checkpointer_type=kind).result(60)


WAYS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    way.__name__: way
    for way in (
        by_stock,
        by_stocks_async_save,
        by_columns,
        by_columns_with_stocks_writer,
        by_this_package,
        by_a_process,
    )
}


def by_an_agent_with(mode: Any, state: dict[str, Any], path: Path) -> None:
    run = path.parent / "run"
    with Run(run, asynchronous=True, agent=True, writer={"check_replicas": mode}) as made:
        made.save(int(path.name), state)
    dist.barrier()
    if dist.get_rank() == 0:
        (run / f"step-{path.name}").rename(path)
    dist.barrier()


def by_a_run_with_an_agent(state: dict[str, Any], path: Path) -> None:
    by_an_agent_with("sample", state, path)


def with_more_on_the_first_rank(state: dict[str, Any]) -> dict[str, Any]:
    """The first rank has so much to write alone that others would write its replicas."""
    return state | ({} if dist.get_rank() else {"own": torch.zeros(SIZES)})


class FindingPlanner(dcp.DefaultSavePlanner):
    """Has tensors that are not in its state dict."""

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index)
