"""Rules inferred from a DeepSpeed checkpoint's description of its model-parallel ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.rules import Padded, Rule
from torch_ckpt.formats.unions import Average, Boxes, Fused, Replicated, Shard, Shards, Sizes, Union

__all__ = ["boxes_of_map", "rules_from_info"]

_MAX_MAP_VERSION = 1


def rules_from_info(info: Mapping[str, Any], shards: Mapping[str, Shards]) -> dict[str, Rule]:
    """Returns the rule of each FQN by a ``universal_checkpoint_info`` of any version.

    As in DeepSpeed, its ``affine_map``, if any, takes precedence over its lists of patterns. Raises
    UnsupportedError if a parameter is sharded in a way that the value does not describe.
    """
    geometry = info.get("affine_map") or {}
    if geometry.get("version", _MAX_MAP_VERSION) > _MAX_MAP_VERSION:
        raise UnsupportedError(f"cannot use an affine_map of version {geometry['version']}")
    unsupported = dict(info.get("autotp_unsupported_parameter_patterns") or {})
    parts: list[tuple[str, dict[str, Any]]] = []
    for shape in info.get("parameter_with_sub_params") or ():
        facts = shape if isinstance(shape, dict) else vars(shape)
        parts += [(pattern, facts) for pattern in facts["patterns"]]
    widths = info.get("sub_param_shard_widths") or {}

    def match(patterns: Iterable[str], fqn: str) -> str | None:
        return next((pattern for pattern in patterns if re.match(pattern, fqn)), None)

    def is_in(key: str, fqn: str) -> bool:
        patterns = info.get(key) or []
        if not isinstance(patterns, list | tuple):
            raise TypeError(f"{key} is not a list")
        return match(patterns, fqn) is not None

    def union_of(fqn: str, of_ranks: Shards) -> Union:
        if (pattern := match(unsupported, fqn)) is not None:
            raise UnsupportedError(
                f"cannot load {fqn!r}: DeepSpeed has not stored how it is sharded: "
                f"{unsupported[pattern]}"
            )
        maps = geometry.get("params") or {}
        if (pattern := match(maps, fqn)) is not None:
            return boxes_of_map(fqn, maps[pattern])
        if is_in("tp_replicated_parameter_patterns", fqn):
            return Replicated()
        if is_in("parameter_to_average_patterns", fqn):
            return Average()
        if is_in("parameter_with_2_sub_params_cat_dim_0", fqn):
            return _fused(2, 0, None, of_ranks)
        for pattern, facts in parts:
            if re.match(pattern, fqn):
                dim = int(facts["partition_dim"])
                return _fused(facts["shape"][dim], dim, widths.get(pattern), of_ranks)
        return Shard(1 if is_in("parameter_with_row_parallelism_patterns", fqn) else 0)

    def rule_of(fqn: str, of_ranks: Shards) -> Rule:
        is_padded = is_in("vocabulary_parameter_patterns", fqn)
        then = (Padded(int(info["original_vocab_size"])),) if is_padded else ()
        return Rule(re.escape(fqn), union_of(fqn, of_ranks), then)

    return {fqn: rule_of(fqn, of_ranks) for fqn, of_ranks in shards.items()}


def _fused(parts: Any, dim: int, widths: Any, shards: Shards) -> Fused:
    """Returns the operator for the sizes of the fused parameters, or for their number."""
    if isinstance(parts, int) and widths is None:
        whole = sum(sizes[dim] for sizes in shards.values())
        return Fused((whole // parts,) * parts, dim)
    sizes = tuple(parts) if isinstance(parts, list | tuple) else tuple(map(sum, widths))
    return Fused(sizes, dim, None if widths is None else tuple(map(tuple, widths)))


def boxes_of_map(fqn: str, facts: Mapping[str, Any]) -> Union:
    """Returns the operator for the pieces of an ``affine_map``, which must be boxes.

    A piece has a shape, and its offset and strides in the whole parameter (``source``) and in the
    shard (``dest``). A piece on several ranks is taken from the first one.
    """
    whole = tuple(facts["logical_shape"])
    if all(
        tuple(shard["shard_shape"]) == whole and len(shard["pieces"]) == 1
        for shard in facts["ranks"].values()
    ) and all(shard["pieces"][0].get("scale", 1.0) == 1 for shard in facts["ranks"].values()):
        return Replicated()
    boxes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for rank, shard in sorted(facts["ranks"].items()):
        for piece in shard["pieces"]:
            sizes = tuple(piece["shape"])
            at = _box_offsets(whole, sizes, *piece["source"])
            offsets = _box_offsets(tuple(shard["shard_shape"]), sizes, *piece["dest"])
            if at is None or offsets is None:
                raise UnsupportedError(
                    f"cannot load {fqn!r}: a piece of its affine_map is not a box: {piece}"
                )
            scale = piece.get("scale", 1.0)
            box = (rank, offsets, sizes, at) if scale == 1 else (rank, offsets, sizes, at, scale)
            boxes.setdefault((at, sizes), box)
    return Boxes(whole, tuple(boxes.values()))


def _box_offsets(
    whole: Sizes, sizes: Sizes, offset: int, strides: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the offsets of a box, given its first element and its strides in a tensor."""
    if len(sizes) != len(whole):
        return None
    steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    if any(
        size > 1 and stride != step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    ):
        return None
    offsets: list[int] = []
    for step in steps:
        offsets.append(offset // max(step, 1))
        offset -= offsets[-1] * step
    return tuple(offsets)
