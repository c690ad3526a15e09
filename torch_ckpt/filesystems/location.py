"""Locations: files and directories of any file system, named by a path or a URL.

A public function that accepts a path converts it into a :class:`Location`, and passes the location
on. Paths without a scheme and ``file://`` URLs name files of this machine. ``register`` adds a file
system for another scheme.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.object_store import OBSTORE_SCHEMES, file_system_of
from torch_ckpt.filesystems.passwords import refuse_password
from torch_ckpt.filesystems.store_client import PENDING, url_of
from torch_ckpt.process_state import PROCESS, Descriptor

__all__ = [
    "PENDING",
    "Location",
    "can_reach",
    "name_of",
    "refuse_unregistered",
    "register",
    "registered_schemes",
    "remove_each",
]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# Also as `Path("file:///x")` prints it.
_FILE_URL = re.compile(r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.DOTALL)
_URL_AS_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/.*", re.DOTALL)

_ANY_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL)

_BUFFER_NBYTES = 16 << 10  # Buffer size of an open file. Callers read few, scattered records.
_STORE_BUFFER_NBYTES = 8 << 20  # For stores, where a request takes longer.


def register(scheme: str, file_system: _native.FileSystem) -> None:
    """Registers the file system for a URL scheme in this process.

    Args:
        scheme: The text before ``://``.
        file_system: The file system. It receives the text after ``://`` as a path.

    Example::

        register("other-disk", file_system)
        dcp.save(state, storage_writer=FastWriter("other-disk://run/step-100"))
    """
    PROCESS.file_systems[scheme] = file_system
    PROCESS.registered.add(scheme)


def registered_schemes() -> frozenset[str]:
    """Returns the schemes for which :func:`register` was called."""
    return frozenset(PROCESS.registered)


def refuse_unregistered(schemes: frozenset[str]) -> None:
    """From now on, refuses URLs of these schemes unless they are registered here as well.

    The schemes are registered in the parent process. Without its file systems, a URL may lead to
    another store.
    """
    for scheme in schemes - PROCESS.registered:
        PROCESS.file_systems[scheme] = None


def name_of(path: str | os.PathLike[str]) -> str:
    """Returns a name of a location that is the same in all processes: its URL or resolved path.

    The scheme of a URL need not be registered. A name that is a path is absolute.
    """
    text = os.fspath(path)
    _refuse(text)
    if url := _FILE_URL.fullmatch(text):
        return resolved_path(url[1])
    if url := _URL.fullmatch(text):
        return url_of(url[1], PurePosixPath(url[2]))
    return resolved_path(text)


def _refuse(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"no file can have the path {text!r}: it contains a NUL")
    if not _FILE_URL.fullmatch(text) and (url := _ANY_URL.fullmatch(text)):
        has_bucket = url[1] in OBSTORE_SCHEMES  # Then the URL has no port, and no default host.
        rest = url[2].lstrip("/") if has_bucket else url[2]
        if has_bucket and not rest:
            raise UnsupportedError(f"cannot reach {text}: the URL names no bucket")
        refuse_password(url[1], rest, may_have_port=not has_bucket)


def resolved_path(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path on this machine, without links."""
    with _native.StorageCall("resolving", path):
        return os.path.realpath(path)


def can_reach(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path has no scheme, or is a URL of a registered scheme."""
    try:
        Location(path)
    except UnsupportedError:
        return False
    return True


class Location:
    """The name of a file or directory, together with its file system.

    The engine accesses a location through its :attr:`file_system` and :attr:`path`. A location is
    not an ``os.PathLike``, so that no code bypasses the file system. Its path is a
    :class:`pathlib.Path` for files of this machine. Methods raise NotFoundError if a file does not
    exist, and StorageError if an operation fails.

    Args:
        path: Path on this machine, or URL.

    Raises:
        UnsupportedError: The URL's scheme is not registered, the URL lacks a slash because it was
            a ``Path``, it contains a password, or a ``file:`` URL names another host.
        ValueError: The path contains a NUL.

    Example::

        directory = Location("run/step-100")
        print((directory / ".metadata").nbytes(), "bytes in", directory)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        _refuse(text)
        if url := _FILE_URL.fullmatch(text):
            self._become("", Path(url[1]))
        elif url := _URL.fullmatch(text):
            if url[1] == "file":
                raise UnsupportedError(f"cannot reach {text}: it names another host; use file:///")
            self._become(url[1], PurePosixPath(url[2]))
        elif _URL_AS_PATH.fullmatch(text):
            raise UnsupportedError(
                f"cannot reach {text}: a Path has dropped a slash of this URL; pass the URL as a "
                "str, or a local directory by its absolute path"
            )
        else:
            self._become("", Path(text))

    def _become(self, scheme: str, path: PurePath) -> None:
        self._scheme = scheme
        self.path = path
        if not scheme:
            self.file_system = _native.local_file_system()
            return
        if scheme not in PROCESS.file_systems:
            store = file_system_of(scheme)
            if store is None:
                raise UnsupportedError(
                    f"cannot reach {self}: no file system is registered for {scheme}://; register "
                    "one with torch_ckpt.filesystems.location.register"
                )
            PROCESS.file_systems[scheme] = store
        if PROCESS.file_systems[scheme] is None:
            raise UnsupportedError(
                f"cannot reach {self}: the process that started this one has registered a file "
                f"system for {scheme}://, and this process has not. Call register in a module "
                "that both import, such as the main module, outside its __main__ block"
            )
        self.file_system = PROCESS.file_systems[scheme]

    def _with(self, path: PurePath) -> Location:
        other = Location.__new__(Location)
        other._become(self._scheme, path)
        return other

    # ---- Names ----

    def __truediv__(self, name: str | PurePath) -> Location:
        return self._with(self.path / name)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.name

    @property
    def parent(self) -> Location:
        """The parent directory; the location itself for a bucket, or the root of a disk."""
        return self if self._is_bucket(self.path) else self._with(self.path.parent)

    @property
    def parents(self) -> list[Location]:
        """All parent directories, the nearest first."""
        folders = self.absolute().path.parents
        return [self._with(folder) for folder in folders if folder.parts or not self._scheme]

    def _is_bucket(self, path: PurePath) -> bool:
        """Returns whether a path is a first name: the host or bucket of a URL."""
        return bool(self._scheme) and len(path.parts) == 1

    def with_name(self, name: str) -> Location:
        """Returns the location of another name in the same directory."""
        return self._with(self.path.with_name(name))

    def absolute(self) -> Location:
        """Returns the location with an absolute path. Links are not resolved."""
        return self._with(self.path.absolute()) if isinstance(self.path, Path) else self

    def resolved(self) -> Location:
        """Returns the location to which the links in the path lead now.

        If a link changes later, the result does not.
        """
        if not isinstance(self.path, Path):
            return self
        return self._with(Path(resolved_path(self.path)))

    @property
    def checkpoint_id(self) -> str | PurePath:
        """The location as DCP's ``checkpoint_id``: a path of this machine, or a URL."""
        return str(self) if self._scheme else self.path

    def __str__(self) -> str:
        return url_of(self._scheme, self.path) if self._scheme else str(self.path)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Location):
            return NotImplemented
        return (self._scheme, self.path) == (other._scheme, other.path)

    def __hash__(self) -> int:
        return hash((self._scheme, self.path))

    def __reduce__(self) -> tuple[type[Location], tuple[str]]:
        return Location, (str(self),)

    # ---- Files ----

    def exists(self) -> bool:
        """Returns whether the file exists. Raises StorageError if the location is a directory."""
        return self.file_system.exists(self.path)

    def is_missing(self) -> bool:
        """Returns whether neither a file nor a directory exists; also ``False`` if unknown."""
        try:
            return not self.exists()
        except CheckpointError:  # Probably a directory.
            return False

    def is_file(self) -> bool:
        """Returns whether the location exists and is not a directory."""
        try:
            return self.exists()
        except StorageError as error:
            return error.errno not in (errno.EISDIR, errno.ENOTDIR)

    def is_directory(self) -> bool:
        """Returns whether the location is a directory."""
        try:
            self.exists()
        except StorageError as error:
            return error.errno == errno.EISDIR
        return False

    def nbytes(self) -> int:
        """Returns the length of the file, in bytes."""
        return self.file_system.read_range(self.path, 0, 0)[0]

    def modified_s(self) -> float | None:
        """Returns the time of the last write, in seconds since 1970; ``None`` if it is unknown."""
        with contextlib.suppress(CheckpointError):
            found = self.file_system.modified_s(self.path)
            return None if math.isnan(found) else found
        return None

    def renew(self) -> None:
        """Dates the file to the present, with its contents unchanged. Does nothing if it is absent.

        Raises StorageError if the file system refuses that.
        """
        if self.local_path is None:
            with contextlib.suppress(NotFoundError):
                self.replace(self.read(), sync=False)
            return
        try:
            with _native.StorageCall("dating", self.path):
                os.utime(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(
                f"cannot set the time of {self}: {error.strerror}", errno=error.errno
            ) from error

    def identity(self) -> tuple[int, ...] | str | None:
        """Returns a value that changes if the file is replaced; ``None`` if unknown."""
        if self.file_system.publishes_by_condition:
            return self.file_system.version(self.path) or None
        try:
            with _native.StorageCall("inspecting", self.path):
                stat = None if self.local_path is None else self.local_path.stat()
        except OSError:
            return None
        return stat and (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def mount(self) -> int | None:
        """Returns the number of the mount of a directory on disk; ``None`` if it cannot be opened.

        A directory that is mounted at a second place has another number there. Without ``/proc``,
        both have that of the file system.
        """
        assert self.local_path is not None
        try:
            with _native.StorageCall("inspecting", self.path):
                number = os.open(self.local_path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return None
        descriptor = Descriptor(number)
        with contextlib.closing(descriptor):
            try:
                facts = Path(f"/proc/self/fdinfo/{number}").read_text()
                return int(facts.partition("mnt_id:")[2].split()[0])
            except (OSError, ValueError, IndexError):
                return os.fstat(number).st_dev

    def is_same_as(self, other: Location) -> bool:
        """Returns whether both lead to the same file or directory, even through different mounts.

        Always ``False`` for a local path and a URL, although the path may be a mount of the store.
        """
        if self.local_path is None or other.local_path is None:
            return self == other
        try:
            with _native.StorageCall("inspecting", other.path):
                return self.local_path.samefile(other.local_path)
        except OSError:  # One of them does not exist.
            return self == other

    def read_range(self, offset: int, nbytes: int, *, exact: bool = False) -> tuple[int, bytes]:
        """Returns the length of the file, and the bytes of a range up to the end of the file.

        With ``exact``, the caller knows that the file has these bytes. A store then needs one
        request less, does not return the length, and raises CorruptionError if the file is shorter.
        """
        return self.file_system.read_range(self.path, offset, nbytes, exact)

    def read(self) -> bytes:
        """Reads the whole file into memory. Suitable for small files."""
        return self.read_range(0, 1 << 62)[1]

    def open(self) -> io.BufferedReader:
        """Opens the file for reading, as a seekable binary stream."""
        nbytes = _BUFFER_NBYTES if self.file_system.has_folders else _STORE_BUFFER_NBYTES
        return io.BufferedReader(_Stream(self), nbytes)

    @property
    def local_path(self) -> Path | None:
        """The path if this process can map the file into memory; ``None`` otherwise."""
        return self.path if isinstance(self.path, Path) else None

    def write(self, contents: bytes, *, sync: bool, update: bool = False) -> None:
        """Writes a new file, or with ``update`` an empty one.

        Raises StorageError if the new file exists already. A failed write may leave an incomplete
        file.
        """
        self.file_system.write_file(self.path, contents, sync, update)

    def replace(self, contents: bytes, *, sync: bool) -> None:
        """Writes a file atomically: readers find either the old or the new contents."""
        if not self.file_system.writes_at_offsets:
            self.write(contents, sync=sync, update=True)
            return
        pending = self.with_name(f"{PENDING}{secrets.token_hex(8)}")
        try:
            pending.write(contents, sync=sync)
            pending.rename(self)
        except BaseException:
            pending.discard()
            raise

    def append(self, contents: bytes) -> None:
        """Appends to a local file; creates it if it does not exist.

        First completes an unfinished last line. Not synced.
        """
        with Path(self.path).open("ab") as file:
            end = file.tell()
            if end and self.read_range(end - 1, 1)[1] != b"\n":
                file.write(b"\n")
            file.write(contents)

    def copy_to(self, target: Location) -> None:
        """Copies the file, durably. A failed copy may leave an incomplete file."""
        _native.copy_file(self.file_system, self.path, target.file_system, target.path)

    def rename(self, to: Location) -> None:
        """Renames the location within its file system, and replaces the target if it exists."""
        self.file_system.rename(self.path, to.path)

    def link(self, to: Location, *, sync: bool) -> None:
        """Gives the file another name without moving its bytes: a hard link, or a store's own copy.

        With ``sync``, its bytes survive a power cut, and its name as well once the directory is
        synced. Raises UnsupportedError if these two locations cannot be linked, and StorageError
        with ``EEXIST`` if the target exists, except on a store, which replaces it.
        """
        if self.file_system is not to.file_system:
            raise UnsupportedError(f"cannot link {self} to {to}: they are on different storage")
        self.file_system.link(self.path, to.path, sync)

    def link_target(self) -> Location | None:
        """Returns the target of this symbolic link, without following further links.

        Returns ``None`` if the location is no link. Links in its parent directories are resolved.
        """
        if self.local_path is None or not self.local_path.is_symlink():
            return None
        try:
            target = self.local_path.parent / os.readlink(self.path)
        except OSError:  # It was removed meanwhile.
            return None
        return self._with(Path(resolved_path(target.parent)) / target.name)

    def copy_link_to(self, to: Location) -> bool:
        """Makes ``to`` the same symbolic link, if this location is one, and returns whether it is.

        A relative link has the same target only in a sibling directory. Not synced.
        """
        if self.local_path is None or not self.local_path.is_symlink():
            return False
        try:
            os.symlink(os.readlink(self.path), to.path)
        except OSError as error:
            raise StorageError(
                f"cannot make the link {to}: {error.strerror}", errno=error.errno
            ) from error
        return True

    def exchange(self, other: Location) -> bool:
        """Exchanges two files or directories of one file system atomically.

        Returns whether the file system supports this. If not, nothing has changed.
        """
        try:
            self.file_system.exchange(self.path, other.path)
        except StorageError as error:
            # EPERM: a sandbox refuses the call. If it has another reason, the caller's next rename
            # fails, too.
            if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                return False
            raise
        return True

    def remove(self) -> None:
        """Removes a file or an empty directory."""
        self.file_system.remove(self.path)

    def discard(self) -> None:
        """Removes a file or an empty directory, and ignores errors."""
        with contextlib.suppress(CheckpointError):
            self.remove()

    # ---- Directories ----

    def create_directories(self) -> None:
        """Creates the directory and its missing parents."""
        self.file_system.create_directories(self.path)

    def names(self) -> list[str]:
        """Returns the names in the directory, sorted."""
        return self.file_system.list_directory(self.path)

    def directory_names(self) -> list[str]:
        """Returns the names of subdirectories, and of links to directories, sorted.

        On stores, returns all names, because a check would take a request for each.
        """
        if self.local_path is None:
            return self.names()
        try:
            with (
                _native.StorageCall("listing", self.path),
                os.scandir(self.local_path) as entries,
            ):
                return sorted(entry.name for entry in entries if _is_directory(entry))
        except OSError:
            return self.names()  # Raises the error of this class.

    def sync(self) -> None:
        """Syncs the directory, so that its names survive a power cut."""
        self.file_system.sync_directory(self.path)

    def remove_all(self) -> None:
        """Removes a file, or a directory and its contents. Safe if several processes do it at once.

        If one file or directory cannot be removed, the others still are.
        """
        if not self.file_system.has_folders:
            self.file_system.remove_all(self.path)
            return
        try:
            self.remove()
            return
        except NotFoundError:
            return
        except StorageError as error:
            try:
                names = self.names()
            except NotFoundError:
                return
            except StorageError:  # A file.
                raise error from None
        remove_each(self / name for name in names)
        with contextlib.suppress(NotFoundError):
            self.remove()


def remove_each(locations: Iterable[Location]) -> None:
    """Removes files, and directories with their contents, even if one of them cannot be removed.

    Raises the first StorageError at the end.
    """
    first: StorageError | None = None
    try:
        for location in locations:
            try:
                location.remove_all()
            except StorageError as error:
                first = first or error
        if first is not None:
            raise first
    finally:
        del first  # Its traceback refers to this frame, and so to the callers' frames.


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a directory or a link to one; ``True`` if unknown."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno not in (errno.ELOOP, errno.ENOTDIR)


class _Stream(io.RawIOBase):
    """A seekable stream over a file."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._nbytes = location.nbytes()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._nbytes)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        _, data = self._location.read_range(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
