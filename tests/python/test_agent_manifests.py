"""What agents of several machines put down for each other, and what one machine's memory lacks."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import threading
import zlib
from pathlib import Path
from typing import get_args

import pytest
from support.flips import flipped
from waits import SOON_S, until

from torch_ckpt import CheckpointError, IoOptions
from torch_ckpt._core import _native
from torch_ckpt.agent.answers import Answers
from torch_ckpt.agent.client import Member
from torch_ckpt.agent.joint_save import JointSave
from torch_ckpt.agent.manifests import FileKind, Manifests, PendingFailures
from torch_ckpt.agent.messages import (
    Kind,
    decode,
    encode,
    failure_of,
    raise_failure,
    receive,
    send,
)
from torch_ckpt.agent.persist import Writing
from torch_ckpt.commits import checkpoint
from torch_ckpt.commits.garbage import stale_files
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id


def manifests_in(path: Path, node: int = 0) -> Manifests:
    return Manifests(b"r" * 16, b"s" * 16, 7, node, 2, Location(path))


def test_no_byte_of_a_file_can_be_changed_or_cut_off_unnoticed(rng: random.Random) -> None:
    whole = encode({"a": [1, "b"]}, [b"xy", b"", b"z"])
    assert decode(whole) == ({"a": [1, "b"]}, [b"xy", b"", b"z"])
    for at in range(len(whole)):
        for bad in (flipped(whole, at, rng.randrange(8)), whole[:at]):
            is_version = at in (4, 5) and bad != whole[:at]
            with pytest.raises(UnsupportedError if is_version else CorruptionError):
                decode(bad)


def test_a_message_is_received_as_it_was_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        path = os.fsdecode(b"/run/\xff\n")
        send(ours, Kind.SLOT, path=path, has_waited=False)
        failure = failure_of(StorageError(f"cannot create {path}", 28))
        send(ours, Kind.ERROR, failure=failure)
        assert receive(theirs) == {"kind": Kind.SLOT, "path": path, "has_waited": False}
        message = receive(theirs)
        assert message is not None
        with pytest.raises(StorageError, match="cannot create") as caught:
            raise_failure(message["failure"])
        assert caught.value.args[0] == "cannot create /run/\\udcff\n"  # Text that prints.
        assert caught.value.errno == 28
        ours.close()
        assert receive(theirs) is None


def test_a_message_with_a_part_of_negative_length_is_damaged() -> None:
    body = b"[{}, [-1, 3]]\nab"
    head = struct.pack("<4sHQI", b"TCAG", 11, len(body), zlib.crc32(body))
    with pytest.raises(CorruptionError, match="negative length"):
        decode(head + body)


@pytest.mark.parametrize("version", [4, 6, 12])
def test_a_process_of_another_version_is_named_with_both(tmp_path: Path, version: int) -> None:
    said = f"cannot read a message of version {version}: this process uses version 11"
    former = struct.pack("<4sHHQ", b"TCAG", version, 3, 20) + bytes(20)  # As up to version 5.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(former)
        with pytest.raises(UnsupportedError, match=f"^{said}$"):
            receive(theirs)
    files = manifests_in(tmp_path)
    files.put("epoch", {"epoch": "ab"})
    (path,) = tmp_path.iterdir()
    path.write_bytes(former)
    with pytest.raises(UnsupportedError, match=f"^cannot read {path}: {said}$"):
        files.get(0, "epoch")


def joint_save_of(folder: Path, node: int) -> JointSave:
    """The save of a state without items, on one of two machines with a rank each."""
    (folder / f"slot-{node}").unlink(missing_ok=True)
    slot = _native.Slot.create(os.fsencode(folder / f"slot-{node}"), 1 << 16)
    target = os.fsencode(folder / "step")
    table = _native.encode_slot_table(target, "1", True, _native.ItemTable().encode(), None, [])
    member = Member(b"r" * 16, b"s" * 16, node, 2, node, 2, [node])
    slot.begin(member.header(7, 1, persist=True), table, 0)
    slot.complete()
    return JointSave([slot], Writing(IoOptions()), timeout_s=600.0, is_shutting_down=lambda: False)


def test_an_agent_that_ends_right_after_the_commit_leaves_the_index_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (joint_save_of(tmp_path, node) for node in (0, 1))
    for joint in (first, second):
        joint.begin()
    for joint in (first, second):
        assert not joint.advance()
    with monkeypatch.context() as ending:
        ending.setattr(checkpoint, "collect_garbage", lambda *_, **__: _end())
        with pytest.raises(KeyboardInterrupt):
            first.advance()
    step = Location(tmp_path / "step")
    save_id = committed_id(step)
    assert save_id is not None
    again = joint_save_of(tmp_path, 0)
    again.begin()
    assert committed_id(step) == save_id
    assert again.advance()
    assert second.advance()
    assert committed_id(step) == save_id
    assert sorted(step.names()) == [f".index.{save_id}", ".metadata"]


def _end() -> None:
    raise KeyboardInterrupt


def test_a_machine_of_another_version_fails_the_save_on_all_at_once(tmp_path: Path) -> None:
    joint = joint_save_of(tmp_path, 0)
    joint.begin()
    other = manifests_in(tmp_path / "step", 1)
    other.put("lists", {})
    (path,) = (tmp_path / "step").glob("*-1.lists")
    path.write_bytes(b"TCAG\x05\x00" + path.read_bytes()[6:])
    with pytest.raises(UnsupportedError, match=r"-1\.lists: .* of version 5: this process uses"):
        joint.advance()
    found = other.get(0, "failed")
    assert found is not None
    assert found[0]["failure"][0] == "UnsupportedError"


def test_what_is_damaged_or_not_there_is_nothing(tmp_path: Path) -> None:
    files = manifests_in(tmp_path)
    files.put("epoch", {"epoch": "ab"})
    other = manifests_in(tmp_path, 1)
    assert other.get(0, "epoch") == ({"epoch": "ab"}, [])
    assert {k: v for k, v in other.published().items() if v} == {"epoch": {0}}
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert other.get(0, "epoch") is None
    assert other.get(1, "epoch") is None


def test_what_a_save_recognises_as_left_over_is_every_file_of_agents(tmp_path: Path) -> None:
    files = manifests_in(tmp_path)
    for what in get_args(FileKind):
        files.put(what, {})
    names = {path.name for path in tmp_path.iterdir()}
    names |= {f"{name}.tmp" for name in names}
    assert len(names) == 12
    assert set(stale_files([*names, ".agents", "agents-1"], [], None)) == names


def test_a_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    files = manifests_in(tmp_path / "none")
    with pytest.raises(NotFoundError, match="No such file") as caught:
        files.put("epoch", {})
    assert files.failure_of(caught.value)[0] == "StorageError"
    assert not files.has_files()
    with pytest.raises(CheckpointError):
        files.put("failed", {"epoch": None, "failure": files.failure_of(CheckpointError("no"))})


def test_a_call_of_a_directory_does_not_disturb_that_of_another_thread(tmp_path: Path) -> None:
    answers = Answers(Location(tmp_path))
    assert answers.get(lambda: answers.get(lambda: 1)) == 1  # The inner one is in another thread.


@pytest.mark.parametrize("failing", ["the watcher", "a call of the directory"])
def test_failures_are_published_although_once_there_are_too_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    start, count = threading.Thread.start, itertools.count(failing == "the watcher")

    def fail_once(self: threading.Thread) -> None:
        if next(count) == 1:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    pending = PendingFailures()
    run = Location(tmp_path)
    for sequence in (0, 1):
        own = Manifests(b"r" * 16, b"s" * 16, sequence, 0, 2, run, run)
        own.directory.create_directories()
        own._path(1, "lists").write(b"", sync=False)
        pending.abort(own, "no slot", within_s=SOON_S)
        if sequence or failing != "the watcher":
            until(own._path(0, "failed").exists)
