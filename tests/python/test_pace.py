"""What is written in the background steps back, and rests, until somebody waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from waits import SOON_S, until

from torch_ckpt import FastReader, FastWriter, IoOptions, _native
from torch_ckpt.agent.memory import folder_of, open_folder, run_of
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.background_save import BackgroundSave
from torch_ckpt.staged import Staged
from torch_ckpt.staging import SnapshotStager

pytestmark = pytest.mark.timeout(180)


def niceness_while(is_over: Callable[[], bool]) -> set[int]:
    """Of all threads of this process."""
    seen = set()
    while not is_over():
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                seen.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return seen


def test_what_is_written_in_the_background_steps_back_and_nothing_else(
    world_of_one: None, tmp_path: Path
) -> None:
    state = {"w": torch.ones(32 << 20)}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    writer = FastWriter(tmp_path, io=IoOptions(background_nice=3))
    for _ in range(2):
        future = dcp.async_save(state, checkpoint_id=tmp_path, storage_writer=writer)
        assert niceness_while(future.done) == {own, own + 3}
    saving = threading.Thread(
        target=dcp.save, args=(state,), kwargs={"checkpoint_id": tmp_path, "storage_writer": writer}
    )
    saving.start()
    assert niceness_while(lambda: not saving.is_alive()) == {own}


def have_agent_end(run: Path) -> None:
    os.kill(int((folder_of(run_of(run)) / "agent.lock").read_text()), signal.SIGTERM)


def seconds_of_saves(
    folder: Path, state: dict[str, Any], io: IoOptions, agent: bool
) -> tuple[float, float]:
    """Until one is on disk, then until saves begin of which the last waits for the first."""
    made = SnapshotAgent(folder, options=AgentOptions(io=io)) if agent else None
    writer = FastWriter(folder, io=io)

    def save(step: int) -> Future[Any]:
        path = folder / f"step-{step}"
        if made is None:
            return dcp.async_save(state, checkpoint_id=path, storage_writer=writer)
        future = made.async_save(state, path, step=step)
        assert future is not None
        return future

    began = time.monotonic()
    save(0).result()
    alone = time.monotonic() - began
    began = time.monotonic()
    futures = [save(step) for step in range(1, 3 + agent)]  # One more than there is memory for.
    until_begun = time.monotonic() - began
    if made is not None:
        have_agent_end(folder)  # In haste.
    with _native.Haste():
        wait(futures)
    if made is not None:
        made.close(drop=True)
    return alone, until_begun


@contextlib.contextmanager
def on_a_busy_cpu() -> Iterator[None]:
    """This thread, and what it starts, has one CPU, which others want all the time."""
    cpus = os.sched_getaffinity(0)
    spin = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, {min(cpus)})
        for _ in range(3):
            stack.callback(stack.enter_context(subprocess.Popen(spin)).kill)
        yield


def assert_at_last(measure: Callable[[Path], tuple[bool, object]], folder: Path) -> None:
    """It is so in one of a few times: other processes want this machine as well."""
    found: list[object] = []
    for number in range(4):
        is_so, measured = measure(folder / str(number))
        if is_so:
            return
        found.append(measured)
    raise AssertionError(found)


@pytest.mark.parametrize("agent", [False, True])
def test_what_is_written_in_the_background_rests_where_others_want_the_cpus(
    world_of_one: None, memory: Path, agent: bool
) -> None:
    state = {"w": torch.arange(16 << 20, dtype=torch.float32)}
    restless, resting = (IoOptions(background_share=share) for share in (1.0, 0.001))

    def does_rest(folder: Path) -> tuple[bool, object]:
        full = seconds_of_saves(folder / "full", state, restless, agent)
        rests = seconds_of_saves(folder / "rests", state, resting, agent)
        loaded = {"w": torch.zeros(16 << 20)}
        dcp.load(loaded, storage_reader=FastReader(folder / "rests" / "step-0"))
        assert torch.equal(loaded["w"], state["w"])
        alone, until_begun = rests[0] - full[0], rests[1] - full[1]
        # While training waits for the memory of a save, that does not rest.
        return alone > 4 * full[0] and until_begun < alone / 4, (full, rests)

    with on_a_busy_cpu(), tempfile.TemporaryDirectory(dir=memory) as folder:
        assert_at_last(does_rest, Path(folder))  # In memory: threads want a CPU, and no disk.


def test_an_agent_that_is_to_end_does_not_rest(world_of_one: None, memory: Path) -> None:
    state = {"w": torch.arange(16 << 20, dtype=torch.float32)}
    io = IoOptions(background_share=0.001)

    def is_hurried(folder: Path) -> tuple[bool, object]:
        agent = SnapshotAgent(folder, options=AgentOptions(io=io))
        seconds = []
        for step in range(2):
            began = time.monotonic()
            future = agent.async_save(state, folder / f"step-{step}", step=step)
            assert future is not None
            if step == 1:
                have_agent_end(folder)
            future.result()
            seconds.append(time.monotonic() - began)
        agent.close(drop=True)
        return seconds[1] < seconds[0] / 4, seconds

    with on_a_busy_cpu(), tempfile.TemporaryDirectory(dir=memory) as folder:
        assert_at_last(is_hurried, Path(folder))


def test_what_somebody_waits_for_does_not_rest(memory: Path) -> None:
    save: Future[None] = Future()
    waiting = threading.Thread(target=BackgroundSave(1, save, lambda: None).settle, args=(SOON_S,))
    waiting.start()
    until(_native.Haste.is_on)
    save.set_result(None)
    waiting.join(SOON_S)
    assert not _native.Haste.is_on()


def test_what_must_be_written_before_training_goes_on_does_not_rest(
    world_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_haste = []
    wait_for_first = Staged.wait_for_first

    def look(staged: Staged, timeout_s: float) -> None:
        in_haste.append(_native.Haste.is_on())
        wait_for_first(staged, timeout_s)

    monkeypatch.setattr(Staged, "wait_for_first", look)
    state = {f"w{number}": torch.ones(1 << 18) for number in range(8)}
    for max_nbytes in (64 << 20, 1 << 20):
        writer = FastWriter(tmp_path, stager=SnapshotStager(max_host_nbytes=max_nbytes))
        dcp.async_save(state, storage_writer=writer).result()
    assert in_haste == [True]
    assert not _native.Haste.is_on()


TRAINER = """
import sys
from torch_ckpt.agent.client import AgentClient, Place
from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.options import AgentOptions

place = Place(run_of(sys.argv[1]), bytes(16), 0, 1, 0, 1, [0])
client = AgentClient(sys.argv[1], place, AgentOptions())
sys.stdin.read()
"""


def test_an_agent_rests_only_while_its_trainers_live(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    folder = open_folder(run_of(run))
    agent = Agent(run_of(run), folder, AgentOptions(linger_s=SOON_S))
    serving = threading.Thread(target=agent.serve)
    serving.start()
    until(_native.Haste.is_on)
    command = [sys.executable, "-c", TRAINER, os.fspath(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as trainer:
        until(lambda: not _native.Haste.is_on())
        trainer.kill()
        until(_native.Haste.is_on)
    agent.stop()
    serving.join(SOON_S)
    assert not _native.Haste.is_on()
