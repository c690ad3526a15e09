"""Runs with a local directory and an agent, which copies the steps to the directory of the run."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from forks import run_python
from support.agents import agent_pid, kill_agent
from support.process_io import nbytes_read_by
from waits import until

from torch_ckpt import CheckpointError, Run
from torch_ckpt.agent.memory import folder_of, has_agent, run_of
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

NBYTES = 16 << 20
SLOWLY = 12 << 20
"""Bytes in a second at which a step is copied in about a second."""


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((NBYTES // 4,), float(step))}


def _run(folder: Path, rate: int | None = None) -> Run:
    return Run(
        folder / "run",
        local=folder / "local",
        asynchronous=True,
        agent=True,
        promote_bytes_per_s=rate,
    )


def _save(run: Run, step: int) -> None:
    run.save(step, _state(step))
    run.wait()


def _steps(directory: Path) -> list[int]:
    return committed_steps(Location(directory))


def _arrived(folder: Path, step: int = 1) -> dict[str, int]:
    """Names and inodes of the data files of a step that are whole in the directory of the run."""
    found = (folder / "run" / f"step-{step}").glob("__*.distcp")
    return {path.name: path.stat().st_ino for path in found}


def _is_being_copied(folder: Path, step: int = 1) -> bool:
    directory = folder / "run" / f"step-{step}"
    return not _arrived(folder, step) and any(p.stat().st_size for p in directory.glob(".*-__*"))


def test_the_agent_reads_the_bytes_of_a_promoted_step_and_the_training_process_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _run(tmp_path) as run:
        run.reserve(_state(1))

        def save() -> None:
            run.save(1, _state(1))
            run.wait(promoted=True)

        assert nbytes_read_by(save) < NBYTES // 4
    assert _steps(tmp_path / "run") == [1]
    assert "this process promotes" not in caplog.text


_TRAINS = """
import os, signal, sys, time, torch, torch_ckpt, torch_ckpt.agent
from pathlib import Path
folder, rate, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
agent = torch_ckpt.agent.AgentOptions(linger_s=float(sys.argv[5]))
with torch_ckpt.Run(
    folder / "run", local=folder / "local", asynchronous=True, agent=agent, promote_bytes_per_s=rate
) as run:
    run.save(1, {"w": torch.full((nbytes // 4,), 1.0)})
    run.wait()
    while not any(p.stat().st_size for p in (folder / "run" / "step-1").glob(".*-__*")):
        time.sleep(0.01)
    if sys.argv[4] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[4] == "raises":
        raise RuntimeError("of training")
"""


@pytest.mark.thin("raises")
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_copy_goes_on_when_training_dies_and_the_next_process_sends_no_file_again(
    tmp_path: Path, how: str
) -> None:
    rate = SLOWLY // (4 if how == "killed" else 8)  # The other process takes a while to end.
    arguments = [str(tmp_path), str(rate), str(NBYTES), how, "600"]
    ended = run_python("-c", _TRAINS, *arguments, folder=tmp_path)
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 1)
    assert not _arrived(tmp_path)
    until(lambda: len(_arrived(tmp_path)) == 1)
    arrived = _arrived(tmp_path)
    assert _steps(tmp_path / "run") == []  # The next process commits.
    with _run(tmp_path) as run:
        assert nbytes_read_by(run.wait, promoted=True) < NBYTES // 4
        assert _steps(tmp_path / "run") == [1]
        assert _arrived(tmp_path) == arrived
        state = _state(0)
        assert run.restore(state) == 1
    assert torch.equal(state["w"], _state(1)["w"])


def test_the_next_process_joins_a_copy_that_is_in_progress(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(SLOWLY), str(NBYTES), "killed", "600"]
    run_python("-c", _TRAINS, *arguments, folder=tmp_path)
    (partial,) = (tmp_path / "run" / "step-1").glob(".*-__*")
    inode = partial.stat().st_ino
    with _run(tmp_path, SLOWLY) as run:
        run.wait(promoted=True)
    assert list(_arrived(tmp_path).values()) == [inode]
    assert _steps(tmp_path / "run") == [1]


def test_a_full_disk_is_reported_by_the_next_save_as_without_an_agent(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(small_disk / "run", local=tmp_path / "local", asynchronous=True, agent=True)
    _save(run, 1)  # The disk has room for half of it.
    failed = r"step 1 was not promoted to .*No space left"
    for _ in range(2):
        with pytest.raises(StorageError, match=failed) as raised:
            run.wait(promoted=True)
        assert raised.value.errno == errno.ENOSPC
        with pytest.raises(CheckpointError, match=failed):
            run.save(2, _state(2))
    with pytest.raises(StorageError, match=failed):
        run.close()
    assert "this process promotes" not in caplog.text


def test_a_damaged_step_is_reported_and_is_not_promoted(tmp_path: Path) -> None:
    run = _run(tmp_path, SLOWLY)
    _save(run, 1)
    (file,) = (tmp_path / "local" / "step-1").glob("__*.distcp")
    with file.open("r+b") as data:
        data.seek(-4096, os.SEEK_END)
        data.write(b"damage")
    with pytest.raises(CheckpointError, match=r"step 1 was not promoted.*checksum of the block"):
        run.close()
    assert _steps(tmp_path / "run") == []


def test_training_promotes_where_the_agent_does_not_reach_the_directory_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "memory://promotion-by-agents/run"  # Each process has such a store for itself.
    with Run(url, local=tmp_path / "local", asynchronous=True, agent=True) as run:
        for step in (1, 2):
            _save(run, step)
            run.wait(promoted=True)
    assert committed_steps(Location(url)) == [2, 1]
    warned = [each for each in caplog.records if "this process promotes" in each.getMessage()]
    assert len(warned) == 1
    assert "it finds no run at" in warned[0].getMessage()


def test_training_goes_on_with_the_copy_of_an_agent_that_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with _run(tmp_path, SLOWLY) as run:
        _save(run, 1)
        until(lambda: _is_being_copied(tmp_path))
        kill_agent(tmp_path / "run")
        run.wait(promoted=True)
        assert _steps(tmp_path / "run") == [1]
        _save(run, 2)  # The ranks have started another agent.
    assert _steps(tmp_path / "run") == [2, 1]
    assert "this process promotes" in caplog.text


def test_a_copy_ends_with_the_steps_that_are_discarded(tmp_path: Path) -> None:
    with _run(tmp_path, SLOWLY) as run:
        _save(run, 1)
        run.wait(promoted=True)
        _save(run, 2)
        until(lambda: _is_being_copied(tmp_path, 2))
        assert run.discard_after(1) == [2]
        log = (folder_of(run_of(tmp_path / "run")) / "agent.log").read_text()
        assert "step-2 has ended" in log
        assert not (tmp_path / "run" / "step-2").exists()
        _save(run, 2)
    assert _steps(tmp_path / "run") == [2, 1]


def test_an_agent_ends_when_a_copy_that_was_left_behind_has_ended(tmp_path: Path) -> None:
    run = _run(tmp_path, SLOWLY)
    _save(run, 1)
    until(lambda: _is_being_copied(tmp_path))
    with pytest.raises(CheckpointError, match="are still being promoted"):
        run._saves.close_promotion(0.1)
    run.close()
    assert not _arrived(tmp_path)
    until(lambda: len(_arrived(tmp_path)) == 1)
    until(lambda: not folder_of(run_of(tmp_path / "run")).exists())


@pytest.mark.thin("signal")
@pytest.mark.parametrize("how", ["signal", "late"])
def test_an_agent_that_is_to_end_cancels_a_copy(tmp_path: Path, how: str) -> None:
    arguments = [str(tmp_path), str(1 << 20), str(NBYTES), "killed"]
    linger_s = "1" if how == "late" else "600"
    run_python("-c", _TRAINS, *arguments, linger_s, folder=tmp_path)
    folder = folder_of(run_of(tmp_path / "run"))
    assert has_agent(folder)
    if how == "signal":
        os.kill(agent_pid(tmp_path / "run"), signal.SIGTERM)
    begin = time.monotonic()
    until(lambda: not has_agent(folder))
    assert time.monotonic() - begin < 12  # The copy would have taken 16 s.
    assert not _arrived(tmp_path)
