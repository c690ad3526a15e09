"""The command ``torch-ckpt``: inspects and verifies checkpoints, and runs the agent of a run.

For a checkpoint with an index, the command neither imports torch nor unpickles data.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch_ckpt.cli import agent, inspect, run, verify, watch
from torch_ckpt.cli.terminal import DAMAGED, FAILED, SOUND
from torch_ckpt.errors import CheckpointError, CorruptionError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except CheckpointError as error:
        print(f"torch-ckpt: {error}", file=sys.stderr)
        return DAMAGED if isinstance(error, CorruptionError) else FAILED
    except BrokenPipeError:  # The reader closed the pipe, for example `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"torch-ckpt: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torch-ckpt",
        description="Inspects and verifies checkpoints, and runs the agent of a training run.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify.add_to(commands)
    inspect.add_to(commands)
    agent.add_to(commands)
    run.add_to(commands)
    watch.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
