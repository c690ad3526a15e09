"""EventLog: ``events.jsonl``, the record of a run, which a background thread writes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location

__all__ = ["EVENTS", "OLDER_EVENTS", "EventLog"]

EVENTS, OLDER_EVENTS = "events.jsonl", "events.1.jsonl"

_LOG = logging.getLogger("torch_ckpt")

_LOCAL_NBYTES = 64 << 20
"""Length at which ``events.jsonl`` replaces ``events.1.jsonl``."""

_STORE_NBYTES = 4 << 20
"""The same on a store, where each append rewrites the whole file."""

_MOST_WAITING = 1000
"""Maximum number of records that wait for storage; further ones are dropped."""

_WATCH_S = 5.0
_CLOSE_S = 5.0


class EventLog:
    """Appends to the record of a run. If storage fails, only events are lost.

    ``directory`` is the directory of the run. A missing local directory is not created. Events are
    dropped while ``is_own`` returns ``False``: another directory is at its path.
    """

    def __init__(self, directory: Location, is_own: Callable[[], bool] = lambda: True) -> None:
        self._is_own = is_own
        self._file, self._older = directory / EVENTS, directory / OLDER_EVENTS
        self._directory = directory
        self._waiting: queue.Queue[Callable[[], str] | None] = queue.Queue(_MOST_WAITING)
        self._watched: list[Callable[[], str | None]] = []
        self._later: deque[Callable[[], None]] = deque()
        self._whole: bytes | None = None  # The contents of the file on a store, once known.
        self._thread: threading.Thread | None = None

    def put(self, lines: Callable[[], str]) -> None:
        """Schedules a function, and appends its lines."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(lines)
            self._start()

    def call_later(self, function: Callable[[], None]) -> None:
        """Calls a function when no lines are waiting. Called by the thread of this log."""
        self._later.append(function)

    def watch(self, unfinished: Callable[[], str | None]) -> None:
        """Calls a function at intervals, and appends its lines, until it returns ``None``."""
        self._watched.append(unfinished)
        self._start()

    def close(self, *, waits: bool = True) -> None:
        """Ends the record. By default, waits a short time until all lines are written."""
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            with contextlib.suppress(RuntimeError):  # It could not be started.
                self._thread.join(_CLOSE_S if waits else 0.0)

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # A forked child has no such thread.
            self.close()

    def _start(self) -> None:
        if self._thread is None:
            # The interpreter must not end while native code of the thread runs.
            atexit.register(self._at_exit, os.getpid())
            name = "torch_ckpt-events"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # The system has no more threads.
                self._thread.start()

    def _work(self) -> None:
        due = time.monotonic() + _WATCH_S
        while True:
            if self._later and self._waiting.empty():
                self._call(self._later.popleft())
                continue
            with contextlib.suppress(queue.Empty):
                lines = self._waiting.get(timeout=max(due - time.monotonic(), 0.0))
                if lines is None:
                    for function in self._later:
                        self._call(function)
                    return
                self._append(lines)
            if time.monotonic() >= due:
                self._append_unfinished()
                due = time.monotonic() + _WATCH_S

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException:  # Also `sys.exit`: the thread and the run continue.
            _LOG.exception("a listener of the record of %s failed", self._directory)

    def _append_unfinished(self) -> None:
        for unfinished in list(self._watched):
            if not self._append(unfinished):
                self._watched.remove(unfinished)

    def _append(self, lines: Callable[[], str | None]) -> bool:
        """Appends the lines that a function returns; returns whether it has returned any text."""
        text: str | None = ""
        try:
            text = lines()
            if text:
                self._append_to_file(text.encode())
        except BaseException as error:  # The thread continues.
            _LOG.debug("the record of %s lacks events: %r", self._directory, error)
        return text is not None

    def _append_to_file(self, lines: bytes) -> None:
        if self._file.local_path is not None:
            if not (self._directory.is_directory() and self._is_own()):
                return
            if self._file.is_file() and self._file.nbytes() + len(lines) > _LOCAL_NBYTES:
                self._file.rename(self._older)
            self._file.append(lines)
            return
        if self._whole is None:
            try:
                self._whole = self._file.read()
            except NotFoundError:
                self._whole = b""
        if self._whole and len(self._whole) + len(lines) > _STORE_NBYTES:
            self._older.replace(self._whole, sync=False)
            self._whole = b""
        self._whole += lines
        self._file.replace(self._whole, sync=False)
