"""Runs whose steps are in the memory of an agent as well as on disk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agents import agent_pid
from support.freezing import freeze
from waits import SOON_S, until

import torch_ckpt
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, client, messages
from torch_ckpt.agent.memory import discard_slots, folder_of, has_agent, run_of
from torch_ckpt.agent.messages import Kind
from torch_ckpt.agent.slots import Slots
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records.calls import calls_of
from torch_ckpt.records.reading import read_events

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

TRAINING = """
import os, signal, sys, torch, torch_ckpt
how, directory = sys.argv[1:]
state = {"w": torch.zeros(1000), "step": 0}
with torch_ckpt.Run(directory, asynchronous=True, agent=True, keep_last=2) as run:
    start = run.restore(state) or 0
    assert state["step"] == start and state["w"].eq(start).all()
    print("began at", start)
    run.reserve(state)
    for step in range(start + 1, start + 5):
        state["w"].fill_(step)
        state["step"] = step
        run.save(step, state, persist=step % 4 == 2)
    if how == "killed":
        run.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise RuntimeError("of training")
"""


def steps_of(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("step-*/.metadata"))


def test_training_goes_on_from_memory_however_it_ended(
    run: Path, run_python: Callable[..., str], full: bool
) -> None:
    lives = ["killed", "raises", "ends", "ends"] if full else ["killed", "ends"]
    for start, how in zip(range(0, 16, 4), lives, strict=False):
        try:
            printed = run_python(TRAINING, how, run)
        except AssertionError as error:
            printed = str(error)
            status = -signal.SIGKILL if how == "killed" else 1
            assert f"exit status {status}" in printed
        else:
            assert how == "ends", printed
        assert f"began at {start}\n" in printed
        if how != "ends":  # What was in memory alone comes to disk without its trainer.
            until(lambda step=start + 4: f"step-{step}" in steps_of(run))  # type: ignore[misc]
            assert folder_of(run_of(run)).exists()
    until(lambda: not folder_of(run_of(run)).exists())
    assert f"step-{4 * len(lives)}" in steps_of(run)
    assert len(steps_of(run)) <= 3  # The two that are kept, and that of the end.


def test_a_run_finds_the_newer_of_memory_and_disk(tmp_path: Path) -> None:
    state = {"w": torch.ones(10)}
    with torch_ckpt.Run(tmp_path / "run", asynchronous=True, agent=True) as run:
        run.save(1, state)
        run.wait()
        assert run.latest_step() == 1
        state["w"].fill_(2)
        run.save(2, state, persist=False)
        assert run.latest_step() == 2
        assert steps_of(tmp_path / "run") == ["step-1"]
        for step, value in ((None, 2.0), (1, 1.0), (2, 2.0)):
            loaded = {"w": torch.zeros(10)}
            assert run.restore(loaded, step=step) == (step or 2)
            assert torch.equal(loaded["w"], torch.full((10,), value))
    assert torch_ckpt.Run(tmp_path / "run").latest_step() in (1, 2)


def test_an_agent_needs_saves_in_the_background_and_memory_alone_needs_an_agent(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="asynchronous=True"):
        torch_ckpt.Run(tmp_path, agent=True)
    with (
        torch_ckpt.Run(tmp_path, asynchronous=True) as run,
        pytest.raises(ValueError, match="only an agent"),
    ):
        run.save(1, {}, persist=False)


@pytest.mark.parametrize("persists", [True, False])
def test_where_memory_is_too_small_saving_goes_on_without_an_agent(
    tmp_path: Path,
    mount_tmpfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    persists: bool,
) -> None:
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs("size=6m")))
    state = {"w": torch.zeros(1 << 20)}  # 4 MiB: there is room for one slot.
    agent = AgentOptions(persist_on_failure=persists)
    with torch_ckpt.Run(tmp_path / "run", asynchronous=True, agent=agent) as run:
        run.save(1, state, persist=False)
        run.wait()
        assert run.saved == 0
        state["w"].fill_(1)
        with pytest.warns(UserWarning, match=r"without an agent: .*ENOSPC.* needs 2 slots"):
            run.save(2, state, persist=False)
        run.wait()
        loaded = {"w": torch.zeros(1 << 20)}
        assert run.restore(loaded) == 2
        until(lambda: not folder_of(run_of(tmp_path / "run")).exists())
        state["w"].fill_(2)
        run.save(3, state)
        run.wait()
        assert run.saved == 2
        for step in (1, 2, 3):
            loaded = {"w": torch.zeros(1 << 20)}
            assert run.restore(loaded, step=step) == step
            assert loaded["w"].eq(step - 1).all()
    assert steps_of(tmp_path / "run") == ["step-1", "step-2", "step-3"]
    saves = [c for c in calls_of(read_events(Location(tmp_path / "run"))) if c.kind == "save"]
    assert all(call.error is None for call in saves)
    assert saves[1].result == "ok"


@pytest.mark.parametrize("size", ["size=6m", "nr_inodes=1"])
def test_no_memory_for_what_is_reserved_is_found_at_once(
    tmp_path: Path,
    mount_tmpfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    """Or none for an agent at all."""
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs(size)))
    state = {"w": torch.ones(1 << 20)}
    with warnings.catch_warnings(record=True) as told:
        run = torch_ckpt.Run(tmp_path / "run", asynchronous=True, agent=True)
        run.reserve(state)
    assert re.search("without an agent: .*[Nn]o space left", str(told[0].message))
    run.save(1, state, persist=False)  # It cannot be kept in memory alone.
    run.close()
    assert run.saved == 1
    assert torch_ckpt.Run(tmp_path / "run").restore({"w": torch.zeros(1 << 20)}) == 1


def test_the_command_is_the_agent_of_a_run(run: Path) -> None:
    command = [sys.executable, "-m", "torch_ckpt.cli.main", "agent", str(run)]
    first = subprocess.Popen([*command, "--options", '{"linger_s": 60}'])
    lock = folder_of(run_of(run)) / "agent.lock"
    until(lambda: lock.exists() and re.fullmatch(r"\d+", lock.read_text()) is not None)
    assert int(lock.read_text()) == first.pid
    assert subprocess.run(command, timeout=SOON_S).returncode == 0  # There is one.
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(SOON_S) == -signal.SIGTERM


@pytest.mark.thin("True")
@pytest.mark.parametrize("is_new", [False, True])
def test_a_frozen_agent_is_left_after_the_timeout(run: Path, is_new: bool) -> None:
    state = {"w": torch.ones(1000)}
    training = former = torch_ckpt.Run(run, asynchronous=True, agent=True, timeout_s=3)
    training.save(1, state)
    training.wait()
    agent = agent_pid(run)
    freeze(agent)
    begin = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as warned:
            if is_new:
                training = torch_ckpt.Run(run, asynchronous=True, agent=True, timeout_s=3)
            training.save(2, state)
        training.wait()
        training.save(3, state)
        training.close()
        assert time.monotonic() - begin < 25
    finally:
        os.kill(agent, signal.SIGCONT)
    former.close()  # At the end of this process, it would start an agent that no longer runs.
    said = [str(one.message) for one in warned if "without an agent" in str(one.message)]
    assert len(said) == 1
    assert re.search(r"the agent of this machine did not answer within \d s", said[0])
    assert steps_of(run) == ["step-1", "step-2", "step-3"]


REQUESTS = ["acquire", "filled", "hello", "persist", "no socket"]
"""What a save sends, in this order, and an agent that is starting or ending."""


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_frozen_agent_is_lost_after_one_limit_whenever_it_freezes(
    run: Path, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    limit_s, froze = 2.0, []
    state = {"w": torch.ones(1000)}
    training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    training.save(1, state)
    training.wait()
    agent, sent = agent_pid(run), client.send

    def freeze_agent() -> None:
        freeze(agent)
        froze.append(time.monotonic())

    def freeze_before(connection: socket.socket, kind: Kind, **fields: Any) -> None:
        if kind.value == request_ and not froze:
            freeze_agent()
        sent(connection, kind, **fields)

    for name in ("_ANSWER_S", "_START_S"):
        monkeypatch.setattr(client, name, limit_s, raising=False)
    monkeypatch.setattr(client, "send", freeze_before)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if request_ == "no socket":
                freeze_agent()
                (folder_of(run_of(run)) / "agent.socket").unlink()
                training._saves._backend._agent._client.close()
            training.save(2, state)
            said = [str(each.message) for each in warned if "agent" in str(each.message)]
            if not said:
                said = [failure_of_wait(training)]
        assert 0.8 * limit_s < time.monotonic() - froze[0] < limit_s + 8  # On a busy machine.
        assert re.search("did not answer within 2 s|no agent answered", said[0])
    finally:
        os.kill(agent, signal.SIGCONT)
    with contextlib.suppress(CheckpointError):
        training.close()


def small_files(run: Path, step: int) -> set[str]:
    return {path.name for path in (run / f"step-{step}").glob("*.json")}


def test_a_step_that_a_frozen_agent_commits_later_has_its_metrics(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(8 << 20)}  # The agent has not written it when it freezes.
    monkeypatch.setattr(client, "_ANSWER_S", 1.0, raising=False)
    best = {"keep_best": 1, "monitor": "loss", "timeout_s": 3.0}
    training = torch_ckpt.Run(run, asynchronous=True, agent=True, **best)
    training.save(1, state, metrics={"loss": 2.0})
    training.wait()
    agent, sent = agent_pid(run), client.send

    def freeze_before(connection: socket.socket, kind: Kind, **fields: Any) -> None:
        if kind == Kind.PERSIST:
            freeze(agent)
        sent(connection, kind, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(client, "send", freeze_before)
        try:
            training.save(2, state, metrics={"loss": 1.0})
            assert "did not answer" in failure_of_wait(training)
            assert steps_of(run) == ["step-1"]
        finally:
            os.kill(agent, signal.SIGCONT)
    until(lambda: "step-2" in steps_of(run))
    assert small_files(run, 2) == {"metrics.json", "branch.json"}
    assert training.best_step() == 2
    assert training.saved == 2
    training.close()


@pytest.mark.slow
def test_a_save_whose_agent_freezes_before_the_commit_fails(run: Path) -> None:
    training = torch_ckpt.Run(run, asynchronous=True, agent=True, timeout_s=3)
    training.save(1, {"w": torch.ones(1000)})
    training.wait()
    agent = agent_pid(run)
    training.save(2, {"w": torch.ones(100 << 20, dtype=torch.uint8)})
    freeze(agent)
    try:
        assert "did not answer within 3 s" in failure_of_wait(training)
    finally:
        os.kill(agent, signal.SIGCONT)
    training.close()


def failure_of_wait(training: torch_ckpt.Run) -> str:
    """The failure of the save in the background, which ends soon."""
    deadline = time.monotonic() + 30
    while True:
        with pytest.raises(CheckpointError) as failed:
            training.wait()
        if "still being saved" not in str(failed.value):
            return str(failed.value)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("mode", [0o755, None])
def test_memory_that_others_may_enter_is_left_alone_and_saves_go_on(
    run: Path, memory: Path, mode: int | None
) -> None:
    folder = folder_of(run_of(run)).parent
    if mode is None:
        folder.write_text("somebody's file")
    else:
        folder.mkdir()
        folder.chmod(mode)
    with pytest.warns(UserWarning, match="without an agent.*not a private directory of this user"):
        training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    training.save(1, {"w": torch.ones(10)})
    training.close()
    assert steps_of(run) == ["step-1"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory whose files survive a power cut."""
    if _native.is_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    return tmp_path / "disk"


def test_slots_that_a_disk_has_kept_through_a_power_cut_are_not_restored(
    run: Path, memory: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(1 << 18)}
    with torch_ckpt.Run(run, asynchronous=True, agent=True) as training:
        for step in (1, 2):
            state["w"].fill_(step)
            training.save(step, state, persist=step == 1)
            training.wait()
        shutil.copytree(memory, disk, ignore=shutil.ignore_patterns("*.socket"))
    shutil.rmtree(run / "step-2", ignore_errors=True)  # The end of the run has written it.
    slots = list(disk.glob("*/*/rank-0.*"))
    assert len(slots) == 2
    for slot in slots:  # The header was written back, and the tensors were not.
        data = slot.read_bytes()
        begin, nbytes = struct.unpack_from("<2q", data, 144)
        slot.write_bytes(data[:begin] + bytes(nbytes) + data[begin + nbytes :])
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(disk))
    with pytest.warns(UserWarning, match="without an agent: .*on a disk.*set TORCH_CKPT_MEMORY"):
        training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    with training:
        assert training.restore(state) == 1
        assert state["w"].eq(1).all()


@pytest.mark.parametrize("name", ["memory", ""])
def test_a_relative_path_of_the_memory_is_refused_and_an_empty_one_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names another directory after a ``chdir``."""
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    (tmp_path / "first" / "memory").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.setenv("TORCH_CKPT_MEMORY", name)
    if not name:
        assert folder_of(bytes(16)).parents[1] == Path("/dev/shm")
        return
    with pytest.warns(UserWarning, match="without an agent: .*this path is relative.*absolute"):
        training = torch_ckpt.Run(tmp_path / "run", asynchronous=True, agent=True)
    with training:
        training.save(1, {"w": torch.ones(3)})
        monkeypatch.chdir(tmp_path / "second")
        training.save(2, {"w": torch.ones(3)})
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-1", "step-2"]
    assert os.listdir(tmp_path / "second") == os.listdir(tmp_path / "first" / "memory") == []


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "hugetlbfs"])
def test_slots_may_be_in_any_file_system_of_memory(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(["mount", "-t", kind, "none", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount {kind} here")
    try:
        assert _native.is_in_memory(tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.fixture
def agent_elsewhere(run: Path) -> Iterator[Path]:
    """The folder of a run whose agent is in another namespace of process ids."""
    with agent_in(run, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child") as folder:
        yield folder


@contextlib.contextmanager
def agent_in(run: Path, *inside: str) -> Iterator[Path]:
    """Runs the agent of a run in other namespaces. Yields the folder of the run's memory."""
    folder = folder_of(run_of(run))
    command = [*inside, sys.executable, "-m", "torch_ckpt.cli.main", "agent", str(run)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        until(lambda: (folder / "agent.socket").exists() or started.poll() is not None)
        if started.poll() is not None:
            pytest.skip(f"needs namespaces: {started.communicate()[1].decode()}")
        yield folder
    finally:
        started.kill()
        started.communicate()
        until(lambda: not has_agent(folder))  # Its lock names a process id of the other namespace.


def test_an_agent_in_another_pid_namespace_saves(run: Path, agent_elsewhere: Path) -> None:
    state = {"w": torch.ones(10)}
    with (
        contextlib.suppress(ZeroDivisionError),
        torch_ckpt.Run(run, asynchronous=True, agent=True) as made,
    ):
        made.save(1, state)
        made.wait()
        made.save(2, state, persist=False)
        raise ZeroDivisionError
    until(lambda: "step-2" in steps_of(run))  # The connection has ended without a word.
    assert "persisting step 2 without its trainers" in (agent_elsewhere / "agent.log").read_text()


def test_an_agent_of_a_container_with_another_directory_there_is_not_used(run: Path) -> None:
    """Its saves would be written to the directory of another job."""
    run.mkdir()
    inside = f'mount -t tmpfs none {shlex.quote(str(run))} && exec "$@"'
    with agent_in(run, "unshare", "--mount", "sh", "-c", inside, "sh"):
        with pytest.warns(UserWarning, match=r"without an agent: .* has another directory at "):
            training = torch_ckpt.Run(run, asynchronous=True, agent=True)
        training.save(1, {"w": torch.ones(10)})
        training.close()
    assert steps_of(run) == ["step-1"]


def test_the_memory_of_a_step_that_is_a_link_is_freed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "other").mkdir(parents=True)
    run.mkdir()
    (run / "step-5").symlink_to(tmp_path / "disk" / "other")
    with torch_ckpt.Run(run, asynchronous=True, agent=True) as made:
        made.save(5, {"w": torch.ones(10)})
    assert (tmp_path / "disk" / "other" / ".metadata").exists()
    until(lambda: not folder_of(run_of(run)).exists())


def test_a_step_that_is_discarded_while_its_agent_ends_is_nowhere(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.stage({"w": torch.ones(10)}, run / "step-5", step=5, persist=False)
    slots = Slots(agent.folder, run_of(run), threading.Condition(), lambda *_: False)
    scan = slots.scan()
    assert scan.newest is not None
    assert scan.directory_of(scan.newest.save) == str(run / "step-5")
    discard_slots(agent.folder, run_of(run), lambda _: True)
    assert scan.directory_of(scan.newest.save) is None
    agent.close(drop=True)


def test_saves_go_on_where_the_shared_memory_was_removed(run: Path) -> None:
    """As programs that tidy up do."""
    with torch_ckpt.Run(run, asynchronous=True, agent=True) as made:
        made.save(1, {"w": torch.ones(10)})
        made.wait()
        shutil.rmtree(folder_of(run_of(run)))
        with pytest.warns(UserWarning, match="without an agent: "):
            made.save(2, {"w": torch.ones(10)})
    assert steps_of(run) == ["step-1", "step-2"]


def test_a_run_saves_without_an_agent_where_that_does_not_know_its_scheme(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROCESS.file_systems, "same-disk", _native.local_file_system())
    with pytest.warns(UserWarning, match=r"without an agent: .*no file system .* same-disk://"):
        training = torch_ckpt.Run(f"same-disk://{run}", asynchronous=True, agent=True)
    training.save(1, {"w": torch.ones(10)})
    training.close()
    assert steps_of(run) == ["step-1"]


@pytest.mark.slow
def test_an_agent_saves_where_proc_is_not_mounted(run: Path) -> None:
    inside = "mount -t tmpfs none /proc && exec " + shlex.join([sys.executable, "-c", TRAINING])
    command = ["unshare", "--mount", "sh", "-c", f"{inside} ends {shlex.quote(str(run))}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"needs namespaces: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "without an agent" not in done.stderr
    until(lambda: "step-4" in steps_of(run))


def test_a_run_saves_without_an_agent_of_another_version(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_VERSION", 1)
    named = r"without an agent: cannot use the agent .* process \d+, which is of another version: "
    with pytest.warns(UserWarning, match=f"{named}.* this process uses version 1"):
        training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    training.save(1, {"w": torch.ones(10)})
    training.close()
    assert steps_of(run) == ["step-1"]


def test_a_run_saves_without_an_agent_that_does_not_know_an_option(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SnapshotAgent(run).leave()
    encode = AgentOptions.encode
    later = {"of_a_later_version": 1}
    monkeypatch.setattr(
        AgentOptions, "encode", lambda self: json.dumps({**json.loads(encode(self)), **later})
    )
    with pytest.warns(UserWarning, match=r"without an agent: .* of another version"):
        training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    training.save(1, {"w": torch.ones(10)})
    training.close()
    assert steps_of(run) == ["step-1"]


def test_the_end_of_a_run_does_not_wait_for_an_agent_whose_storage_stands_still(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def stands_still(*_: object) -> None:
        answers.wait(60)
        raise StorageError("the answer of the agent was not awaited")

    monkeypatch.setattr(client.AgentClient, "persist", stands_still)
    training = torch_ckpt.Run(run, asynchronous=True, agent=True)
    training.save(1, {"w": torch.ones(1000)})
    monkeypatch.setattr(training._saves, "_timeout_s", 0.3)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="step 1 is still being saved"):
        training.close()
    assert time.monotonic() - begin < 10
    answers.set()
    until(lambda: steps_of(run) == ["step-1"])  # The agent writes it when the ranks have ended.
