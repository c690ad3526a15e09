"""Object stores: the interface of store clients, and the file system based on it.

The clients are Python libraries, which are imported when a URL of their scheme is first used:
``obstore`` for S3, Google Cloud Storage and Azure, ``hdfs-native`` for HDFS, and ``fsspec`` for any
other scheme that it supports. Credentials, endpoints, regions and proxies come from the
configuration of these libraries.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch_ckpt._core import _native
from torch_ckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["OBSTORE_SCHEMES", "ObjectStore", "file_system_of", "object_store"]

OBSTORE_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
"""Schemes that ``obstore`` serves."""

HDFS_SCHEMES = frozenset({"hdfs", "viewfs"})
"""Schemes that ``hdfs-native`` serves."""


class ObjectStore(Protocol):
    """A client of a store, as the engine calls it, from any thread.

    A path begins with the name of the bucket. Methods raise NotFoundError if the object does not
    exist, and StorageError with an ``errno`` if the store refuses or fails. Messages name the URL.
    """

    copies: bool
    """Whether ``copy`` retains the source, and moves no bytes through this machine."""

    def find(self, path: str, start_nbytes: int) -> tuple[int, str, float, Buffer]:
        """Returns the facts about an object, in one request.

        These are its length, its version, the time of its last write (seconds since 1970, by the
        clock of the store), and its first bytes.
        """

    def get(self, path: str, offset: int, nbytes: int) -> Buffer:
        """Returns the bytes of a range."""

    def put(self, path: str, contents: Buffer, version: str | None) -> None:
        """Writes an object in one request.

        ``version`` is the version of the object to replace, or empty if the object must not exist.
        ``None`` replaces any version. Raises StorageError with ``EEXIST`` if the version differs.
        """

    def put_stream(self, path: str, part_nbytes: int, windows: Iterator[Buffer]) -> None:
        """Writes an object in parts, while its bytes arrive.

        A window is released once no reference to it remains. It may be memory of a tensor, and the
        save waits for its release before it passes more. So a loop over windows must end with ``del
        window``. If the iterator raises an error, this method raises it, and no object appears.
        """

    def list(self, path: str) -> list[str]:
        """Returns the names of the objects and folders in a folder."""

    def copy(self, source: str, target: str) -> None:
        """Copies an object within the store, or renames it: the caller removes the source next."""

    def remove(self, path: str) -> None:
        """Removes an object, if it exists."""

    def remove_all(self, path: str) -> None:
        """Removes all objects in a folder and its subfolders, metadata first."""


def object_store(scheme: str, **options: Any) -> _native.FileSystem:
    """Returns the file system of a store with options that override the environment.

    Pass it to :func:`~torch_ckpt.filesystems.location.register`, in each process. By default,
    clients read their options from the environment.

    Args:
        scheme: ``"s3"``, ``"gs"`` or ``"az"``.
        **options: Options of ``obstore.store.from_url``, such as ``endpoint`` or ``region``.

    Raises:
        UnsupportedError: The client is not installed.

    Example::

        register("s3", object_store("s3", endpoint="https://storage.example.com"))
    """
    from torch_ckpt.filesystems.obstore_client import ObstoreClient

    return _native.StoreFileSystem(ObstoreClient(scheme, options))


def file_system_of(scheme: str) -> _native.FileSystem | None:
    """Returns the file system of a scheme; ``None`` if nothing serves it.

    Raises UnsupportedError if the client of the scheme is not installed.
    """
    if scheme in OBSTORE_SCHEMES:
        return object_store(scheme)
    if scheme in HDFS_SCHEMES:
        from torch_ckpt.filesystems.hdfs_client import HdfsClient

        return _native.StoreFileSystem(HdfsClient(scheme))
    try:
        from torch_ckpt.filesystems.fsspec_client import FsspecClient, is_known
    except UnsupportedError:
        return None
    return _native.StoreFileSystem(FsspecClient(scheme)) if is_known(scheme) else None
