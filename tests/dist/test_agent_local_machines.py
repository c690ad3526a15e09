"""Agents of several machines that save to local directories, which the machines do not share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from machines import RANKS_PER_MACHINE, on_machine
from ranks import Ranks
from test_machine_promotion import restore, run_on, state_of, steps_in

from torch_ckpt.runs.background.agent import AgentBackend

pytestmark = pytest.mark.timeout(300)

RANKS = 4  # Two of each machine.
MACHINES = [0, 0, 1, 1]


@pytest.fixture(autouse=True)
def memory(memory: Path) -> Path:
    """Shared memory of this test alone, with a folder for each machine."""
    return memory


def save_steps(folder: Path, memory: Path, steps: list[int], options: dict[str, Any]) -> None:
    """Saves by the agents, and promotes."""
    on_machine(memory)
    with run_on(folder, MACHINES, asynchronous=True, agent=True, **options) as run:
        for step in steps:
            run.save(step, state_of(step))
            run.wait()
        assert run.saved == len(steps)
        assert isinstance(run._backend, AgentBackend)
        assert run._backend.can_stay_in_memory  # It has not fallen back.


def data_files(directory: Path) -> set[str]:
    return {name for name in os.listdir(directory) if name.endswith(".distcp")}


def test_machines_save_their_own_files_and_the_run_gets_all(tmp_path: Path, memory: Path) -> None:
    with Ranks(RANKS) as world:
        world.run(save_steps, tmp_path, memory, [1, 2, 3], {"keep_last": 2})
        assert steps_in(tmp_path / "machine-0") == steps_in(tmp_path / "machine-1") == [3]
        assert steps_in(tmp_path / "run")[0] == 3
        here, there = (data_files(tmp_path / f"machine-{m}" / "step-3") for m in (0, 1))
        assert here
        assert there
        assert here.isdisjoint(there)
        assert here | there == data_files(tmp_path / "run" / "step-3")
        assert not list((tmp_path / "run" / ".agents").iterdir())
