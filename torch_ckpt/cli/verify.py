"""``torch-ckpt verify``: checks every byte of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from torch_ckpt.cli.arguments import add_json, add_rules, add_trust_pickle, checkpoint_at, rules_of
from torch_ckpt.cli.terminal import DAMAGED, SOUND, UNKNOWN, print_json, printable
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.progress import progress_bar
from torch_ckpt.storage.verify import examine

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint",
        description="Checks every byte of a checkpoint against its index and lists damaged ranges. "
        "Accepts every format that FastReader loads, and a run, whose newest step it checks. "
        "Exit status: 0 if all bytes are sound; 1 if some are damaged; 2 if not all bytes can be "
        "verified, because a checkpoint of stock DCP has only the CRCs of its zip archives, and "
        "these match, or because safetensors have no checksums; 3 if there is no checkpoint or it "
        "cannot be read.",
    )
    parser.add_argument("path", type=Location, help="directory or file of the checkpoint, or a run")
    add_rules(parser)
    add_trust_pickle(parser)
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    path = checkpoint_at(options.path)
    begin = 0.0  # Set when the checkpoint is open: modules that load first take longer.
    progress = [0, 0]  # Checked bytes, all bytes.

    def watch(done: int, total: int) -> None:
        nonlocal begin
        begin = begin or time.monotonic()
        progress[:] = done, total

    bar = progress_bar("verifying", path, lambda: progress[1], lambda: progress[0])
    with contextlib.nullcontext() if options.quiet else bar:
        rules = rules_of(options)
        report = examine(path, watch=watch, trust_pickle=options.trust_pickle, rules=rules)
    seconds = max(time.monotonic() - begin, 1e-9) if begin else 0.0
    status = DAMAGED if report.damage else UNKNOWN if report.doubts else SOUND
    outcome = {DAMAGED: "damaged", UNKNOWN: "no damage found", SOUND: "sound"}[status]
    if options.json:
        facts = {
            "path": str(path),
            "outcome": outcome,
            "damage": report.damage,
            "fqns": sorted(report.fqns),
            "unverified": report.doubts,
            "nbytes": report.nbytes,
            "seconds": seconds,
        }
        print_json(facts)
        return status
    if str(path) != str(options.path):
        print(f"the newest step is {printable(str(path))}")
    for line in report.damage:
        print(printable(f"damaged: {line}"))
    if report.fqns:
        count = len(report.fqns)
        print("1 FQN is damaged" if count == 1 else f"{count} FQNs are damaged")
    if not report.damage:
        for line in report.doubts:
            print(printable(f"cannot verify: {line}"))
    speed = f", {report.nbytes / seconds / 1e9:.2f} GB/s" if seconds else ""
    print(f"{outcome} ({report.nbytes} bytes in {seconds:.2f} s{speed})")
    return status
