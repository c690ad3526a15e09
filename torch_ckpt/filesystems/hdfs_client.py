"""A client of HDFS: the library ``hdfs-native``, which needs no Java.

A file is written under a temporary name, synced, and renamed, which is atomic at the NameNode. So
it appears when it is complete.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from torch_ckpt.filesystems.passwords import without_secrets
from torch_ckpt.filesystems.store_client import (
    METADATA,
    PENDING,
    StoreClient,
    copied,
    pending_path,
)

try:
    import hdfs_native
except ImportError as error:
    raise UnsupportedError(
        "cannot reach HDFS: hdfs-native is not installed; pip install hdfs-native"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HdfsClient"]

_CALL_S = 200.0
"""How long one call may take. The library itself tries to connect to a NameNode for up to three
minutes, and never times out if the NameNode accepts the connection but does not answer."""

_RETRY_S = 180.0
"""For how long a failing call is repeated."""

_FIRST_S = 5.0
"""How long the first call to a NameNode may take."""

_FEW_RETRIES = {
    "dfs.client.failover.max.attempts": "2",
    "dfs.client.failover.sleep.base.millis": "50",
}

_EXIT_S = 2.0
"""How long the process waits at exit for calls without an answer. The interpreter would crash if
one ended during its shutdown."""

_THREAD = "torch_ckpt-hdfs"

_CLAIM_POLL_S = 0.1
_CLAIM_S = 10.0
"""For how long a job that replaces a file excludes other jobs. A replacement takes milliseconds."""

_MAX_READERS = 256
"""Number of files whose block locations are cached."""

_REMOTE = re.compile(r'RPCError\("(?:[\w$]+\.)*([\w$]+)", "((?:[^"\\]|\\.)*)"\)', re.DOTALL)
_DENIED = re.compile(r"AccessControl|Authorization|InvalidToken|Sasl|SASL|GSSAPI|GSSException")
_LATER = re.compile(
    r"SafeMode|Standby|RetriableException|DataTransferError|OperationFailed|could only be "
)
_BELOW_FILE = re.compile(r'access=EXECUTE, inode="[^"]*":\S+:-|ParentNotDirectory')
_DAMAGED = re.compile(r"ChecksumError")
_SETTING = re.compile(r"UrlParseError|InvalidArgument|XmlParseError")

_Answer = TypeVar("_Answer")


class HdfsClient(StoreClient):
    """Implements :class:`torch_ckpt.filesystems.object_store.ObjectStore`.

    The first component of a path is a NameNode with its port, or a name service; it is empty for
    the default file system of the configuration.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self._readers: dict[str, hdfs_native.FileReader] = {}

    def find(self, path: str, start_nbytes: int) -> tuple[int, str, float, Buffer]:
        with self._naming("find", path):
            client, key = self._locate(path)
            self._readers.pop(path, None)  # Otherwise, `get` could read a replaced file.
            status = self._patiently(client.get_file_info, key)
            if status.isdir:
                raise FileNotFoundError(path)
            nbytes, start = status.length, b""
            if start_nbytes and nbytes:
                reader = self._patiently(self._open, path)
                nbytes = len(reader)  # It may have been replaced since.
                start = self._read(path, 0, min(start_nbytes, nbytes))
            return nbytes, _version(status), status.modification_time / 1000, start

    def get(self, path: str, offset: int, nbytes: int) -> Buffer:
        with self._naming(f"read {nbytes} bytes at {offset} of", path):
            return self._read(path, offset, nbytes)

    def put(self, path: str, contents: Buffer, version: str | None) -> None:
        copied = bytes(contents)  # The library copies any other object byte by byte.

        def write(client: hdfs_native.Client, key: str) -> None:
            self._patiently(lambda: self._finish(self._begin(client, key, copied)))

        self._write(path, write, version)

    def put_stream(self, path: str, part_nbytes: int, windows: Iterator[Buffer]) -> None:
        def write(client: hdfs_native.Client, key: str) -> None:
            parts = copied(windows)
            writer = self._patiently(self._begin, client, key, next(parts, b""))
            for contents in parts:
                self._call(writer.write, contents)
            self._call(self._finish, writer)

        self._write(path, write, None)

    def list(self, path: str) -> list[str]:
        with self._naming("list", path):
            client, key = self._locate(path)
            try:
                found = self._patiently(lambda: [one.path for one in client.list_status(key)])
            except FileNotFoundError:
                return []
            return [one.rpartition("/")[2] for one in found if one != key]

    def copy(self, source: str, target: str) -> None:
        with self._naming("rename", source):
            client, key = self._locate(source)
            if source.partition("/")[0] != target.partition("/")[0]:
                raise UnsupportedError(f"cannot rename {self._url(source)} to {self._url(target)}")
            if self._patiently(client.get_file_info, key).isdir:
                with contextlib.suppress(RuntimeError):  # The engine ignores empty folders.
                    self._patiently(client.delete, key)
                raise FileNotFoundError(source)
            to = self._locate(target)[1]
            self._patiently(client.mkdirs, to.rpartition("/")[0] or "/", 0o755, True)
            with self._changing(source), self._changing(target):
                self._rename(client, key, to, overwrite=True)

    def remove(self, path: str) -> None:
        with self._naming("remove", path), self._changing(path):
            client, key = self._locate(path)
            self._patiently(client.delete, key)

    def remove_all(self, path: str) -> None:
        with (
            self._naming("remove", path),
            self._changing(path),
            contextlib.suppress(FileNotFoundError),
        ):
            client, key = self._locate(path)
            found = self._patiently(lambda: [one.path for one in client.list_status(key, True)])
            for one in found:
                if METADATA.fullmatch(one.rpartition("/")[2]):
                    self._patiently(client.delete, one)
            self._patiently(client.delete, key, True)

    # ---- Files ----

    def _write(
        self, path: str, write: Callable[[hdfs_native.Client, str], None], version: str | None
    ) -> None:
        """Writes a file under a new name, and renames it."""
        with self._naming("write", path), self._changing(path):
            client, key = self._locate(path)
            written, own = pending_path(key), ""
            names = {written}
            try:
                write(client, written)
                own = self._version_of(client, written)
                if version:
                    written = self._claim(client, written, key, version)
                    names.add(written)
                    if self._version_of(client, key) != version:
                        raise FileExistsError(key)
                self._rename(client, written, key, overwrite=version != "")
                # A late job may have renamed the file of the next one.
                if version and self._version_of(client, key) != own:
                    raise FileExistsError(key)
            except BaseException:
                with contextlib.suppress(Exception):
                    for name in names:
                        if not own or self._version_of(client, name) == own:
                            self._call(client.delete, name)
                raise

    @staticmethod
    def _begin(client: hdfs_native.Client, key: str, contents: bytes) -> hdfs_native.FileWriter:
        """Writes the first bytes of a file; repeats this if necessary.

        If the first DataNode is down, the library fails. On a retry, the NameNode may choose
        another one.
        """
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True)
        writer = client.create(key, options)
        writer.write(contents)
        return writer

    @staticmethod
    def _finish(writer: hdfs_native.FileWriter) -> None:
        with contextlib.suppress(NotImplementedError):  # An erasure-coded file.
            writer.hsync()
        writer.close()

    def _claim(self, client: hdfs_native.Client, written: str, key: str, version: str) -> str:
        """Renames a file to the single name from which this version may be replaced; returns it.

        So only one job at a time replaces a version. Raises FileExistsError if another job has
        replaced it. If a job died while it had this name, waits for ``_CLAIM_S``.
        """
        folder, _, name = key.rpartition("/")
        digest = hashlib.sha256(f"{name}/{version}".encode()).hexdigest()[:16]
        claim = f"{folder}/{PENDING}{digest}-{name}"
        other, seen = "", 0
        while True:
            try:
                self._rename(client, written, claim, overwrite=False)
                return claim
            except FileExistsError:
                if self._version_of(client, key) != version:
                    raise
            found = self._version_of(client, claim)
            # Counts polls, not time: while HDFS is down, no job makes progress.
            other, seen = found, seen + 1 if found == other else 0
            if found and seen * _CLAIM_POLL_S > _CLAIM_S:
                self._patiently(client.delete, claim)
            time.sleep(_CLAIM_POLL_S)

    def _rename(
        self, client: hdfs_native.Client, source: str, target: str, *, overwrite: bool
    ) -> None:
        """Renames a file. If an answer is lost, checks whether the target is the former source."""
        own = self._version_of(client, source)
        try:
            self._patiently(client.rename, source, target, overwrite)
        except FileNotFoundError as error:
            if not own or self._version_of(client, target) != own:
                raise FileExistsError(target) from error

    @contextlib.contextmanager
    def _changing(self, path: str) -> Iterator[None]:
        """Replaces or removes a file, or all in a folder, within the block."""
        try:
            yield
        finally:
            self._forget(path)  # DataNodes serve blocks of removed files for a while.

    def _forget(self, path: str) -> None:
        """Drops the cached block locations of a file, or of all files in a folder."""
        for known in list(self._readers):
            if known == path or known.startswith(f"{path}/"):
                self._readers.pop(known, None)

    def _read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Returns the bytes of a range from the cached reader of a file, if that still works."""
        self._locate(path)  # Refuses a forked process.
        if known := self._readers.get(path):
            with contextlib.suppress(OSError, RuntimeError):  # Its blocks may have moved.
                return self._call(self._read_from, known, path, offset, nbytes)
        return self._patiently(lambda: self._read_from(self._open(path), path, offset, nbytes))

    def _read_from(
        self, reader: hdfs_native.FileReader, path: str, offset: int, nbytes: int
    ) -> bytes:
        if offset + nbytes > len(reader):
            raise CorruptionError(
                f"cannot read {nbytes} bytes at {offset} of {self._url(path)}: it ends at "
                f"{len(reader)}"
            )
        return reader.read_range(offset, nbytes)

    def _open(self, path: str) -> hdfs_native.FileReader:
        """Opens a file, and caches its reader with the locations of its blocks."""
        client, key = self._locate(path)
        if len(self._readers) >= _MAX_READERS:
            self._readers.clear()
        reader = self._readers[path] = client.read(key)
        return reader

    def _version_of(self, client: hdfs_native.Client, key: str) -> str:
        try:
            return _version(self._patiently(client.get_file_info, key))
        except FileNotFoundError:
            return ""

    # ---- Calls ----

    def _locate(self, path: str) -> tuple[hdfs_native.Client, str]:
        """Returns the client of a path, and the path in its file system."""
        client: hdfs_native.Client = self._connection(path)
        return client, "/" + path.partition("/")[2].strip("/")

    def _connect(self, first: str) -> hdfs_native.Client:
        with self._naming("reach", first):
            url = f"{self._scheme}://{first}/"
            soon = hdfs_native.Client(url, _FEW_RETRIES)
            # A NameNode of the service may be down, and the library waits to connect to it.
            self._call(soon.get_file_info, "/", seconds=_FIRST_S if ":" in first else _CALL_S)
            return hdfs_native.Client(url)

    def _call(
        self, call: Callable[..., _Answer], *arguments: Any, seconds: float = _CALL_S
    ) -> _Answer:
        """Makes a call of the library, which has no deadlines."""
        future: Future[_Answer] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name=_THREAD, daemon=True)
        thread.start()
        try:
            return future.result(seconds)
        except TimeoutError:
            raise OSError(f"no answer in {seconds:.0f} s") from None

    def _patiently(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Makes an idempotent call; repeats it if HDFS is down or the answer was lost."""
        deadline = time.monotonic() + _RETRY_S
        wait_s = 0.1
        while True:
            try:
                return self._call(call, *arguments)
            except (FileExistsError, FileNotFoundError, IsADirectoryError):
                raise
            except (OSError, RuntimeError) as error:
                number, reason = _cause(error)
                is_brief = number == errno.ETIMEDOUT and "SafeMode" not in reason
                if not is_brief or time.monotonic() + wait_s > deadline:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    def _failure(self, attempt: str, error: Exception) -> CheckpointError:
        number, reason = _cause(error)
        if _BELOW_FILE.search(reason):
            return NotFoundError(f"{attempt}: {reason}")
        if _DAMAGED.match(reason):
            return CorruptionError(f"{attempt}: {reason}")
        return StorageError(f"{attempt}: {reason} ({_configuration()})", number)


@atexit.register
def _await_calls() -> None:
    deadline = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(max(deadline - time.monotonic(), 0.0))


def _cause(error: Exception) -> tuple[int | None, str]:
    """Returns the error code and the text of an error of the library."""
    text = without_secrets(str(error))
    if found := _REMOTE.search(text):
        reason = found[2].encode().decode("unicode_escape", "replace")
        text = f"{found[1]}: {(reason.strip().splitlines() or [''])[0]}"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return errno.EACCES, text
    if _SETTING.match(text):
        return errno.EINVAL, text
    is_later = isinstance(error, OSError) or _LATER.search(text)
    return errno.ETIMEDOUT if is_later else None, text


def _configuration() -> str:
    """Returns where the library searched for the configuration of Hadoop."""
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        if folder := os.environ.get(name):
            return f"{name}={folder}"
    return "neither HADOOP_CONF_DIR nor HADOOP_HOME is set"


def _version(status: hdfs_native.FileStatus) -> str:
    return f"{status.modification_time}-{status.length}"
