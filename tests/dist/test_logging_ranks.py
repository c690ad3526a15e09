"""What ranks log and warn of: one line for all ranks, and nothing about a missing process group."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import on_ranks

import torch_ckpt


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@on_ranks(2)
def test_only_the_first_rank_logs_a_save_and_a_load(path: Path) -> None:
    handler, logger = Lines(), logging.getLogger("torch_ckpt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        state = {"w": torch.ones(8 << 20)}  # So large that the ranks exchange reads.
        torch_ckpt.save(state, checkpoint_id=path / "step")
        torch_ckpt.load(state, checkpoint_id=path / "step")
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    if dist.get_rank():
        assert handler.lines == []
        return
    saved, loaded = handler.lines
    assert re.search(r"saved .*: 33\.\d\d MB in .* GB/s, 2 ranks, ", saved)
    assert re.search(r"loaded .*, rank 0 of 2 ranks, with an exchange$", loaded)


@on_ranks(2)
def test_a_rank_that_saves_alone_within_a_group_warns_of_nothing(path: Path) -> None:
    from torch_ckpt.integrations.lightning import FastCheckpointIO

    own = path / str(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_ckpt.save({"w": torch.ones(3)}, checkpoint_id=own / "a", no_dist=True)
        torch_ckpt.load({"w": torch.ones(3)}, checkpoint_id=own / "a", no_dist=True)
        plugin = FastCheckpointIO(asynchronous=True)
        plugin.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, own / "b")
        plugin.load_checkpoint(own / "b")
