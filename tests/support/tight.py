"""A stager in a container that has too little memory for staged tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from torch_ckpt.filesystems.cgroups import MemoryLimit
from torch_ckpt.staging import stager
from torch_ckpt.staging.stager import SnapshotStager

__all__ = ["TightStager"]


class TightStager(SnapshotStager):
    """Cannot allocate a snapshot, because its container has no memory left."""

    def _place(self, *args: Any, **options: Any) -> Any:
        limit = MemoryLimit(1 << 30, 0, Path("/sys/fs/cgroup/memory.max"))
        with mock.patch.object(stager, "memory_limit", return_value=limit):
            return super()._place(*args, **options)
