"""``torch-ckpt verify``: checks every byte of a checkpoint."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from torch_ckpt.cli.terminal import DAMAGED, SOUND, UNKNOWN, printable
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import examine

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to a parser's."""
    parser = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint",
        description="Checks every byte of a checkpoint against its index. Exits 0 where all are "
        "sound; 1 where some are damaged, which it lists; 2 where that cannot be told, because a "
        "checkpoint of stock DCP has only the CRCs of its zip archives, and those match; 3 where "
        "there is no checkpoint or it cannot be read.",
    )
    parser.add_argument("path", type=Location, help="directory of the checkpoint")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    bar = None if options.quiet or not sys.stderr.isatty() else _Progress()
    try:
        report = examine(options.path, watch=bar)
    finally:
        if bar is not None:
            bar.close()
    seconds = max(time.monotonic() - begin, 1e-9)
    speed = f"{report.nbytes} bytes in {seconds:.2f} s, {report.nbytes / seconds / 1e9:.2f} GB/s"
    for line in report.damage:
        print(printable(f"damaged: {line}"))
    if report.damage:
        if report.fqns:
            print(
                printable(f"{len(report.fqns)} FQNs are damaged: {', '.join(sorted(report.fqns))}")
            )
        print(f"damaged ({speed})")
        return DAMAGED
    for line in report.doubts:
        print(printable(f"cannot tell: {line}"))
    print(f"{'no damage found' if report.doubts else 'sound'} ({speed})")
    return UNKNOWN if report.doubts else SOUND


class _Progress:
    """A bar on the terminal."""

    _WIDTH = 30

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        part = min(done / max(total, 1), 1.0)
        bar = "#" * round(part * self._WIDTH)
        speed = done / max(time.monotonic() - self._begin, 1e-9) / 1e9
        sys.stderr.write(f"\r[{bar:{self._WIDTH}}] {part:4.0%} {speed:6.2f} GB/s  {name}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\r\x1b[K")
