"""A slow disk that several nodes share, on one machine: so many bytes a second for all together.

Files are packed into an ext4 image behind a loop device, and a cgroup limits what its processes
read from that device. Every node has a loop device and a mount of its own on top, hence a page
cache of its own, as real nodes have, while each byte that any of them fetches is counted and
limited once, at the device below. All of it is the kernel's: O_DIRECT, io_uring and mmap work.

Needs root, the blkio controller of cgroup v1 or the io controller of v2, util-linux and e2fsprogs.
Nothing outlives the processes but the image and an empty cgroup: loop devices detach by themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from machine import MIB

TOOLS = ("losetup", "mkfs.ext4", "mount", "umount", "unshare")


def _run(*command: str | Path) -> str:
    """Runs `command` and returns what it prints, stripped.

    Raises:
        RuntimeError: It failed; the message carries what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _mounts() -> Iterator[tuple[Path, str, str]]:
    """Yields (mount point, file system type, its options) of every mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        yield Path(left.split()[4]), kind, options


class ReadLimit(ABC):
    """A cgroup whose processes together read at most so many bytes a second from one device.

    Args:
        root: Where the hierarchy is mounted.
        device: "major:minor".
        bytes_per_s: The limit.
    """

    def __init__(self, root: Path, device: str, bytes_per_s: int) -> None:
        self.device = device
        self.folder = root / f"bench-load-{os.getpid()}-{device.replace(':', '-')}"
        self.folder.mkdir()
        try:
            self._set(bytes_per_s)
        except BaseException:
            self.folder.rmdir()
            raise

    @abstractmethod
    def _set(self, bytes_per_s: int) -> None:
        """Sets the limit."""

    @abstractmethod
    def read_nbytes(self) -> int:
        """Bytes that processes of the cgroup have fetched from the device so far."""

    @property
    def processes(self) -> Path:
        """A process joins by writing its id there."""
        return self.folder / "cgroup.procs"

    def close(self) -> None:
        """Removes the cgroup; its processes must have ended."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except OSError:  # A process that has just been killed is still there.
                time.sleep(0.1)
            else:
                return


class _LimitV1(ReadLimit):
    def _set(self, bytes_per_s: int) -> None:
        limit = self.folder / "blkio.throttle.read_bps_device"
        limit.write_text(f"{self.device} {bytes_per_s}\n")

    def read_nbytes(self) -> int:
        for line in (self.folder / "blkio.throttle.io_service_bytes").read_text().splitlines():
            if line.startswith(f"{self.device} Read "):
                return int(line.split()[2])
        return 0


class _LimitV2(ReadLimit):
    def _set(self, bytes_per_s: int) -> None:
        (self.folder.parent / "cgroup.subtree_control").write_text("+io\n")
        (self.folder / "io.max").write_text(f"{self.device} rbps={bytes_per_s}\n")

    def read_nbytes(self) -> int:
        for line in (self.folder / "io.stat").read_text().splitlines():
            device, *counters = line.split()
            if device == self.device:
                return int(dict(counter.split("=") for counter in counters).get("rbytes", 0))
        return 0


def _hierarchy() -> tuple[type[ReadLimit], Path] | None:
    """Returns how reads can be limited here and where, or None."""
    for point, kind, options in _mounts():
        if kind == "cgroup" and "blkio" in options.split(","):
            return _LimitV1, point
        controllers = point / "cgroup.controllers"
        if kind == "cgroup2" and "io" in controllers.read_text().split():
            return _LimitV2, point
    return None


def missing() -> str | None:
    """Returns what this machine lacks for a throttled disk, or None where it has everything."""
    if os.geteuid() != 0:
        return "only root may mount file systems and limit reads"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    found = _hierarchy()
    if found is None:
        return "no cgroup hierarchy with the blkio or io controller"
    if not os.access(found[1], os.W_OK):
        return f"{found[1]} cannot be written"
    return None


def _loop_device(file: Path) -> str:
    """Returns a new read-only loop device that reads `file` past the page cache."""
    device = _run("losetup", "--find", "--show", "--direct-io=on", "--read-only", file)
    if Path(f"/sys/block/{Path(device).name}/loop/dio").read_text().strip() != "1":
        _run("losetup", "--detach", device)
        raise RuntimeError(f"{device} does not read {file} past the page cache")
    return device


class ThrottledDisk:
    """What lies below one directory, on a disk that gives all its readers so many bytes a second.

    Args:
        contents: Is copied to the disk.
        image: Where the disk's image goes; as large as `contents`, and some more.
        bytes_per_s: For all processes that have mounted it together.

    Raises:
        RuntimeError: A tool failed.
        OSError: This system does not let its cgroups or loop devices be used.

    Example::

        disk = ThrottledDisk(Path("saved"), Path("disk.img"), 200_000_000)
        try:
            ...  # processes started in mount namespaces of their own: Node(...).mount()
            print(disk.limit.read_nbytes())
        finally:
            disk.close()
    """

    def __init__(self, contents: Path, image: Path, bytes_per_s: int) -> None:
        found = _hierarchy()
        if found is None:
            raise RuntimeError(missing())
        self.image = image
        nbytes = sum(path.stat().st_size for path in contents.rglob("*"))
        with image.open("wb") as file:
            file.truncate((int(nbytes * 1.05) // MIB + 64) * MIB)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-d", contents, image)
        os.sync()
        self.device = _loop_device(image)
        # Detached as soon as nobody has it open, however this process and its nodes end.
        self._held = os.open(self.device, os.O_RDONLY)
        try:
            _run("losetup", "--detach", self.device)
            number = Path(f"/sys/block/{Path(self.device).name}/dev").read_text().strip()
            kind, root = found
            self.limit = kind(root, number, bytes_per_s)
        except BaseException:
            os.close(self._held)
            image.unlink()
            raise

    def close(self) -> None:
        """Removes the disk; the processes that have mounted it must have ended. May be repeated."""
        if self._held < 0:
            return
        # Of a process killed before it had mounted it.
        columns = ("--noheadings", "--output", "NAME", "--associated", self.device)
        for device in _run("losetup", *columns).split():
            _run("losetup", "--detach", device)
        os.close(self._held)
        self._held = -1
        self.limit.close()
        self.image.unlink(missing_ok=True)


def mount_node(device: str, point: Path) -> None:
    """Mounts a throttled disk as a node would, with nothing of it in the page cache.

    What is mounted there already goes. The process must be in a mount namespace of its own.

    Args:
        device: `ThrottledDisk.device`.
        point: A directory, the same for all nodes or not.

    Raises:
        RuntimeError: The device cannot be mounted.
    """
    if any(mounted == point for mounted, _, _ in _mounts()):
        _run("umount", "--lazy", point)
    own = _loop_device(Path(device))
    try:
        _run("mount", "-t", "ext4", "-o", "ro", own, point)
    finally:
        _run("losetup", "--detach", own)  # Once it is unmounted.
