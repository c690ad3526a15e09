"""The agent: snapshots in memory that outlive their trainer, and come to disk without it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import run_python
from support.agents import agent_pid, kill_agent
from support.states import blanked, random_state, same
from waits import SOON_S, until

from torch_ckpt import CheckpointError, FastReader, FastSavePlanner, FastWriter, IoOptions
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader, messages, saves
from torch_ckpt.agent.client import AgentClient, Member
from torch_ckpt.agent.memory import (
    agent_lock,
    discard_slots,
    folder_of,
    has_agent,
    open_folder,
    remove_abandoned,
    run_of,
    slot_path,
)
from torch_ckpt.agent.messages import Kind, encode, receive, send
from torch_ckpt.agent.persist import Writing, persist
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.slot_reports import machine_slots
from torch_ckpt.agent.slots import Slots
from torch_ckpt.errors import CancelledError, NotFoundError, StorageError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]


@pytest.fixture
def agent(run: Path) -> Iterator[SnapshotAgent]:
    made = SnapshotAgent(run)
    yield made
    made.close(drop=True)


def state_of(step: int, numel: int = 1 << 20) -> dict[str, Any]:
    return {"w": torch.full((numel,), float(step)), "n": {"step": step, "l": ["x", torch.ones(3)]}}


def holds(reader: Any, state: dict[str, Any]) -> bool:
    """Whether a load gives just that."""
    out = blanked(state)
    dcp.load(out, storage_reader=reader)
    return same(out, state)


def on_disk(run: Path, *steps: int) -> bool:
    return all(holds(FastReader(run / str(step)), state_of(step)) for step in steps)


def save(agent: SnapshotAgent, run: Path, step: int, state: Any = None) -> None:
    """Until it is on disk."""
    agent.persist(agent.stage(state or state_of(step), run / str(step), step=step))


def newest(agent: SnapshotAgent) -> int:
    return agent.newest().step


def is_gone(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return not Path(f"/proc/{pid}").exists()


def outcome(state: dict[str, Any], reader: Any) -> Any:
    """What a load gives, or the kind of its error."""
    out = blanked(state)
    try:
        dcp.load(out, storage_reader=reader)
    except BaseException as error:  # CheckpointException is no Exception.
        return re.sub(r"_[0-9a-f]{16}\b", "", str(error).strip().splitlines()[-1])
    return out


def test_whatever_is_saved_is_what_a_save_without_agent_stores(
    agent: SnapshotAgent, run: Path, tmp_path: Path, rng: random.Random, full: bool
) -> None:
    compared = 0
    steps = 60 if full else 10
    for step in range(steps):
        state = random_state(rng)
        path, other = run / f"step-{step}", tmp_path / "without"
        try:
            dcp.save(state, storage_writer=FastWriter(other), planner=FastSavePlanner())
        except BaseException:
            with pytest.raises((ValueError, TypeError)):
                agent.stage(state, path, step=step)
            continue
        staged = agent.stage(state, path, step=step)
        checkpoint = agent.newest()
        assert checkpoint.step == step
        agent.persist(staged)
        expected = outcome(state, FastReader(other))
        assert same(outcome(state, FastReader(path)), expected)
        stock = outcome(state, dcp.FileSystemReader(other))
        assert same(outcome(state, dcp.FileSystemReader(path)), stock)
        if not isinstance(expected, str):
            assert same(outcome(state, SnapshotReader(checkpoint)), expected)
            compared += same(expected, state)
    assert compared > steps // 8


def test_a_future_is_done_when_the_checkpoint_is_there(agent: SnapshotAgent, run: Path) -> None:
    first = agent.async_save(state_of(1), run / "1", step=1)
    second = agent.async_save(state_of(2), run / "2", step=2, persist=False)
    assert second.done()
    first.result(SOON_S)
    save_id = FastReader(run / "1").read_metadata().storage_meta.save_id
    assert str(uuid.UUID(save_id)) == save_id
    assert not (run / "2").exists()


def test_later_changes_are_not_saved(agent: SnapshotAgent, run: Path) -> None:
    state = state_of(1)
    staged = agent.stage(state, run / "1", step=1)
    state["w"].fill_(2)
    state["n"]["l"][1].zero_()
    agent.persist(staged)
    assert on_disk(run, 1)


def test_states_that_change_their_shapes_dtypes_and_keys_are_saved_as_they_are(
    agent: SnapshotAgent, run: Path
) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.ones(10)},
        {"a": torch.ones(1 << 22), "b": torch.ones(3, dtype=torch.int8)},
        {"b": torch.ones(3, dtype=torch.float64), "c": {"d": 5}},
        {"c": torch.ones(2)},
    ]
    for step, state in enumerate(states):
        save(agent, run, step, state)
        reader = FastReader(run / str(step))
        assert set(reader.read_metadata().state_dict_metadata) == {
            key if not isinstance(value, dict) else f"{key}.d" for key, value in state.items()
        }
        assert holds(reader, state)


def test_memory_is_made_once_and_nothing_is_left_of_it_at_a_good_end(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.reserve(state_of(0))
    slots = {path: path.stat().st_ino for path in folder_of(run_of(run)).glob("rank-*")}
    assert len(slots) == 2
    pid = agent_pid(run)
    for step in range(4):
        agent.stage(state_of(step), run / str(step), step=step)
    assert {path: path.stat().st_ino for path in slots} == slots
    agent.close()
    until(lambda: is_gone(pid))
    assert not folder_of(run_of(run)).exists()
    assert on_disk(run, *range(4))  # Also what nobody has waited for.


KILLED_IN_MID_COPY = """
import os, signal, sys, torch
from unittest import mock
from torch_ckpt._core import _native
from torch_ckpt.agent import SnapshotAgent
run = sys.argv[1]
agent = SnapshotAgent(run)
state = {"a": torch.full((1 << 18,), 1.0), "b": torch.full((1 << 18,), 1.0)}
agent.stage(state, run + "/1", step=1, persist=False)
for value in state.values():
    value.fill_(2.0)
copy = _native.Slot.copy
def copy_half(slot, batch, positions, offsets, *rest):
    copy(slot, batch, positions[:1], offsets[:1], *rest)
    os.kill(os.getpid(), signal.SIGKILL)
with mock.patch.object(_native.Slot, "copy", copy_half):
    if sys.argv[2] == "torn":
        begin = _native.Slot.begin
        _native.Slot.begin = lambda slot, *what: (begin(slot, *what), slot.complete())
    agent.stage(state, run + "/2", step=2)
"""


KILLED_BEFORE_IT_SAYS_SO = """
import os, signal, sys, torch
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent import AgentOptions, SnapshotAgent
run = sys.argv[1]
agent = SnapshotAgent(run, options=AgentOptions(persist_on_failure=False))
request = AgentClient.request
def killed(client, kind, *args, **fields):
    if kind == "filled":
        os.kill(os.getpid(), signal.SIGKILL)
    return request(client, kind, *args, **fields)
AgentClient.request = killed
agent.stage({"a": torch.ones(1 << 18)}, run + "/1", step=1)
"""


def run_trainer(script: str, run: Path, *arguments: Any) -> tuple[int, str]:
    """How a trainer of its own process ends, and what it says of that."""
    done = run_python("-c", script, run, *arguments, folder=run.parent, timeout_s=SOON_S)
    return done.returncode, done.stdout


def test_a_save_comes_to_disk_whose_trainer_dies_before_it_says_that_it_is_complete(
    run: Path,
) -> None:
    assert run_trainer(KILLED_BEFORE_IT_SAYS_SO, run)[0] == -signal.SIGKILL
    until(lambda: (run / "1" / ".metadata").exists())
    SnapshotAgent(run).close(drop=True)


def test_a_trainer_that_is_killed_in_mid_copy_leaves_the_former_snapshot(run: Path) -> None:
    assert run_trainer(KILLED_IN_MID_COPY, run, "sound")[0] == -signal.SIGKILL
    state = {"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}
    until(lambda: (run / "1" / ".metadata").exists())  # Though it was for memory alone.
    assert holds(FastReader(run / "1"), state)
    agent = SnapshotAgent(run)
    found = agent.newest()
    assert found.step == 1
    assert holds(SnapshotReader(found), state)
    agent.close(drop=True)
    assert not (run / "2").exists()


@pytest.mark.slow
def test_it_would_be_noticed_if_a_slot_were_complete_before_it_is_filled(run: Path) -> None:
    assert run_trainer(KILLED_IN_MID_COPY, run, "torn")[0] == -signal.SIGKILL
    agent = SnapshotAgent(run)
    assert newest(agent) == 2  # Which it never was.
    agent.close(drop=True)


def test_an_agent_that_is_killed_is_replaced_and_nothing_is_lost(
    agent: SnapshotAgent, run: Path
) -> None:
    for step in range(6):
        kill_agent(run)
        staged = agent.stage(state_of(step), run / str(step), step=step)
        if step % 2:
            kill_agent(run)
        agent.persist(staged)
        assert on_disk(run, step)


def test_an_agent_that_is_told_to_end_brings_the_newest_step_to_disk_first(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.stage(state_of(7), run / "7", step=7, persist=False)
    time.sleep(1)
    assert not (run / "7").exists()
    child = agent._client._child
    child.terminate()
    assert child.wait(SOON_S) == -signal.SIGTERM
    assert on_disk(run, 7)
    # This process goes on, with another.
    assert newest(agent) == 7
    save(agent, run, 8)
    agent.close()


ENDS = """
import sys, torch
from torch_ckpt.agent import AgentOptions, SnapshotAgent
run, how = sys.argv[1:]
agent = SnapshotAgent(run, options=AgentOptions(persist_on_failure=how != "kept in memory"))
agent.stage({"w": torch.ones(1000)}, run + "/1", step=1, persist=False)
if how != "well":
    raise RuntimeError("of training")
"""


@pytest.mark.thin("by an exception-True-True")
@pytest.mark.parametrize(
    ("how", "on_disk", "in_memory"),
    [("well", True, False), ("by an exception", True, True), ("kept in memory", False, True)],
)
def test_what_is_in_memory_when_a_trainer_ends(
    run: Path, how: str, on_disk: bool, in_memory: bool
) -> None:
    status, said = run_trainer(ENDS, run, how)
    assert status == (how != "well"), said
    if on_disk:
        until(lambda: (run / "1" / ".metadata").exists())
    if not in_memory:
        until(lambda: not folder_of(run_of(run)).exists())
    time.sleep(2)
    assert (run / "1" / ".metadata").exists() == on_disk
    agent = SnapshotAgent(run)
    assert (agent.newest() is not None) == in_memory
    agent.close(drop=True)


class Held:
    """An agent in a thread of this process, whose saves to disk wait until they may go on."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.how: dict[str, Any] = {}
        bring = saves.persist

        def wait_first(*args: Any, **how: Any) -> Any:
            self.how = {"writing": args[1], **how}
            assert self.may_go_on.wait(SOON_S)
            return bring(*args, **how)

        monkeypatch.setattr(saves, "persist", wait_first)
        folder = open_folder(run_of(run))
        self.agent = Agent(run_of(run), folder, AgentOptions(linger_s=SOON_S))

        def serve() -> None:
            # A client may come before the socket listens. It starts no second agent then.
            with agent_lock(folder) as is_ours:
                assert is_ours
                self.agent.serve()

        self.thread = threading.Thread(target=serve)
        self.thread.start()
        until(lambda: (folder / "agent.socket").exists())


@pytest.mark.parametrize("on_busy", ["wait", "skip", "error"])
def test_a_save_that_finds_all_slots_in_use(
    run: Path, monkeypatch: pytest.MonkeyPatch, on_busy: Any
) -> None:
    held = Held(run, monkeypatch)
    agent = SnapshotAgent(run, on_busy=on_busy, timeout_s=SOON_S)
    for step in (1, 2):
        assert agent.stage(state_of(step), run / str(step), step=step) is not None
    third: list[Any] = []
    if on_busy == "wait":
        thread = threading.Thread(
            target=lambda: third.append(agent.stage(state_of(3), run / "3", step=3))
        )
        thread.start()
        thread.join(1)
        assert thread.is_alive()
        held.may_go_on.set()
        thread.join(SOON_S)
        agent.persist(third[0])
    elif on_busy == "skip":
        assert agent.stage(state_of(3), run / "3", step=3) is None
    else:
        with pytest.raises(CheckpointError, match="occupy all slots"):
            agent.stage(state_of(3), run / "3", step=3)
    counted = (agent.waited, agent.skipped, agent.refused)
    assert counted == tuple(int(on_busy == kind) for kind in ("wait", "skip", "error"))
    held.may_go_on.set()
    for step in (1, 2, 3):
        if step == 3 and on_busy != "wait":
            assert not (run / "3").exists()
            continue
        until(lambda step=step: (run / str(step) / ".metadata").exists())  # type: ignore[misc]
        assert on_disk(run, step)
    agent.close(drop=True)
    held.thread.join(SOON_S)
    assert not held.thread.is_alive()


@pytest.mark.parametrize("step", [None, 1])
def test_a_save_that_stood_still_commits_nothing_over_one_that_did_not(
    agent: SnapshotAgent, run: Path, step: int | None
) -> None:
    """Which may have taken its files for left over."""
    for number in (0, 1):
        assert agent.stage(state_of(number), run / "1", step=1, persist=False) is not None
    slots = [slot_path(folder_of(run_of(run)), 0, number) for number in (0, 1)]
    former, slow = (_native.Slot.open(os.fsencode(path), False).read() for path in slots)
    if step is not None:
        persist([former], Writing(IoOptions()))

    def stand_still() -> bool:
        persist([former], Writing(IoOptions()))
        return True

    with pytest.raises(CheckpointError, match=r"another save, [0-9a-f]{16}, was committed there"):
        persist([slow], Writing(IoOptions()), is_current=stand_still)
    assert holds(FastReader(run / "1"), state_of(0))


def test_a_commit_whose_reply_was_lost_is_a_commit(
    agent: SnapshotAgent, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the client then repeats the rename, and finds nothing to rename."""
    assert agent.stage(state_of(0), run / "1", step=1, persist=False) is not None
    slot = slot_path(folder_of(run_of(run)), 0, 0)
    snapshot = _native.Slot.open(os.fsencode(slot), False).read()
    commit = _native.FileSystem.commit

    def commit_twice(*args: Any) -> None:
        commit(*args)
        raise NotFoundError("cannot rename")

    with monkeypatch.context() as patched:
        patched.setattr(_native.FileSystem, "commit", commit_twice)
        persist([snapshot], Writing(IoOptions()))
    assert holds(FastReader(run / "1"), state_of(0))


def test_a_save_that_has_lost_a_file_is_not_committed(agent: SnapshotAgent, run: Path) -> None:
    assert agent.stage(state_of(0), run / "1", step=1, persist=False) is not None
    slot = slot_path(folder_of(run_of(run)), 0, 0)
    snapshot = _native.Slot.open(os.fsencode(slot), False).read()

    def lose() -> bool:
        for path in (run / "1").glob("*.distcp"):
            path.unlink()
        return True

    with pytest.raises(CheckpointError, match=r"distcp is missing or has another length"):
        persist([snapshot], Writing(IoOptions()), is_current=lose)
    assert not (run / "1" / ".metadata").exists()


def test_an_agent_that_runs_already_takes_the_options_of_the_ranks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(run, monkeypatch)
    held.may_go_on.set()
    options = AgentOptions(io=IoOptions(direct=False), check_replicas="full")
    agent = SnapshotAgent(run, options=options)
    agent.persist(agent.stage(state_of(1), run / "1", step=1))
    assert held.agent.options == options
    assert held.how["writing"] == Writing(options.io)
    assert held.how["check_replicas"] == "full"
    agent.close(drop=True)
    held.thread.join(SOON_S)


def test_a_save_for_which_there_is_no_thread_fails_and_the_next_does_not(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(run, monkeypatch)
    held.may_go_on.set()
    agent = SnapshotAgent(run)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "torch_ckpt-persist" and not held.how:
            held.how = {"refused": True}
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CheckpointError, match="can't start new thread"):
        agent.persist(agent.stage(state_of(1), run / "1", step=1))
    agent.persist(agent.stage(state_of(2), run / "2", step=2))
    assert on_disk(run, 2)
    agent.close(drop=True)
    held.thread.join(SOON_S)


@pytest.mark.parametrize("text", ["[]", '{"unknown": 1}', '{"io": 3}', "{", '{"io": {"x": 1}}'])
def test_options_of_an_agent_that_are_no_options_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an object of options"):
        AgentOptions.decode(text)


@pytest.mark.parametrize("name", ["linger_s", "peers_timeout_s"])
@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), float("-inf"), "5", None])
def test_seconds_of_an_agent_that_are_no_seconds_are_refused(name: str, seconds: Any) -> None:
    with pytest.raises(ValueError, match=name):
        AgentOptions(**{name: seconds})
    assert AgentOptions(**{name: 0})
    assert AgentOptions(**{name: float("inf")})


def test_a_slot_that_changes_while_it_comes_to_disk_is_not_committed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(run, monkeypatch)
    agent = SnapshotAgent(run)
    staged = agent.stage(state_of(1), run / "1", step=1)
    until(lambda: held.agent._saves.is_running)
    for number in (0, 1):  # By a trainer that does not ask.
        with contextlib.suppress(CheckpointError):
            slot = slot_path(folder_of(run_of(run)), 0, number)
            _native.Slot.open(os.fsencode(slot), True).clear()
    held.may_go_on.set()
    with pytest.raises(CheckpointError):
        agent.persist(staged)
    assert not (run / "1" / ".metadata").exists()
    agent.close(drop=True)
    held.thread.join(SOON_S)


def test_memory_that_is_not_to_be_had_is_an_error_and_saves_go_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, mount_tmpfs: Callable[[str], Path]
) -> None:
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs("size=8m")))
    agent = SnapshotAgent(run)
    with pytest.raises(StorageError, match=r"cannot reserve .* bytes left") as caught:
        agent.reserve(state_of(0, 2 << 20))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(StorageError, match="cannot reserve"):
        agent.stage(state_of(0, 4 << 20), run / "0", step=0)
    save(agent, run, 1, state_of(1, 1000))
    pid = agent_pid(run)
    agent.close()
    until(lambda: is_gone(pid))


def test_what_was_for_memory_alone_is_not_on_disk_because_a_later_one_is(
    agent: SnapshotAgent, run: Path
) -> None:
    staged = [
        agent.stage(state_of(step), run / str(step), step=step, persist=step > 1)
        for step in (1, 2, 3)
    ]
    agent.persist(staged[1])
    agent.persist(staged[2])
    kill_agent(run)
    agent.persist(staged[2])
    with pytest.raises(CancelledError, match="no longer in memory"):
        agent.persist(staged[0])
    assert not (run / "1").exists()


def test_a_state_that_cannot_be_staged_takes_no_slot(agent: SnapshotAgent, run: Path) -> None:
    for step in range(1, 6):
        with pytest.raises(AttributeError, match="local object"):
            agent.stage({"bad": lambda: None}, run / "bad", step=step)
        save(agent, run, step)


def test_a_child_of_the_trainer_ends_nothing(agent: SnapshotAgent, run: Path) -> None:
    agent.stage(state_of(1), run / "1", step=1, persist=False)
    child = os.fork()
    if child == 0:
        agent._at_exit()
        agent.close()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(1)
    assert agent.newest() is not None


def test_a_good_end_after_the_death_of_the_agent_is_one(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.stage(state_of(1), run / "1", step=1, persist=False)
    kill_agent(run)
    agent.close()
    until(lambda: not folder_of(run_of(run)).exists())
    assert on_disk(run, 1)


def test_a_trainer_that_goes_elsewhere_finds_its_agent_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agent = SnapshotAgent("run")
    staged = agent.stage(state_of(1), "run/1", step=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    os.kill(agent_pid(run), signal.SIGKILL)
    agent.persist(staged)
    assert on_disk(run, 1)
    agent.close()


def test_a_disk_that_fails_is_the_error_of_that_save_alone(agent: SnapshotAgent, run: Path) -> None:
    run.mkdir()
    (run / "1").write_text("in the way")
    staged = [agent.stage(state_of(step), run / str(step), step=step) for step in (1, 2)]
    with pytest.raises(CheckpointError, match=str(run / "1")):
        agent.persist(staged[0])
    agent.persist(staged[1])
    assert on_disk(run, 2)


def test_a_run_has_one_process_for_each_rank(agent: SnapshotAgent, run: Path) -> None:
    script = (
        "import sys; from torch_ckpt.agent.trainer import SnapshotAgent; SnapshotAgent(sys.argv[1])"
    )
    error = run_trainer(script, run)[1]
    assert f"process {os.getpid()} already" in error
    assert "close its Run, or end it" in error
    agent.stage(state_of(1), run / "1", step=1)


def test_a_job_with_more_ranks_does_not_begin_beside_one_that_saves(
    agent: SnapshotAgent, run: Path
) -> None:
    later = Member(run_of(run), b"\x7f" * 16, 1, 2, 0, 1, [0, 1])
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} of another job .* rank 0 "):
        AgentClient(run, later, AgentOptions(), timeout_s=30)
    for step in range(3):
        save(agent, run, step)


def header_of(
    run: bytes, session: bytes = b"s" * 16, *, sequence: int = 0, rank: int = 0, world_size: int = 1
) -> _native.SlotHeader:
    member = Member(run, session, rank, world_size, 0, 1, range(world_size))
    return member.header(sequence, 5, persist=True)


def fill_slot(
    folder: Path, number: int, header: _native.SlotHeader, nbytes: int = 1 << 16
) -> _native.Slot:
    """As a rank completes one, of no tensors."""
    slot = _native.Slot.create(os.fsencode(slot_path(folder, header.rank, number)), nbytes)
    table = _native.encode_slot_table(b"d", "1", True, _native.ItemTable().encode(), None, [])
    slot.begin(header, table, 0)
    slot.complete()
    return slot


def test_the_header_of_a_slot_is_found_there_by_name(tmp_path: Path) -> None:
    header = header_of(b"r" * 16, sequence=3, rank=2, world_size=7)
    header.tensors_id, header.share = b"t" * 16, bytes(range(16))
    slot = fill_slot(tmp_path, 1, header)
    found = slot.header()
    assert found == slot.read().header
    for name in ("run", "session", "sequence", "step", "rank", "world_size", "node", "node_count"):
        assert getattr(found, name) == getattr(header, name)
    assert (found.ranks_here, found.persist) == (7, 1)
    assert (found.tensors_id, found.share) == (b"t" * 16, bytes(range(16)))
    assert found.save == (b"s" * 16, 3)
    found.rank = 1
    assert found != slot.header()
    with pytest.raises(ValueError, match="16 bytes"):
        found.share = b"t" * 17
    with pytest.raises(AttributeError, match="holder"):
        _native.SlotHeader(holder=2)  # type: ignore[call-arg]


def test_slots_of_another_run_and_damaged_ones_are_nothing(run: Path) -> None:
    folder = open_folder(run_of(run))
    fill_slot(folder, 0, header_of(b"o" * 16))
    slot_path(folder, 0, 1).write_bytes(os.urandom(8192))
    slot_path(folder, 0, 7).write_bytes(b"")
    agent = SnapshotAgent(run)
    assert agent.newest() is None
    for step in range(3):
        save(agent, run, step)
    agent.close(drop=True)


def test_a_folder_that_others_may_enter_is_not_used(run: Path, memory: Path) -> None:
    folder = folder_of(run_of(run))
    folder.mkdir(parents=True, mode=0o755)
    folder.parent.chmod(0o700)
    folder.chmod(0o755)
    with pytest.raises(StorageError, match="not a private directory"):
        SnapshotAgent(run)


def test_memory_that_nobody_has_gone_on_with_for_a_day_is_removed(tmp_path: Path) -> None:
    own, old, young = (open_folder(run_of(tmp_path / name)) for name in ("own", "old", "young"))
    for folder in (old, young):
        slot_path(folder, 0, 0).write_bytes(b"memory")
    day = time.time() - 25 * 3600
    for path in (slot_path(old, 0, 0), old):
        os.utime(path, (day, day))
    starting = open_folder(run_of(tmp_path / "starting"))  # It is empty, until its agent locks it.
    assert remove_abandoned(own) == [old]
    assert starting.exists()
    assert not old.exists()
    assert young.exists()


def test_memory_that_is_filled_now_is_not_a_day_old(
    agent: SnapshotAgent, run: Path, tmp_path: Path
) -> None:
    for step in (0, 1):
        assert agent.stage(state_of(step), run / str(step), step=step, persist=False) is not None
    folder = folder_of(run_of(run))
    day = time.time() - 25 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (day, day))
    assert agent.stage(state_of(2), run / "2", step=2, persist=False) is not None
    kill_agent(run)
    until(lambda: not has_agent(folder))
    assert remove_abandoned(open_folder(run_of(tmp_path / "another"))) == []
    assert newest(agent) == 2


def test_a_run_begins_while_the_agent_of_the_last_one_removes_its_folder(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    folder, ended = folder_of(run), threading.Event()

    def remove() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                folder.rmdir()

    ending = threading.Thread(target=remove)
    ending.start()
    try:
        for _ in range(2000):
            assert open_folder(run) == folder
            assert machine_slots(folder, run) == []
            assert discard_slots(folder, run, lambda _: True) == set()
    finally:
        ended.set()
        ending.join()


def test_whoever_looks_for_an_agent_keeps_none_from_beginning(run: Path) -> None:
    folder = open_folder(run_of(run))
    with agent_lock(folder) as is_ours:
        assert is_ours
        assert has_agent(folder)
    looking = os.open(folder / "agent.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, [looking]).start()
    with agent_lock(folder) as is_ours:
        assert is_ours


def test_memory_of_ranks_that_are_no_more_makes_room_if_it_is_on_disk(run: Path) -> None:
    folder = open_folder(run_of(run))
    for rank in (0, 5, 6):
        fill_slot(folder, 0, header_of(run_of(run), sequence=rank, rank=rank, world_size=7))
    slots = Slots(folder, run_of(run), threading.Condition(), lambda *_: False)
    assert not slots.release([0], lambda save: False)
    assert slots.release([0], lambda save: save == (b"s" * 16, 5))
    assert {path.name for path in folder.iterdir()} == {"rank-0.0", "rank-6.0"}


@pytest.mark.parametrize("reserves", [True, False])
def test_a_rank_has_memory_that_former_ranks_need_no_more(
    run: Path, mount_tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs("size=12m")))
    folder = open_folder(run_of(run))
    fill_slot(folder, 0, header_of(run_of(run), bytes(16), rank=5, world_size=7), 9 << 20)
    (folder / f"done-{bytes(16).hex()}-0").touch()
    agent = SnapshotAgent(run)
    if reserves:
        agent.reserve(state_of(1))
    for step in (1, 2):  # 4 MiB each.
        assert agent.stage(state_of(step), run / str(step), step=step) is not None
    assert not slot_path(folder, 5, 0).exists()
    agent.close(drop=True)


def test_whatever_comes_to_its_socket_the_agent_goes_on(
    agent: SnapshotAgent, run: Path, rng: random.Random
) -> None:
    path = folder_of(run_of(run)) / "agent.socket"
    assert path.stat().st_mode & 0o777 == 0o600
    hostile = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sHQI", b"TCAG", messages._VERSION, 1 << 60, 0),
        struct.pack("<4sHQI", b"TCAG", 99, 0, 0),
        encode({}),
        encode({"kind": ["hello"]}),
        encode({"kind": Kind.HELLO}),
        encode({"kind": Kind.HELLO, "run": run_of(run).hex(), "session": 5, "rank": 0}),
        encode({"kind": Kind.PERSIST}),
        encode({"kind": Kind.OK}, [b"blob"])[:-1],
        *(rng.randbytes(64) for _ in range(20)),
    ]
    for data in hostile:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
            connection.settimeout(SOON_S)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        send(connection, Kind.HELLO, run="another run", session="", rank=0)
        answer = receive(connection)
        assert answer["kind"] == Kind.ERROR
        assert "belongs to another run" in answer["failure"][1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.settimeout(SOON_S)
        send(connection, Kind.HELLO, run=run_of(run).hex(), session="", rank=float("inf"))
        answer = receive(connection)
        assert answer["kind"] == Kind.ERROR
    save(agent, run, 1)


def test_the_agent_does_without_torch(run_new_python: Callable[..., str]) -> None:
    run_new_python(
        "import sys; import torch_ckpt.agent.main, torch_ckpt.agent.client; "
        "assert 'torch' not in sys.modules"
    )


def test_an_agent_without_trainers_ends_after_a_while(run: Path) -> None:
    folder = open_folder(run_of(run))
    agent = Agent(run_of(run), folder, AgentOptions(linger_s=0.2))
    assert agent.serve()


def test_a_handler_that_stages_while_the_same_thread_stages_is_refused(
    agent: SnapshotAgent, run: Path
) -> None:
    refused = []

    def handle(*_: object) -> None:
        with pytest.raises(CheckpointError, match="a signal handler has interrupted"):
            agent.stage(state_of(2), run / "2", step=2)
        refused.append(True)

    class Interrupting:
        """Is pickled while the state is copied."""

        def __reduce__(self) -> Any:
            if not refused:
                signal.raise_signal(signal.SIGUSR1)
            return int, (7,)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        save(agent, run, 1, {"w": torch.ones(4), "n": Interrupting()})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused
    save(agent, run, 2)
    assert on_disk(run, 2)
