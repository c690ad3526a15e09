"""``torch-ckpt inspect``: lists the tensors, objects and files of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections import defaultdict
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.cli.arguments import add_rules, add_trust_pickle, checkpoint_at, path_of, rules_of
from torch_ckpt.cli.terminal import SOUND, print_json, print_table, printable
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.formats.expansion import allowed_nbytes
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.progress import readable_nbytes
from torch_ckpt.storage.stored_entries import (
    Checkpoint,
    check_metadata,
    described,
    open_checkpoints,
)

__all__ = ["add_to"]

_RANK = re.compile(r"(?:__|(?:[a-z0-9]+_)?zero_pp_rank_)(\d+)_")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list the tensors, objects and files of a checkpoint",
        description="Lists the tensors and objects of a checkpoint: names, dtypes, shapes, boxes, "
        "files, sizes, and the bytes that each rank has written. Accepts every format that "
        "FastReader loads, and a run, whose newest step it lists.",
    )
    parser.add_argument("path", type=path_of, help="directory or file of the checkpoint, or a run")
    add_rules(parser)
    add_trust_pickle(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with every box")
    parser.set_defaults(command=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    trust = options.trust_pickle
    path, rules = checkpoint_at(options.path), rules_of(options)
    summaries = [
        _summary(described(checkpoint, trust_pickle=trust))
        for checkpoint in open_checkpoints(path, trust_pickle=trust, rules=rules)
    ]
    if options.json:
        print_json(summaries[0] if len(summaries) == 1 else summaries)
    for summary in () if options.json else summaries:
        _print_summary(summary)
    check_metadata(path)  # Last: the index has all that was printed.
    return SOUND


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    files = [name for name, _ in checkpoint.files]
    itemsizes = dict(zip(_native.DTYPE_NAMES, _native.DTYPE_ITEMSIZES, strict=True))
    stored: set[tuple[int, int, int]] = set()  # Several boxes may share an extent.
    tensors: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for fqn, properties, boxes in checkpoint.entries or ():
        places = []
        for offsets, sizes, file, offset, nbytes, _, transforms in boxes:
            stored.add((file, offset, nbytes))
            place = {"file": files[file], "offset": offset, "nbytes": nbytes}
            if transforms:
                place["transforms"] = list(transforms)
            if properties is not None:
                place = {"offsets": list(offsets), "sizes": list(sizes), **place}
            places.append(place)
        if properties is None:
            objects.append({"fqn": fqn, **places[0]})
        else:
            dtype, _, _, _, shape = properties
            facts: dict[str, Any] = {"fqn": fqn, "dtype": dtype, "shape": list(shape)}
            if dtype in itemsizes:
                facts["nbytes"] = math.prod(shape) * itemsizes[dtype]
            tensors.append({**facts, "boxes": places})
    per_rank: defaultdict[int | None, int] = defaultdict(int)
    for file, _, nbytes in stored:
        per_rank[_rank_of(files[file])] += nbytes
    return {
        "metadata": str(checkpoint.path),
        "format": _format_of(checkpoint),
        "index": checkpoint.metadata is not None and checkpoint.index is not None,
        "save_id": checkpoint.save_id,
        "tensors": tensors,
        "objects": objects,
        "unreadable": [
            {"fqn": fqn, "reason": str(why)} for fqn, why in checkpoint.unreadable.items()
        ],
        "rules": [{"fqn": fqn, "rule": str(rule)} for fqn, rule in checkpoint.rules.items()],
        "files": [
            {"name": name, "nbytes": nbytes, "rank": _rank_of(name), "first_saved": first}
            for (name, nbytes), first in zip(
                checkpoint.files, _first_saved(checkpoint), strict=True
            )
        ],
        "ranks": [
            {"rank": rank, "nbytes": nbytes}
            for rank, nbytes in sorted(per_rank.items(), key=lambda item: (item[0] is None, item))
        ],
    }


def _first_saved(checkpoint: Checkpoint) -> list[str | None]:
    """Returns the save that wrote each file: its id, and its step if the run still has it.

    ``None`` stands for the save of the checkpoint itself.
    """
    index = checkpoint.index
    origins = [0 if index is None else index.origin(n) for n in range(len(checkpoint.files))]
    if index is None or not any(origins):
        return [None] * len(origins)
    run = checkpoint.path.parent.parent
    steps: dict[str | None, int] = {}
    with contextlib.suppress(CheckpointError):
        steps = {committed_id(run / f"step-{step}"): step for step in committed_steps(run)}
    found = []
    for origin in origins:
        save_id = f"{origin:016x}"
        step = f", step {steps[save_id]}" if save_id in steps else ""
        found.append(f"save {save_id}{step}" if origin else None)
    return found


def _format_of(checkpoint: Checkpoint) -> str:
    if checkpoint.format is not None:
        return checkpoint.format
    by = "torch_ckpt" if checkpoint.index is not None else "stock DCP"
    return f"checkpoint of {by}"


def _rank_of(file: str) -> int | None:
    found = _RANK.match(file)
    return int(found[1]) if found else None


def _extents(boxes: list[dict[str, Any]]) -> set[tuple[str, int, int]]:
    return {(box["file"], box["offset"], box["nbytes"]) for box in boxes}


def _row(tensor: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a tensor. The name is last, so that a long one moves no other cell.

    They also state the stored size if it does not justify the size of the tensor.
    """
    stored = sum(nbytes for *_, nbytes in _extents(tensor["boxes"]))
    nbytes = tensor.get("nbytes", stored)
    size = readable_nbytes(nbytes)
    if nbytes > allowed_nbytes(stored):
        size += f" (stored in {readable_nbytes(stored)})"
    shape, count = str(tensor["shape"]), str(len(tensor["boxes"]))
    return tensor["dtype"], shape, count, size, tensor["fqn"]


def _counted(noun: str, listed: list[Any]) -> str:
    return f"{len(listed)} {noun}{'' if len(listed) == 1 else 's'}"


def _print_summary(summary: dict[str, Any]) -> None:
    nbytes = sum(file["nbytes"] for file in summary["files"])
    print(printable(f"{summary['metadata']}: {summary['format']}"))
    rows = [_row(tensor) for tensor in summary["tensors"]]
    rows += [("object", "", "", readable_nbytes(o["nbytes"]), o["fqn"]) for o in summary["objects"]]
    print_table(rows, header=("dtype", "shape", "boxes", "size", "name"), right=(2, 3))
    print(f"{_counted('tensor', summary['tensors'])}, {_counted('object', summary['objects'])}")
    if unreadable := summary["unreadable"]:
        print("values that cannot be loaded")
        print_table([(one["fqn"], one["reason"]) for one in unreadable])
    if rules := summary["rules"]:
        print("parameters, and the rules that unite their shards")
        print_table([(one["fqn"], one["rule"]) for one in rules])
    if summary["save_id"] is not None:
        print(f"save id {summary['save_id']}")
    print_table(
        [
            (
                file["name"],
                readable_nbytes(file["nbytes"]),
                f"written by {file['first_saved']}" if file["first_saved"] else "",
            )
            for file in summary["files"]
        ],
        right=(1,),
    )
    print(f"{_counted('file', summary['files'])}, {readable_nbytes(nbytes)}")
    per_rank = [rank["nbytes"] for rank in summary["ranks"]]
    for rank in summary["ranks"]:
        name = "?" if rank["rank"] is None else rank["rank"]
        print(f"  rank {name}: {readable_nbytes(rank['nbytes'])}")
    if len(per_rank) > 1 and sum(per_rank):
        most = max(per_rank) * len(per_rank) / sum(per_rank)
        print(f"the busiest of {len(per_rank)} ranks wrote {most:.2f} times the mean")
