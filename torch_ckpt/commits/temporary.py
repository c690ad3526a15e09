"""Hidden files and directories beside a target, until a process renames or removes them.

The name identifies the owner, so that another process can remove the temporary after the owner has
died. It is ``.<kind>.<target>.<random>.<owner>``: a hash of the target's name, random digits, and
the machine, process id and start of the owner. Many scripts search a folder for names such as
``step-100``, and some search for digits anywhere in a name. So these names contain neither the
target's name nor digits: letters stand for digits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import secrets
from collections.abc import Callable, Iterable

from torch_ckpt.coordination.owner import is_dead, this_process
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = [
    "OLD",
    "PARTIAL",
    "TMP",
    "end_partials",
    "has_temporaries",
    "now_at",
    "remove_abandoned",
    "remove_temporary",
    "replace_directory",
    "temporary",
]

PARTIAL = "partial"
"""Kind of the directory of a new checkpoint until its commit."""

TMP = "tmp"
"""Kind of files that a conversion writes."""

OLD = "old"
"""Kind of a replaced target, whose name is restored if its process dies before the replacement."""

_REMOVED = "removed"
_MAX_AGE_S = 24 * 3600.0
"""Seconds after its last write until a temporary of another machine counts as abandoned."""

_DIGITS, _LETTERS = "0123456789-", "ghijklmnop."
_TO_LETTERS, _TO_DIGITS = str.maketrans(_DIGITS, _LETTERS), str.maketrans(_LETTERS, _DIGITS)
_NAME = re.compile(
    rf"\.(?P<kind>{PARTIAL}|{TMP}|{OLD}|{_REMOVED})\.(?P<target>[a-p]{{16}})\.[a-p]{{16}}"
    r"\.(?P<owner>[a-p]{8}\.[g-p]{1,9}\.[g-p]{1,20})"
)


def temporary(target: Location, kind: str) -> Location:
    """Returns an unused location beside a target, which is in use as long as this object lives.

    ``kind`` is one of the constants above.
    """
    random, owner = (text.translate(_TO_LETTERS) for text in (secrets.token_hex(8), this_process()))
    name = f".{kind}.{_hash_of(target.name)}.{random}.{owner}"
    path = target.with_name(name)
    PROCESS.temporaries[name] = path
    return path


def remove_abandoned(directory: Location, target: str | None = None) -> list[str]:
    """Removes the temporaries of one or all targets whose process is dead; ignores errors.

    It is unknown whether processes of other machines or containers are dead: their temporaries are
    removed 24 hours after the last write. A replaced target is restored only if its name is given
    as ``target``. Returns the names of the other temporaries.
    """
    left: list[str] = []
    now = functools.cache(lambda: now_at(temporary(directory / "clock", TMP)))
    with contextlib.suppress(CheckpointError):
        for match in filter(None, map(_NAME.fullmatch, directory.names())):
            kind, path = match["kind"], directory / match[0]
            is_meant = kind != OLD if target is None else match["target"] == _hash_of(target)
            if not is_meant or not _is_abandoned(match, path, now):
                left.append(match[0])
                continue
            if kind == OLD and target is not None and (directory / target).is_missing():
                with contextlib.suppress(CheckpointError):
                    path.rename(directory / target)
                continue
            remove_temporary(path)
    return left


def has_temporaries(names: Iterable[str]) -> bool:
    """Returns whether any of these names is that of a temporary."""
    return any(map(_NAME.fullmatch, names))


def end_partials(target: Location, found: Iterable[str]) -> None:
    """Removes the hidden directories of other saves to the same target.

    ``found`` is the earlier result of :func:`remove_abandoned`. Directories of processes that are
    certainly alive remain: such a save detects that the target exists, and moves its files there.
    """
    wanted = (PARTIAL, _hash_of(target.name))
    for match in filter(None, map(_NAME.fullmatch, found)):
        if (match["kind"], match["target"]) == wanted and _is_unused(match) is not False:
            remove_temporary(target.with_name(match[0]))


def replace_directory(unpublished: Location, target: Location) -> Location | None:
    """Renames a complete directory to its final name, also if that exists.

    Returns the new path of the replaced directory, or ``None``. The caller must sync the parent
    before it removes the replaced directory.
    """
    replaced = None
    if not target.is_directory():
        unpublished.rename(target)
    elif target.exchange(unpublished):
        replaced = unpublished
    else:
        # If this process dies between the two renames, the next write restores the directory.
        replaced = temporary(target, OLD)
        target.rename(replaced)
        try:
            unpublished.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
    return replaced


def now_at(file: Location) -> float | None:
    """Returns the time by the clock of the file system, by which files are dated.

    A server and this machine may have different clocks. ``None`` if no file can be written. The
    file is new, and is removed.
    """
    written = None
    with contextlib.suppress(CheckpointError):
        file.write(b"", sync=False)
        written = file.modified_s()
    file.discard()
    return written


def remove_temporary(path: Location) -> None:
    """Removes a temporary; ignores errors. Its owner finds it missing, never damaged."""
    with contextlib.suppress(CheckpointError):
        if not path.file_system.has_folders:
            path.remove_all()
            return
        doomed = temporary(path, _REMOVED)
        try:
            path.rename(doomed)
        except NotFoundError:
            return
        except StorageError:  # The file system does not rename directories.
            doomed = path
        doomed.remove_all()


def _hash_of(name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
    return digest[:16].translate(_TO_LETTERS)


def _is_unused(match: re.Match[str]) -> bool | None:
    """Returns whether no process uses a temporary any more; ``None`` if that is unknown."""
    owner = match["owner"].translate(_TO_DIGITS)
    return match[0] not in PROCESS.temporaries if owner == this_process() else is_dead(owner)


def _is_abandoned(match: re.Match[str], path: Location, now: Callable[[], float | None]) -> bool:
    if (is_unused := _is_unused(match)) is not None:
        return is_unused
    now_s = now()
    return now_s is not None and now_s - _written_s(path) > _MAX_AGE_S


def _written_s(path: Location) -> float:
    """Returns the time of the last write to a file, or to anything in a directory.

    It is infinite if it is unknown.
    """
    written = path.modified_s()
    times = [math.inf if written is None else written]
    with contextlib.suppress(CheckpointError):
        times += [_written_s(path / name) for name in path.names()]
    return max(times)
