"""Exit statuses and output of all commands: tables, JSON and names."""

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
    "age_text",
    "colored",
    "fail",
    "print_columns",
    "print_json",
    "print_table",
    "printable",
    "width",
]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""Exit statuses. Wrong usage is 2 as well, as in most commands."""

DIFFERENT = 1
"""Exit status of a comparison that found a difference."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in a shell."""

PIPE_CLOSED = 141
"""Exit status if the reader of the output has ended, as in a shell."""


def fail(error: object) -> int:
    """Prints an error, and returns the exit status of a failure."""
    print(colored("torch-ckpt:", sys.stderr), error, file=sys.stderr)
    return FAILED


def print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=1, allow_nan=False))


def printable(name: str) -> str:
    """Returns a name with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


_STYLES = {
    "red": ("31", ("damaged", "failed", "torch-ckpt:", "differs")),
    "yellow": ("33", ("unfinished", "incomplete", "unknown", "cannot verify", "not durable")),
    "green": ("32", ("sound", "files present", "ok")),
}
"""Color -> its code of ANSI terminals, and the first words of texts in it."""


def colored(text: str, stream: Any = None) -> str:
    """Returns a text that begins with a state in the color of the state, on a terminal.

    ``NO_COLOR`` and ``TERM=dumb`` turn colors off. ``stream`` is the standard output by default.
    """
    name = _color_of(text)
    if name is None or not _has_colors(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_STYLES[name][0]}m{text}\x1b[0m"


def _color_of(text: str) -> str | None:
    begins = text.lstrip()
    return next((name for name, (_, words) in _STYLES.items() if begins.startswith(words)), None)


def _has_colors(stream: object) -> bool:
    is_off = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_off and is_terminal(stream)


def width() -> int:
    """Returns the width of the terminal in columns; 80 if the output is not a terminal.

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

    ``right`` are the numbers of right-aligned columns. With a ``header``, columns without any text
    are omitted.
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
            table.add_row(*(Text(cell, style=_color_of(cell) or "") for cell in row))
        Console(width=width()).print(table)
        return
    print_columns(rows, right=right)


def print_columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Prints rows in aligned columns, as narrow as they can be."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - len(cell))
            cells.append(padding + cell if number in right else colored(cell) + padding)
        print("  " + "  ".join(cells).rstrip())


def age_text(seconds: float | None) -> str:
    """Returns how long ago something was, in one unit; a dash if that is unknown."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
