"""Answers: calls that use a directory which may not answer, such as one on a lost file server."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location

__all__ = ["Answers"]

ANSWER_S = 30.0
"""Time within which a directory answers."""

T = TypeVar("T")


class Answers:
    """Calls functions that use a directory, each in a new thread. Thread-safe.

    Raises StorageError if a call does not return within ``ANSWER_S``. While that call is still
    running, all further calls fail immediately.
    """

    def __init__(self, directory: Location) -> None:
        self._directory = directory
        self._silent: threading.Thread | None = None

    def get(self, call: Callable[[], T]) -> T:
        """Returns the result of a call, or raises its error."""
        if self._silent is None or not self._silent.is_alive():
            results: list[T] = []
            errors: list[BaseException] = []

            def run() -> None:
                try:
                    results.append(call())
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run, name="torch_ckpt-answers", daemon=True)
            thread.start()
            thread.join(ANSWER_S)
            for error in errors:
                raise error
            if results:
                return results[0]
            self._silent = thread
        raise StorageError(f"{self._directory} does not answer", errno.ETIMEDOUT)
