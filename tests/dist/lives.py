"""The life of some processes in a campaign of kills: what they report, and how long one waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

__all__ = ["TIMEOUT_S", "Life", "Pipes"]

TIMEOUT_S = 150.0  # The machine may be busy.

Pipes = dict[connection.Connection, int]
"""The pipe of each rank that lives."""


@dataclass
class Life:
    """What the ranks of one life report. A subclass has a dict for each kind of report."""

    failed: dict[int, str] = field(default_factory=dict)

    def take(self, rank: int, report: tuple[str, Any]) -> None:
        """Stores a report: its kind and value."""
        getattr(self, report[0])[rank] = report[1]

    def listen(self, pipes: Pipes, until: Callable[[], bool]) -> None:
        """Receives reports until something holds. AssertionError if a rank fails."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert time.monotonic() < deadline, f"nothing happens any more: {self}"
            self._receive(pipes, 1.0)
            assert not self.failed, f"a rank has failed: {self.failed}"

    def pause(self, pipes: Pipes, seconds: float) -> None:
        """Receives reports for some time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._receive(pipes, left)

    def _receive(self, pipes: Pipes, seconds: float) -> None:
        for pipe in connection.wait(list(pipes), seconds):
            assert isinstance(pipe, connection.Connection)
            try:
                self.take(pipes[pipe], pipe.recv())
            except (EOFError, OSError):
                del pipes[pipe]
