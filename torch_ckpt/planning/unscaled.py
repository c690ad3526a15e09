"""Refuses loads that would widen a quantised tensor without its scales.

A quantised model stores ``x.weight`` in 8 bits beside ``x.weight_scale_inv``. The elements alone,
converted to a wider dtype, are not the weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.opened import Opened

__all__ = ["check_scaled", "why_unscaled"]

_ENDS = {
    "_scale_inv": "",
    "_scale": "",
    "_scales": "",
    # bitsandbytes: int8, 4 bits, scales that are quantised themselves, and optimizers.
    "SCB": "weight",
    ".absmax": "",
    "nested_absmax": "absmax",
    "absmax1": "state1",
    "absmax2": "state2",
}
"""End of the name of a tensor's scales -> the end that it replaces in the name of the tensor."""

_ALL_ENDS = tuple(_ENDS)
_PACKED = ".absmax"  # The numbers of such a tensor may be stored in any dtype.
_OF_BITSANDBYTES = ("SCB", "absmax", "absmax1", "absmax2")
_FEW = 8


def check_scaled(state_dict: Mapping[str, Any], metadata: Metadata, opened: Opened) -> None:
    """Checks the targets of a load against the tensors of an open checkpoint.

    Raises:
        UnsupportedError: A quantised tensor has a target of a wider dtype, and the load would not
            multiply it by its scales; or the target is stored as blocks and scales.
    """
    stored = metadata.state_dict_metadata
    for fqn in _candidates(state_dict, stored, opened):
        target = state_dict.get(fqn)
        entry = stored.get(fqn)
        if entry is None and target is not None and f"{fqn}_blocks" in opened.unscaled:
            raise UnsupportedError(opened.unscaled[f"{fqn}_blocks"])
        if not isinstance(target, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            continue
        if why := why_unscaled(fqn, entry.properties.dtype, target.dtype, stored, opened):
            raise UnsupportedError(why)


def _candidates(
    state_dict: Mapping[str, Any], stored: Mapping[str, Any], opened: Opened
) -> Iterable[str]:
    """Returns the names of which a target may be refused."""
    if opened.unknown_quantization:
        return state_dict
    names: Iterable[str] = stored
    if len(stored) > _FEW * len(state_dict):  # Avoids reading all names of a large checkpoint.
        names = (name for fqn in state_dict for name in _scales_of(fqn))
    scales = (name for name in names if name.endswith(_ALL_ENDS))
    ends = ((name, end) for name in scales for end in _ENDS if name.endswith(end))
    found = (name.removesuffix(end) + _ENDS[end] for name, end in ends)
    return dict.fromkeys([*found, *opened.unscaled])


def _scales_of(fqn: str) -> Iterator[str]:
    """Yields the names that the scales of a tensor may have."""
    for end, replaced in _ENDS.items():
        if fqn.endswith(replaced):
            yield fqn.removesuffix(replaced) + end


def why_unscaled(
    fqn: str,
    stored: torch.dtype,
    target: torch.dtype,
    names: Container[object],
    opened: Opened,
) -> str:
    """Returns why a tensor cannot be loaded into a target of another dtype; empty if it can.

    ``names`` are those of the checkpoint.
    """
    # An integer gets the stored integer, of which nothing is lost.
    is_number = target.is_floating_point or target.is_complex or stored.is_floating_point
    is_wide = is_number and target.itemsize > 1 and target != stored
    is_narrow = stored.itemsize == 1 and stored != torch.bool
    if not is_wide or fqn in opened.quantized or not (is_narrow or fqn + _PACKED in names):
        return ""
    if fqn in opened.unscaled:
        return opened.unscaled[fqn]
    path = opened.directory
    what = f"cannot load {fqn!r} of {path} into {target}: it is stored as {stored}"
    if opened.unknown_quantization:
        return f"{what}, and {opened.unknown_quantization}; load it in its stored dtype"
    scales = next((name for name in _scales_of(fqn) if name in names), None)
    if scales is None:
        return ""
    remedy = "load both in their stored dtypes, and multiply"
    if scales.endswith(_OF_BITSANDBYTES):
        remedy = "load both in their stored dtypes, and dequantise them with bitsandbytes"
    elif opened.format == "safetensors":
        remedy = f"pass FastReader(path, dequantize=True), or {remedy}"
    return f"{what} with scales in {scales!r}; {remedy}"
