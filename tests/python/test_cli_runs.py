"""Commands on whole runs: ``rm --step``, ``gc``, ``verify --all`` and ``watch``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import ROOT
from command import DAMAGED, FAILED, MODULE, SOUND, run_command
from forks import run_python

import torch_ckpt
from torch_ckpt import Publisher, Run
from torch_ckpt.cli import watch
from torch_ckpt.commits import leases
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder import step_files
from torch_ckpt.records.calls import in_flight
from torch_ckpt.records.event import Event
from torch_ckpt.records.reading import recent_events

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memory")]


def save_steps(run: Path, *steps: int) -> None:
    with Run(run) as saving:
        for step in steps:
            saving.save(step, {"w": torch.full((1000,), float(step))})


def steps_in(run: Path) -> list[int]:
    return sorted(step_files.listed_steps(Location(run)))


def leave_unfinished(run: Path, step: int) -> Path:
    """The remains of a save to a directory that was there."""
    path = run / f"step-{step}"
    path.mkdir()
    (path / "__0_0_0123456789abcdef.distcp").write_bytes(b"half")
    (path / ".metadata.0123456789abcdef.tmp").write_bytes(b"")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_steps(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


# rm --step


@pytest.mark.parametrize(("step", "left"), [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])])
def test_rm_removes_one_step(step: int, left: list[int], run: Path) -> None:
    status, printed = run_command("rm", run, "--step", step, "--yes")
    assert (status, steps_in(run)) == (SOUND, left)
    assert printed == (
        f"the newest step of {run} that remains: {left[-1]}\n"
        f"steps to remove: {step}\n"
        "removed steps: 1 on disk, 0 in memory\n"
    )
    assert Run(run).restore({"w": torch.zeros(1000)}) == left[-1]


def test_rm_of_a_step_asks_first(run: Path) -> None:
    status, printed = run_command("rm", run, "--step", 2)
    assert (status, "pass --yes" in printed, steps_in(run)) == (FAILED, True, [1, 2, 3])


def test_rm_of_a_leased_step_removes_nothing(run: Path) -> None:
    with leases.lease(Location(run), 2):
        status, printed = run_command("rm", run, "--step", 2, "--yes")
        assert (status, steps_in(run)) == (FAILED, [1, 2, 3])
        assert printed.startswith(
            f"torch-ckpt: cannot remove step 2 of {run}: another process reads step 2 under a lease"
        )
        assert run_command("rm", run, "--step", 1, "--yes")[0] == SOUND
    assert steps_in(run) == [2, 3]


def test_rm_of_the_only_whole_step_removes_nothing(run: Path) -> None:
    for step in (1, 2):
        (data,) = (run / f"step-{step}").glob("*.distcp")
        os.truncate(data, 10)
    status, printed = run_command("rm", run, "--step", 3, "--yes")
    assert (status, steps_in(run)) == (DAMAGED, [1, 2, 3])
    assert "one whole step must remain, and no other step is whole" in printed


def test_rm_of_a_step_to_which_a_link_leads_removes_nothing(run: Path) -> None:
    (run / "step-9").symlink_to("step-2")
    status, printed = run_command("rm", run, "--step", 2, "--yes")
    assert (status, steps_in(run)) == (FAILED, [1, 2, 3, 9])
    assert "step 9 is a link to step 2" in printed


def test_rm_of_what_is_no_step_asks_nothing(run: Path) -> None:
    assert run_command("rm", run, "--step", 7) == (
        FAILED,
        f"torch-ckpt: {run} has no step 7. Nothing was removed\n",
    )
    for file in (run / "step-3").glob(".*"):  # As `cp step-3/*` leaves it.
        file.unlink()
    for options in (["--step", 3], ["--after", 2]):
        status, printed = run_command("rm", run, *options)
        assert (status, "Nothing was removed" in printed) == (FAILED, True)
        assert "pass --yes" not in printed
    assert steps_in(run) == [1, 2, 3]


def test_rm_removes_one_step_of_both_directories_of_a_run(tmp_path: Path) -> None:
    path, local = tmp_path / "run", tmp_path / "local"
    with Run(path, local=local, keep_local=2) as saving:
        for step in (1, 2):
            saving.save(step, {"w": torch.ones(10)})
    assert (steps_in(path), steps_in(local)) == ([1, 2], [1, 2])
    assert run_command("rm", local, "--step", 2, "--yes")[0] == SOUND
    assert (steps_in(path), steps_in(local)) == ([1], [1])


@pytest.mark.filterwarnings("ignore:step .* is newer")
def test_rm_of_the_only_step_of_the_lineage_removes_nothing(run: Path) -> None:
    with Run(run) as going_back:
        assert going_back.restore({"w": torch.zeros(1000)}, step=1) == 1
        going_back.save(5, {"w": torch.ones(1000)})
    assert run_command("rm", run, "--step", 1, "--yes")[0] == SOUND
    status, printed = run_command("rm", run, "--step", 5, "--yes")
    assert (status, steps_in(run)) == (FAILED, [2, 3, 5])
    assert "no other step is committed, except step 3, which the run has left" in printed


def test_rm_removes_one_step_from_the_memory_of_an_agent(tmp_path: Path) -> None:
    training = Run(tmp_path, asynchronous=True, agent=True)
    for step in (1, 2):
        training.save(step, {"w": torch.full((10,), float(step))})
        training.wait()
    training._saves._backend.leave()  # type: ignore[union-attr]
    status, printed = run_command("rm", tmp_path, "--step", 2, "--yes")
    assert (status, "removed steps: 1 on disk, 1 in memory" in printed) == (SOUND, True)
    with Run(tmp_path, asynchronous=True, agent=True) as again:
        assert again.restore({"w": torch.zeros(10)}) == 1


def test_commands_on_whole_runs_work_on_a_store(store_url: str) -> None:
    url = f"{store_url}/run"
    with Run(url) as saving:
        for step in (1, 2, 3):
            saving.save(step, {"w": torch.full((1000,), float(step))})
    pending = Location(url) / "step-0" / ".metadata.0123456789abcdef.tmp"
    pending.write(b"", sync=False)
    assert run_command("verify", "--quiet", "--all", url)[0] == SOUND
    assert run_command("gc", url)[0] == SOUND
    assert not pending.exists()
    assert run_command("rm", url, "--step", 2, "--yes")[0] == SOUND
    assert step_files.committed_steps(Location(url)) == [3, 1]


# gc


def test_gc_removes_what_killed_processes_have_left_and_nothing_else(run: Path) -> None:
    old = leave_unfinished(run, 0)
    newer = leave_unfinished(run, 4)  # A save may be in progress.
    shutil.copytree(run / "step-1", run / ".removed-step-7-0123abcd")
    (data,) = (run / "step-1").glob("*.distcp")
    os.truncate(data, 10)
    lease = run / ".lease-1-0123456789abcdef"
    lease.write_text("{}")
    os.utime(lease, (0, 0))
    with leases.lease(Location(run), 2):
        before = set(os.listdir(run))
        status, printed = run_command("gc", run)
        left = {lease.name, ".removed-step-7-0123abcd", old.name}
        assert set(os.listdir(run)) == before - left
    assert status == SOUND
    assert printed.splitlines() == [f"removed {run / name}" for name in sorted(left)]
    assert newer.exists()
    assert run_command("gc", run) == (SOUND, "nothing to remove\n")


_KILLED_IN_THE_FIRST_SAVE = """
import os, sys
from unittest import mock
import torch
from torch_ckpt import FastWriter, Run

with mock.patch.object(FastWriter, "finish", lambda *_, **__: os.kill(os.getpid(), 9)):
    Run(sys.argv[1]).save(1, {"w": torch.ones(1000)})
"""


def test_gc_removes_what_a_killed_first_save_has_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_python("-c", _KILLED_IN_THE_FIRST_SAVE, run, folder=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    (hidden,) = run.glob(".*")
    assert steps_in(run) == []
    assert run_command("gc", run) == (SOUND, f"removed {hidden}\n")
    assert run_command("gc", run) == (SOUND, "nothing to remove\n")


def test_gc_leaves_a_save_in_progress_after_a_run_has_gone_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 20, 30)
    with Run(run) as going_back:
        with pytest.warns(UserWarning, match="step 30"):
            assert going_back.restore({"w": torch.zeros(1000)}, step=1) == 1
        going_back.save(5, {"w": torch.ones(1000)})
    shutil.rmtree(run / "step-5")
    leave_unfinished(run, 0)
    leave_unfinished(run, 10)  # Older than steps that the run has left.
    assert run_command("gc", run) == (SOUND, f"removed {run}/step-0\n")
    assert steps_in(run) == [1, 10, 20, 30]


def test_gc_of_a_local_directory_leaves_it_if_another_run_is_under_the_path_of_its_run(
    tmp_path: Path,
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    with Run(run, local=local) as saving:
        saving.save(1, {"w": torch.zeros(10)})
    shutil.rmtree(run)
    with Run(run, local=tmp_path / "other") as another:
        another.save(1, {"w": torch.zeros(10)})
    unfinished = leave_unfinished(local, 0)
    status, printed = run_command("gc", local)
    assert status == FAILED
    assert f"is not the run of the steps in {local}" in printed
    assert unfinished.exists()


def test_gc_of_no_run_says_so(tmp_path: Path) -> None:
    status, printed = run_command("gc", tmp_path / "absent")
    assert (status, "the directory does not exist" in printed) == (FAILED, True)
    versions = tmp_path / "versions"
    with Publisher(versions) as publisher:
        publisher.publish(1, {"w": torch.ones(10)})
    (versions / ".removed-step-1-0123abcd").mkdir()
    before = set(os.listdir(versions))
    assert run_command("gc", versions)[0] == FAILED
    assert set(os.listdir(versions)) == before


@pytest.mark.parametrize("words", ["gc", "rm --yes --step 1", "ls", "verify --all", "watch --once"])
def test_a_checkpoint_is_named_where_a_run_is_required(words: str, tmp_path: Path) -> None:
    command, *options = words.split()
    path = tmp_path / "best"
    torch_ckpt.save({"w": torch.ones(10)}, checkpoint_id=path)
    expected = f"torch-ckpt: {path} is not a run: it is a checkpoint\n"
    assert run_command(command, path, *options) == (FAILED, expected)
    [data] = path.glob("*.distcp")
    data.unlink()
    assert run_command(command, path, *options) == (FAILED, expected)


@pytest.mark.parametrize("words", ["gc", "rm --yes --step 1", "watch --once"])
def test_published_versions_are_named_where_a_run_is_required(words: str, tmp_path: Path) -> None:
    command, *options = words.split()
    with Publisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(10)})
    expected = f"torch-ckpt: {tmp_path} is not a run: it has the versions of a publisher\n"
    assert run_command(command, tmp_path, *options) == (FAILED, expected)


# verify --all, watch, paths, usage


def test_verify_checks_all_steps_of_a_run(run: Path) -> None:
    status, printed = run_command("verify", "--quiet", "--all", run)
    assert status == SOUND
    lines = printed.splitlines()
    assert lines[::2] == [f"{run}/step-{step}" for step in (3, 2, 1)]
    assert all(line.startswith("sound (") for line in lines[1::2])

    (data,) = (run / "step-2").glob("*.distcp")
    os.truncate(data, 10)
    status, printed = run_command("verify", "--quiet", "--all", "--json", run)
    assert status == DAMAGED
    facts = json.loads(printed)
    assert [each["outcome"] for each in facts] == ["sound", "damaged", "sound"]
    assert [each["path"] for each in facts] == [f"{run}/step-{step}" for step in (3, 2, 1)]
    status, printed = run_command("verify", "--all", run / "step-2")
    assert (status, "torch-ckpt: " in printed) == (FAILED, True)


def test_watch_of_a_directory_that_does_not_exist_says_what_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, found in (("mistyped", "does not exist"), ("empty", "has no step")):
        words = ["watch", str(tmp_path / name), "--exec", "true"]
        with subprocess.Popen(
            [sys.executable, "-m", "torch_ckpt", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        ) as watching:
            assert watching.stderr is not None
            said = next(line for line in watching.stderr if line.startswith("torch-ckpt: "))
            watching.kill()
        assert said == f"torch-ckpt: {tmp_path / name} {found} yet; waiting for its first step\n"


def test_every_path_that_a_command_prints_is_absolute(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    (data,) = (run / "step-2").glob("*.distcp")
    os.truncate(data, 10)
    for words in (
        ["ls", "run"],
        ["ls", "--json", "run"],
        ["verify", "run"],
        ["inspect", "run"],
        ["rm", "run", "--after", "3"],
        ["convert", "run", "out.pt", "--to", "torch"],
        ["ls", "run/step-1"],
    ):
        _, printed = run_command(*words)
        assert str(run.parent) in printed
        assert not re.search(r"(?<![/\w-])run/", printed)


# ---- JSON, and what is in flight ----


def json_of(*arguments: object) -> tuple[int, Any]:
    status, printed = run_command(*arguments, "--json")
    return status, json.loads(printed, parse_constant=pytest.fail)


def test_commands_that_change_a_run_print_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 1, 2, 3)
    (run / "step-0").mkdir()
    assert json_of("gc", run) == (
        SOUND,
        {"run": str(run), "removed": ["step-0"], "problems": []},
    )
    status, printed = run_command("rm", run, "--step", 2, "--json")
    assert (status, "pass --yes as well. Nothing was removed" in printed) == (FAILED, True)
    assert json_of("rm", run, "--after", 1, "--yes") == (
        SOUND,
        {"run": str(run), "newest": 1, "removed": [3, 2], "removed_from_memory": []},
    )
    assert json_of("convert", run, tmp_path / "x.pt", "--to", "torch") == (
        SOUND,
        {
            "source": str(run / "step-1"),
            "target": str(tmp_path / "x.pt"),
            "format": "torch",
            "ties": {},
        },
    )


def test_watch_without_a_command_prints_the_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    assert run_command("watch", tmp_path, "--once", "--all") == (
        SOUND,
        f"step 1: {tmp_path}/step-1\nstep 2: {tmp_path}/step-2\n",
    )
    status, printed = run_command("watch", tmp_path, "--once", "--json", "--exec", "false")
    assert status == FAILED
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert lines == [{"step": 2, "path": f"{tmp_path}/step-2", "succeeded": False}]


@pytest.mark.parametrize("options", [[], ["--exec", "true"], ["--all"]])
def test_watch_passes_over_a_step_that_lacks_a_file(run: Path, options: list[str]) -> None:
    [data] = (run / "step-3").glob("*.distcp")
    content = data.read_bytes()
    data.unlink()
    status, printed = run_command("watch", run, "--once", "--json", *options)
    steps = [json.loads(line)["step"] for line in printed.splitlines()]
    assert (status, steps) == (SOUND, [1, 2] if options == ["--all"] else [2])
    known = watch._terms_of_whole_steps(Location(run), {})
    data.write_bytes(content[:-1])
    assert watch._terms_of_whole_steps(Location(run), known).keys() == {1, 2}
    data.write_bytes(content)
    with mock.patch.object(watch, "check_whole", wraps=watch.check_whole) as check:
        assert watch._terms_of_whole_steps(Location(run), known).keys() == {1, 2, 3}
    assert check.call_count == 1


def lines_of(call: str, phase: str, end: float, **details: Any) -> str:
    return "".join(
        Event(call, "save", 7, rank, "host", phase, end - 6, end, details).line() for rank in (0, 1)
    )


@pytest.mark.parametrize(("options", "steps"), [([], [3, 4, 5, 6]), (["--exec", "true"], [3, 6])])
def test_watch_prints_each_new_step_and_runs_a_command_on_the_newest(
    run: Path, options: list[str], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched, searches = watch._terms_of_whole_steps, itertools.count()

    def search(*arguments: Any) -> dict[int, int]:
        if next(searches) == 1:
            save_steps(run, 4, 5, 6)
        return searched(*arguments)

    monkeypatch.setattr(watch, "_terms_of_whole_steps", search)
    words = ["--interval", 0.01, "--until-step", 6, "--json"]
    status, printed = run_command("watch", run, *words, *options)
    facts = map(json.loads, printed.splitlines())
    assert (status, [each["step"] for each in facts if "step" in each]) == (SOUND, steps)


@pytest.mark.parametrize("as_json", [True, False])
def test_watch_shows_what_is_in_flight(tmp_path: Path, as_json: bool) -> None:
    save_steps(tmp_path, 1)
    record, now = tmp_path / "events.jsonl", time.time()
    command = [*MODULE, "watch", str(tmp_path), "--interval", "0.05", *["--json"] * as_json]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watching,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(watching.kill)
        assert watching.stdout is not None
        line = watching.stdout.readline()
        assert '"step": 1' in line if as_json else line == f"step 1: {tmp_path}/step-1\n"
        with record.open("a") as file:
            file.write(lines_of("dead", "write", now - 60, unfinished=True))
            file.write(lines_of("alive", "write", now, unfinished=True))
        line = watching.stdout.readline()
        if as_json:
            [call] = json.loads(line)["in_flight"]
            assert (call["kind"], call["step"], call["phases"]) == ("save", 7, ["write"])
        else:
            assert line == "save of step 7: all 2 ranks have not finished writing for 6 s\n"
        with record.open("a") as file:
            file.write(lines_of("alive", "write", now))
            file.write(lines_of("alive", "commit", now, unfinished=True))
        line = watching.stdout.readline()
        assert "commit" in line
        assert "writ" not in line


def test_only_the_end_of_a_long_record_is_read(tmp_path: Path) -> None:
    now = time.time()
    with (tmp_path / "events.jsonl").open("w") as file:
        file.write(lines_of("old", "write", now, unfinished=True))
        file.write(lines_of("other", "write", now) * 6000)
        file.write(lines_of("new", "write", now, unfinished=True))
    assert (tmp_path / "events.jsonl").stat().st_size > 1 << 20
    events = recent_events(Location(tmp_path))
    assert {event.call for event in events} == {"other", "new"}
    assert [call.name for call in in_flight(events, now)] == ["new"]
    assert in_flight(events, now + 60) == []
    assert recent_events(Location(tmp_path / "absent")) == []
