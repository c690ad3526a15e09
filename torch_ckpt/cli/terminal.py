"""Exit statuses of all commands, and what they print: tables, JSON and names."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch_ckpt.storage.progress import is_terminal

__all__ = [
    "DAMAGED",
    "DIFFERENT",
    "FAILED",
    "INTERRUPTED",
    "PIPE_CLOSED",
    "SOUND",
    "UNKNOWN",
    "fail",
    "print_columns",
    "print_json",
    "print_table",
    "printable",
    "width",
]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""Exit statuses. That of a wrong usage is 2 as well, as of most commands."""

DIFFERENT = 1
"""Exit status of a comparison that found a difference."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in a shell."""

PIPE_CLOSED = 141
"""Exit status if the reader of the output has gone, as in a shell."""


def fail(error: object) -> int:
    """Prints an error, and returns the exit status of a failure."""
    print(f"torch-ckpt: {error}", file=sys.stderr)
    return FAILED


def print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=1, allow_nan=False))


def printable(name: str) -> str:
    """Returns a name with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def width() -> int:
    """Returns the columns of the terminal; 80 if the output is no terminal.

    ``COLUMNS`` overrides both.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # No file, or a closed one.
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    return 80


def print_table(
    rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), right: Sequence[int] = ()
) -> None:
    """Prints rows in aligned columns; with rich on a terminal, if it is installed.

    ``right`` are the numbers of the columns that align at the right. With a ``header``, columns
    without any text are left out.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if header and rows:
        used = [number for number in range(len(header)) if any(row[number] for row in rows)]
        rows = [[row[number] for number in used] for row in (header, *rows)]
        right = [place for place, number in enumerate(used) if number in right]
    if is_terminal(sys.stdout) and find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2))
        for number in range(max(map(len, rows), default=0)):
            table.add_column(justify="right" if number in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        Console(width=width()).print(table)
        return
    print_columns(rows, right=right)


def print_columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Prints rows in aligned columns, as narrow as they can be."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
