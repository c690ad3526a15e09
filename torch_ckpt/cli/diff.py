"""``torch-ckpt diff``: compares two checkpoints of any formats, tensor by tensor."""

from __future__ import annotations

import argparse
from typing import Any

from torch_ckpt.cli.arguments import (
    add_json,
    add_rules,
    add_trust_pickle,
    checkpoint_at,
    path_of,
    rules_of,
    tolerance,
)
from torch_ckpt.cli.terminal import DIFFERENT, SOUND, UNKNOWN, fail, print_json, print_table
from torch_ckpt.errors import CorruptionError
from torch_ckpt.storage.stored_entries import check_metadata

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints, of any formats",
        description="Compares two checkpoints, tensor by tensor, whatever their formats and their "
        "sharding. Reads both in pieces of 8 Mi elements. Without a tolerance, tensors must be "
        "equal bit for bit. Exit status: 0 if they are equal; 1 if they differ; 2 if they are "
        "equal, but not every value can be compared; 3 if one cannot be read.",
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=path_of, help="checkpoint, or a run for its newest step")
    parser.add_argument("--atol", type=tolerance, default=0.0, help="absolute tolerance")
    parser.add_argument("--rtol", type=tolerance, default=0.0, help="tolerance relative to B")
    parser.add_argument(
        "--prefix",
        default="",
        help="compare only the names with this prefix, without it; if one checkpoint has no such "
        "name, all of it is compared",
    )
    add_rules(parser, of="A")
    add_trust_pickle(parser)
    add_json(parser)
    parser.set_defaults(command=_diff)


def _diff(options: argparse.Namespace) -> int:
    from torch_ckpt.storage.compare import compare  # Imports torch.

    a, b = checkpoint_at(options.a), checkpoint_at(options.b)
    try:
        for path in (a, b):
            check_metadata(path)
        found = compare(
            *(a, b),
            prefix=options.prefix,
            atol=options.atol,
            rtol=options.rtol,
            trust_pickle=options.trust_pickle,
            rules=rules_of(options),
        )
    except CorruptionError as error:  # Status 1 means a difference.
        return fail(error)
    status = DIFFERENT if found.differences else UNKNOWN if found.unknown else SOUND
    if options.json:
        facts = {
            "equal": found.equal,
            "differences": [
                {"fqn": fqn, "difference": what} for fqn, what in found.differences.items()
            ],
            "not_compared": [{"fqn": fqn, "reason": why} for fqn, why in found.unknown.items()],
        }
        print_json(facts)
        return status
    for reasons in (found.differences, found.unknown):
        if reasons:
            print_table([(reason, fqn) for fqn, reason in reasons.items()])
    print(
        f"{found.equal} values are equal, {len(found.differences)} differ, {len(found.unknown)} "
        "cannot be compared"
    )
    return status
