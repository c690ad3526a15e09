"""Where checkpoints of tests lie: folders of several file systems, and an object store."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import ObjectStore, from_url
from support.store_server import SeaweedFS

from torch_ckpt.filesystems.location import Location

__all__ = ["PLACES", "Place", "Places", "downloaded", "upload"]

PLACES = ("ext4", "tmpfs", "ext2", "overlay", "store")


@dataclass(frozen=True)
class Place:
    """Where the checkpoints of one case lie.

    Attributes:
        path: Path or URL of their folder.
        scratch: A folder of this machine, for all else.
        variables: Of the environment, by which every process reaches the store.
    """

    path: str
    scratch: Path
    variables: dict[str, str]


class Places:
    """A folder on each of several file systems, and a bucket, as long as a ``with`` block lasts.

    Args:
        folder: On the first of them.
        server: A server that runs. By default, one starts when the first case needs it.

    Attributes:
        missing: Why there is no folder on some of them.
    """

    def __init__(self, folder: Path, server: SeaweedFS | None = None) -> None:
        self.folders = {"ext4": folder}
        self.missing: dict[str, str] = {}
        self._stack = contextlib.ExitStack()
        self._bucket = ""
        self._runs = server is not None
        self._server = server
        if not SeaweedFS.is_installed():
            self.missing["store"] = f"weed is missing: {SeaweedFS.INSTALLED_BY}"
        elif server is None:
            self._server = SeaweedFS(folder / "seaweedfs")

    @contextlib.contextmanager
    def place(self, name: str) -> Iterator[Place]:
        """A new folder, of the first file system where there is none on this one."""
        folder = self.folders.get(name, self.folders["ext4"])
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix="case-"))
        # They are the same in every case: the process of a save has those of its start.
        variables = self._server.environment() if self._server else {}
        try:
            if name != "store" or self._server is None:
                yield Place(str(scratch), scratch, variables)
                return
            path = f"{self._bucket_of(self._server)}/{scratch.name}"
            try:
                yield Place(f"s3://{path}", scratch, variables)
            finally:
                self._server.remove_folder(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def __enter__(self) -> Places:
        shared = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-crossed-"))
        self._stack.callback(shutil.rmtree, shared, ignore_errors=True)
        self.folders["tmpfs"] = shared
        first = self.folders["ext4"]
        image, lower, upper, work = (first / n for n in ("image", "lower", "upper", "work"))
        for each in (lower, upper, work):
            each.mkdir()
        with open(image, "wb") as file:
            file.truncate(512 << 20)
        made = subprocess.run(["mkfs.ext2", "-q", "-F", str(image)], capture_output=True, text=True)
        if made.returncode == 0:
            self._mount("ext2", "-o", "loop", str(image))
        else:
            self.missing["ext2"] = made.stderr
        over = f"lowerdir={lower},upperdir={upper},workdir={work}"
        self._mount("overlay", "-t", "overlay", "-o", over, "overlay")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bucket_of(self, server: SeaweedFS) -> str:
        """The bucket, whose disk space is free again at the end."""
        if not self._bucket:
            if not self._runs:
                self._stack.enter_context(server)
            self._bucket = f"crossed-{secrets.token_hex(6)}"
            server.create_bucket(self._bucket)
            self._stack.callback(server.remove_bucket, self._bucket)
        return self._bucket

    def _mount(self, name: str, *options: str) -> None:
        folder = self.folders["ext4"] / f"{name} mounted"
        folder.mkdir()
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
        if done.returncode:
            self.missing[name] = done.stderr.strip()
        else:
            self._stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            self.folders[name] = folder


# ---- Copies, by the client alone -----------------------------------------------------------------


def upload(folder: Path, target: Location) -> None:
    """Copies the files of a folder to a store, those of metadata last."""
    store, key = _store_of(target)
    files = [file for file in folder.iterdir() if file.is_file()]
    for file in sorted(files, key=lambda file: file.name == ".metadata"):
        obstore.put(store, f"{key}/{file.name}", file)


def downloaded(source: Location, folder: Path) -> Path:
    """Copies a file, or the files of a folder, of a store to a folder of this machine."""
    store, key = _store_of(source)
    found = [one["path"] for chunk in obstore.list(store, prefix=key) for one in chunk]
    for path in found or [key]:
        copy = folder / Path(path).relative_to(Path(key).parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(obstore.get(store, path).bytes())
    return folder / source.name


def _store_of(location: Location) -> tuple[ObjectStore, str]:
    bucket, _, key = str(location).removeprefix("s3://").partition("/")
    return from_url(f"s3://{bucket}"), key
