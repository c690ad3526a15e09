"""Checks that the reads planned by DCP's planner fill the tensors of a state dict.

DCP's planner lists a read for each stored box that overlaps a tensor, and does not count elements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import cpu_as_default, printable
from torch_ckpt.errors import CorruptionError, MismatchError
from torch_ckpt.planning.columns import overrides

__all__ = ["check_plan", "check_reads", "naming_checkpoint"]

_Box = tuple[Sequence[int], Sequence[int]]


def check_plan(plan: LoadPlan, planner: object) -> None:
    """Checks a plan made by DCP's own ``create_local_plan``; ignores others.

    Other planners may request a part of a tensor. Raises the errors of :func:`check_reads`.
    """
    if (
        isinstance(planner, DefaultLoadPlanner)
        and planner.metadata is not None
        and not overrides(planner, DefaultLoadPlanner, ("create_local_plan",))
    ):
        check_reads(plan.items, planner.state_dict, planner.metadata)


@contextlib.contextmanager
def naming_checkpoint(metadata: Metadata) -> Iterator[None]:
    """Adds the name of the checkpoint to an error in the block about its boxes."""
    try:
        yield
    except (CorruptionError, MismatchError) as error:
        path = getattr(metadata.storage_meta, "checkpoint_id", None)
        if path and str(path) not in str(error):
            error.args = (f"{error}, in {path}",)
        raise


def check_reads(
    items: Sequence[ReadItem], state_dict: Mapping[str, Any], metadata: Metadata
) -> None:
    """Checks the items that DCP's planner made for a flat state dict.

    Raises MismatchError if an element is in no stored box, and CorruptionError if it is in several.
    """
    stored = metadata.state_dict_metadata
    reads: dict[str, list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            reads.setdefault(item.dest_index.fqn, []).append(item)
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor) and isinstance(stored.get(fqn), TensorStorageMetadata):
            found = reads.get(fqn, [])
            if len(found) != 1 or not _fills(found[0], value):
                with naming_checkpoint(metadata):
                    _check_boxes(fqn, value, found)


def _fills(item: ReadItem, value: torch.Tensor) -> bool:
    """Returns whether a single read fills a tensor of this rank."""
    if isinstance(value, ShardedTensor):  # It may have several local shards.
        return False
    local = value._local_tensor if isinstance(value, DTensor) else value
    return math.prod(item.lengths) == local.numel()


def _check_boxes(fqn: str, value: torch.Tensor, items: Sequence[ReadItem]) -> None:
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return
    # Offsets of a box -> its reads. At most one box at the same offsets is not empty.
    reads: dict[tuple[int, ...], dict[Any, _Box]] = {}
    for item in items:
        at = tuple(item.dest_index.offset or ())
        begin = [a + b for a, b in zip(at, item.dest_offsets, strict=True)]
        # Equal stored boxes are replicas. Different boxes must not overlap.
        key = (item.storage_index, item.storage_offsets, item.dest_offsets, item.lengths)
        reads.setdefault(at, {})[key] = (begin, item.lengths)
    with cpu_as_default():
        chunks = _create_chunk_list(value)
    for chunk in chunks:
        if math.prod(chunk.sizes):
            filled = list(reads.get(tuple(chunk.offsets), {}).values())
            _native.check_cover(printable(fqn), (chunk.offsets, chunk.sizes), filled)
