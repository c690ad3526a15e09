"""torch_ckpt: a fast checkpoint engine behind torch.distributed.checkpoint.

Public names are loaded lazily, so that programs can import the package without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ckpt.agent.options import AgentOptions
    from torch_ckpt.api import async_load, async_save, load, save
    from torch_ckpt.commits.leases import reading
    from torch_ckpt.errors import CheckpointError
    from torch_ckpt.filesystems.location import register
    from torch_ckpt.integrations.fsdp1 import fsdp1_state_dict, load_fsdp1_state_dict
    from torch_ckpt.integrations.installation import install, installed
    from torch_ckpt.options import IoOptions
    from torch_ckpt.planning.flat_shard import FlatShard
    from torch_ckpt.planning.load_planner import FastLoadPlanner
    from torch_ckpt.planning.rank_state import RankState
    from torch_ckpt.planning.save_planner import FastSavePlanner
    from torch_ckpt.publishing.publisher import Publisher
    from torch_ckpt.publishing.subscriber import Subscriber
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
    "Publisher": "publishing.publisher",
    "RankState": "planning.rank_state",
    "Run": "runs.run",
    "SafetensorsWriter": "storage.safetensors_writer",
    "SnapshotStager": "staging.stager",
    "Subscriber": "publishing.subscriber",
    "async_load": "api",
    "async_save": "api",
    "fsdp1_state_dict": "integrations.fsdp1",
    "install": "integrations.installation",
    "installed": "integrations.installation",
    "load": "api",
    "load_fsdp1_state_dict": "integrations.fsdp1",
    "reading": "commits.leases",
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
    "Publisher",
    "RankState",
    "Run",
    "SafetensorsWriter",
    "SnapshotStager",
    "Subscriber",
    "async_load",
    "async_save",
    "fsdp1_state_dict",
    "install",
    "installed",
    "load",
    "load_fsdp1_state_dict",
    "reading",
    "register",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
