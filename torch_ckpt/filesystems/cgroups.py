"""The memory that a container may still use, according to its control groups (cgroups).

If a group exceeds its limit, Linux kills a process instead of refusing memory. So large allocations
are compared with the limit first. Memory in tmpfs counts, too.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["RESERVED_NBYTES", "MemoryLimit", "memory_limit"]

RESERVED_NBYTES = 128 << 20
"""Memory that large allocations leave free: for I/O buffers, and for the process of an agent."""


@dataclass(frozen=True)
class MemoryLimit:
    """The most restrictive limit of the groups of a process, and the file that states it.

    The page cache of files counts as free, because the kernel reclaims it.
    """

    nbytes: int
    free_nbytes: int
    file: Path

    @property
    def allowed_nbytes(self) -> int:
        """Memory that large allocations may use."""
        return max(0, self.free_nbytes - RESERVED_NBYTES)

    def __str__(self) -> str:
        return (
            f"the container's limit of {self.nbytes} bytes ({self.file}) leaves "
            f"{self.free_nbytes} bytes free, of which {RESERVED_NBYTES} are reserved for buffers"
        )


@dataclass(frozen=True)
class _Names:
    """The files of one version of cgroups, and the counters of page cache in ``memory.stat``."""

    limit: str
    used: str
    cache: tuple[str, str]


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_limit(proc: Path = Path("/proc/self")) -> MemoryLimit | None:
    """Returns the memory limit of this process; ``None`` if it is unlimited or unknown.

    The limits of its group and of all visible parent groups count.
    """
    found = [limit for folder, names in _groups(proc) if (limit := _limit_of(folder, names))]
    return min(found, key=lambda limit: limit.free_nbytes, default=None)


def _groups(proc: Path) -> Iterator[tuple[Path, _Names]]:
    """Yields the directories of the process's groups with a memory controller."""
    try:
        lines = _lines(proc / "cgroup")
        mounts = [line.split(" ") for line in _lines(proc / "mountinfo")]
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            kind, _, options = mount[mount.index("-") + 1 :][:3]
            is_v2 = not controllers
            if kind != ("cgroup2" if is_v2 else "cgroup"):
                continue
            if is_v2 or "memory" in options.split(","):
                root, point = mount[3], Path(_unescaped(mount[4]))
                names = _V2 if is_v2 else _V1
                folder = point / _relative(group, root)
                yield folder, names
                yield from ((p, names) for p in folder.parents if p.is_relative_to(point))


def _lines(file: Path) -> list[str]:
    """Returns the lines of a file of ``/proc``. Names in it may be any bytes, or empty."""
    return os.fsdecode(file.read_bytes()).rstrip("\n").split("\n")


def _relative(group: str, root: str) -> PurePosixPath:
    """Returns the path of a group below a mount of ``root``.

    In a container, the group may have its name on the host, although only the group itself is
    mounted.
    """
    with contextlib.suppress(ValueError):
        relative = PurePosixPath(group).relative_to(root)
        if ".." not in relative.parts:
            return relative
    return PurePosixPath()


def _unescaped(text: str) -> str:
    """Returns a path from ``mountinfo``, in which blanks are escaped as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _limit_of(folder: Path, names: _Names) -> MemoryLimit | None:
    try:
        limit = int((folder / names.limit).read_text())
        used = int((folder / names.used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(name, 0)) for name in names.cache)
    except (OSError, ValueError):  # The file does not exist, or the limit is "max".
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if limit >= total:  # No effective limit.
        return None
    return MemoryLimit(limit, max(0, limit - used + min(cache, used)), folder / names.limit)
