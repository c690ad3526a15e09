"""Finds quantised tensors that a load widens without their scales.

A model with a ``quantization_config`` stores ``x.weight`` in 8 bits beside ``x.weight_scale_inv``.
A load into a wider dtype converts the elements, but does not know how to scale them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.model_config import model_config
from torch_ckpt.planning.differences import listed

__all__ = ["unscaled_names", "unscaled_warning"]

_SUFFIXES = ("_scale_inv", "_scale", "_scales")
_FEW = 8


def unscaled_names(state_dict: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Returns the names of tensors of one byte per element that are loaded into a wider dtype.

    Only tensors for which the checkpoint contains a scale are returned.
    """
    stored = metadata.state_dict_metadata
    names: Iterable[str] = stored
    if len(stored) > _FEW * len(state_dict):  # Avoids reading all names of a large checkpoint.
        names = (fqn + suffix for fqn in state_dict for suffix in _SUFFIXES)
    found: dict[str, None] = {}
    for name in names:
        suffix = next(filter(name.endswith, _SUFFIXES), None) if name.endswith(_SUFFIXES) else None
        if suffix and name in stored and _is_widened(name.removesuffix(suffix), state_dict, stored):
            found[name.removesuffix(suffix)] = None
    return list(found)


def _is_widened(fqn: str, state_dict: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    target, entry = state_dict.get(fqn), stored.get(fqn)
    if not isinstance(target, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return False
    dtype = entry.properties.dtype
    is_wide = target.dtype.is_floating_point and target.dtype.itemsize > dtype.itemsize
    return is_wide and dtype.itemsize == 1 and dtype != torch.bool


def unscaled_warning(names: Sequence[str], metadata: Metadata) -> str:
    """Returns the warning of a load for the tensors of :func:`unscaled_names` on all ranks."""
    path = getattr(metadata.storage_meta, "checkpoint_id", None)
    config: Any = None
    if path is not None:
        try:
            config = model_config(Location(path)).get("quantization_config")
        except (CheckpointError, ValueError):
            config = None
    method = config.get("quant_method") if isinstance(config, dict) else None
    by = f" (config.json: quantization_config of {method!r})" if config is not None else ""
    count = "1 quantised tensor" if len(names) == 1 else f"{len(names)} quantised tensors"
    return (
        f"{path or 'the checkpoint'}: {count}{by} loaded into a wider dtype without the stored "
        f"scales: {listed(names)}; multiply the values by the scales, or load them into the "
        "stored dtype"
    )
