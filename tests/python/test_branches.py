"""A run that goes back to an older step: warnings, branches, and the removal of newer steps."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT
from command import run_command
from support.run_steps import data_file, restored, state_of, steps_in, warned

from torch_ckpt import CheckpointError, Run
from torch_ckpt.agent.memory import complete_slots, folder_of, run_of
from torch_ckpt.commits import leases
from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location

pytestmark = pytest.mark.timeout(120)

AGENT: dict[str, Any] = {"asynchronous": True, "agent": True}
MODES: dict[str, dict[str, Any]] = {"direct": {}, "thread": {"asynchronous": True}, "agent": AGENT}


def save_steps(run: Run, *steps: int, **options: Any) -> Run:
    for step in steps:
        run.save(step, state_of(step), **options)
    run.wait()
    return run


@pytest.fixture
def run_with_steps(run: Path, memory: Path) -> Path:
    with Run(run) as saving:
        save_steps(saving, 300, 500, 700)
    return run


# ---- Warnings ----


@pytest.mark.parametrize("mode", MODES)
def test_a_restore_of_an_older_step_and_the_saves_after_it_warn_once(
    mode: str, run_with_steps: Path
) -> None:
    with Run(run_with_steps, **MODES[mode]) as run:
        [message] = warned(lambda: [restored(run, step=300), save_steps(run, 400, 450)])
    assert message.startswith(f"step 300 was restored, but step 700 of {run_with_steps} is newer")
    assert f"run.discard_after(300), or run: torch-ckpt rm {run_with_steps} --after 300" in message


def test_saves_below_the_newest_step_warn_once(run_with_steps: Path) -> None:
    run = Run(run_with_steps)
    [message] = warned(lambda: save_steps(run, 10, 20))
    assert message.startswith("step 10 is saved, but step 700 of")


def test_runs_that_do_not_go_back_get_no_warning(run_with_steps: Path) -> None:
    def work() -> None:
        run = Run(run_with_steps)
        assert restored(run, step=700) == 700
        save_steps(run, 700, 800)
        assert restored(run) == 800
        (run_with_steps / "step-800/.metadata").unlink()  # Now it is damaged.
        run = Run(run_with_steps)
        assert restored(run) == 700
        save_steps(run, 750)

    messages = warned(work)
    assert [m for m in messages if "is newer" in m] == []


def test_a_damaged_step_is_not_warned_of_as_newer(run_with_steps: Path) -> None:
    os.truncate(data_file(run_with_steps, 700), 10)
    run = Run(run_with_steps)
    [message] = warned(lambda: restored(run, step=300))
    assert "step 500 of" in message
    os.truncate(data_file(run_with_steps, 500), 10)
    run = Run(run_with_steps)
    assert warned(lambda: [restored(run, step=300), save_steps(run, 310)]) == []


def test_a_save_below_a_step_of_the_same_process_warns(run: Path) -> None:
    going = Run(run)
    [message] = warned(lambda: save_steps(going, 700, 300, 400))
    assert message.startswith("step 300 is saved, but step 700 of")


def test_retention_leaves_the_step_to_which_the_run_went_back(run_with_steps: Path) -> None:
    run = Run(run_with_steps, keep_last=3)
    warned(lambda: [restored(run, step=300), save_steps(run, 310, 320)])
    assert steps_in(run_with_steps) == [300, 310, 320, 500, 700]
    run.discard_after(320)
    save_steps(run, 330)
    assert steps_in(run_with_steps) == [310, 320, 330]


def test_the_best_step_is_restored_without_a_warning(run_with_steps: Path) -> None:
    run = Run(run_with_steps, monitor="loss")
    save_steps(run, 800, metrics={"loss": 1.0})
    save_steps(run, 900, metrics={"loss": 2.0})
    assert warned(lambda: restored(run, step=run.best_step())) == []
    [message] = warned(lambda: save_steps(run, 850, metrics={"loss": 3.0}))
    assert message.startswith("step 850 is saved, but step 900")


def test_a_step_that_is_newer_in_memory_alone_is_warned_of(run: Path, memory: Path) -> None:
    with Run(run, **AGENT) as training:
        save_steps(training, 300)
        save_steps(training, 310, persist=False)
        [message] = warned(lambda: restored(training, step=300))
    assert "but step 310 of" in message


# ---- Branches ----


def branches(run: Path) -> dict[int, Any]:
    status, printed = run_command("ls", "--json", run)
    assert status == 0
    steps = json.loads(printed)["steps"]
    return {step["step"]: step["branch"] and step["branch"]["continued_from"] for step in steps}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:step .* is newer")
def test_ls_shows_the_branch_of_each_step(mode: str, run_with_steps: Path) -> None:
    with Run(run_with_steps, **MODES[mode]) as run:
        restored(run, step=300)
        save_steps(run, 400, 500, 900)  # The old step 500 is replaced.
    assert branches(run_with_steps) == {900: 300, 700: None, 500: 300, 400: 300, 300: None}

    with Run(run_with_steps, **MODES[mode]) as run:  # It continues the new branch.
        assert restored(run) == 900
        save_steps(run, 1000)
        restored(run, step=500)
        save_steps(run, 510)
    found = branches(run_with_steps)
    assert (found[1000], found[510]) == (300, 500)
    lines = run_command("ls", run_with_steps)[1].splitlines()
    assert "from step 300" in lines[1]
    assert "from step 500" in next(line for line in lines if line.startswith("   510 "))
    assert "from" not in next(line for line in lines if line.startswith("   700 "))


@pytest.mark.filterwarnings("ignore:step .* is newer")
def test_a_training_that_begins_anew_is_a_branch(run_with_steps: Path) -> None:
    save_steps(Run(run_with_steps), 100)
    assert "from the start" in run_command("ls", run_with_steps)[1].splitlines()[-1]


# ---- Removal of newer steps ----


@pytest.mark.parametrize("mode", MODES)
def test_discard_after_removes_newer_steps_and_the_next_restore_finds_the_older_one(
    mode: str, run_with_steps: Path
) -> None:
    with Run(run_with_steps, **MODES[mode]) as run:
        save_steps(run, 800)
        assert run.discard_after(300) == [800, 700, 500]
        assert run.latest_step() == 300
        assert restored(run) == 300
        assert warned(lambda: save_steps(run, 310)) == []
        assert run.discard_after(300) == [310]
        assert restored(run) == 300
        save_steps(run, 320)
    assert steps_in(run_with_steps) == [300, 320]
    assert branches(run_with_steps) == {300: None, 320: None}


def test_discard_after_a_restore_ends_the_branch(run_with_steps: Path) -> None:
    run = Run(run_with_steps)
    with pytest.warns(UserWarning, match="step 300 was restored"):
        restored(run, step=300)
    run.discard_after(300)
    assert warned(lambda: save_steps(run, 310)) == []
    assert branches(run_with_steps) == {300: None, 310: None}


def test_discarded_steps_do_not_return_from_memory(run: Path, memory: Path) -> None:
    """Neither from that of this process, nor from that of a process that has died."""
    training = Run(run, **AGENT)
    save_steps(training, 300)
    save_steps(training, 310, persist=False)
    assert training.discard_after(300) == []
    assert restored(training) == 300
    save_steps(training, 320, persist=False)
    training._saves._backend.leave()  # type: ignore[union-attr]

    with Run(run, **AGENT) as again:
        assert again.discard_after(300) in ([], [320])  # The agent may have written it.
        assert restored(again) == 300
        slots = complete_slots(folder_of(run_of(run)), run_of(run))
        assert {header.step for header, _ in slots} <= {300}
    assert steps_in(run) == [300]


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_a_run_without_an_agent_discards_the_memory_of_an_earlier_one(
    mode: str, run: Path, memory: Path
) -> None:
    training = Run(run, **AGENT)
    save_steps(training, 300, 500)
    save_steps(training, 700, persist=False)
    training._saves._backend.leave()  # type: ignore[union-attr]

    with Run(run, **MODES[mode]) as going_back:
        assert 500 in going_back.discard_after(300)

    with Run(run, **AGENT) as again:
        assert restored(again) == 300
    assert steps_in(run) == [300]


def test_discard_after_leaves_a_whole_step(run_with_steps: Path) -> None:
    os.truncate(data_file(run_with_steps, 300), 10)
    reason = r"no step up to 300 is whole.*has 10 bytes instead of .*Nothing was removed"
    with pytest.raises(CorruptionError, match=reason):
        Run(run_with_steps).discard_after(300)
    status, printed = run_command("rm", run_with_steps, "--after", 300, "--yes")
    assert (status, "no step up to 300 is whole" in printed) == (1, True)
    assert steps_in(run_with_steps) == [300, 500, 700]
    assert Run(run_with_steps).discard_after(500) == [700]


def test_discard_after_leaves_a_step_that_is_leased_meanwhile(
    run_with_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rename, lease = Run(run_with_steps), Location.rename, contextlib.ExitStack()

    def renamed(path: Location, to: Location) -> None:
        if path.name == "step-700":
            lease.enter_context(run.lease(500))
        rename(path, to)

    monkeypatch.setattr(Location, "rename", renamed)
    monkeypatch.setattr(leases, "_REMOVAL_S", 0.1)
    with lease, pytest.raises(CheckpointError, match="step 500 under a lease") as raised:
        run.discard_after(300)
    assert "1 remain, 1 were removed" in str(raised.value)
    assert "Nothing was removed" not in str(raised.value)
    assert steps_in(run_with_steps) == [300, 500]
    assert restored(run, step=500) == 500


def test_discard_after_leaves_a_step(run_with_steps: Path) -> None:
    run = Run(run_with_steps)
    with pytest.raises(NotFoundError, match=r"no step up to 30 is committed.*Nothing was removed"):
        run.discard_after(30)
    assert steps_in(run_with_steps) == [300, 500, 700]


def test_discard_after_removes_nothing_that_is_leased(run_with_steps: Path) -> None:
    run = Run(run_with_steps)
    with (
        run.lease(500),
        pytest.raises(
            CheckpointError, match=r"reads step 500 under a lease\. Nothing was removed"
        ) as raised,
    ):
        run.discard_after(300)
    assert re.search("on this machine at once.* another one 300 s after", str(raised.value))
    assert steps_in(run_with_steps) == [300, 500, 700]
    assert run.discard_after(500) == [700]


def test_rm_removes_newer_steps_on_disk_and_in_memory(run: Path, memory: Path) -> None:
    training = Run(run, **AGENT)
    save_steps(training, 300, 500)
    training._saves._backend.leave()  # type: ignore[union-attr]
    status, printed = run_command("rm", run, "--after", 300)
    assert status == 3
    assert "pass --yes" in printed
    status, printed = run_command("rm", run, "--after", 200, "--yes")
    assert (status, "no step up to 200 is committed" in printed) == (3, True)
    assert steps_in(run) == [300, 500]

    status, printed = run_command("rm", run, "--after", 300, "--yes")

    assert status == 0
    assert "steps to remove: 500\n" in printed
    assert "removed steps: 1 on disk, 1 in memory" in printed
    assert steps_in(run) == [300]
    with Run(run, **AGENT) as again:
        assert restored(again) == 300


def test_rm_without_newer_steps_asks_nothing_and_removes_nothing(run_with_steps: Path) -> None:
    for options in ([], ["--yes"]):
        status, printed = run_command("rm", run_with_steps, "--after", 700, *options)
        assert (status, "has no steps after step 700" in printed) == (3, True)
        assert "pass --yes" not in printed
    assert steps_in(run_with_steps) == [300, 500, 700]


def test_rm_removes_steps_that_are_in_memory_alone(run: Path, memory: Path) -> None:
    training = Run(run, **AGENT)
    training.save(300, state_of(300))
    training.wait()
    training.save(500, state_of(500), persist=False)
    training._saves._backend.leave()  # type: ignore[union-attr]
    status, printed = run_command("rm", run, "--after", 300)
    assert (status, "steps to remove from memory: 500\n" in printed) == (3, True)
    assert "pass --yes" in printed
    status, printed = run_command("rm", run, "--after", 300, "--yes")
    assert (status, "removed steps: 0 on disk, 1 in memory" in printed) == (0, True)
    assert run_command("rm", run, "--after", 300, "--yes")[0] == 3


@pytest.mark.parametrize(("answer", "steps"), [("y", [300]), ("n", [300, 500, 700])])
def test_rm_asks_on_a_terminal(answer: str, steps: list[int], run_with_steps: Path) -> None:
    here, terminal = pty.openpty()
    command = [sys.executable, "-m", "torch_ckpt", "rm", str(run_with_steps), "--after", "300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, env=environment) as done:
        os.write(here, f"{answer}\n".encode())
        printed, _ = done.communicate(timeout=60)
    os.close(here)
    os.close(terminal)
    assert b"Remove them? [y/N]" in printed
    assert done.returncode == (0 if answer == "y" else 3)
    assert steps_in(run_with_steps) == steps
