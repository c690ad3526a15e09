"""Hidden files and directories beside a target, which a process makes and later renames or removes.

A name states the process, so that another process can remove the temporary after its death. It is
``.<kind>.<target>.<random>.<owner>``: a hash of the target's name, random digits, and the machine,
process id and start of the owner. Many scripts search a folder for names such as ``step-100``, and
some search for digits anywhere in a name. So these names have neither the target's name nor any
digit: letters stand for digits.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Iterable

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
    "remove_abandoned",
    "remove_temporary",
    "replace_directory",
    "temporary",
]

PARTIAL = "partial"
"""Kind of the directory of a new checkpoint until its commit."""

TMP = "tmp"
"""Kind of what a conversion writes."""

OLD = "old"
"""Kind of a replaced target, which gets its name back if its process dies too early."""

_REMOVED = "removed"
_MAX_AGE_S = 24 * 3600.0
"""Seconds after the last write to a temporary of another machine, until it counts as abandoned."""

_DIGITS, _LETTERS = "0123456789-", "ghijklmnop."
_TO_LETTERS, _TO_DIGITS = str.maketrans(_DIGITS, _LETTERS), str.maketrans(_LETTERS, _DIGITS)
_NAME = re.compile(
    rf"\.(?P<kind>{PARTIAL}|{TMP}|{OLD}|{_REMOVED})\.(?P<target>[a-p]{{16}})\.[a-p]{{16}}"
    r"\.(?P<owner>[a-p]{8}\.[g-p]{1,9}\.[g-p]{1,20})"
)


def temporary(target: Location, kind: str) -> Location:
    """Returns an unused location beside a target, which is in use as long as this object lives.

    The kind is one of those above.
    """
    random, owner = (text.translate(_TO_LETTERS) for text in (secrets.token_hex(8), this_process()))
    name = f".{kind}.{_hash_of(target.name)}.{random}.{owner}"
    path = target.with_name(name)
    PROCESS.temporaries[name] = path
    return path


def remove_abandoned(directory: Location, target: str | None = None) -> list[str]:
    """Removes the temporaries of one target, or of all, whose process is dead; ignores errors.

    Whether a process of another machine, or of another container, is dead is unknown. Its
    temporaries are removed 24 hours after their last write. A replaced target can get its name back
    only if its name is known. Returns the names of the other temporaries.
    """
    left: list[str] = []
    with contextlib.suppress(CheckpointError):
        for match in filter(None, map(_NAME.fullmatch, directory.names())):
            kind, path = match["kind"], directory / match[0]
            is_meant = kind != OLD if target is None else match["target"] == _hash_of(target)
            if not is_meant or not _is_abandoned(match, path):
                left.append(match[0])
                continue
            if kind == OLD and target is not None and (directory / target).is_missing():
                with contextlib.suppress(CheckpointError):
                    path.rename(directory / target)
                continue
            remove_temporary(path)
    return left


def has_temporaries(names: Iterable[str]) -> bool:
    """Returns whether there are temporaries among some names."""
    return any(map(_NAME.fullmatch, names))


def end_partials(target: Location, found: Iterable[str]) -> None:
    """Removes the directories of other new checkpoints that were to get a target's name.

    ``found`` is what :func:`remove_abandoned` returned before. Those of processes that certainly
    live remain: such a save finds the target, and moves its files there.
    """
    wanted = (PARTIAL, _hash_of(target.name))
    for match in filter(None, map(_NAME.fullmatch, found)):
        if (match["kind"], match["target"]) == wanted and _is_unused(match) is not False:
            remove_temporary(target.with_name(match[0]))


def replace_directory(unpublished: Location, target: Location) -> Location | None:
    """Gives a complete directory its name, also if there is a directory of this name.

    Returns where the replaced directory is now; ``None`` if there was none. The caller syncs the
    parent before it removes the replaced directory.
    """
    replaced = None
    if not target.is_directory():
        unpublished.rename(target)
    elif target.exchange(unpublished):
        replaced = unpublished
    else:
        # In between there is no directory. If this process dies then, the next write restores it.
        replaced = temporary(target, OLD)
        target.rename(replaced)
        try:
            unpublished.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
    return replaced


def remove_temporary(path: Location) -> None:
    """Removes a temporary; ignores errors. Its process then finds it missing, never damaged."""
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
    """Returns whether nobody uses a temporary any more; ``None`` if that is unknown."""
    owner = match["owner"].translate(_TO_DIGITS)
    return match[0] not in PROCESS.temporaries if owner == this_process() else is_dead(owner)


def _is_abandoned(match: re.Match[str], path: Location) -> bool:
    is_unused = _is_unused(match)
    return time.time() - _written_s(path) > _MAX_AGE_S if is_unused is None else is_unused


def _written_s(path: Location) -> float:
    """Returns the time of the last write to a file, or to anything in a directory."""
    written = path.modified_s()
    times = [time.time() if written is None else written]
    with contextlib.suppress(CheckpointError):
        times += [_written_s(path / name) for name in path.names()]
    return max(times)
