"""The command ``torch-ckpt``: lists, verifies and compares checkpoints, and serves runs.

For a checkpoint with an index, the command neither imports torch nor unpickles data.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

import torch_ckpt
from torch_ckpt.cli.terminal import DAMAGED, INTERRUPTED, PIPE_CLOSED, fail
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CheckpointError, CorruptionError

__all__ = ["main"]

_COMMANDS = [
    *("ls", "report", "inspect", "verify", "diff", "convert", "rm", "gc"),
    *("watch", "follow", "run", "agent", "doctor", "completion"),
]
"""Each has a module of its name in this package."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # For names that it cannot encode.
    watch_storage()
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        named = [word for word in arguments[:1] if word in _COMMANDS]
        options = _parser(named or _COMMANDS).parse_args(arguments)
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


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of these commands. It imports no other: imports take most of a short command."""
    parser = argparse.ArgumentParser(
        prog="torch-ckpt",
        description="Lists, verifies, compares and converts checkpoints, and serves training runs.",
    )
    version = f"torch-ckpt {torch_ckpt.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        importlib.import_module(f"torch_ckpt.cli.{name}").add_to(commands)
    parser.set_defaults(program=lambda: _parser(_COMMANDS))  # For `completion`.
    return parser


if __name__ == "__main__":
    sys.exit(main())
