"""A client of any store that ``fsspec`` supports. It is slow, and has no conditional writes."""

from __future__ import annotations

import contextlib
import datetime
import errno
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch_ckpt.errors import StorageError, UnsupportedError
from torch_ckpt.filesystems.store_client import (
    METADATA,
    StoreClient,
    copied,
    grown_part_nbytes,
    pending_path,
)

try:
    import fsspec
except ImportError as error:
    raise UnsupportedError("fsspec is not installed") from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FsspecClient", "is_known"]

_log = logging.getLogger("torch_ckpt")


def is_known(scheme: str) -> bool:
    """Returns whether ``fsspec`` has a client for a scheme."""
    return scheme in fsspec.available_protocols()


class FsspecClient(StoreClient):
    """Implements :class:`torch_ckpt.filesystems.object_store.ObjectStore`."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        _log.warning(
            "%s:// is accessed through fsspec, which is slow, and cannot detect that two jobs "
            "write the same file",
            scheme,
        )

    def find(self, path: str, start_nbytes: int) -> tuple[int, str, float, Buffer]:
        with self._naming("find", path):
            info = self._info(path)
            if info["type"] == "directory":
                raise FileNotFoundError(path)
            nbytes = int(info["size"])
            start = min(start_nbytes, nbytes)
            contents = self.get(path, 0, start) if start else b""
            return nbytes, _version(info), self._modified_s(path), contents

    def get(self, path: str, offset: int, nbytes: int) -> Buffer:
        with self._naming(f"read {nbytes} bytes at {offset} of", path):
            found: bytes = self._store(path).cat_file(
                self._key(path), start=offset, end=offset + nbytes
            )
            return found

    def put(self, path: str, contents: Buffer, version: str | None) -> None:
        with self._naming("write", path):
            if version is not None and self._version_of(path) != version:
                raise StorageError(
                    f"cannot write {self._url(path)}: another one was written meanwhile",
                    errno.EEXIST,
                )
            self._make_folder(path)
            # Some of these file systems write in place, so a reader could see half of a file.
            pending = self._key(pending_path(path))
            try:
                self._store(path).pipe_file(pending, bytes(contents))
                self._store(path).mv(pending, self._key(path))
            except BaseException:
                with contextlib.suppress(Exception):
                    self._store(path).rm_file(pending)
                raise

    def put_stream(self, path: str, part_nbytes: int, windows: Iterator[Buffer]) -> None:
        with self._naming("write", path):
            self._make_folder(path)
            with self._store(path).open(self._key(path), "wb", block_size=part_nbytes) as file:
                try:
                    sent_nbytes = 0
                    for contents in copied(windows):
                        if hasattr(file, "blocksize"):  # Some clients have no parts.
                            file.blocksize = grown_part_nbytes(part_nbytes, sent_nbytes)
                        file.write(contents)
                        sent_nbytes += len(contents)
                except BaseException:
                    with contextlib.suppress(Exception):
                        file.discard()
                    raise

    def list(self, path: str) -> list[str]:
        with self._naming("list", path):
            try:
                store = self._store(path)
                found = store.ls(self._key(path), detail=False, **_fresh(store.ls))
            except FileNotFoundError:
                return []
        here = self._key(path).strip("/")
        return [one.rstrip("/").rpartition("/")[2] for one in found if one.strip("/") != here]

    def copy(self, source: str, target: str) -> None:
        with self._naming("copy", source):
            if self._info(source)["type"] == "directory":
                raise FileNotFoundError(source)
            self._store(source).cp_file(self._key(source), self._key(target))

    def remove(self, path: str) -> None:
        with self._naming("remove", path), contextlib.suppress(FileNotFoundError):
            self._store(path).rm_file(self._key(path))

    def remove_all(self, path: str) -> None:
        with self._naming("remove", path), contextlib.suppress(FileNotFoundError):
            store = self._store(path)
            for one in store.find(self._key(path), **_fresh(store.ls)):  # It calls `ls`.
                if METADATA.fullmatch(one.rpartition("/")[2]):
                    store.rm_file(one)
            store.rm(self._key(path), recursive=True)

    def _store(self, path: str) -> Any:
        """Returns the file system of a path. Its first name may be a host."""
        return self._connection(path.strip("/"))

    def _connect(self, first: str) -> Any:
        # Cached listings would hide files that other processes write.
        return fsspec.core.url_to_fs(self._url(first), use_listings_cache=False)[0]

    def _key(self, path: str) -> str:
        key: str = self._store(path)._strip_protocol(self._url(path))
        return key

    def _make_folder(self, path: str) -> None:
        folder = self._key(path).rpartition("/")[0]
        if folder:
            with contextlib.suppress(NotImplementedError):
                self._store(path).makedirs(folder, exist_ok=True)

    def _info(self, path: str) -> Any:
        """Returns what the store states of a file or folder now."""
        store = self._store(path)
        return store.info(self._key(path), **_fresh(store.info))

    def _version_of(self, path: str) -> str:
        try:
            return _version(self._info(path))
        except FileNotFoundError:
            return ""

    def _modified_s(self, path: str) -> float:
        try:
            modified: datetime.datetime = self._store(path).modified(self._key(path))
        except (NotImplementedError, FileNotFoundError):
            return math.nan  # Unknown. A wrong guess could make a new file seem old.
        return modified.timestamp()


def _fresh(method: Callable[..., Any]) -> dict[str, bool]:
    """Returns the option of a client's method to ask the store, if it has one.

    Some clients answer from listings that they keep, whatever ``use_listings_cache`` is. Others
    raise an error if they get an option that they do not know.
    """
    return {"refresh": True} if "refresh" in inspect.signature(method).parameters else {}


def _version(info: Any) -> str:
    for name in ("ETag", "etag", "version_id", "generation", "mtime", "created", "LastModified"):
        if info.get(name) is not None:
            return f"{name}={info[name]}"
    return f"size={info['size']}"
