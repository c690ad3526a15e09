"""An agent that was lost goes on. A step that was saved without it meanwhile remains."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.agents import agent_pid, kill_agent
from support.freezing import freeze
from waits import SOON_S, until

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, client, persist, process
from torch_ckpt.agent.memory import agent_lock, folder_of, has_agent, open_folder, run_of
from torch_ckpt.agent.messages import Kind, Message
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.saves import Saves
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.process_state import PROCESS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

LIMIT_S = 0.5
NEVER_S = 600.0


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def assert_stored(run: Path, step: int, value: float, **options: Any) -> None:
    state = state_of(-1.0)
    assert Run(run, **options).restore(state) == step
    assert state["w"].eq(value).all()


@contextlib.contextmanager
def freezing(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Freezes the agent of a run within the block."""
    pid = agent_pid(run)
    monkeypatch.setattr(client, "_ANSWER_S", LIMIT_S)
    freeze(pid)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("has_local", [False, True])
def test_an_older_copy_of_a_step_is_not_written_over_a_save_without_the_agent(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, has_local: bool
) -> None:
    where = {"local": tmp_path / "local"} if has_local else {}
    training = Run(run, asynchronous=True, agent=True, **where)
    training.save(4, state_of(4.0))
    training.wait(promoted=has_local)  # No request that began earlier waits longer.
    training.save(5, state_of(5.0), persist=False)
    with freezing(run, monkeypatch) as pid:
        with pytest.warns(UserWarning, match="without an agent.*did not answer"):
            training.save(5, state_of(5.5))
        training.close()
        assert_stored(run, 5, 5.5)
    os.kill(pid, signal.SIGTERM)  # It writes the newest step first.
    until(lambda: not has_agent(folder_of(run_of(run))))
    assert_stored(run, 5, 5.5)


class FrozenAgent:
    """An agent in threads of this process, which freezes once within a save.

    It freezes when ``is_requested`` is set, so that the call that requests the save has returned.
    """

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thawed, self.has_frozen = threading.Event(), threading.Event()
        self.is_requested = threading.Event()
        self.thawed.set()
        self.signals: list[int] = []
        receive = process.receive

        def receive_later(connection: socket.socket) -> Message | None:
            message = receive(connection)
            assert self.thawed.wait(SOON_S)
            return message

        monkeypatch.setattr(process, "receive", receive_later)
        self.folder = open_folder(run_of(run))
        options = AgentOptions(linger_s=NEVER_S)
        self.agent = Agent(run_of(run), self.folder, options, signals=self.signals)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with agent_lock(self.folder) as is_ours:
            assert is_ours
            thread = threading.Thread(target=self.agent.serve)
            thread.start()
            until((self.folder / "agent.socket").exists)
            try:
                yield
            finally:
                self.thawed.set()
                self.signals.append(signal.SIGTERM)  # It writes the newest step first.
                thread.join(SOON_S)
            assert not thread.is_alive()

    def freezing(self, function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        """A function before or after which the agent freezes, if a save of the agent calls it."""

        def pause() -> None:
            is_agent = threading.current_thread().name == "torch_ckpt-persist"
            if is_agent and not self.has_frozen.is_set():
                assert self.is_requested.wait(SOON_S)
                self.thawed.clear()
                self.has_frozen.set()
                assert self.thawed.wait(SOON_S)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not after:
                pause()
            result = function(*arguments, **options)
            if after:
                pause()
            return result

        return call

    def thaw(self) -> None:
        """Waits until the agent has ended its save."""
        self.thawed.set()
        until(lambda: not self.agent._saves.is_running)


MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "before it reads": (Saves, "_claim_directory", False),
    "before it begins": (CheckpointTransaction, "begin", False),
    "before it writes": (persist, "write_shares", False),
    "after it wrote": (persist, "write_shares", True),
    "after it checked the slots": (persist, "publish", False),
    "after it checked the directory": (CheckpointTransaction, "commit", False),
    "before the small files": (CheckpointTransaction, "_write_small_files", False),
    "after the small files": (CheckpointTransaction, "_write_small_files", True),
    "before the commit": (CheckpointTransaction, "_publish", False),
}
"""When a save of the agent freezes."""


@pytest.mark.thin(*(f"{moment}-True-after it" for moment in MOMENTS))
@pytest.mark.parametrize("thaws", ["before the commit of the other", "after it"])
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_agent_that_freezes_within_a_save_commits_nothing_over_a_later_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, moment: str, is_new: bool, thaws: str
) -> None:
    if not is_new and "small files" in moment:
        return  # They are written after the commit.
    watch_storage()
    frozen = FrozenAgent(run, monkeypatch)
    with frozen.serving():
        training = Run(run, asynchronous=True, agent=True, monitor="loss", keep_best=9)
        training.save(4 if is_new else 5, state_of(4.0), metrics={"loss": 4.0})
        training.wait()
        owner, name, after = MOMENTS[moment]
        monkeypatch.setattr(owner, name, frozen.freezing(getattr(owner, name), after=after))
        monkeypatch.setattr(client, "_ANSWER_S", LIMIT_S)
        training.save(5, state_of(5.0), metrics={"loss": 5.0})
        frozen.is_requested.set()
        with pytest.raises(StorageError, match="did not answer"):
            training.wait()
        assert frozen.has_frozen.is_set()
        commit = CheckpointTransaction.commit

        def commit_later(*arguments: Any) -> None:
            if threading.current_thread().name != "torch_ckpt-persist":
                frozen.thaw()
            commit(*arguments)

        if "before" in thaws:
            monkeypatch.setattr(CheckpointTransaction, "commit", commit_later)
        with pytest.warns(UserWarning, match="without an agent.*did not answer"):
            training.save(5, state_of(5.5), metrics={"loss": 5.5})
        training.wait()
        frozen.thaw()
        training.close()
    assert_stored(run, 5, 5.5)
    names = {path.name for path in (run / "step-5").iterdir()}
    assert {"metrics.json", "branch.json"} <= names
    assert '"loss": 5.5' in (run / "step-5" / "metrics.json").read_text()
    if "after" in thaws:
        assert sum(name.endswith(".distcp") for name in names) == 1


@contextlib.contextmanager
def freezing_before(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, frozen_s: list[float]
) -> Iterator[None]:
    """Freezes the agent of a run before it gets a request of this kind, until the block ends."""
    pid, sent = agent_pid(run), client.send

    def send(connection: socket.socket, sent_kind: Kind, **fields: Any) -> None:
        if sent_kind == kind and not frozen_s:
            freeze(pid)
            frozen_s.append(time.monotonic())
        sent(connection, sent_kind, **fields)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(client, "send", send)
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("method", ["save", "close"])
def test_a_call_waits_only_once_for_a_lost_agent(
    run: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    limit_s = 4.0
    training = Run(run, asynchronous=True, agent=True, on_failure="warn")
    training.save(4, state_of(4.0))
    training.wait()
    monkeypatch.setattr(client, "_ANSWER_S", limit_s)
    frozen_s: list[float] = []
    with freezing_before(run, monkeypatch, Kind.PERSIST, frozen_s):
        training.save(5, state_of(5.0), persist=method == "save")
        if method == "save":
            with pytest.warns(UserWarning, match="without an agent"):
                training.save(6, state_of(6.0))
        else:
            with pytest.raises(StorageError, match=r"step 5 was not saved: .*did not answer"):
                training.close()
        assert limit_s / 2 < time.monotonic() - frozen_s[0] < 2 * limit_s - 1
        training.close()
    assert_stored(run, 6 if method == "save" else 4, 6.0 if method == "save" else 4.0)


def test_an_agent_that_was_lost_is_used_again_once_it_answers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_S", LIMIT_S)
    training = Run(run, asynchronous=True, agent=True)
    training.save(4, state_of(4.0))
    training.wait()
    with freezing_before(run, monkeypatch, Kind.PERSIST, []):
        training.save(5, state_of(5.0))
        with pytest.raises(StorageError, match="did not answer"):
            training.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.save(6, state_of(6.0))
    training.close()
    assert_stored(run, 6, 6.0)


def save_until_signalled(training: Run, method: str) -> None:
    with training.saving_on_signal(lambda: state_of(5.0), grace_s=2.5):
        training.save(5, state_of(5.0))
        if method != "save":
            getattr(training, method)()


@pytest.mark.parametrize("method", ["save", "wait", "close"])
def test_a_signal_ends_the_wait_for_a_frozen_agent_in_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    training = Run(run, asynchronous=True, agent=True)
    training.save(4, state_of(4.0))
    training.wait()
    frozen_s: list[float] = []
    monkeypatch.setattr(client, "_POLLS", 60)  # So a ping waits when the signal arrives.
    with contextlib.ExitStack() as stack:
        former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Of a run that is closed.
        stack.callback(signal.signal, signal.SIGTERM, former)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        kind = Kind.ACQUIRE if method == "save" else Kind.PERSIST
        stack.enter_context(freezing_before(run, monkeypatch, kind, frozen_s))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(SystemExit, match="143"):
            save_until_signalled(training, method)
        seconds = time.monotonic() - frozen_s[0]
        assert 2.0 < seconds < 9.0
    with contextlib.suppress(CheckpointError):
        training.close()


# ---- An agent that does not start ----


def _refuse(_: client.AgentClient) -> None:
    raise OSError(errno.EAGAIN, "no more processes")


def test_a_signal_ends_the_wait_for_an_agent_to_start(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SnapshotAgent(run)
    kill_agent(run)
    with monkeypatch.context() as patched:
        patched.setattr(client.AgentClient, "_start", lambda _: None)
        patched.setattr(PROCESS, "preemption", SimpleNamespace(ends_at=time.monotonic()))
        with pytest.raises(StorageError, match="a signal ends this process"):
            agent.reserve(state_of(1.0))
    agent.leave()


def test_an_agent_that_replaces_a_lost_one_has_the_usual_time_to_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Run(run, asynchronous=True, agent=True)
    training.save(4, state_of(4.0))
    training.wait()
    with monkeypatch.context() as patched:
        patched.setattr(client, "_ANSWER_S", LIMIT_S)
        with freezing_before(run, monkeypatch, Kind.PERSIST, []):
            training.save(5, state_of(5.0))
            with pytest.raises(StorageError, match="did not answer"):
                training.wait()
            kill_agent(run)
            until(lambda: not has_agent(folder_of(run_of(run))))
    has_arrived, asked = client.has_arrived, dict[socket.socket, float]()

    def arrives_late(connection: socket.socket, pause_s: float) -> bool:
        time.sleep(0.01)
        is_late = time.monotonic() > asked.setdefault(connection, time.monotonic()) + 0.3
        return has_arrived(connection, min(pause_s, 0.01)) and is_late

    monkeypatch.setattr(client, "has_arrived", arrives_late)
    monkeypatch.setattr(client, "_LOST_S", 0.1)
    with warnings.catch_warnings(action="error"):
        training.save(6, state_of(6.0))
    training.close()
    assert_stored(run, 6, 6.0)


def test_a_run_that_loses_its_agent_restores_newer_steps_from_memory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Run(run, asynchronous=True, agent=True)
    training.save(4, state_of(4.0))
    training.wait()
    training.save(5, state_of(5.0), persist=False)
    kill_agent(run)
    monkeypatch.setattr(client.AgentClient, "_start", _refuse)
    with pytest.warns(UserWarning, match="without an agent.*no more processes"):
        training.reserve(state_of(6.0))
    assert training.restore(state_of(-1.0)) == 5
    with pytest.raises(StorageError, match=r"step 5 was not saved: .*no more processes"):
        training.close()


def test_a_step_that_is_saved_again_without_the_agent_is_not_reported_as_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Run(run, asynchronous=True, agent=True)
    training.save(5, state_of(5.0), persist=False)
    with monkeypatch.context() as patched:
        full = StorageError("the tmpfs is full")
        patched.setattr(SlotContents, "of", Mock(side_effect=full))
        with pytest.warns(UserWarning, match="without an agent.*the tmpfs is full"):
            training.save(5, state_of(5.5))
    training.close()
    until(lambda: not has_agent(folder_of(run_of(run))))
    assert_stored(run, 5, 5.5)
    del training
    gc.collect()
    assert "was not saved" not in capfd.readouterr().err


def test_a_job_without_its_agent_restores_nothing_from_memory_if_its_directory_has_no_id(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may be of a job in another container, with another directory at the path."""
    former = SnapshotAgent(run, has_directory=True)
    former.stage(state_of(5.0), run / "step-5", step=5, persist=False)
    kill_agent(run)
    monkeypatch.setattr(client.AgentClient, "_start", _refuse)
    former.leave()
    with pytest.warns(UserWarning, match="without an agent.*no more processes"):
        training = Run(run, asynchronous=True, agent=True)
    assert training.restore(state_of(-1.0)) is None
    training.close()


def test_a_job_that_only_reads_the_memory_writes_no_id_to_a_store(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROCESS.file_systems, "same-disk", _native.local_file_system())
    monkeypatch.setenv("TORCH_CKPT_MEMORY", "relative")
    with pytest.warns(UserWarning, match="without an agent.*this path is relative"):
        Run(f"same-disk://{run}", asynchronous=True, agent=True).close()
    assert not (run / "run-id").exists()
