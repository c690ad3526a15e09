"""LoadReport: which names a load did not fill, did not use, or filled with converted values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LoadReport"]


@dataclass(frozen=True)
class LoadReport:
    """The names that a load did not simply copy from the checkpoint to the state dict.

    ``missing`` and ``unused`` are of all ranks that loaded together, and equal on these ranks. The
    other two are of the tensors of this rank alone. Names are FQNs of the state dict.

    Attributes:
        missing: Names that a rank requested and the checkpoint lacks, by rank and in the order of
            its state dict. Their values are unchanged. Empty unless the load allows it: with
            ``strict=False``, or a planner with ``allow_partial_load``.
        unused: Names of the checkpoint that no rank requested, in the checkpoint's order. ``None``
            if unknown, because each rank has loaded a checkpoint of its own.
        cast: Tensors that were stored in another dtype than that of the target, and converted, in
            the order of the state dict. Dequantised tensors do not count.
        resized: Tensors that have another shape in the checkpoint, of which the common part was
            loaded. Empty except in Megatron, for tensors with ``allow_shape_mismatch``.
    """

    missing: Sequence[str] = ()
    unused: Sequence[str] | None = ()
    cast: Sequence[str] = ()
    resized: Sequence[str] = ()
