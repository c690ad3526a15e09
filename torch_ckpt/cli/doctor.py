"""``torch-ckpt doctor``: facts about this machine and a directory, for a bug report."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from torch_ckpt.cli import directory_probes, machine_probes
from torch_ckpt.cli.arguments import add_json
from torch_ckpt.cli.directory_probes import Fact
from torch_ckpt.cli.terminal import SOUND, print_json, printable
from torch_ckpt.filesystems.location import Location

__all__ = ["add_to"]

_LIMIT_S = 5.5
"""Seconds for all probes. A hanging file system must not make the command hang."""

_GRACE_S = 0.5
"""Seconds for a probe to remove its files after the limit."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="print facts on this machine and a directory, for a bug report",
        description="Prints what a bug report needs: versions, and what this machine and a "
        "directory can do, with what that means for torch-ckpt. Writes and reads files in a hidden "
        "subdirectory for about 2 seconds, and removes them. A probe that cannot run states why. "
        "Exit status: 0.",
    )
    parser.add_argument(
        "directory",
        nargs="?",
        default=".",
        metavar="DIR",
        help="directory for checkpoints (default: the working directory)",
    )
    add_json(parser)
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    facts = []
    for name, found, means in _facts(options.directory):
        facts.append({"name": name, "found": found, "means": means})
        if not options.json:
            text = f"{found}; {means}" if means else found
            print(f"{name:<18}{printable(text)}", flush=True)
    if options.json:
        print_json({"facts": facts})
    return SOUND


def _facts(directory: str) -> Iterator[Fact]:
    """Yields the facts of all probes."""
    deadline = time.monotonic() + _LIMIT_S
    for probe in machine_probes.PROBES:
        yield from _within(deadline, probe)
    yield from _within(deadline, machine_probes.agents, directory)
    try:
        path = Location(directory).absolute()
    except Exception as error:
        yield "directory", f"not probed: {error}", ""
        return
    yield from _within(deadline, directory_probes.directory, path)


def _within(
    deadline: float, probe: Callable[..., Generator[Fact]], *arguments: Any
) -> Iterator[Fact]:
    """Yields the facts of a probe, and the reason if it fails or takes too long."""
    found: SimpleQueue[Fact | None] = SimpleQueue()
    has_ended = Event()

    def run() -> None:
        try:
            with contextlib.closing(probe(*arguments)) as facts:  # Removes its files.
                for fact in facts:
                    found.put(fact)
                    if has_ended.is_set():
                        break
        except Exception as error:
            found.put((_name_of(probe), f"not probed: {error or type(error).__name__}", ""))
        found.put(None)

    thread = Thread(target=run, daemon=True)  # The process ends without it.
    thread.start()
    try:
        while (fact := found.get(timeout=max(deadline - time.monotonic(), 0.01))) is not None:
            yield fact
    except Empty:
        yield _name_of(probe), f"did not answer within {_LIMIT_S:g} s", "a file system may hang"
    finally:  # Also after Ctrl-C.
        has_ended.set()
        thread.join(_GRACE_S)


def _name_of(probe: Callable[..., object]) -> str:
    return probe.__name__.replace("_", " ")
