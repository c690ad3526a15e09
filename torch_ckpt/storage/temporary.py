"""Hidden files and directories beside a target, which a process makes and later renames or removes.

Their names state the process, so that another process can remove them after its death. A name is
``.<target>.<id>.<owner>.<kind>``, where the owner is a machine, a process id and the time when the
process started.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection

from torch_ckpt.coordination.owner import is_dead, this_process
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = ["OLD", "can_be_renamed", "remove_abandoned", "temporaries_of", "temporary"]

_NAME = re.compile(
    r"\.(?P<target>.+)\.[0-9a-f]{16}\.(?P<owner>[0-9a-f]{8}-\d+-\d+)\.(?P<kind>[a-z]+)", re.DOTALL
)
OLD = "old"
"""Kind of a replaced target, which gets its name back if its process dies too early."""

_REMOVED = "removed"
_MAX_NAME_NBYTES = 190
"""Length of a target's name, so that the temporary's name is within the 255 bytes of a name."""

_MAX_AGE_S = 24 * 3600.0
"""Seconds after the last write to a temporary of another machine, until it counts as abandoned."""


def temporary(target: Location, kind: str, unique: str = "") -> Location:
    """Returns an unused location beside a target, which is in use as long as this object lives.

    Args:
        target: The file or directory that is to be written.
        kind: The last part of the name.
        unique: 16 hexadecimal digits; random ones by default.
    """
    name = f".{target.name}.{unique or secrets.token_hex(8)}.{this_process()}.{kind}"
    path = target.with_name(name)
    PROCESS.temporaries[name] = path
    return path


def can_be_renamed(target: Location) -> bool:
    """Returns whether a directory can be written beside its target, and renamed once complete.

    It cannot if the target exists, even as an empty directory: somebody may have given it a quota,
    stripes or permissions, or may hold it open. Creates the parents of the target.

    Raises:
        StorageError: A parent cannot be created.
    """
    if len(os.fsencode(target.name)) > _MAX_NAME_NBYTES:
        return False
    if target.is_file() or target.is_directory():
        return False
    target.parent.create_directories()
    return target.file_system.renames_directories(target.parent.path)


def remove_abandoned(
    directory: Location, target: str | None = None, found: Collection[str] = ()
) -> None:
    """Removes the temporaries whose process is dead; ignores errors.

    Whether a process of another machine, or of another container, is dead is unknown. Its
    temporaries are removed 24 hours after their last write.

    Args:
        directory: The directory of the temporaries.
        target: Name of a target; of all targets if ``None``.
        found: Temporaries of a target that was replaced meanwhile. They are removed as well unless
            their process certainly lives.
    """
    with contextlib.suppress(CheckpointError):
        for name in directory.names():
            match = _NAME.fullmatch(name)
            if match is None or (target is not None and match["target"] != target):
                continue
            is_unused = _is_unused(name, match["owner"])
            if is_unused is None:
                is_unused = name in found or _age_s(directory / name) > _MAX_AGE_S
            if is_unused:
                with contextlib.suppress(CheckpointError):
                    _remove(directory / name, match["target"], match["kind"])


def temporaries_of(target: Location) -> frozenset[str]:
    """Returns the names of the temporaries beside a target."""
    with contextlib.suppress(CheckpointError):
        matches = filter(None, map(_NAME.fullmatch, target.parent.names()))
        return frozenset(match[0] for match in matches if match["target"] == target.name)
    return frozenset()


def _remove(path: Location, target: str, kind: str) -> None:
    """Removes a temporary. Its process, if it lives, then finds it missing rather than damaged."""
    replaced = path.with_name(target)
    if kind == OLD and not (replaced.is_file() or replaced.is_directory()):
        path.rename(replaced)  # The process has died before the new target had its name.
        return
    doomed = temporary(replaced, _REMOVED)
    path.rename(doomed)
    doomed.remove_all()


def _is_unused(name: str, owner: str) -> bool | None:
    """Returns whether nobody uses a temporary any more; ``None`` if that is unknown."""
    return name not in PROCESS.temporaries if owner == this_process() else is_dead(owner)


def _age_s(path: Location) -> float:
    """Returns the seconds since the last write to a file, or to any file of a directory."""
    times = [path.modified_s()]
    with contextlib.suppress(CheckpointError):
        times += [(path / name).modified_s() for name in path.names()]
    written = [at for at in times if at is not None]
    return time.time() - max(written) if written else 0.0
