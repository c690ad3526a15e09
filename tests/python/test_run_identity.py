"""The identity of a run: memory of a run whose directory is gone is not offered to the next one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from waits import SOON_S, until

import torch_ckpt
from torch_ckpt.agent import AgentOptions, SnapshotAgent
from torch_ckpt.agent.identity import (
    RunId,
    begun_id,
    claim_directory,
    id_in_directory,
    id_in_memory,
    set_id,
    write_id,
)
from torch_ckpt.agent.memory import complete_slots, folder_of, has_agent, run_of
from torch_ckpt.commits.small_files import BRANCH
from torch_ckpt.commits.terms import take_term
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memory")]

A, B = "a" * 16, "b" * 16

AGENT = [sys.executable, "-m", "torch_ckpt.cli.main", "agent"]

IN_MEMORY = AgentOptions(persist_on_failure=False)
"""An agent that leaves steps in memory alone when training fails."""


@contextlib.contextmanager
def training(run: Path, options: AgentOptions | bool = IN_MEMORY) -> Iterator[torch_ckpt.Run]:
    """A run that an exception ends: what is in memory stays there."""
    with (
        contextlib.suppress(ZeroDivisionError),
        torch_ckpt.Run(run, asynchronous=True, agent=options) as made,
    ):
        yield made
        raise ZeroDivisionError


DAMAGED = [b"", b"two words", b"\xff", b"0" * 15]


def save(made: torch_ckpt.Run, step: int, *, persist: bool = True) -> None:
    made.save(step, {"w": torch.full((1000,), float(step))}, persist=persist)
    made.wait()


def restored(run: Path) -> int | None:
    """The step that a new start finds; its values are those of the step."""
    with training(run) as made:
        state = {"w": torch.zeros(1000)}
        step = made.restore(state)
        assert state["w"].eq(step or 0).all()
    return step


def move_away(run: Path) -> None:
    run.rename(run.with_name("moved"))


def remove_contents(run: Path) -> None:
    """As ``rm -rf run/*`` does."""
    for path in run.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replace_by_another(run: Path) -> None:
    with training(run.with_name("other")) as made:
        save(made, 1)
    move_away(run)
    run.with_name("other").rename(run)


@pytest.mark.thin(1.0)
@pytest.mark.parametrize("lose", [move_away, shutil.rmtree, remove_contents, replace_by_another])
def test_memory_of_a_run_whose_directory_is_gone_is_not_restored(
    run: Path, lose: object, caplog: pytest.LogCaptureFixture
) -> None:
    with training(run) as made:
        save(made, 6)
        save(made, 7, persist=False)
    lose(run)  # type: ignore[operator]
    caplog.clear()
    assert restored(run) == (1 if lose is replace_by_another else None)
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "steps 6, 7" in told
    assert str(run) in told
    assert ("another run" if lose is replace_by_another else "removed or moved") in told
    folder, former = marks(run)
    assert steps_in(folder) == {6, 7}, "until the first save"
    with training(run) as made:
        made.reserve({"w": torch.zeros(1000)})
        assert marks(run)[1].id != former.id
        assert steps_in(folder) == set(), "the memory is freed"
        save(made, 2)
    assert restored(run) == 2


def steps_in(folder: Path) -> set[int]:
    """The steps in the memory of a run, of whichever run it is."""
    return {header.step for header, _ in complete_slots(folder, bytes.fromhex(folder.name))}


def test_a_job_whose_directory_was_not_mounted_leaves_the_memory(run: Path) -> None:
    with training(run) as made:
        save(made, 1)
        save(made, 2, persist=False)
    move_away(run)
    assert restored(run) is None
    with torch_ckpt.Run(run, asynchronous=True, agent=IN_MEMORY):
        pass  # Its end in good order writes nothing, because the newest step is not its own.
    assert not run.exists()
    run.with_name("moved").rename(run)
    assert restored(run) == 2


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_id_counts_as_none(run: Path, content: bytes) -> None:
    with training(run) as made:
        save(made, 1)
        (run / "run-id").write_bytes(content)
        save(made, 2)
    assert id_in_directory(Location(run)) == marks(run)[1].id
    (run / "run-id").write_bytes(content)
    with training(run) as made:
        save(made, 3)
    assert id_in_directory(Location(run)) == marks(run)[1].id
    assert restored(run) == 3


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_id_beside_the_slots_counts_as_none(run: Path, content: bytes) -> None:
    with training(run) as made:
        save(made, 1, persist=False)
    (marks(run)[0] / "run-id").write_bytes(content)
    assert restored(run) == 1
    with training(run) as made:
        save(made, 2)
    assert id_in_directory(Location(run)) == marks(run)[1].id


def test_a_mark_that_cannot_be_written_fails_no_save(run: Path) -> None:
    """As where the tmpfs is full."""
    with training(run) as made:
        pending = folder_of(run_of(run)) / "run-id.tmp"
        pending.mkdir()
        save(made, 1)
        assert not marks(run)[1].is_written
        pending.rmdir()
        save(made, 2)
        assert marks(run)[1].is_written


def test_memory_of_the_same_run_is_restored_wherever_its_directory_was_meanwhile(
    run: Path,
) -> None:
    with training(run) as made:
        save(made, 1, persist=False)
    assert restored(run) == 1, "a run in memory alone has no directory"
    with training(run) as made:
        save(made, 2)
        save(made, 3, persist=False)
    move_away(run)
    shutil.copytree(run.with_name("moved"), run)
    assert restored(run) == 3


def marks(run: Path) -> tuple[Path, RunId]:
    """The folder of a run in memory, and its id there."""
    folder = folder_of(run_of(run))
    found = id_in_memory(folder)
    assert found is not None
    return folder, found


def test_a_crash_between_the_steps_of_the_first_save_loses_and_offers_nothing_wrong(
    run: Path,
) -> None:
    with training(run) as made:
        save(made, 1, persist=False)
    folder, new = marks(run)
    assert not new.is_written
    run.mkdir(
        exist_ok=True
    )  # The agent makes the directory, then writes the id, then the mark, then the step.
    assert restored(run) == 1
    claim_directory(Location(run) / "step-1", folder)
    assert marks(run)[1] == RunId(new.id, True)
    set_id(folder, new)  # As if the agent had died before the mark.
    assert restored(run) == 1
    assert marks(run)[1] == RunId(new.id, True)
    assert restored(run) == 1  # As if it had died before the step.
    shutil.rmtree(run)
    assert restored(run) is None


def test_an_agent_whose_memory_was_removed_goes_by_terms_or_the_id_of_a_local_directory(
    run: Path,
) -> None:
    """Each machine has its own local directory, which may lack the term of the job."""
    run.mkdir()
    term = take_term(Location(run), {0: 0}, job="own").number
    step, folder = Location(run) / "step-1", run.with_name("removed memory")
    own, other = ({BRANCH: json.dumps({"term": term, "job": j}).encode()} for j in ("own", "b"))
    for _ in range(2):
        claim_directory(step, folder, own)
        with pytest.raises(CheckpointError, match="not the directory of this run"):
            claim_directory(step, folder, other)
        write_id(Location(run), A)
    claim_directory(step, folder, other, may_be_empty=True)


def test_a_step_in_memory_is_written_although_the_term_of_its_job_is_gone(run: Path) -> None:
    with training(run) as made:
        save(made, 1, persist=False)
    shutil.rmtree(run)
    dies = mock.patch.object(SnapshotAgent, "async_save", side_effect=ZeroDivisionError)
    with dies, training(run) as made:  # Its directory has a term of this job alone.
        assert made.restore({"w": torch.zeros(1000)}) == 1
        save(made, 2)
    with torch_ckpt.Run(run, asynchronous=True, agent=True) as made:
        assert made.restore({"w": torch.zeros(1000)}) == 1
    until(lambda: (run / "step-1/.metadata").exists())  # The agent writes it after the end.


def test_an_agent_writes_nothing_where_the_directory_of_its_run_is_gone(run: Path) -> None:
    with training(run, AgentOptions()) as made:
        save(made, 1)
        save(made, 2, persist=False)
    folder, _ = marks(run)
    agent = int((folder / "agent.lock").read_text())
    move_away(run)
    os.kill(agent, signal.SIGTERM)  # It writes the newest step before it ends.
    until(lambda: not has_agent(folder))
    assert not run.exists()
    assert "moved or unmounted" in (folder / "agent.log").read_text()
    command = [*AGENT, run, "--options", '{"linger_s": 0.1}']
    assert subprocess.run(command, timeout=SOON_S).returncode == 0
    assert not run.exists()


def test_a_run_that_goes_on_makes_its_directory_again(run: Path) -> None:
    with training(run) as made:
        save(made, 1)
        move_away(run)
        save(made, 2)
        assert made.latest_step() == 2
    assert id_in_directory(Location(run)) == marks(run)[1].id
    assert restored(run) == 2


def test_a_run_writes_nothing_into_the_directory_of_another_run(run: Path) -> None:
    with training(run) as made:
        save(made, 1)
        replace_by_another(run)
        with pytest.raises(CheckpointError, match="not the directory of this run"):
            save(made, 2)
    assert not (run / "step-2").exists()


@pytest.mark.parametrize("is_written", [True, False])
def test_an_agent_writes_nothing_where_a_run_without_an_agent_has_begun(
    run: Path, is_written: bool
) -> None:
    """Such a run has no id."""
    made = torch_ckpt.Run(run, asynchronous=True, agent=True)
    if is_written:
        save(made, 1)
    save(made, 3, persist=False)
    move_away(run)
    torch_ckpt.Run(run).save(2, {"w": torch.full((1000,), 2.0)})
    with pytest.raises(CheckpointError, match="not the directory of this run"):
        made.close()
    assert not (run / "run-id").exists()
    assert torch_ckpt.Run(run).latest_step() == 2


def test_a_run_saves_nothing_where_another_has_begun_at_the_path_of_its_local_directory(
    run: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    made = torch_ckpt.Run(run, local=local, keep_local=9)
    save(made, 1)
    move_away(local)
    save(torch_ckpt.Run(local), 2)
    with pytest.raises(CheckpointError, match="not the directory of this run"):
        save(made, 3)
    assert not (local / "step-3").exists()


def test_a_job_does_not_begin_where_one_of_the_former_run_still_saves(run: Path) -> None:
    with training(run) as made:
        save(made, 1)
        move_away(run)
        folder, own = marks(run)
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} of the earlier run"):
            SnapshotAgent(run, has_directory=True)
        assert marks(run) == (folder, own)


def test_memory_of_earlier_versions_has_no_id_and_is_restored(run: Path) -> None:
    with training(run) as made:
        save(made, 1)
        save(made, 2, persist=False)
    (marks(run)[0] / "run-id").unlink()
    (run / "run-id").unlink()
    assert restored(run) == 2
    with training(run) as made:
        save(made, 3)
    assert id_in_directory(Location(run)) == marks(run)[1].id


def test_an_agent_without_a_run_has_no_id(run: Path) -> None:
    agent = SnapshotAgent(run)
    agent.async_save({"w": torch.ones(3)}, run / "any", step=1).result()
    assert not (run / "run-id").exists()
    agent.close(drop=True)


@pytest.mark.parametrize(
    ("in_memory", "in_directory", "agreed"),
    [
        ([(A, False), None], None, A),
        ([None, (A, False)], None, A),
        ([(A, False), (A, True)], None, ""),  # One machine has marked it, so it was written.
        ([(A, True), (B, False)], None, B),
        ([(A, False), (B, True)], B, B),
        ([None, None], B, B),
    ],
)
def test_machines_agree_on_an_id(
    run: Path, in_memory: list[tuple[str, bool] | None], in_directory: str | None, agreed: str
) -> None:
    run.mkdir()
    if in_directory is not None:
        (run / "run-id").write_text(f"{in_directory}\n")
    found = begun_id([each and RunId(*each) for each in in_memory], Location(run))
    assert found.is_written == (in_directory is not None)
    assert found.id == agreed if agreed else len(found.id) == 16
