"""The machine under a benchmark: what it is, its page cache, its counters, its raw disk speed.

Everything here reads the kernel directly (`/proc`, `/sys`, `fio`); nothing knows about checkpoints.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def _first_field(path: str, key: str) -> str:
    """Returns the value of the first `key: value` line of a `/proc` file, or "unknown"."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _mount_of(directory: Path) -> tuple[str, str, str, str, str]:
    """Returns (mount point, type, source, options, "major:minor") of the mount with `directory`."""
    best = ("", "unknown", "unknown", "", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, source, super_options) = left.split(), right.split()[:3]
        point = fields[4].replace("\\040", " ")
        inside = directory == Path(point) or Path(point) in directory.parents
        if inside and len(point) >= len(best[0]):
            best = (point, kind, source, f"{fields[5]},{super_options}", fields[2])
    return best


def _disk_of(device: str) -> str:
    """Returns the block queue's settings of `device` ("major:minor"), or "no block device"."""
    node = Path("/sys/dev/block") / device
    queue = next((q for q in (node / "queue", node / "../queue") if q.exists()), None)
    if not device or queue is None:
        return "no block device"
    names = ("scheduler", "write_cache", "rotational", "max_sectors_kb", "logical_block_size")
    settings = {name: (queue / name).read_text().strip() for name in names}
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def describe(directory: Path) -> dict[str, str]:
    """Returns the facts a reader needs to place numbers measured in `directory`."""
    directory = directory.resolve()
    point, kind, source, options, device = _mount_of(directory)
    free = shutil.disk_usage(directory).free
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _first_field("/proc/meminfo", "MemTotal"),
        "huge pages": thp.read_text().strip() if thp.exists() else "unknown",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "directory": str(directory),
        "file system": f"{kind} on {source} at {point} ({options}), {free / GIB:.0f} GiB free",
        "disk": _disk_of(device),
        "load average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "cold reads": "drop_caches" if can_drop_caches() else "posix_fadvise(DONTNEED) per file",
        "python": platform.python_version(),
    }


# Page cache ------------------------------------------------------------------------------------


def files_in(directory: Path) -> list[Path]:
    """Returns every regular file below `directory`, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def can_drop_caches() -> bool:
    """Returns whether this process may drop the whole page cache."""
    return os.access(_DROP_CACHES, os.W_OK)


def make_cold(directory: Path) -> None:
    """Writes back everything dirty, then evicts the files of `directory` from the page cache."""
    os.sync()
    if can_drop_caches():
        _DROP_CACHES.write_text("3\n")
        return
    for path in files_in(directory):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def make_warm(directory: Path) -> None:
    """Reads the files of `directory` once, so that the page cache holds them."""
    read_files(files_in(directory))


def read_files(paths: Iterable[Path]) -> None:
    """Reads files once with plain reads, and keeps nothing."""
    buffer = bytearray(4 * MIB)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_fraction(directory: Path) -> float | None:
    """Returns the share of the bytes below `directory` in the page cache; None if unknown."""
    files = files_in(directory)
    if shutil.which("fincore") is None or not files:
        return None
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES,SIZE", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split() for line in done.stdout.splitlines()]
    if done.returncode != 0 or not rows:
        return None
    size = sum(int(row[1]) for row in rows)
    return min(1.0, sum(int(row[0]) for row in rows) / size) if size else None


def sync_tree(directory: Path) -> None:
    """Makes `directory` survive a power cut: fsync of its files, of itself and of its parent."""
    for path in [*files_in(directory), directory, directory.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_tree(directory: Path) -> None:
    """Removes `directory` and waits until the file system has written that down."""
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


# Counters --------------------------------------------------------------------------------------


def _io_counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(":") for line in lines)}


def _memory_kib(key: str) -> int:
    return int(_first_field("/proc/self/status", key).split()[0])


@dataclass
class Usage:
    """What one measured call cost this process, all its threads together.

    Attributes:
        seconds: Wall time until the last `Meter.lap`, or until the end where there was none.
        total_seconds: Wall time of the whole `with` block.
        cpu_s: User plus system time.
        device_read: Bytes fetched from the device (`read_bytes`), readahead included.
        device_written: Bytes written or dirtied (`write_bytes`).
        syscall_read: Bytes that read calls returned (`rchar`), from the page cache or not.
        rss_growth: Peak resident memory above what was resident at the start, in bytes.
    """

    seconds: float = 0.0
    total_seconds: float = 0.0
    cpu_s: float = 0.0
    device_read: int = 0
    device_written: int = 0
    syscall_read: int = 0
    rss_growth: int = 0


class Meter:
    """Measures the body of a `with` block into `usage`; for one thread at a time.

    Example::

        with Meter() as meter:
            save()
            meter.lap()  # the call has returned
            sync_tree(directory)
        print(meter.usage.seconds, meter.usage.total_seconds)
    """

    def __init__(self) -> None:
        self.usage = Usage()
        self._lap: float | None = None

    def __enter__(self) -> Meter:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5\n")  # the peak restarts at what is resident
        self._rss_kib = _memory_kib("VmRSS")
        self._io = _io_counters()
        self._cpu = time.process_time()
        self._start = time.perf_counter()
        return self

    def lap(self) -> None:
        """Marks the moment that `usage.seconds` ends."""
        self._lap = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        end = time.perf_counter()
        cpu_s = time.process_time() - self._cpu
        io = _io_counters()
        self.usage = Usage(
            seconds=(self._lap or end) - self._start,
            total_seconds=end - self._start,
            cpu_s=cpu_s,
            device_read=io["read_bytes"] - self._io["read_bytes"],
            device_written=io["write_bytes"] - self._io["write_bytes"],
            syscall_read=io["rchar"] - self._io["rchar"],
            rss_growth=max(0, _memory_kib("VmHWM") - self._rss_kib) * 1024,
        )


# The device's ceiling --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fio:
    """Raw O_DIRECT speed of the disk under a file, as fio measures it.

    Attributes:
        engine: fio's I/O engine.
        block_mib: Bytes per request, in MiB.
        depth: Requests in flight.
    """

    engine: str
    block_mib: int
    depth: int

    def measure(self, path: Path, nbytes: int, *, write: bool) -> Usage:
        """Writes a new file of `nbytes` (rounded up to whole blocks) at `path`, or reads it.

        A write includes the final fsync, as `end_fsync` puts it inside fio's own clock. The clock
        excludes fio's start and the allocation of the file. Times are scaled to `nbytes`.

        Raises:
            RuntimeError: fio is missing or failed; the message carries what it printed.
        """
        block = self.block_mib * MIB
        size = -(-nbytes // block) * block
        command = ["fio", "--name=ceiling", f"--filename={path}", f"--size={size}", f"--bs={block}"]
        command += [f"--rw={'write' if write else 'read'}", f"--iodepth={self.depth}"]
        command += ["--direct=1", f"--ioengine={self.engine}", "--fallocate=native"]
        command += ["--end_fsync=1", "--output-format=json"]
        if shutil.which("fio") is None:
            raise RuntimeError("fio is not installed, so there is no device ceiling to compare to")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        start = done.stdout.find("{")
        if done.returncode != 0 or start < 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}{done.stdout}")
        job = json.loads(done.stdout[start:])["jobs"][0]
        rate = job["write" if write else "read"]["bw_bytes"]
        percent = job["usr_cpu"] + job["sys_cpu"]
        usage = Usage(seconds=nbytes / rate, total_seconds=nbytes / rate)
        usage.cpu_s = percent / 100 * job["job_runtime"] / 1000
        usage.device_read, usage.device_written = (0, size) if write else (size, 0)
        return usage


def pick_fio(directory: Path, *, block_mib: int, depth: int) -> Fio | None:
    """Returns fio with the first engine that works in `directory`, or None, saying why."""
    reason = ""
    for engine in ("io_uring", "libaio"):
        fio, path = Fio(engine, block_mib, depth), directory / "fio-probe"
        try:
            fio.measure(path, block_mib * MIB, write=True)
        except RuntimeError as error:
            reason = str(error)
        else:
            return fio
        finally:
            path.unlink(missing_ok=True)
    print(f"no device ceiling: {reason}", file=sys.stderr)
    return None
