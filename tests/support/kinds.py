"""The table of kinds: which kinds of tensors each way to save and load takes.

docs/compatibility.md has the table, and tests/dist/test_kinds.py runs each of its cells on two
ranks. A new kind, or a new way, joins by one line of a list. This module imports no torch.
"""

from __future__ import annotations

KINDS = {
    "plain": "plain tensor, equal on all ranks",
    "FSDP2": "`DTensor` of FSDP2 (`Shard(0)`)",
    "TP": "`DTensor` of TP (`Shard(1)`)",
    "HSDP": "`DTensor` of HSDP (`Replicate()`, `Shard(0)`)",
    "2-D": "`DTensor` on a 2-D mesh (`Shard(0)`, `Shard(1)`)",
    "FSDP2 over TP": "`DTensor` of FSDP2 over TP (`_StridedShard(0)`, `Shard(0)`)",
    "strided shards of several boxes": "`DTensor` whose shard is several boxes",
    "FSDP1": "FSDP1 without a device mesh (`ShardedTensor`)",
    "FSDP1 with a mesh": "FSDP1 with a device mesh (`DTensor`)",
    "flat shards": "FSDP1 by `fsdp1_state_dict` (`FlatShard`)",
    "LocalShards": "`LocalShards` of several boxes",
    "ShardedTensor": "`ShardedTensor` of several shards, or of none on a rank",
    "wrapper subclass": "wrapper subclass",
    "DTensor of a wrapper": "`DTensor` of a wrapper subclass",
    "torchao": "quantized weight of torchao",
    "other subclass": "other subclass of `torch.Tensor`",
    "conj and neg": "lazily conjugated or negated tensor",
    "result of a collective": "result of a functional collective, not yet awaited",
    "quantized": "quantized tensor of torch",
    "in an object": "tensors in a tuple, including slices and sparse ones",
    "RankState": "`RankState` with tensors",
    "sparse": "sparse tensor",
    "nested": "nested tensor",
    "meta": "meta tensor",
}
"""Name of a kind -> its text in the table."""

SAVES = {
    "torch_ckpt.save": "`save`",
    "dcp.save": "`dcp.save`",
    "torch_ckpt.async_save": "`async_save`",
    "dcp.async_save": "`dcp.async_save`",
    "process": "`async_save` in a process",
    "run": "`Run`",
    "run, asynchronous": "asynchronous `Run`",
    "run, agent": "`Run` with the agent",
    "installed": "`installed()`",
    "safetensors": "safetensors",
}
LOADS = {
    "torch_ckpt.load": "`load`",
    "dcp.load": "`dcp.load`",
    "memory": "restore from memory",
    "stock": "stock's reader",
    "reshard": "reshard",
}
WAYS = {**SAVES, **LOADS}
"""Name of a way -> its heading in the table. Loads are of what a save has written."""

_TORCH_ONLY = {"safetensors": "only torch can store|the format does not support"}
_OBJECT = {"safetensors": "the format supports only tensors"}
REFUSED: dict[str, dict[str, str]] = {
    "strided shards of several boxes": {"stock": "AssertionError"},  # It loads other rows.
    "wrapper subclass": _TORCH_ONLY,
    "DTensor of a wrapper": _TORCH_ONLY | {"memory": "boxes that only torch can read"},
    "torchao": _TORCH_ONLY,
    "other subclass": _TORCH_ONLY,
    "quantized": _TORCH_ONLY | {"process": "cannot call qscheme"},
    "in an object": _OBJECT,
    "RankState": _OBJECT,
    "sparse": dict.fromkeys(SAVES, "x.w"),
    "nested": dict.fromkeys(SAVES, "x.w|NestedTensorImpl"),
    "meta": dict.fromkeys(SAVES, "x.w"),
}
"""Kind -> the ways that refuse it, and a part of the error."""

WHOLE_ONLY = {
    *("wrapper subclass", "DTensor of a wrapper", "torchao", "quantized"),
    *("in an object", "RankState"),
}
"""Kinds of which a rank does not load a part."""


def cell(kind: str, way: str) -> str:
    """Returns "yes", "no", or "-" for a case that does not exist."""
    if way == "reshard" and kind in WHOLE_ONLY:
        return "-"
    if way in LOADS and "dcp.save" in REFUSED.get(kind, {}):
        return "-"
    return "no" if way in REFUSED.get(kind, {}) else "yes"


def table() -> str:
    """Returns the table in Markdown: kinds that the same ways refuse share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, text in KINDS.items():
        cells = {way: cell(kind, way) for way in WAYS}
        refused, missing = (
            ", ".join(WAYS[way] for way in WAYS if cells[way] == value) for value in ("no", "-")
        )
        if all(cells[way] == "no" for way in SAVES):
            refused = "all saves"
        rows.setdefault((refused, missing), []).append(text)
    lines = ["| kind | refused by | no such case |", "|---|---|---|"]
    for (refused, missing), texts in rows.items():
        lines.append(f"| {'<br>'.join(texts)} | {refused or 'none'} | {missing or 'none'} |")
    return "\n".join(lines)
