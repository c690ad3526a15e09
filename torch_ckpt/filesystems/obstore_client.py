"""A client of S3, Google Cloud Storage and Azure: the library ``obstore``."""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import itertools
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    StorageError,
    UnsupportedError,
)
from torch_ckpt.filesystems.passwords import without_secrets
from torch_ckpt.filesystems.store_client import METADATA, MOST_PARTS, StoreClient

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ImportError as error:
    raise UnsupportedError(
        "cannot reach an object store: obstore is not installed; pip install obstore"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObstoreClient"]

_log = logging.getLogger("torch_ckpt")

_UPLOADS = 8
"""Parts of one file in flight."""

_GROWTH = 8
"""Factor by which the parts of a stream grow when it has reached the maximum number of parts. Its
first bytes are then read back, and written again."""

_GROWN_UPLOADS = 2
"""Parts of such a stream in flight. Each is a copy in memory."""

_PIECE_NBYTES = 8 << 20
"""Bytes that one request reads back. ``_UPLOADS`` requests are in flight."""

_TIMEOUT = "120s"
"""How long one request may take, with its bytes."""

_RETRY_S = 180.0
"""For how long a request that the store does not answer is repeated."""

_FIRST_TIMEOUT = "5s"
"""How long the first request to a bucket may take. It fails soon for a wrong name or credential;
later requests are repeated for minutes."""

_FEW_RETRIES: dict[str, Any] = {"seconds": 5.0, "max_retries": 2}
"""How often the first request of a kind is repeated, which tests what a store supports."""

_CLIENT_OPTIONS = (
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_url", "timeout", "user_agent"),
)

_CREDENTIALS = {
    "AWS_": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "GOOGLE_": "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_": "AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_BUCKET = re.compile("NoSuchBucket|BucketNotFound|ContainerNotFound")
_BAD_REQUEST = re.compile("status code: 400")
_NO_RANGE = re.compile("status code: 416")
_NOT_IMPLEMENTED = re.compile("status code: 501")
_CONDITION_ERRORS = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
_DENIED = re.compile(
    "ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|HeaderMalformed"
)
"""In an answer of S3 with status 400: the credentials are the reason."""
_NO_ANSWER = re.compile(
    r"HTTP error|response body|Got invalid \w+ response|ConditionalRequestConflict"
)
_BROKEN_ANSWER = re.compile(r"body error|response body|Got invalid \w+ response")
_STATUS = re.compile(r"status code: (\d{3})")
_BUSY = re.compile(r"status code: (429|5\d\d)")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.\d+\.\d+|/latest/(api/token|meta-data)|/metadata/identity|Missing \w*(Key|Secret)"
)
"""A client without credentials requests a role from a service of the machine."""

_Answer = TypeVar("_Answer")


class ObstoreClient(StoreClient):
    """Implements :class:`torch_ckpt.filesystems.object_store.ObjectStore`."""

    copies = True
    _exists_errors = _CONDITION_ERRORS
    _shows_causes = False  # Debug details repeat the message, and quote the answer of the server.

    def __init__(self, scheme: str, options: dict[str, Any]) -> None:
        super().__init__(scheme)
        self._options = options
        self._impatient: dict[str, Any] = {}  # Clients of the same buckets with few retries.
        self._conditional: dict[str, bool] = {}  # Bucket -> whether it respects conditions.
        self._with_bare_versions: set[str] = set()  # Buckets that compare versions without quotes.

    def find(self, path: str, start_nbytes: int) -> tuple[int, str, float, Buffer]:
        store, key = self._locate(path)
        with self._naming("find", path):
            if not key:  # A bucket is not an object, and stores answer differently.
                raise FileNotFoundError(path)
            if start_nbytes:

                def get_start() -> tuple[int, str, float, Buffer]:
                    got = obstore.get(store, key, options={"range": (0, start_nbytes)})
                    return *_facts(got.meta), got.bytes()

                try:
                    return self._repeated(get_start)
                except exceptions.GenericError as error:
                    if not _NO_RANGE.search(str(error)):  # The object is empty.
                        raise
            meta = self._head(store, key)
            end = min(start_nbytes, meta["size"])
            return *_facts(meta), self.get(path, 0, end) if end else b""

    def _head(self, store: Any, key: str) -> Any:
        """Returns the facts of an object. A request for a byte finds out why HEAD is refused."""
        try:
            return self._repeated(lambda: obstore.head(store, key))
        except exceptions.GenericError as error:
            if not _BAD_REQUEST.search(str(error)):
                raise
            options: Any = {"range": (0, 1)}
            return self._repeated(lambda: obstore.get(store, key, options=options)).meta

    def get(self, path: str, offset: int, nbytes: int) -> Buffer:
        store, key = self._locate(path)
        with self._naming(f"read {nbytes} bytes at {offset} of", path):
            try:
                return self._repeated(
                    lambda: obstore.get_range(store, key, start=offset, length=nbytes)
                )
            except exceptions.GenericError as error:
                if not _NO_RANGE.search(str(error)):
                    raise
                raise CorruptionError(
                    f"cannot read {nbytes} bytes at {offset} of {self._url(path)}: it ends earlier"
                ) from None

    def put(self, path: str, contents: Buffer, version: str | None) -> None:
        store, key = self._locate(path)
        mode: Any = "overwrite" if version is None else json.loads(version) if version else "create"
        bucket = path.strip("/").partition("/")[0]
        with self._naming("write", path):
            if version is None or self._conditional.get(bucket) is False:
                self._overwrite(store, key, contents)
                return
            try:
                is_written = bucket not in self._conditional and self._put_first(
                    bucket, key, contents, mode
                )
                if not is_written:
                    self._put_if(bucket, key, contents, mode)
            except (exceptions.NotSupportedError, NotImplementedError):
                self._ignores_conditions(bucket)
                self._overwrite(store, key, contents)
                return
            if bucket not in self._conditional:
                self._probe_conditions(bucket, store, key, contents)

    def _overwrite(self, store: Any, key: str, contents: Buffer) -> None:
        self._repeated(lambda: obstore.put(store, key, contents, use_multipart=False))

    def _put_first(self, bucket: str, key: str, contents: Buffer, mode: Any) -> bool:
        """Makes the first conditional write of a process. Returns whether it succeeded.

        Raises NotImplementedError if the store does not support such writes. The library treats its
        answer, 501, as a transient failure, and would repeat the request for minutes.
        """
        try:
            obstore.put(self._impatient[bucket], key, contents, mode=mode)
        except exceptions.BaseError as error:
            if _NOT_IMPLEMENTED.search(str(error)):
                raise NotImplementedError from error
            return False
        return True

    def _put_if(self, bucket: str, key: str, contents: Buffer, mode: Any) -> None:
        """Writes an object on a condition.

        radosgw of Ceph 16 compares versions without the quotes of HTTP.
        """
        store = self._connection(bucket)
        quoted = mode.get("e_tag", "") if isinstance(mode, dict) else ""
        bare: Any = {**mode, "e_tag": quoted.strip('"')} if quoted.startswith('"') else mode
        first = bare if bucket in self._with_bare_versions else mode
        try:
            # If the first write succeeded, the caller detects its own bytes.
            self._repeated(lambda: obstore.put(store, key, contents, mode=first))
        except exceptions.PreconditionError:
            if first is bare or self._repeated(lambda: _version_of(store, key)) != quoted:
                raise
            self._repeated(lambda: obstore.put(store, key, contents, mode=bare))
            self._with_bare_versions.add(bucket)

    def put_stream(self, path: str, part_nbytes: int, windows: Iterator[Buffer]) -> None:
        store, key = self._locate(path)

        def upload(pieces: Iterator[Buffer], in_flight: int) -> None:
            obstore.put(
                *(store, key, pieces),
                use_multipart=True,
                chunk_size=part_nbytes,
                max_concurrency=in_flight,
            )

        stream = _Stream(windows)
        has_object = False
        with self._naming("write", path):
            try:
                upload(stream.until(MOST_PARTS * part_nbytes), _UPLOADS)
                while stream.has_more:  # All parts of one upload have the same length.
                    has_object, sent = True, self._read_back(path, stream.nbytes)
                    part_nbytes *= _GROWTH
                    # The writer has no memory for larger parts, so they are copied.
                    rest = (bytes(one) for one in stream.until(MOST_PARTS * part_nbytes))
                    upload(itertools.chain(sent, rest), _GROWN_UPLOADS)
            except BaseException:
                if has_object:
                    with contextlib.suppress(CheckpointError):
                        self.remove(path)
                raise

    def _read_back(self, path: str, nbytes: int) -> Iterator[Buffer]:
        """Yields the bytes of an object, read by other threads.

        The library cannot make requests in the thread that pulls from an iterator.
        """
        reads: collections.deque[Future[Buffer]] = collections.deque()
        with ThreadPoolExecutor(_UPLOADS, "torch_ckpt-read") as executor:
            for offset in range(0, nbytes, _PIECE_NBYTES):
                if len(reads) == _UPLOADS:
                    yield reads.popleft().result()
                length = min(_PIECE_NBYTES, nbytes - offset)
                reads.append(executor.submit(self.get, path, offset, length))
            while reads:
                yield reads.popleft().result()

    def list(self, path: str) -> list[str]:
        store, key = self._locate(path)
        with self._naming("list", path):
            found = self._repeated(lambda: obstore.list_with_delimiter(store, prefix=key or None))
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        # Programs mark a folder by an empty object with the name of the folder.
        return [path.rpartition("/")[2] for path in paths if path.strip("/") != key]

    def copy(self, source: str, target: str) -> None:
        store, key = self._locate(source)
        if source.partition("/")[0] != target.partition("/")[0]:
            raise UnsupportedError(f"cannot rename {self._url(source)} to {self._url(target)}")
        with self._naming("copy", source):
            to = self._locate(target)[1]
            self._repeated(lambda: obstore.copy(store, key, to))

    def remove(self, path: str) -> None:
        store, key = self._locate(path)
        with self._naming("remove", path):
            self._delete(store, [key])

    def remove_all(self, path: str) -> None:
        store, key = self._locate(path)
        with self._naming("remove", path):
            chunks = self._repeated(lambda: [*obstore.list(store, prefix=key)])
            keys = [one["path"] for chunk in chunks for one in chunk] or [key]
            metadata = [key for key in keys if METADATA.fullmatch(key.rpartition("/")[2])]
            self._delete(store, metadata)
            self._delete(store, sorted(set(keys).difference(metadata)))

    def _delete(self, store: Any, keys: Sequence[str]) -> None:
        """Removes objects, which another process may remove at the same time."""
        try:
            if keys:
                self._repeated(lambda: obstore.delete(store, keys))
        except FileNotFoundError:
            for key in keys if len(keys) > 1 else ():
                self._delete(store, [key])

    def _locate(self, path: str) -> tuple[Any, str]:
        """Returns the store of the bucket of a path, and the key."""
        path = path.strip("/")
        return self._connection(path), path.partition("/")[2]

    def _connect(self, bucket: str) -> Any:
        """Returns the store of a bucket, after a first request to it.

        Raises StorageError if the bucket does not exist or cannot be reached.
        """
        url = self._url(bucket)
        if not bucket:
            raise StorageError(f"cannot reach {url}: it names no bucket", errno.EINVAL)
        options = dict(self._options)
        if self._scheme in (
            "s3",
            "s3a",
        ):  # Several gateways answer bulk deletes incorrectly.
            options.setdefault("disable_bulk_delete", True)
        connect: Any = from_url  # Its options depend on the scheme.
        client_options = {
            "connect_timeout": _FIRST_TIMEOUT,
            **_client_options_of_environment(self._scheme),
            **options.pop("client_options", {}),
        }
        few = _retries(**_FEW_RETRIES)
        retries = _retries(_RETRY_S, max_retries=1000)  # Limited only by time.
        with self._naming("reach", bucket):
            first = connect(
                url,
                **{**options, "retry_config": few},
                client_options={**client_options, "timeout": _FIRST_TIMEOUT},
            )
            try:
                _repeated(
                    lambda: obstore.get(first, ".torch_ckpt-is-there-a-bucket"),
                    _BROKEN_ANSWER,
                    seconds=2.0,
                )
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise StorageError(
                        f"cannot reach {url}: there is no such bucket", errno.ENODEV
                    ) from None
            except exceptions.PermissionDeniedError:
                pass  # Some stores answer like this for a missing object.
            except exceptions.GenericError as error:
                if not _BUSY.search(str(error)):
                    raise
                # The store exists, but is busy. Later requests are repeated for longer.
            self._impatient[bucket] = first
            return connect(
                url,
                **{"retry_config": retries, **options},
                client_options={"timeout": _TIMEOUT, **client_options},
            )

    def _probe_conditions(self, bucket: str, store: Any, key: str, contents: Buffer) -> None:
        """Tests whether a bucket respects conditions, with an object that exists by now."""
        try:
            for _ in range(2):  # Before the first write, another job may have removed the object.
                obstore.put(store, key, contents, mode="create")
        except _CONDITION_ERRORS:
            self._conditional[bucket] = True
        except (exceptions.BaseError, ValueError):
            pass  # The object is written. The next write repeats the test.
        else:
            self._ignores_conditions(bucket)

    def _ignores_conditions(self, bucket: str) -> None:
        self._conditional[bucket] = False
        _log.warning(
            "the store of %s ignores conditions of writes: if two jobs save the same checkpoint at "
            "the same time, it may have files of both; let one job write a directory",
            self._url(bucket),
        )

    @contextlib.contextmanager
    def _naming(self, what: str, path: str) -> Iterator[None]:
        """As the base class, also for a lost bucket, a bug in the library, or unusual settings."""
        try:
            with super()._naming(what, path):
                try:
                    yield
                except FileNotFoundError as error:
                    if not _NO_BUCKET.search(str(error)):
                        raise
                    raise self._failure(f"cannot {what} {self._url(path)}", error) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise StorageError(
                f"cannot {what} {self._url(path)}: obstore failed: {without_secrets(str(error))}",
                errno.EINVAL,
            ) from None

    def _failure(self, attempt: str, error: Exception) -> CheckpointError:
        message = without_secrets(str(error).partition("Debug source")[0]).strip()
        hint, number = "", _errno_of(error, message)
        if number == errno.ENODEV:
            hint = "there is no such bucket; "
        elif isinstance(error, exceptions.GenericError) and _NO_CREDENTIALS.search(message):
            hint = f"no credentials in {_CREDENTIALS[_prefix(self._scheme)]}; "
        elif "builder error" in message and "http://" in message:
            hint = f"for an endpoint of http://, set {_prefix(self._scheme)}ALLOW_HTTP=true; "
        return StorageError(f"{attempt}: {hint}{message}", number)

    def _repeated(self, request: Callable[[], _Answer]) -> _Answer:
        retries = self._options.get("retry_config") or {}
        limit = retries.get("retry_timeout", datetime.timedelta(seconds=_RETRY_S))
        return _repeated(request, _NO_ANSWER, seconds=limit.total_seconds())


class _Stream:
    """Windows of a stream, which several uploads pull one after the other.

    ``nbytes`` is the length of the windows pulled so far. ``has_more``: whether the stream
    continues after the last upload.
    """

    def __init__(self, windows: Iterator[Buffer]) -> None:
        self._windows = windows
        self._next: Buffer | None = None
        self.nbytes, self.has_more = 0, False

    def until(self, end: int) -> Iterator[Buffer]:
        """Yields windows until the next one would make the stream longer than ``end`` bytes."""
        self.has_more = True
        while (window := self._pulled()) is not None:
            nbytes = memoryview(window).nbytes
            if self.nbytes + nbytes > end:
                self._next = window
                return
            self.nbytes += nbytes
            yield window
            del window  # The client releases a window when the store has its part.
        self.has_more = False

    def _pulled(self) -> Buffer | None:
        window, self._next = self._next, None
        return next(self._windows, None) if window is None else window


def _repeated(
    request: Callable[[], _Answer], failures: re.Pattern[str], *, seconds: float
) -> _Answer:
    """Sends a request, and repeats it if the response is lost or broken.

    The library itself repeats most requests within the same time, but not conditional writes, nor
    requests whose response has begun.
    """
    deadline = time.monotonic() + seconds
    wait_s = 0.1
    while True:
        try:
            return request()
        except (exceptions.GenericError, *_CONDITION_ERRORS) as error:
            message = str(error).partition("Debug source")[0]
            if not failures.search(message) or _NO_CREDENTIALS.search(message):
                raise
            if time.monotonic() + wait_s > deadline:
                raise
        time.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, 10.0)


def _errno_of(error: Exception, message: str) -> int | None:
    """Returns the error code for an error of the library, which states whether it is retriable.

    Returns ``None`` if the store refuses the request for another reason than credentials or the
    bucket. The library has exceptions for statuses 401, 403 and 404, but not in a listing.
    """
    denied = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if isinstance(error, denied) or _NO_CREDENTIALS.search(message):
        return errno.EACCES
    found = _STATUS.search(message)
    status = int(found[1]) if found else 0
    if status in (401, 403) or (status == 400 and _DENIED.search(message)):
        return errno.EACCES
    if status == 404 and _NO_BUCKET.search(message):
        return errno.ENODEV
    if 400 <= status < 500 and status not in (408, 409, 425, 429):
        return None
    is_answerable = isinstance(error, exceptions.GenericError) and "builder error" not in message
    return errno.ETIMEDOUT if is_answerable else errno.EINVAL


def _prefix(scheme: str) -> str:
    """Returns the prefix of a client's environment variables."""
    return {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_"}.get(scheme, "AZURE_")


def _client_options_of_environment(scheme: str) -> dict[str, Any]:
    """Returns the options of HTTP that obstore reads from the environment, such as AWS_ALLOW_HTTP.

    obstore ignores these if any are passed explicitly.
    """
    prefix = _prefix(scheme)
    named = {name: os.environ.get(f"{prefix}{name.upper()}") for name in _CLIENT_OPTIONS}
    return {name: value for name, value in named.items() if value is not None}


def _version_of(store: Any, key: str) -> str | None:
    """Returns the version of an object; ``None`` if it has none, or does not exist."""
    with contextlib.suppress(FileNotFoundError):
        version: str | None = obstore.head(store, key)["e_tag"]
        return version
    return None


def _facts(meta: Any) -> tuple[int, str, float]:
    """Returns an object's length, the mode of a write that replaces it, and when it was written."""
    known = {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}
    return meta["size"], json.dumps(known), meta["last_modified"].timestamp()


def _retries(seconds: float, *, max_retries: int) -> dict[str, Any]:
    begin, most = datetime.timedelta(milliseconds=100), datetime.timedelta(seconds=10)
    return {
        "max_retries": max_retries,
        "retry_timeout": datetime.timedelta(seconds=seconds),
        "backoff": {"init_backoff": begin, "max_backoff": most, "base": 2},
    }
