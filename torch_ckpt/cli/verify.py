"""``torch-ckpt verify``: checks every byte of a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from torch_ckpt.cli.paths import checkpoint_at
from torch_ckpt.cli.terminal import DAMAGED, SOUND, UNKNOWN, printable
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import examine

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
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
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    path = checkpoint_at(options.path)
    begin = time.monotonic()
    bar = None if options.quiet or not sys.stderr.isatty() else _Progress()
    try:
        report = examine(path, watch=bar)
    finally:
        if bar is not None:
            bar.close()
    seconds = max(time.monotonic() - begin, 1e-9)
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
        json.dump(facts, sys.stdout, indent=1)
        print()
        return status
    if str(path) != str(options.path):
        print(f"the newest step is {printable(str(path))}")
    for line in report.damage:
        print(printable(f"damaged: {line}"))
    if report.fqns:
        print(printable(f"{len(report.fqns)} FQNs are damaged: {', '.join(sorted(report.fqns))}"))
    if not report.damage:
        for line in report.doubts:
            print(printable(f"cannot verify: {line}"))
    speed = f"{report.nbytes} bytes in {seconds:.2f} s, {report.nbytes / seconds / 1e9:.2f} GB/s"
    print(f"{outcome} ({speed})")
    return status


class _Progress:
    """A progress bar on the terminal."""

    _WIDTH = 30

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        fraction = min(done / max(total, 1), 1.0)
        bar = "#" * round(fraction * self._WIDTH)
        speed = done / max(time.monotonic() - self._begin, 1e-9) / 1e9
        sys.stderr.write(f"\r[{bar:{self._WIDTH}}] {fraction:4.0%} {speed:6.2f} GB/s  {name}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\r\x1b[K")
