"""What ranks log and show: one line and one progress bar for all ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from progress_bars import LoadPlanner, SavePlanner, on_a_terminal
from ranks import on_ranks
from support.logs import logged

import torch_ckpt


@on_ranks(2)
def test_only_the_first_rank_logs_a_save_and_a_load(path: Path) -> None:
    with logged() as lines:
        state = {"w": torch.ones(8 << 20)}  # So large that the ranks exchange reads.
        torch_ckpt.save(state, checkpoint_id=path / "step")
        torch_ckpt.load(state, checkpoint_id=path / "step")
        for file in (path / "step").iterdir():
            file.read_bytes()
        torch_ckpt.load(state, checkpoint_id=path / "step")  # From the page cache.
    if dist.get_rank():
        assert lines == []
        return
    saved, loaded, loaded_from_cache = lines
    assert re.search(r"saved .*: 32\.\d\d MiB in .* GB/s, 2 ranks, ", saved)
    assert re.search(r"loaded .*, rank 0 of 2 ranks, with an exchange$", loaded)
    assert loaded_from_cache.endswith(", rank 0 of 2 ranks, without an exchange")


@pytest.mark.parametrize("options", [{}, {"no_dist": True}, {"use_collectives": False}], ids=str)
@on_ranks(2)
def test_only_the_first_rank_logs_and_shows_a_bar(path: Path, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    is_alone = "no_dist" in options
    own = path / str(rank) if is_alone else path
    state = {"w": torch.ones(3), f"step {rank}": 7}
    saving, loading = SavePlanner(), LoadPlanner()
    with on_a_terminal(), logged() as lines:
        torch_ckpt.save(state, checkpoint_id=own, planner=saving, **options)
        torch_ckpt.load(state, checkpoint_id=own, planner=loading, no_dist=is_alone)
    assert [saving.had_bar, loading.had_bar, loading.was_planned_with_bar] == [rank == 0] * 3
    assert len(lines) == (0 if rank else 2)
    if is_alone and not rank:
        assert ", 1 rank, without an exchange" in lines[1]


@pytest.mark.usefixtures("memory")
@on_ranks()  # Ranks that were started with this memory.
def test_only_the_first_rank_logs_a_save_of_the_agent(path: Path) -> None:
    state = {"w": torch.ones(1000), "step": 1}
    with (
        logged() as lines,
        torch_ckpt.Run(path / "run", asynchronous=True, agent=True, timeout_s=60) as run,
    ):
        run.save(1, state)
        run.wait()
        run.save(2, state, persist=False)
    if dist.get_rank():
        assert lines == []
        return
    assert len(lines) == 2, lines  # The second step was in memory alone until the end.
    for step, saved in enumerate(lines, 1):
        assert re.fullmatch(
            rf"saved {path}/run/step-{step}: \d\.\d\d KiB in [\d.]+ s, [\d.]+ GB/s, 2 ranks, "
            "by the agent",
            saved,
        ), saved


@pytest.mark.usefixtures("memory")
@on_ranks()  # Ranks that were started with this memory.
def test_each_rank_logs_its_copy_to_the_memory_of_the_agent(path: Path) -> None:
    state = {"w": torch.ones(1000), "step": 1}
    with (
        torch_ckpt.Run(path / "run", asynchronous=True, agent=True, timeout_s=60) as run,
        logged(logging.DEBUG) as lines,
    ):
        run.save(1, state, persist=False)
    (copied,) = lines
    assert re.fullmatch(rf"the slot of {path}/run/step-1: copied \d+ bytes in [\d.]+ s", copied)
