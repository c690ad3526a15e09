"""torch_ckpt: a fast checkpoint engine behind torch.distributed.checkpoint.

Public names load lazily, so that a program which needs no torch can import the package without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ckpt.agent.options import AgentOptions
    from torch_ckpt.api import async_save, load, save
    from torch_ckpt.errors import CheckpointError
    from torch_ckpt.filesystems.location import register
    from torch_ckpt.integrations.fsdp1 import fsdp1_state_dict, load_fsdp1_state_dict
    from torch_ckpt.integrations.installation import install, installed
    from torch_ckpt.options import IoOptions
    from torch_ckpt.planning.flat_shard import FlatShard
    from torch_ckpt.planning.load_planner import FastLoadPlanner
    from torch_ckpt.planning.rank_state import RankState
    from torch_ckpt.planning.save_planner import FastSavePlanner
    from torch_ckpt.runs.run import Run
    from torch_ckpt.staging.stager import SnapshotStager
    from torch_ckpt.storage.reader import FastReader
    from torch_ckpt.storage.safetensors_writer import SafetensorsWriter
    from torch_ckpt.storage.writer import FastWriter

__version__ = "0.3.0"

_HOMES = {
    "AgentOptions": "agent.options",
    "CheckpointError": "errors",
    "FastLoadPlanner": "planning.load_planner",
    "FastReader": "storage.reader",
    "FastSavePlanner": "planning.save_planner",
    "FastWriter": "storage.writer",
    "FlatShard": "planning.flat_shard",
    "IoOptions": "options",
    "RankState": "planning.rank_state",
    "Run": "runs.run",
    "SafetensorsWriter": "storage.safetensors_writer",
    "SnapshotStager": "staging.stager",
    "async_save": "api",
    "fsdp1_state_dict": "integrations.fsdp1",
    "install": "integrations.installation",
    "installed": "integrations.installation",
    "load": "api",
    "load_fsdp1_state_dict": "integrations.fsdp1",
    "register": "filesystems.location",
    "save": "api",
}

__all__ = [
    "AgentOptions",
    "CheckpointError",
    "FastLoadPlanner",
    "FastReader",
    "FastSavePlanner",
    "FastWriter",
    "FlatShard",
    "IoOptions",
    "RankState",
    "Run",
    "SafetensorsWriter",
    "SnapshotStager",
    "async_save",
    "fsdp1_state_dict",
    "install",
    "installed",
    "load",
    "load_fsdp1_state_dict",
    "register",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
