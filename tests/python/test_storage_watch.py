"""The thread that logs long calls of storage: when it begins, what it logs, and after a fork."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks

import torch_ckpt
from torch_ckpt import FastWriter, Run, SafetensorsWriter
from torch_ckpt._core import _native
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.conversion.convert import convert
from torch_ckpt.coordination import storage_watch, waiting
from torch_ckpt.coordination.group import group_of
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.filesystems.location import Location, name_of

THREADS = 16


def is_watched() -> bool:
    return any(thread.name == "torch_ckpt-storage" for thread in threading.enumerate())


# ---- When it begins ----


def use_a_group(path: Path) -> None:
    """As an engine of DeepSpeed does."""
    group_of(None)


def convert_a_checkpoint(path: Path) -> None:
    """It has the format already, so that nothing reads it."""
    torch.save({}, path)
    convert(Location(path), Location(path.parent / "converted"), "torch")


WAYS: dict[str, Callable[[Path], object]] = {
    "run": Run,
    "agent": SnapshotAgent,
    "group": use_a_group,
    "conversion": convert_a_checkpoint,
    "base of a writer": lambda path: FastWriter(path, base=path),
    "base of a writer of models": lambda path: SafetensorsWriter(path, base=path),
    "staging": lambda path: FastWriter(path).stage({}),
}


def is_watched_at_first_use(way: str, path: Path) -> bool:
    """Returns whether the thread lives when this process has begun to use storage."""

    def realpath(*args: Any, **options: Any) -> str:
        raise torch_ckpt.CheckpointError("the first use")

    os.path.realpath = realpath  # type: ignore[assignment]
    assert not is_watched()
    with contextlib.suppress(torch_ckpt.CheckpointError):
        WAYS[way](path)
    return is_watched()


@pytest.mark.parametrize("way", WAYS)
def test_each_use_of_storage_begins_with_the_thread_that_logs(tmp_path: Path, way: str) -> None:
    assert Forks().call(is_watched_at_first_use, way, tmp_path / "run")


def watches_begun_at_once() -> int:
    """Returns how many threads watch after many have begun to use storage at once."""
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(THREADS)

    def begin() -> None:
        barrier.wait()
        watch_storage()

    threads = [threading.Thread(target=begin) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(thread.name == "torch_ckpt-storage" for thread in threading.enumerate())


def test_threads_that_begin_at_once_start_one_thread_that_logs() -> None:
    assert [Forks().call(watches_begun_at_once) for _ in range(5)] == [1] * 5


# ---- What it logs ----


def test_each_long_call_of_a_job_is_logged_with_its_own_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "LOG_S", 0.05)
    jobs: dict[int, Any] = {}

    def found(number: int, waited_s: float) -> list[str]:
        """Returns the lines for a call of the job that is found now."""
        caplog.clear()
        with caplog.at_level(logging.WARNING, "torch_ckpt"):
            storage_watch._log(jobs, [(77, number, waited_s, "writing", b"/mnt/f", 1, 2)])
        return caplog.messages

    def line(waited: str) -> list[str]:
        return [
            f"waiting for storage: process {os.getpid()} is writing /mnt/f, 1 B of 2 B done "
            f"({waited} so far)"
        ]

    assert found(1, 5.4) == line("5.4 s")
    assert found(1, 5.5) == []
    time.sleep(0.06)
    assert found(2, 7.2) == line("7.2 s")
    # A slow disk has many long calls.
    assert [found(number, 6.0) for number in range(3, 9)] == [[]] * 6
    time.sleep(0.06)
    storage_watch._log(jobs, [])
    assert jobs == {}, "a later job may have the same key"
    assert found(9, 61.0) == line("61 s")


def test_a_long_call_has_a_number_and_a_time_of_its_own() -> None:
    numbers = []
    for _ in range(2):
        began = time.monotonic()
        with _native.StorageCall("reading", "/mnt/f"):
            (call,) = [each for each in _native.long_storage_calls(0.0) if each[4] == b"/mnt/f"]
        assert 0 <= call[2] <= time.monotonic() - began
        assert call[3] == "reading"
        numbers.append(call[1])
    assert numbers[0] < numbers[1]


# ---- After a fork ----


def listed_by_a_child() -> tuple[list[bytes], list[bytes]]:
    """Forks within a call. Returns what the child lists after this call, with one of its own.

    And what it lists while the call of the parent has not ended there.
    """
    receiver, sender = os.pipe()
    call = _native.StorageCall("writing", "/mnt/parent")
    call.__enter__()
    pid = os.fork()
    if pid:
        os.close(sender)
        call.__exit__()
        os.waitpid(pid, 0)
        with os.fdopen(receiver, "rb") as answer:
            first, second = answer.read().split(b"|")
        return first.split(), second.split()

    def listed() -> bytes:
        return b" ".join(sorted(each[4] for each in _native.long_storage_calls(0.0)))

    with _native.StorageCall("writing", "/mnt/same-thread"):
        within = listed()
    for _ in range(9):  # More calls than the parent has made.
        with _native.StorageCall("writing", "/mnt/before"):
            pass
    has_begun, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with _native.StorageCall("writing", "/mnt/child"):
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=write)
    thread.start()
    has_begun.wait()
    call.__exit__()
    os.write(sender, listed() + b"|" + within)
    may_end.set()
    thread.join()
    os._exit(0)


def test_a_child_that_is_forked_within_a_call_lists_its_own_calls() -> None:
    assert Forks().call(listed_by_a_child) == ([b"/mnt/child"], [b"/mnt/same-thread"])


# ---- Names ----


@pytest.mark.parametrize("call", [Location, name_of, FastWriter, Run])
@pytest.mark.parametrize("path", ["/tmp/a\0b", "file:///a\0b", "memory://a\0b"])
def test_a_path_with_a_nul_is_refused_by_name(call: Callable[[str], object], path: str) -> None:
    with pytest.raises(ValueError, match=r"path '.*a\\x00b': it contains a NUL"):
        call(path)
