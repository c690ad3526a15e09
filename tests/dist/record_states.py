"""States of ranks whose saves are recorded."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

__all__ = ["Slow", "state_of"]


class Slow:
    """An object whose pickle takes so many seconds, in which the rank is busy."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __deepcopy__(self, _: object) -> Slow:
        return self

    def __reduce__(self) -> Any:
        time.sleep(self.seconds)
        return complex, (1.0, 2.0)


def state_of(columns: int = 100_000) -> dict[str, Any]:
    """64 rows of so many columns, of which each rank has a part."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"rows": distribute_tensor(torch.ones(64, columns), mesh, [Shard(0)]), "step": 3}
