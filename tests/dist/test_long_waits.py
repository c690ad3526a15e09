"""Every public call that waits long logs for whom or what: a rank, a process, a save, a copy."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_ranks import AMPLE_S, Detour, LoadPlanner, SavePlanner, Writer, own_state
from ranks import Ranks, Worlds
from support.agents import agent_pid
from support.freezing import freeze
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from waits import until

import torch_ckpt
from torch_ckpt import FastWriter, Run, SnapshotStager
from torch_ckpt.agent import client
from torch_ckpt.coordination import peer, waiting
from torch_ckpt.process_state import PROCESS
from torch_ckpt.storage.copying import CheckpointCopy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

LINE_S = 0.3  # Instead of 5 s.
FOUND_S = 20.0  # The time that a held rank waits for the line of another.
STATE = {"w": torch.ones(1000)}


class Lines(logging.Handler):
    """The warnings of this process. Each is a file as well, for the other ranks of a test."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.folder, self.lines = folder, list[str]()
        self._has_line = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith("waiting for") or "for an agent to start" in text:
            return
        self.lines.append(text)
        if self.folder is not None:
            (self.folder / f"line-{os.getpid()}-{len(self.lines)}").write_text(text)
        self._has_line.set()

    def until_a_line(self) -> None:
        assert self._has_line.wait(FOUND_S), "a call waits, and logs no line"


@contextlib.contextmanager
def lines(folder: Path | None = None) -> Iterator[Lines]:
    """Makes waits of a fraction of a second long ones, and collects their lines."""
    handler, logger = Lines(folder), logging.getLogger("torch_ckpt")
    logger.addHandler(handler)
    try:
        with (
            mock.patch.object(waiting, "LOG_S", LINE_S),
            mock.patch.object(client, "_POLLS", round(client._ANSWER_S / LINE_S)),
            mock.patch.object(peer, "_SILENT_S", 2 * LINE_S),
        ):
            yield handler
    finally:
        logger.removeHandler(handler)


def until_any_line(folder: Path, begin: str = "") -> None:
    """Waits until a rank of a test has logged a line with this begin."""
    files = folder.glob
    until(lambda: any(f.read_text().startswith(begin) for f in files("line-*")), FOUND_S)


def until_the_coordinators_line(folder: Path) -> None:
    """The neighbours of a coordinator whose process has no time log that it does not answer."""
    until_any_line(folder, "waiting for ranks: ")


# ---- Other ranks ----


def save_with(detour: Detour, path: Path) -> None:
    state = own_state(dist.get_rank(), "new")
    writer = Writer(path / "new", detour)
    planner = SavePlanner(detour)
    torch_ckpt.save(state, storage_writer=writer, planner=planner, timeout_s=AMPLE_S)


def load_with(detour: Detour, path: Path) -> None:
    state = own_state(dist.get_rank(), "none")
    planner = LoadPlanner(detour)
    torch_ckpt.load(state, checkpoint_id=path / "old", planner=planner, timeout_s=AMPLE_S)


def dcp_save_with(detour: Detour, path: Path) -> None:
    with torch_ckpt.installed(timeout_s=AMPLE_S):
        state, planner = own_state(dist.get_rank(), "new"), SavePlanner(detour)
        dcp.save(state, checkpoint_id=path / "new", planner=planner)


def run_with(detour: Detour, path: Path) -> None:
    """Each decision of a run is a wait for all ranks."""
    with Run(path / "run", timeout_s=AMPLE_S) as run:
        detour("run")
        run.save(1, own_state(dist.get_rank(), "new"))


CALLS: dict[str, tuple[Callable[[Detour, Path], None], str]] = {
    "save: local plan": (save_with, "planning"),
    "save: write": (save_with, "writing"),
    "save: results": (save_with, "writing"),
    "load: local plan": (load_with, "planning"),
    "load: read": (load_with, "reading"),
    "dcp.save: local plan": (dcp_save_with, "planning"),
    "run: run": (run_with, ""),
}
BY_RANK_0 = {"save: finish": (save_with, "committing"), "save: publish": (save_with, "committing")}
CASES = [(call, rank) for call in CALLS for rank in (0, 1)] + [(call, 0) for call in BY_RANK_0]


def late_in(call: str, rank: int, path: Path) -> list[str]:
    function, _ = (CALLS | BY_RANK_0)[call]
    if call.startswith("load"):
        torch_ckpt.save(own_state(dist.get_rank(), "old"), checkpoint_id=path / "old")
    detour = Detour(call.partition(": ")[2], rank, until_the_coordinators_line, path)
    with lines(path) as found:
        function(detour, path)
    return found.lines


@pytest.mark.parametrize(("call", "rank"), CASES)
def test_a_rank_that_is_late_is_named_also_if_it_is_the_first(
    worlds: Worlds, tmp_path: Path, call: str, rank: int
) -> None:
    found = worlds.run(2, late_in, call, rank, tmp_path)[0]
    _, phase = (CALLS | BY_RANK_0)[call]
    pattern = f"waiting for ranks: rank {rank} is still {phase}"
    assert any(line.startswith(pattern) for line in found), found


def first_call_beside_a_late_rank(rank: int, path: Path) -> list[str]:
    group = dist.new_group(backend="gloo")
    with lines(path) as found:
        if dist.get_rank() == rank:
            until_any_line(path)
        torch_ckpt.save(STATE, checkpoint_id=path / "new", process_group=group, timeout_s=AMPLE_S)
    return found.lines


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_late_for_the_first_call_is_named(
    worlds: Worlds, tmp_path: Path, rank: int
) -> None:
    found = worlds.run(2, first_call_beside_a_late_rank, rank, tmp_path)[1 - rank]
    assert any(f"rank {rank} is still" in line for line in found), found


def save_beside_a_frozen_rank(path: Path) -> list[str]:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    torch_ckpt.save(STATE, checkpoint_id=path / "old")
    with lines(path) as found:
        if dist.get_rank() == 1:
            freeze(pids[0])
            threading.Thread(
                target=lambda: (found._has_line.wait(FOUND_S), os.kill(pids[0], signal.SIGCONT))
            ).start()
        torch_ckpt.save(STATE, checkpoint_id=path / "new", timeout_s=AMPLE_S)
    return found.lines


def test_a_first_rank_that_is_frozen_is_named_by_the_others(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        found = ranks.run(save_beside_a_frozen_rank, tmp_path)[1]
    assert any("waiting for rank 0, which does not answer, while" in line for line in found), found


# ---- What this process does in the background ----


@contextlib.contextmanager
def held(owner: Any, name: str, found: Lines) -> Iterator[None]:
    """Holds the calls of a function, until a line was logged."""
    function = getattr(owner, name)

    def hold(*arguments: Any, **options: Any) -> Any:
        found.until_a_line()
        return function(*arguments, **options)

    with mock.patch.object(owner, name, hold):
        yield


def async_save_and_wait(path: Path) -> None:
    future: Any = torch_ckpt.async_save(STATE, checkpoint_id=path / "new")
    assert isinstance(future, Future)
    future.result()


def async_save_and_look(path: Path) -> None:
    future: Any = torch_ckpt.async_save(STATE, checkpoint_id=path / "new")
    assert future.exception(AMPLE_S) is None


def dcp_async_save_and_wait(path: Path) -> None:
    with torch_ckpt.installed():
        future: Any = dcp.async_save(STATE, checkpoint_id=path / "new")
        future.result()


def two_async_saves(path: Path) -> None:
    stager = SnapshotStager()
    futures: list[Any] = [
        torch_ckpt.async_save(STATE, checkpoint_id=path / f"{i}", async_stager=stager)
        for i in range(2)
    ]
    for future in futures:
        future.result()


def run_and(then: Callable[[Run], Any], **options: Any) -> Callable[[Path], None]:
    def call(path: Path) -> None:
        with Run(path / "run", asynchronous=True, timeout_s=AMPLE_S, **options) as run:
            run.save(1, STATE)
            then(run)

    return call


BACKGROUND = {
    "async_save.result": (async_save_and_wait, "the asynchronous save to .*new: rank 0 is "),
    "async_save.exception": (async_save_and_look, "the asynchronous save to .*new: rank 0 is "),
    "dcp.async_save.result": (dcp_async_save_and_wait, "the asynchronous save to .*new: rank 0 "),
    "async_save": (two_async_saves, "a free snapshot, .*"),
    "run.save": (run_and(lambda run: run.save(2, STATE)), "the asynchronous save to .*step-1: "),
    "run.wait": (run_and(lambda run: run.wait()), "the asynchronous save to .*step-1: rank 0 is"),
    "run.restore": (run_and(lambda run: run.restore(STATE)), "the asynchronous save to .*step-1: "),
    "run.close": (run_and(lambda _: None), "the asynchronous save to .*step-1: rank 0 is"),
    "run.wait by the agent": (
        run_and(lambda run: run.wait(), agent=True),
        r"the agent of this machine, process \d+, to commit .*step-1",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("call", BACKGROUND)
def test_a_call_that_waits_for_a_slow_background_save_says_which_and_how_far_it_is(
    tmp_path: Path, call: str
) -> None:
    function, pattern = BACKGROUND[call]
    is_agent = "agent" in call
    with lines() as found:
        owner, name = (client.AgentClient, "persist") if is_agent else (FastWriter, "finish")
        with held(owner, name, found):
            function(tmp_path)
    assert any(re.match(f"waiting for {pattern}", line) for line in found.lines), found.lines


def test_a_line_of_a_background_save_has_the_bytes_that_are_written(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20)}
    with lines() as found, held(torch.futures.Future, "value", found):
        future: Any = torch_ckpt.async_save(state, checkpoint_id=tmp_path / "new")
        future.result()
    assert "rank 0 is writing, 4.2 MB of 4.2 MB written" in found.lines[0]


@pytest.mark.parametrize("call", ["wait", "close"])
def test_a_call_that_waits_for_a_slow_promotion_says_which_and_how_far_it_is(
    tmp_path: Path, call: str
) -> None:
    with (
        lines() as found,
        held(CheckpointCopy, "commit", found),
        Run(tmp_path / "run", local=tmp_path / "local", timeout_s=AMPLE_S) as run,
    ):
        run.save(1, STATE)
        if call == "wait":
            run.wait(promoted=True)
    assert re.match(r"waiting for the promotion of step 1 to .*run, \d.*B copied", found.lines[0])


def test_a_thread_that_waits_for_another_says_what_for(tmp_path: Path) -> None:
    with lines() as found, Run(tmp_path / "run", timeout_s=AMPLE_S) as run:
        with held(FastWriter, "finish", found):
            other = threading.Thread(target=run.save, args=(1, STATE))
            other.start()
            until(lambda: bool(run._exclusive._uses))
            run.latest_step()
        other.join()
    assert re.match("waiting for another thread, which uses the run .*, to choose", found.lines[0])


# ---- Processes that are stopped ----


@contextlib.contextmanager
def stopped(pid: int, found: Lines) -> Iterator[None]:
    """Stops a process, until a line was logged."""
    freeze(pid)

    def resume() -> None:
        with contextlib.suppress(AssertionError):
            found.until_a_line()
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=resume)
    thread.start()
    try:
        yield
    finally:
        thread.join()


AGENT_CALLS: dict[str, Callable[[Run, dict[str, Any]], Any]] = {
    "save": lambda run, state: run.save(2, state),
    "save in memory": lambda run, state: run.save(2, state, persist=False),
    "wait": lambda run, _: run.wait(),
    "close": lambda run, _: run.close(),
}


@pytest.mark.parametrize("call", AGENT_CALLS)
def test_a_call_that_waits_for_a_stopped_agent_names_its_process(tmp_path: Path, call: str) -> None:
    with Run(tmp_path / "run", asynchronous=True, agent=True, timeout_s=AMPLE_S) as run:
        run.save(1, STATE)
        if call != "wait":
            run.wait()
        pid = agent_pid(tmp_path / "run")
        with lines() as found, stopped(pid, found):
            AGENT_CALLS[call](run, STATE)
    assert any(f"the agent of this machine, process {pid}," in line for line in found.lines)


@pytest.mark.slow
def test_a_save_that_waits_for_a_stopped_save_process_names_it(tmp_path: Path) -> None:
    def save(name: str) -> Any:
        kind = AsyncCheckpointerType.PROCESS
        return torch_ckpt.async_save(
            STATE, checkpoint_id=tmp_path / name, async_checkpointer_type=kind, timeout_s=AMPLE_S
        )

    save("first").result()
    (process,) = PROCESS.save_processes.values()
    pid = process._process.pid
    with lines() as found, stopped(pid, found):
        save("second").result()
    assert any(f"the save process {pid} of rank 0" in line for line in found.lines), found.lines


# ---- The lines of one wait ----


def test_a_wait_is_logged_after_5_s_1_5_and_15_min_and_each_quarter_of_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now)
    handler, logger = Lines(), logging.getLogger("torch_ckpt")
    logger.addHandler(handler)
    try:
        at = []
        for pause_s in waiting.LongWait(lambda: "rank 3").rounds(3600.0):
            now += pause_s
            if handler.lines and len(handler.lines) > len(at):
                at.append(now - pause_s)
        at.append(now)
    finally:
        logger.removeHandler(handler)
    assert at == [5.0, 60.0, 300.0, 900.0, 1800.0, 2700.0, 3600.0]
    assert handler.lines[0] == "waiting for rank 3 (5 s so far)"
    assert handler.lines[-1] == "waiting for rank 3 (60 min so far)"
