"""Ranks on machines of their own: two ranks have one folder of shared memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

RANKS_PER_MACHINE = 2


def memory_of(memory: Path, machine: int) -> Path:
    return memory / f"machine-{machine}"


def on_machine(memory: Path) -> None:
    """Gives this rank the shared memory of its machine."""
    folder = memory_of(memory, dist.get_rank() // RANKS_PER_MACHINE)
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
