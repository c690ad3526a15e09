"""The agent process, which writes snapshots from shared memory to disk, and its clients.

Public names load lazily: the agent process imports this package and must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_ckpt.agent.options import AgentOptions
    from torch_ckpt.agent.reader import MemoryCheckpoint, SnapshotReader
    from torch_ckpt.agent.trainer import SnapshotAgent

_MODULES = {
    "AgentOptions": "options",
    "MemoryCheckpoint": "reader",
    "SnapshotAgent": "trainer",
    "SnapshotReader": "reader",
}

__all__ = ["AgentOptions", "MemoryCheckpoint", "SnapshotAgent", "SnapshotReader"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
