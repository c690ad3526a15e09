"""torch_ckpt: a fast checkpoint engine behind torch.distributed.checkpoint.

Public names load lazily, so that a program which needs no torch can import the package without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ckpt.agent.options import AgentOptions
    from torch_ckpt.agent.reader import SnapshotReader
    from torch_ckpt.agent.trainer import SnapshotAgent
    from torch_ckpt.api import async_save, installed, load, save
    from torch_ckpt.errors import (
        AlreadyExistsError,
        CancelledError,
        CheckpointError,
        CorruptionError,
        MismatchError,
        NotFoundError,
        RankTimeoutError,
        StorageError,
        UnsupportedError,
    )
    from torch_ckpt.options import IoMode, IoOptions
    from torch_ckpt.planning.load_planner import FastLoadPlanner
    from torch_ckpt.planning.rank_state import RankState
    from torch_ckpt.planning.save_planner import FastSavePlanner
    from torch_ckpt.runs.run import Run
    from torch_ckpt.staging.stager import SnapshotStager
    from torch_ckpt.storage.reader import FastReader
    from torch_ckpt.storage.safetensors_writer import SafetensorsWriter
    from torch_ckpt.storage.writer import FastWriter

_HOMES = {
    "AgentOptions": "agent.options",
    "AlreadyExistsError": "errors",
    "CancelledError": "errors",
    "CheckpointError": "errors",
    "CorruptionError": "errors",
    "FastLoadPlanner": "planning.load_planner",
    "FastReader": "storage.reader",
    "FastSavePlanner": "planning.save_planner",
    "FastWriter": "storage.writer",
    "IoMode": "options",
    "IoOptions": "options",
    "MismatchError": "errors",
    "NotFoundError": "errors",
    "RankState": "planning.rank_state",
    "RankTimeoutError": "errors",
    "Run": "runs.run",
    "SafetensorsWriter": "storage.safetensors_writer",
    "SnapshotAgent": "agent.trainer",
    "SnapshotReader": "agent.reader",
    "SnapshotStager": "staging.stager",
    "StorageError": "errors",
    "UnsupportedError": "errors",
    "async_save": "api",
    "installed": "api",
    "load": "api",
    "save": "api",
}

__all__ = [
    "AgentOptions",
    "AlreadyExistsError",
    "CancelledError",
    "CheckpointError",
    "CorruptionError",
    "FastLoadPlanner",
    "FastReader",
    "FastSavePlanner",
    "FastWriter",
    "IoMode",
    "IoOptions",
    "MismatchError",
    "NotFoundError",
    "RankState",
    "RankTimeoutError",
    "Run",
    "SafetensorsWriter",
    "SnapshotAgent",
    "SnapshotReader",
    "SnapshotStager",
    "StorageError",
    "UnsupportedError",
    "async_save",
    "installed",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
