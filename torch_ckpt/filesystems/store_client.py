"""What the clients of stores share: connections, URLs in messages, names of pending files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.passwords import cause_of, without_secrets

__all__ = [
    "METADATA",
    "MOST_PARTS",
    "PENDING",
    "StoreClient",
    "grown_part_nbytes",
    "pending_path",
    "url_of",
]

PENDING = ".pending-"
"""Begin of the names of files that have not been renamed yet to the name that readers know."""

METADATA = re.compile(r"(__\d+)?\.metadata")
"""Names that make a directory a checkpoint: removed first."""

MOST_PARTS = 10_000
"""Most parts of one upload, as S3 and Google Cloud Storage limit it. Others allow more."""

_FAILED_S = 1.0
"""For how long a bucket that was not reached is not tried again."""


def url_of(scheme: str, path: str | PurePath) -> str:
    """Returns the URL of a path on a store; ``.`` is the root of a store without buckets."""
    path = str(path)
    return f"{scheme}://{'' if path == '.' else path}"


def pending_path(path: str) -> str:
    """Returns a new path beside another one. Garbage collection finds it by its name."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{PENDING}{secrets.token_hex(8)}-{name}"


def grown_part_nbytes(part_nbytes: int, sent_nbytes: int) -> int:
    """Returns the length of the next part of a stream, after bytes that were sent in parts.

    A thousandth of these, if that is more than the length that was planned. So 10,000 parts of
    8 MiB at first have room for 60 TiB.
    """
    return max(part_nbytes, 10 * sent_nbytes // MOST_PARTS)


class StoreClient:
    """The part of an :class:`~torch_ckpt.filesystems.object_store.ObjectStore` that all have."""

    copies = False  # Those that rename, as HDFS, must not lose a file that is to be copied.

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._pid = 0  # The process that has connected, whose threads a child lacks.
        self._lock = threading.Lock()
        self._connected: dict[str, Any] = {}  # By the first name of paths.
        # First name that was not reached -> when, why, and the error code.
        self._failed: dict[str, tuple[float, str, int | None]] = {}

    def _connect(self, first: str) -> Any:
        """Returns the library's client of a first name, after a request to it."""
        raise NotImplementedError

    def _connection(self, path: str) -> Any:
        """Returns the library's client of the first name of a path: a bucket, or a host."""
        first = path.partition("/")[0]
        if self._pid not in (0, os.getpid()):
            raise UnsupportedError(
                f"cannot reach {self._url(path)}: this process was forked from one that uses the "
                "store; start processes with 'spawn' or 'forkserver'"
            )
        with self._lock:
            self._pid = os.getpid()
            if first not in self._connected:
                try:
                    self._connected[first] = self._connect_once(first)
                except StorageError as error:
                    raise StorageError(
                        f"{error} (needed for {self._url(path)})", error.errno
                    ) from error.__cause__
            return self._connected[first]

    def _connect_once(self, first: str) -> Any:
        """Returns as ``_connect``. What cleans up after a failure fails at once."""
        failed_s, message, number = self._failed.get(first, (0.0, "", 0))
        if message and time.monotonic() - failed_s < _FAILED_S:
            raise StorageError(message, number)
        try:
            return self._connect(first)
        except StorageError as error:
            self._failed[first] = (time.monotonic(), str(error), error.errno)
            raise

    def _url(self, path: str) -> str:
        return url_of(self._scheme, path)

    @contextlib.contextmanager
    def _naming(self, what: str, path: str) -> Iterator[None]:
        """Names the operation and the URL in errors of the library."""
        attempt = f"cannot {what} {self._url(path)}"
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"{attempt}: there is none") from cause_of(error)
        except FileExistsError as error:
            raise StorageError(
                f"{attempt}: another one was written meanwhile", errno.EEXIST
            ) from cause_of(error)
        except Exception as error:
            raise self._failure(attempt, error) from cause_of(error)

    def _failure(self, attempt: str, error: Exception) -> CheckpointError:
        """Returns the error for one of the library, which begins with what was attempted."""
        number = getattr(error, "errno", None) or errno.EIO
        text = without_secrets(str(error))
        return StorageError(f"{attempt}: {type(error).__name__}: {text}", number)
