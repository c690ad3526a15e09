"""Lists all differences between a state dict and a checkpoint that does not match it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.planning.dispatch import size_of

__all__ = ["listed", "with_differences", "with_similar"]

_MOST = 20
"""Maximum number of names in each list of a message."""

_MOST_CANDIDATES = 200
"""Maximum number of names that are compared with a missing name."""


def with_differences(
    error: RuntimeError | ValueError, state_dict: dict[str, Any], metadata: Metadata
) -> Exception:
    """Returns DCP's error for the first difference, extended by a list of all differences.

    It has the same class, and its message begins with the message of ``error``.
    """
    stored = metadata.state_dict_metadata
    missing = [fqn for fqn in state_dict if fqn not in stored]
    unrequested = [fqn for fqn in stored if fqn not in state_dict]
    kinds, shapes, dtypes = [], [], []
    for fqn, value in state_dict.items():
        entry = stored.get(fqn)
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            if isinstance(entry, TensorStorageMetadata):
                kinds.append(f"{fqn} a tensor, not {type(value).__name__}")
            continue
        size = size_of(value)
        if entry.size != size:
            shapes.append(f"{fqn} {list(entry.size)}, not {list(size)}")
        elif entry.properties.dtype != value.dtype:
            dtypes.append(f"{fqn} {entry.properties.dtype}, not {value.dtype}")
    lines = [
        ("missing in the checkpoint", with_similar(missing, unrequested)),
        ("of another type in the checkpoint", kinds),
        ("of another shape in the checkpoint", shapes),
        ("of another dtype in the checkpoint, which is no error", dtypes),
        ("in the checkpoint, but not requested", unrequested),
    ]
    text = "".join(f"\n  {what}: {listed(names)}" for what, names in lines if names)
    path = getattr(metadata.storage_meta, "checkpoint_id", None) or "the checkpoint"
    return type(error)(f"{error}\nAll differences from {path}:{text}" if text else str(error))


def with_similar(missing: Sequence[str], unrequested: Sequence[str]) -> list[str]:
    """Returns the missing names; adds similar names of the checkpoint to the first ones."""
    described = []
    for number, fqn in enumerate(missing):
        close = number < _MOST and (
            [name for name in unrequested if name.endswith(f".{fqn}") or fqn.endswith(f".{name}")]
            or difflib.get_close_matches(fqn, _candidates(fqn, unrequested), n=1)
        )
        described.append(f"{fqn} (similar: {close[0]})" if close else fqn)
    return described


def listed(names: Iterable[str]) -> str:
    """Returns the first names as text, followed by the number of the others."""
    names = list(names)
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _candidates(fqn: str, names: Sequence[str]) -> list[str]:
    """Returns a few names of similar length, with the same last component if any have it."""
    last = fqn.rpartition(".")[2]
    alike = [name for name in names if name.rpartition(".")[2] == last] or names
    return sorted(alike, key=lambda name: abs(len(name) - len(fqn)))[:_MOST_CANDIDATES]
