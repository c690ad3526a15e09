"""Copies of state dicts for files of ``torch.save``: staged, or sharing the memory of training."""

from __future__ import annotations

from typing import Any

import torch

from torch_ckpt._core.tensors import bytes_of
from torch_ckpt.staging.copied_state import CopiedFile
from torch_ckpt.staging.memory_runs import runs_of
from torch_ckpt.staging.stager import SnapshotStager

__all__ = ["FileStager", "live_state"]


class FileStager(SnapshotStager):
    """Stages all that ``torch.save`` stores, including parameters and attributes of tensors."""

    _copy_class = CopiedFile


def live_state(state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the state dict with copied objects, and tensors that share the memory of training.

    A tensor that is part of a larger storage gets a smaller storage over its memory, without a
    copy. Overlapping views share one. Returns ``None`` unless all tensors are on the CPU.
    """
    copied = CopiedFile(state_dict)
    if any(tensor.live.device.type != "cpu" for tensor in copied.tensors):
        return None
    for run in runs_of(copied.tensors, keeps_sharing=True):
        elements: Any = bytes_of(run.live())
        run.set_memory(torch.from_numpy(elements.numpy()))  # Its storage ends where the run ends.
    copied.build_wrappers()
    return copied.state
