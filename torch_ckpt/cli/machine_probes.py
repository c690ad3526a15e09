"""Facts about this machine for ``torch-ckpt doctor``. This module imports no torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import torch_ckpt
from torch_ckpt._core import _native
from torch_ckpt.agent.memory import LOCK_NAME, complete_slots, folder_of, has_agent, run_of
from torch_ckpt.cli.directory_probes import Fact, mount_of
from torch_ckpt.filesystems.cgroups import memory_limit
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import IoMode
from torch_ckpt.storage.progress import readable_nbytes

__all__ = ["PROBES", "agents"]

_BLOCK_NBYTES = 1 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def versions() -> Generator[Fact]:
    """Versions of this package and of its dependencies."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    yield "torch_ckpt", torch_ckpt.__version__, ""
    yield "torch", torch, ""
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})", ""
    yield "kernel", f"{platform.system()} {platform.release()}, {platform.machine()}", ""
    yield "libc", " ".join(platform.libc_ver()) or "unknown", ""


def memory() -> Generator[Fact]:
    """Processors, memory and the limits of this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    nbytes = os.sysconf("SC_PHYS_PAGES") * page
    cpus = len(os.sched_getaffinity(0))
    yield "CPUs", f"{cpus} usable of {os.cpu_count()}", ""
    yield "memory", readable_nbytes(nbytes), ""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = "a load may need 256 descriptors: raise ulimit -n" if 0 <= files < 512 else ""
    yield "open files", f"at most {_limit(files, str)}", few
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield "locked memory", f"at most {_limit(locked, readable_nbytes)}", ""


def _limit(limit: int, shown: Callable[[int], str]) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else shown(limit)


def cgroup() -> Generator[Fact]:
    """The memory limit of the control groups of this process."""
    limit = memory_limit()
    if limit is None:
        yield "cgroup memory", "no limit", ""
        return
    yield (
        "cgroup memory",
        f"at most {readable_nbytes(limit.nbytes)} ({limit.file}), "
        f"{readable_nbytes(limit.free_nbytes)} free",
        "snapshots of asynchronous saves and the agent's slots count towards it",
    )


def huge_pages() -> Generator[Fact]:
    """Whether the system allows huge pages."""
    match = re.search(r"\[(\S+)\]", _HUGE_PAGES.read_text())
    private = match[1] if match else "unknown"
    means = "" if private in ("always", "madvise") else "snapshots use small pages"
    yield "huge pages", private, means


def shared_memory() -> Generator[Fact]:
    """The tmpfs that contains the agent's slots."""
    base = folder_of(bytes(16)).parent.parent
    space = os.statvfs(base)
    size, free = (n * space.f_frsize for n in (space.f_blocks, space.f_bavail))
    kind, options = mount_of(base)
    huge = re.search(r"huge=(\w+)", options)
    means = "the agent needs twice the bytes that the ranks of this machine save"
    if not _native.is_in_memory(base):
        means = "no agent starts, as this is a disk: set TORCH_CKPT_MEMORY to a tmpfs"
    if not base.is_absolute():
        means = "no agent starts: TORCH_CKPT_MEMORY must be an absolute path"
    yield (
        str(base),
        f"{readable_nbytes(size)}, {readable_nbytes(free)} free "
        f"({kind}, huge={huge[1] if huge else 'never'})",
        means,
    )


def pidfd() -> Generator[Fact]:
    """Whether the agent can wait for the death of a process."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "not in Python"
        yield (
            "pidfd_open",
            f"refused ({reason})",
            "the agent polls /proc, or its connections, to find that a rank has died",
        )
    else:
        yield "pidfd_open", "usable", ""


def io_uring() -> Generator[Fact]:
    """The queue of the engine for files."""
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-doctor-") as folder:
        path = Location(folder) / "file"
        path.write(b"", sync=False)
        pool = _native.BufferPool(2 * _BLOCK_NBYTES, _BLOCK_NBYTES)
        job = _native.SharedFileJob(path.file_system, path.path, 1, pool, False, False)
        mode = IoMode.of(job)
        job.abort()
    why = "; ".join(mode.reasons)
    if mode.queue == "io_uring":
        yield "io_uring", "usable" + (f" ({why})" if why else ", registered buffers"), ""
    else:
        yield "io_uring", f"not used ({why})", "a queue of threads is used, which needs more CPU"


def cuda() -> Generator[Fact]:
    """Whether the engine copies tensors from and to GPUs."""
    why = _native.why_no_cuda()
    yield "CUDA", "usable" if why is None else f"not used ({why})", ""


def zstd() -> Generator[Fact]:
    """Whether weights can be published as differences."""
    why = _native.why_no_zstd()
    yield "libzstd", "built in" if why is None else "not built in", why or ""


def agents(directory: str) -> Generator[Fact]:
    """The agent and the memory of the run in a directory. Other runs are only counted."""
    own = folder_of(run_of(directory))
    base = own.parent
    folders = [each for each in base.iterdir() if _is_of_run(each)] if base.is_dir() else []
    others = [each for each in folders if each != own]
    if own in folders:
        yield _agent(own, run_of(directory))
    else:
        yield "agent", "none is running for this directory, and its run has no memory", ""
    if others:
        number = f"{len(others)} other run{'s' if len(others) > 1 else ''} of this user"
        nbytes = readable_nbytes(sum(map(_nbytes, others)))
        yield "other runs", f"{number} on this machine, {nbytes} of memory", ""


def _is_of_run(folder: Path) -> bool:
    try:
        return bool(bytes.fromhex(folder.name))
    except ValueError:
        return False


def _agent(folder: Path, run: bytes) -> Fact:
    state = "no agent is running"
    if has_agent(folder):
        state = "running"
        with contextlib.suppress(OSError):
            state = f"running as process {(folder / LOCK_NAME).read_text().strip()}"
    steps = sorted({header.step for header, _ in complete_slots(folder, run)})
    saved = f", snapshots of steps {', '.join(map(str, steps))}" if steps else ""
    return "agent", f"{state}, {readable_nbytes(_nbytes(folder))} of memory{saved}", ""


def _nbytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # Its agent may end meanwhile.
        for path in folder.iterdir():
            total += path.stat().st_blocks * 512
    return total


PROBES = (versions, memory, cgroup, huge_pages, shared_memory, pidfd, io_uring, cuda, zstd)
"""Functions that yield facts. A probe that fails is reported by its name."""
