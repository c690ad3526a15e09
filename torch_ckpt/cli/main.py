"""The command ``torch-ckpt``: lists, verifies and compares checkpoints, and serves runs.

For a checkpoint with an index, the command neither imports torch nor unpickles data.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

import torch_ckpt
from torch_ckpt.cli import (
    agent,
    convert,
    diff,
    doctor,
    gc,
    inspect,
    ls,
    report,
    rm,
    run,
    verify,
    watch,
)
from torch_ckpt.cli.terminal import DAMAGED, INTERRUPTED, PIPE_CLOSED, fail
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CheckpointError, CorruptionError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # For names that it cannot encode.
    watch_storage()
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        status = command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except CheckpointError as error:
        status = fail(error)
        return DAMAGED if isinstance(error, CorruptionError) else status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # The reader closed the pipe, for example `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        return fail(f"{type(error).__name__}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-ckpt",
        description="Lists, verifies, compares and converts checkpoints, and serves training runs.",
    )
    version = f"torch-ckpt {torch_ckpt.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (ls, report, inspect, verify, diff, convert, rm, gc, watch, run, agent, doctor):
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
