"""The base of store clients: connections, URLs in messages, names of pending files."""

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
    "copied",
    "grown_part_nbytes",
    "pending_path",
    "url_of",
]

PENDING = ".pending-"
"""Prefix of files that were not yet renamed to their final name."""

METADATA = re.compile(r"(__\d+)?\.metadata")
"""Names that make a directory a checkpoint. They are removed first."""

MOST_PARTS = 10_000
"""Maximum number of parts of an upload to S3 and Google Cloud Storage. Others allow more."""

_FAILED_S = 1.0
"""For how long an unreachable bucket is not tried again."""


def url_of(scheme: str, path: str | PurePath) -> str:
    """Returns the URL of a path on a store; ``.`` is the root of a store without buckets."""
    path = str(path)
    return f"{scheme}://{'' if path == '.' else path}"


def pending_path(path: str) -> str:
    """Returns a new path beside another one. Garbage collection finds it by its name."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{PENDING}{secrets.token_hex(8)}-{name}"


def copied(windows: Iterator[Any]) -> Iterator[bytes]:
    """Returns copies of the windows of a stream, and drops each window once it is copied.

    The save waits for each window, which frames of an error would keep alive.
    """
    return map(bytes, windows)


def grown_part_nbytes(part_nbytes: int, sent_nbytes: int) -> int:
    """Returns the length of the next part of a stream, after bytes that were sent in parts.

    The length is a thousandth of these bytes, if that exceeds the planned length. So 10,000 parts,
    of 8 MiB at first, suffice for 60 TiB.
    """
    return max(part_nbytes, 10 * sent_nbytes // MOST_PARTS)


class StoreClient:
    """The common part of all :class:`~torch_ckpt.filesystems.object_store.ObjectStore` clients."""

    copies = False  # On clients that rename, such as HDFS, `copy` would lose the source.
    _exists_errors: tuple[type[Exception], ...] = (FileExistsError,)
    _shows_causes = True  # Whether errors of the library are shown as causes.

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._pid = 0  # The process that has connected: a forked child lacks its threads.
        self._lock = threading.Lock()
        self._connected: dict[str, Any] = {}  # By the first component of paths.
        # First component that was not reached -> when, why, and the error code.
        self._failed: dict[str, tuple[float, str, int | None]] = {}

    def _connect(self, first: str) -> Any:
        """Returns the library's client for the first component of a path, after a test request."""
        raise NotImplementedError

    def _connection(self, path: str) -> Any:
        """Returns the library's client for the first component of a path: a bucket or a host."""
        first = path.partition("/")[0]
        if self._pid not in (0, os.getpid()):
            raise UnsupportedError(
                f"cannot reach {self._url(path)}: this process was forked from one that uses the "
                "store; start processes with 'spawn' or 'forkserver'"
            )
        connection = self._connected.get(first)
        if connection is not None:
            return connection  # Without the lock: another bucket may be slow to answer.
        with self._lock:
            self._pid = os.getpid()
            connection = self._connected.get(first)
            if connection is None:
                try:
                    connection = self._connected[first] = self._connect_once(first)
                except StorageError as error:
                    raise StorageError(
                        f"{error} (needed for {self._url(path)})", error.errno
                    ) from error.__cause__
            return connection

    def _connect_once(self, first: str) -> Any:
        """Like ``_connect``, but fails immediately if the last attempt failed recently."""
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
        """Names the operation and the URL in errors of the library.

        After a request without an answer, the next one connects again. A request is repeated for
        minutes, and one call of the engine makes several. The test of a connection fails in seconds
        while the store is down, so only the first one takes minutes.
        """
        attempt = f"cannot {what} {self._url(path)}"
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"{attempt}: it does not exist") from cause_of(error)
        except self._exists_errors as error:
            raise StorageError(
                f"{attempt}: another one was written meanwhile", errno.EEXIST
            ) from cause_of(error)
        except Exception as error:
            failure = self._failure(attempt, error)
            if isinstance(failure, StorageError) and failure.errno == errno.ETIMEDOUT:
                self._connected.pop(path.partition("/")[0], None)
            raise failure from cause_of(error) if self._shows_causes else None

    def _failure(self, attempt: str, error: Exception) -> CheckpointError:
        """Returns the error for an error of the library. Its message begins with the attempt."""
        number = getattr(error, "errno", None)
        if number == errno.EIO:  # Libraries use it for any failure. Here it means a bad sector.
            number = None
        if isinstance(error, PermissionError):
            number = errno.EACCES
        elif isinstance(error, TimeoutError | ConnectionError):
            number = errno.ETIMEDOUT
        text = without_secrets(str(error))
        return StorageError(f"{attempt}: {type(error).__name__}: {text}", number)
