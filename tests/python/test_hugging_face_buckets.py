"""Runs in ``hf://buckets``, by the client of ``huggingface_hub`` for fsspec.

The Hub is a dict in this process that answers the calls of its client. The client keeps listings of
folders, which must not hide what other processes write.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt import FastReader, Run
from torch_ckpt.cli.main import main
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.process_state import PROCESS

pytestmark = [
    pytest.mark.framework("huggingface_hub"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

URL = "hf://buckets/user/weights"
BUCKET = "user/weights"


class Hub:
    """A bucket of the Hub, as ``HfApi`` reaches it. Folders are implicit."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.times: dict[str, str] = {}
        self.copied: list[str] = []

    def write(self, path: str, contents: bytes) -> None:
        self.files[path] = contents
        self.times[path] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"

    def bucket_info(self, bucket: str) -> str:
        assert bucket == BUCKET
        return bucket

    def list_bucket_tree(self, bucket: str, prefix: str = "", recursive: bool = False) -> list[Any]:
        from huggingface_hub._buckets import BucketFile, BucketFolder

        assert bucket == BUCKET
        found: dict[str, Any] = {}
        for path, contents in sorted(self.files.copy().items()):  # Other threads write.
            if path != prefix and not path.startswith(f"{prefix}/" if prefix else ""):
                continue
            within = path[len(prefix) :].strip("/")
            if not recursive and "/" in within:
                folder = f"{prefix}/{within.partition('/')[0]}".strip("/")
                found[folder] = BucketFolder(type="directory", path=folder, uploaded_at=None)
                continue
            facts = {"size": len(contents), "uploadedAt": self.times[path]}
            found[path] = BucketFile(type="file", path=path, xetHash=_hash(contents), **facts)
        return list(found.values())

    def batch_bucket_files(
        self, bucket: str, *, add: Any = (), copy: Any = (), delete: Any = ()
    ) -> None:
        assert bucket == BUCKET
        for source, path in add:
            self.write(path, source if isinstance(source, bytes) else Path(source).read_bytes())
        for _, _, xet_hash, path in copy:
            known = {_hash(contents): contents for contents in self.files.copy().values()}
            self.write(path, known[xet_hash])
            self.copied.append(path)
        for path in delete:
            self.files.pop(path, None)


def _hash(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    from huggingface_hub import hf_file_system

    hub = Hub()
    monkeypatch.setattr(hf_file_system, "HfApi", lambda **_: hub)
    monkeypatch.setattr(hf_file_system.HfFileSystem, "cachable", False)

    def fetch(file: Any, start: int, end: int) -> bytes:
        return hub.files[file.resolved_path.path][start:end]

    monkeypatch.setattr(hf_file_system.HfFileSystemFile, "_fetch_range", fetch)
    monkeypatch.setattr(PROCESS, "file_systems", {})
    return hub


def state_of(step: int) -> dict[str, Any]:
    frozen = {f"frozen.{n}": torch.full((1 << 17,), float(n)) for n in range(3)}
    return {**frozen, "tuned": torch.full((10,), float(step)), "step": step}


def zeros() -> dict[str, Any]:
    return {name: value * 0 for name, value in state_of(1).items()}


def assert_is(state: dict[str, Any], step: int) -> None:
    for name, value in state_of(step).items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name


def test_a_run_in_a_bucket_saves_reuses_removes_and_restores(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(f"{URL}/run", keep_last=2) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        assert run.latest_step() == 3
    assert committed_steps(Location(f"{URL}/run")) == [3, 2]
    assert any(path.endswith(".distcp") for path in hub.copied), "nothing is copied on the Hub"
    state = zeros()
    assert Run(f"{URL}/run").restore(state) == 3
    assert_is(state, 3)
    assert main(["verify", f"{URL}/run"]) == 0
    assert main(["ls", f"{URL}/run"]) == 0
    assert capsys.readouterr().out.count("files present") == 2


def test_a_local_run_is_promoted_to_a_bucket(hub: Hub, tmp_path: Path) -> None:
    with Run(f"{URL}/run", local=tmp_path, asynchronous=True) as run:
        run.save(7, state_of(7))
        run.wait(promoted=True)
    state = zeros()
    torch_ckpt.load(state, storage_reader=FastReader(f"{URL}/run/step-7"))
    assert_is(state, 7)


def test_what_other_processes_write_is_found(hub: Hub) -> None:
    folder = Location(f"{URL}/shared")
    (folder / "mine").replace(b"1", sync=True)
    assert not (folder / "theirs").exists()
    assert (folder / "mine").read() == b"1"
    hub.write("shared/theirs", b"22")
    hub.write("shared/mine", b"4444")
    assert (folder / "theirs").exists()
    assert (folder / "mine").read() == b"4444"
    assert (folder / "mine").nbytes() == 4
    hub.files.clear()
    assert not (folder / "mine").exists()
    assert folder.names() == []
