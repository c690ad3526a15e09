"""The last step of a run, if it is in memory alone: it is written, or somebody says why not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from command import run_command
from support.agents import agent_pid, kill_agent
from waits import until

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions, SnapshotAgent
from torch_ckpt.agent.memory import folder_of, has_agent, open_folder, run_of
from torch_ckpt.agent.process import _Listener
from torch_ckpt.errors import CheckpointError, StorageError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((500_000,), float(step))}


def assert_restores(run: Run, step: int) -> None:
    state = state_of(0)
    assert run.restore(state) == step
    assert torch.equal(state["w"], state_of(step)["w"])


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """The disk has no space within the block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    filler.unlink()


def is_on_disk(path: Path, step: int) -> bool:
    return (path / f"step-{step}" / ".metadata").exists()


def in_memory_alone(path: Path, **options: Any) -> Run:
    run = Run(path, asynchronous=True, agent=AgentOptions(linger_s=60), **options)
    run.save(1, state_of(1))
    run.wait()
    run.save(2, state_of(2), persist=False)
    return run


def test_close_writes_the_last_step_and_waits_for_it(run: Path) -> None:
    in_memory_alone(run, keep_last=1).close()
    assert [path.name for path in run.glob("step-*")] == ["step-2"]


def test_a_save_that_is_interrupted_before_its_copy_withdraws_no_former_step(run: Path) -> None:
    last = in_memory_alone(run)
    backend: Any = last._backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._agent._exclusive, "use_by_all", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            last.save(3, state_of(3), persist=False)
    assert_restores(last, 2)
    last.close()
    assert is_on_disk(run, 2)


def test_a_restore_waits_until_the_agent_has_written_a_step_whose_memory_was_removed(
    run: Path,
) -> None:
    """The agent still has it mapped. An older step would hide it."""
    last = in_memory_alone(run)
    shutil.rmtree(folder_of(run_of(run)))
    assert_restores(last, 2)
    assert is_on_disk(run, 2)
    last.close()


def test_a_step_that_is_lost_with_its_memory_fails_one_restore(run: Path) -> None:
    last = in_memory_alone(run)
    kill_agent(run)
    shutil.rmtree(folder_of(run_of(run)))
    with pytest.raises(
        CheckpointError, match=r"step 2 is not on disk, and its memory was removed$"
    ):
        last.restore(state_of(0))
    assert_restores(last, 1)
    last.close()


def test_an_agent_whose_memory_was_removed_writes_to_no_other_directory(run: Path) -> None:
    """The id of the run went with the memory."""
    with Run(run.with_name("other")) as other:
        other.save(2, state_of(20))
    last = in_memory_alone(run)
    run.rename(run.with_name("moved"))
    run.with_name("other").rename(run)
    shutil.rmtree(folder_of(run_of(run)))
    with pytest.raises(CheckpointError, match="not the directory of this run"):
        last.restore(state_of(0))  # Once the agent has ended.
    last.close()
    with Run(run) as other:
        state = state_of(0)
        assert other.restore(state) == 2
        assert torch.equal(state["w"], state_of(20)["w"])


def test_a_step_whose_memory_was_removed_is_discarded_once_the_agent_has_written_it(
    run: Path,
) -> None:
    last = in_memory_alone(run)
    shutil.rmtree(folder_of(run_of(run)))
    assert last.discard_after(1) == [2]
    assert_restores(last, 1)
    last.close()
    assert not is_on_disk(run, 2)


def test_a_frozen_agent_whose_memory_was_removed_hides_no_step(run: Path) -> None:
    last = in_memory_alone(run, timeout_s=1)
    last.save(2, state_of(1))  # An earlier save of the step hides the last one neither.
    last.save(2, state_of(2), persist=False)
    agent = agent_pid(run)
    os.kill(agent, signal.SIGSTOP)
    try:
        shutil.rmtree(folder_of(run_of(run)))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="removed; its agent may still write it"):
                last.restore(state_of(0))
    finally:
        os.kill(agent, signal.SIGCONT)

    def restores() -> bool:
        with contextlib.suppress(CheckpointError):
            assert_restores(last, 2)
            return True
        return False

    until(restores)
    last.close()


def discard_nothing(run: Run) -> None:
    assert run.discard_after(2) == []


def save_without_the_agent(run: Run) -> None:
    """From now on, as if the memory were too small."""
    backend: Any = run._backend
    backend._agent.reserve = Mock(side_effect=StorageError("ENOSPC"))
    with pytest.warns(UserWarning, match="without an agent: ENOSPC"):
        run.reserve(state_of(0))


@pytest.mark.parametrize("first", [lambda run: None, discard_nothing, save_without_the_agent])
def test_close_promotes_the_last_step(first: Callable[[Run], None], tmp_path: Path) -> None:
    run = in_memory_alone(tmp_path / "run", local=tmp_path / "local")
    first(run)
    assert_restores(run, 2)
    run.close()
    assert is_on_disk(tmp_path / "run", 2)
    until(lambda: not folder_of(run_of(tmp_path / "run")).exists())


def fill_the_disk(path: Path) -> contextlib.AbstractContextManager[None]:
    return full(path.parent)


@contextlib.contextmanager
def replace_the_directory(path: Path) -> Iterator[None]:
    other = path.with_name("other")
    with Run(other, asynchronous=True, agent=True) as run:
        run.save(1, state_of(9))
    path.rename(path.with_name("moved"))
    other.rename(path)
    yield
    path.rename(other)
    path.with_name("moved").rename(path)


@contextlib.contextmanager
def move_the_directory(path: Path) -> Iterator[None]:
    path.rename(path.with_name("moved"))
    yield
    assert not path.exists()
    path.with_name("moved").rename(path)


@contextlib.contextmanager
def unmount_the_directory(path: Path) -> Iterator[None]:
    """Its mount point remains."""
    with move_the_directory(path):
        path.mkdir()
        yield
        path.rmdir()


@pytest.mark.thin(1.0)
@pytest.mark.parametrize(
    ("fault", "reason", "first"),
    [
        (fill_the_disk, "ENOSPC", lambda run: None),
        (fill_the_disk, "ENOSPC", discard_nothing),
        (fill_the_disk, "ENOSPC", save_without_the_agent),
        (replace_the_directory, "another run", lambda run: None),
        (move_the_directory, "not the directory of this run", lambda run: None),
        (unmount_the_directory, "not the directory of this run", lambda run: None),
    ],
)
def test_close_reports_a_last_step_that_is_in_memory_alone(
    small_disk: Path,
    fault: Callable[[Path], contextlib.AbstractContextManager[None]],
    reason: str,
    first: Callable[[Run], None],
) -> None:
    path = small_disk / "run"
    run = in_memory_alone(path)
    with fault(path):
        first(run)
        with pytest.raises(CheckpointError, match=f"(?s)step 2 was not saved.*{reason}") as error:
            run.close()
        run.close()  # Nothing more to report.
        (note,) = error.value.__notes__
        assert "step 2 is in the shared memory of this machine only" in note
        assert "for a day" in note
        until(lambda: not (folder_of(run_of(path)) / "agent.socket").exists())
    assert not is_on_disk(path, 2)
    with Run(path, asynchronous=True, agent=True) as run:
        assert_restores(run, 2)
    until(lambda: is_on_disk(path, 2))


@pytest.mark.parametrize("saves", [False, True])
def test_a_restore_reads_the_memory_of_an_agent_that_was_lost(
    saves: bool, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = in_memory_alone(run, timeout_s=1)
    agent = int((folder_of(run_of(run)) / "agent.lock").read_text())
    os.kill(agent, signal.SIGSTOP)
    try:
        with pytest.warns(UserWarning, match="without an agent: the agent .* did not answer"):
            job.reserve(state_of(0))
        assert job.latest_step() == 2
        assert_restores(job, 2)
        with Run(run) as other:
            assert_restores(other, 1)
        assert "has steps (2) in the shared memory" in caplog.text
        if saves:
            job.save(3, state_of(3))
            job.close()  # Step 2 is not the last one.
        else:
            with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*not answer"):
                job.close()
    finally:
        os.kill(agent, signal.SIGCONT)
    with Run(run, asynchronous=True, agent=True) as next_job:
        assert_restores(next_job, 3 if saves else 2)


KILLED = """
import os, signal, sys
from pathlib import Path
from test_last_steps_in_memory import full, in_memory_alone
path = Path(sys.argv[1])
run = in_memory_alone(path)
with full(path.parent):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_agent_tries_again_while_it_lives_until_the_disk_has_space(
    small_disk: Path, run_python: Callable[..., str]
) -> None:
    path = small_disk / "run"
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(KILLED, path)
    log = folder_of(run_of(path)) / "agent.log"
    until(lambda: log.read_text().count("cannot persist save") >= 3)
    (small_disk / "filler").unlink()
    until(lambda: is_on_disk(path, 2))
    with Run(path, asynchronous=True, agent=True) as run:
        assert_restores(run, 2)


KILLED_WITH_LOCAL = """
import os, signal, sys
from pathlib import Path
from test_last_steps_in_memory import in_memory_alone
folder = Path(sys.argv[1])
run = in_memory_alone(folder / "run", local=folder / "local", keep_last=1)
run.wait(promoted=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("local", ["other", None])
def test_a_step_in_memory_is_found_if_the_local_directory_changes(
    tmp_path: Path, run_python: Callable[..., str], local: str | None, lives: bool
) -> None:
    path = tmp_path / "run"
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(KILLED_WITH_LOCAL, tmp_path)
    if lives:
        until(lambda: is_on_disk(tmp_path / "local", 2))
    else:
        kill_agent(path)
    options = {"asynchronous": True, "agent": True, "local": local and tmp_path / local}
    for _ in range(2):  # Nothing is in a directory of these jobs, so the step stays in memory.
        with Run(path, **options) as run:
            assert_restores(run, 2)
        until(lambda: not has_agent(folder_of(run_of(path))))
    with Run(path, **options) as run:
        assert_restores(run, 2)
        run.save(3, state_of(3))
    until(lambda: not folder_of(run_of(path)).exists())
    assert [each.name for each in (tmp_path / (local or "run")).glob("step-3")] == ["step-3"]
    assert not is_on_disk(tmp_path / "local", 3)


KILLED_WITH_ITS_AGENT = """
import os, signal, sys
from pathlib import Path
from support.agents import agent_pid
from support.freezing import freeze
from test_last_steps_in_memory import in_memory_alone
path = Path(sys.argv[1])
run = in_memory_alone(path)
freeze(agent_pid(path)) if sys.argv[2] == "frozen" else os.kill(agent_pid(path), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_step_in_memory_is_restored_while_the_agent_is_frozen(
    run: Path, run_python: Callable[..., str]
) -> None:
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(KILLED_WITH_ITS_AGENT, run, "frozen")
    with pytest.warns(UserWarning, match="without an agent: the agent .* did not answer"):
        job = Run(run, asynchronous=True, agent=True, timeout_s=2)
    with job:
        assert_restores(job, 2)
        job.save(3, state_of(3))
        job.wait()
        assert_restores(job, 3)
        job.discard_after(1)
        assert_restores(job, 1)


def test_a_job_and_ls_name_newer_steps_in_memory_that_are_not_restored(
    run: Path, run_python: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(KILLED_WITH_ITS_AGENT, run, "killed")
    code, printed = run_command("ls", run)
    assert code == 0
    assert "newer steps in the memory of this machine: 2" in printed
    assert json.loads(run_command("ls", run, "--json")[1])["in_memory"] == [2]
    for asynchronous in (False, True):
        caplog.clear()
        with Run(run, asynchronous=asynchronous) as job:
            assert_restores(job, 1)
        assert "has steps (2) in the shared memory of this machine" in caplog.text
    with Run(run, asynchronous=True, agent=True) as job:
        assert_restores(job, 2)
        job.discard_after(1)
    assert "newer" not in run_command("ls", run)[1]


def test_ls_names_the_steps_of_a_run_that_has_none_on_disk(run: Path) -> None:
    with Run(run, asynchronous=True, agent=True) as training:
        training.save(1, state_of(1), persist=False)
        assert run_command("ls", run) == (0, "steps in the memory of this machine: 1\n")
        facts = json.loads(run_command("ls", run, "--json")[1])
        assert (facts["newest"], facts["steps"], facts["in_memory"]) == (None, [], [1])
        assert run_command("ls", run, "--at", "2026-11-28")[0] == 3


def test_a_job_without_an_agent_does_not_name_steps_of_another_run_or_that_were_left(
    run: Path, run_python: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(KILLED_WITH_ITS_AGENT, run, "killed")
    with Run(run) as job:
        assert job.restore(state_of(0), step=1) == 1
        job.save(2, state_of(9))
    shutil.rmtree(run / "step-2")
    with Run(run) as job:
        assert_restores(job, 1)
    shutil.rmtree(run)
    with Run(run) as job:
        assert job.restore(state_of(0)) is None
    assert "shared memory" not in caplog.text


# ---- An agent without a run ----


def staged_last(path: Path) -> SnapshotAgent:
    """An agent that has a step on disk, and a later one in memory alone."""
    agent = SnapshotAgent(path, options=AgentOptions(linger_s=60))
    for step in (1, 2):
        saved = agent.async_save(
            state_of(step), path / f"step-{step}", step=step, persist=step == 1
        )
        assert saved is not None
        saved.result()
    return agent


def test_closing_an_agent_writes_the_last_step_and_waits_for_it(run: Path) -> None:
    staged_last(run).close()
    assert is_on_disk(run, 2)


def test_closing_an_agent_reports_a_last_step_that_it_cannot_write(small_disk: Path) -> None:
    path = small_disk / "run"
    agent = staged_last(path)
    with full(small_disk):
        with pytest.raises(CheckpointError, match="ENOSPC"):
            agent.close()
        agent.close()  # Nothing more to report.


AT_EXIT = """
import sys
from pathlib import Path
from test_last_steps_in_memory import full, staged_last, state_of
path, persists = Path(sys.argv[1]), sys.argv[2] == "persist"
agent = staged_last(path)
filled = full(path.parent)
filled.__enter__()
if persists:
    agent.async_save(state_of(3), path / "step-3", step=3)
"""


@pytest.mark.parametrize(("kind", "step"), [("persist", 3), ("memory", 2)])
def test_the_end_of_the_process_reports_a_last_step_of_an_agent_that_was_not_saved(
    small_disk: Path, run_python: Callable[..., str], kind: str, step: int
) -> None:
    printed = run_python(AT_EXIT, small_disk / "run", kind)
    assert f"step {step} was not saved: " in printed
    assert "ENOSPC" in printed


def replace_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir(mode=0o700)


@pytest.mark.parametrize("remove", [shutil.rmtree, replace_folder])
def test_close_does_not_wait_for_a_last_step_that_others_have_removed_from_memory(
    run: Path, remove: Callable[[Path], None]
) -> None:
    options = AgentOptions(persist_on_failure=False)
    training = Run(run, asynchronous=True, agent=options, timeout_s=30)
    training.save(1, state_of(1), persist=False)
    remove(folder_of(run_of(run)))
    with pytest.raises(CheckpointError, match=r"step 1 .* a slot was removed from memory") as error:
        training.close()
    assert "It remains for a day" not in "".join(getattr(error.value, "__notes__", ()))


def test_the_last_step_is_written_although_the_socket_of_its_agent_was_removed(run: Path) -> None:
    training = Run(run, asynchronous=True, agent=True, timeout_s=20)
    training.save(1, state_of(1), persist=False)
    (folder_of(run_of(run)) / "agent.socket").unlink()
    training.close()
    assert is_on_disk(run, 1)


def test_an_agent_that_ends_leaves_the_socket_of_the_next_one(run: Path) -> None:
    folder = open_folder(run_of(run))
    former, present = (_Listener(folder, lambda _: None) for _ in range(2))
    former.close()
    assert (folder / "agent.socket").exists()
    present.close()
    assert not (folder / "agent.socket").exists()
