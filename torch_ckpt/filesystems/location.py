"""Locations: files and directories of any file system, named by a path or a URL.

Whoever is given a path by a user makes a location of it, and hands that down. A path without a
scheme, and ``file://``, are those of this machine. Other schemes are served by whoever has
registered one: ``register("s3", file_system)``.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.process_state import PROCESS

__all__ = ["Location", "can_reach", "register"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

_BUFFER_NBYTES = 16 << 10  # Of an open file, of which a few records here and there are read.


def register(scheme: str, file_system: _native.FileSystem) -> None:
    """Serves the URLs of a scheme by a file system, in this process.

    Args:
        scheme: What stands before ``://``.
        file_system: Gets what follows it as a path.

    Example::

        register("other-disk", file_system)
        dcp.save(state, storage_writer=FastWriter("other-disk://run/step-100"))
    """
    PROCESS.file_systems[scheme] = file_system


def can_reach(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of this machine, or a URL whose scheme is served.

    Args:
        path: As for :class:`Location`.
    """
    try:
        Location(path)
    except UnsupportedError:
        return False
    return True


class Location:
    """A file or a directory.

    What the engine opens gets :attr:`file_system` and :attr:`path`. There is no other access to the
    files of a checkpoint: a location is no ``os.PathLike``.

    Args:
        path: A path of this machine, or a URL of a registered scheme.

    Attributes:
        file_system: Has the file.
        path: Within the file system; a :class:`pathlib.Path` if that is this machine's.

    Raises:
        UnsupportedError: The scheme of the URL is not registered.

    Example::

        directory = Location("run/step-100")
        print((directory / ".metadata").nbytes(), "bytes in", directory)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        url = _URL.fullmatch(os.fspath(path))
        if url is None:
            self._become("", Path(path))
        elif url[1] == "file":
            self._become("", Path(url[2]))
        else:
            self._become(url[1], PurePosixPath(url[2]))

    def _become(self, scheme: str, path: PurePath) -> None:
        self._scheme = scheme
        self.path = path
        if scheme and scheme not in PROCESS.file_systems:
            raise UnsupportedError(
                f"cannot reach {self}: no file system is registered for {scheme}://; paths of this "
                "machine and file:// are served"
            )
        self.file_system = PROCESS.file_systems[scheme] if scheme else _native.local_file_system()

    def _with(self, path: PurePath) -> Location:
        other = Location.__new__(Location)
        other._become(self._scheme, path)
        return other

    # ---- Names ----

    def __truediv__(self, name: str | PurePath) -> Location:
        return self._with(self.path / name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def parent(self) -> Location:
        """The directory that this lies in."""
        return self._with(self.path.parent)

    @property
    def parents(self) -> list[Location]:
        """All directories above, from the nearest on."""
        return [self._with(folder) for folder in self.absolute().path.parents]

    def with_name(self, name: str) -> Location:
        """Another name in the same directory."""
        return self._with(self.path.with_name(name))

    def absolute(self) -> Location:
        """The same, wherever this process goes."""
        return self._with(Path(os.path.abspath(self.path))) if isinstance(self.path, Path) else self

    @property
    def checkpoint_id(self) -> str | PurePath:
        """What DCP calls it: a path of this machine, or else the URL."""
        return str(self) if self._scheme else self.path

    def __str__(self) -> str:
        return f"{self._scheme}://{self.path}" if self._scheme else str(self.path)

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
        """Whether there is a file.

        Raises:
            StorageError: It cannot be told, as of a directory.
        """
        return self.file_system.exists(self.path)

    def is_file(self) -> bool:
        """Whether there is something, and it is no directory."""
        try:
            return self.exists()
        except StorageError as error:
            return error.errno != errno.EISDIR

    def nbytes(self) -> int:
        """The length of a file.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be opened.
        """
        return self.file_system.read_part(self.path, 0, 0)[0]

    def read_part(self, offset: int, nbytes: int) -> tuple[int, bytes]:
        """The length of a file, and those of these bytes that it has.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be read.
        """
        return self.file_system.read_part(self.path, offset, nbytes)

    def read(self) -> bytes:
        """All of a file that is small.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be read.
        """
        return self.read_part(0, 1 << 62)[1]

    def open(self) -> io.BufferedReader:
        """The file, to be read as if it were open here.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be opened.
        """
        return io.BufferedReader(_Stream(self), _BUFFER_NBYTES)

    @property
    def local_path(self) -> Path | None:
        """Where a file is that this process can map into memory; ``None`` if it cannot."""
        return self.path if isinstance(self.path, Path) else None

    def write(self, contents: bytes, *, sync: bool) -> None:
        """Writes a new file.

        Raises:
            StorageError: It cannot be written, or there is one. There may be a part of it.
        """
        self.file_system.write_file(self.path, contents, sync)

    def rename(self, to: Location) -> None:
        """Gives it another name in the same file system, in place of what has that name.

        Raises:
            NotFoundError: There is nothing to rename.
            StorageError: It cannot be renamed.
        """
        self.file_system.rename(self.path, to.path)

    def remove(self) -> None:
        """Removes a file, or an empty directory.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be removed.
        """
        self.file_system.remove(self.path)

    def discard(self) -> None:
        """Removes a file if that is possible."""
        with contextlib.suppress(CheckpointError):
            self.remove()

    # ---- Directories ----

    def create_directories(self) -> None:
        """Creates the directory and whatever is missing above it.

        Raises:
            StorageError: It cannot be created.
        """
        self.file_system.create_directories(self.path)

    def names(self) -> list[str]:
        """The names in the directory, sorted.

        Raises:
            NotFoundError: There is none.
            StorageError: It cannot be listed.
        """
        return self.file_system.list_directory(self.path)

    def sync(self) -> None:
        """Has the names in the directory survive a power cut.

        Raises:
            StorageError: It cannot be synced.
        """
        self.file_system.sync_directory(self.path)

    def remove_all(self) -> None:
        """Removes a file, or a directory with all that is in it; others may do so at the same time.

        Raises:
            StorageError: Something cannot be removed.
        """
        try:
            self.remove()
        except NotFoundError:
            return
        except StorageError:  # A directory that is not empty, perhaps.
            with contextlib.suppress(NotFoundError):
                for name in self.names():
                    (self / name).remove_all()
                self.remove()


class _Stream(io.RawIOBase):
    """Reads a file where it is told to."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._nbytes = location.nbytes()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        _, data = self._location.read_part(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
