"""What no removal may touch: steps of another run, files, and steps to which links lead."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import FAILED, SOUND, run_command
from support.run_steps import names_in_run, restored, save_steps, state_of, steps_in, warned

from torch_ckpt import CheckpointError, Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.removal import discard_after
from torch_ckpt.ladder.step_files import run_of_local

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


# ---- Steps of another run ----


@pytest.mark.parametrize("has_local", [True, False])
def test_ls_and_rm_of_a_local_directory_leave_another_run_under_the_path_of_its_run(
    has_local: bool, tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    save_steps(run, 1, 2, local=local, keep_local=2).close()
    assert run_command("ls", local)[1].count("local and run") == 2
    shutil.rmtree(run)
    save_steps(run, 1, 2, 3, **{"local": tmp_path / "other"} if has_local else {}).close()

    status, printed = run_command("ls", local)
    assert status == SOUND
    assert [line.split()[0] for line in printed.splitlines() if " KiB" in line] == ["2", "1"]
    assert f"only the local steps are listed: {run}, which" in printed

    status, printed = run_command("rm", local, "--after", 1, "--yes")
    assert status == FAILED
    assert f"is not the run of the steps in {local}" in printed
    assert (steps_in(run), steps_in(local)) == ([1, 2, 3], [1, 2])

    (local / "local-of").unlink()  # As the error advises.
    assert run_command("rm", local, "--after", 1, "--yes")[0] == SOUND
    assert (steps_in(run), steps_in(local)) == ([1, 2, 3], [1])


@pytest.mark.parametrize(
    "contents", [b"corp://bucket/run\n", b"\xff\n", b'"\\ud800"\n', b'"' + b"[" * 100_000, None]
)
def test_no_step_is_removed_where_the_directory_of_the_run_is_unknown(
    contents: bytes | None, tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    save_steps(run, 1, 2, local=local, keep_local=2).close()
    (local / "local-of").unlink()
    if contents is None:
        (local / "local-of").mkdir()
    else:
        (local / "local-of").write_bytes(contents)
    status, printed = run_command("rm", local, "--after", 1, "--yes")
    assert status != SOUND
    assert "corp" in printed or "local-of" in printed
    assert (steps_in(run), steps_in(local)) == ([1, 2], [1, 2])
    assert "only the local steps are listed" in run_command("ls", local)[1]
    if contents is not None:
        save_steps(run, 3, local=local, keep_local=3).close()
        assert "local and run" in run_command("ls", local)[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["gpt\nsecond", "gpt\nfiles of one machine", 'gpt "3"', "gpt\udcff"]
)
def test_a_run_and_its_local_directory_may_have_any_name(
    name: str, mode: str, tmp_path: Path
) -> None:
    other, run, local = tmp_path / "gpt", tmp_path / name, tmp_path / f"local of {name}"
    save_steps(other, 1, 2, 3).close()
    save_steps(run, 1, 2, local=local, keep_local=2, **MODES[mode]).close()
    assert run_of_local(Location(local)) == (Location(run), False)
    assert restored(Run(run)) == 2
    loaded = state_of(0)
    dcp.load(loaded, checkpoint_id=run / "step-2", no_dist=True)
    assert torch.equal(loaded["w"], state_of(2)["w"])

    assert run_command("rm", local, "--after", 1, "--yes")[0] == SOUND

    assert (steps_in(other), steps_in(run), steps_in(local)) == ([1, 2, 3], [1], [1])


def test_a_line_feed_that_an_earlier_version_has_written_leads_to_no_other_run(
    tmp_path: Path,
) -> None:
    other, run, local = tmp_path / "gpt", tmp_path / "gpt\nsecond", tmp_path / "local"
    save_steps(other, 1, 2).close()
    save_steps(run, 1, 2, local=local, keep_local=2).close()
    (local / "local-of").write_text(f"{run}\n")
    assert run_command("rm", local, "--after", 1, "--yes")[0] == FAILED
    assert (steps_in(other), steps_in(run), steps_in(local)) == ([1, 2], [1, 2], [1, 2])


# ---- What is no directory ----


def test_a_file_or_a_link_to_nothing_with_the_name_of_a_step_is_none(tmp_path: Path) -> None:
    (tmp_path / "step-3").write_text("notes of a user")
    (tmp_path / "step-4").symlink_to("a disk that is not mounted")
    (tmp_path / "step-5").symlink_to("step-5")
    assert warned(lambda: [Run(tmp_path).restore(state_of(0))]) == []
    assert Run(tmp_path).restore(state_of(0)) is None
    assert "is not a run" in run_command("ls", tmp_path)[1]

    run = Run(tmp_path, keep_last=1, record=False)
    assert warned(lambda: [run.save(step, state_of(step)) for step in (1, 10, 11)]) == []
    assert names_in_run(tmp_path) == ["step-11", "step-3", "step-4", "step-5"]
    run.save(2, state_of(2))
    assert run.discard_after(2) == [11]
    assert names_in_run(tmp_path) == ["step-2", "step-3", "step-4", "step-5"]


def test_an_object_with_the_name_of_a_step_remains_on_a_store(tmp_path: Path) -> None:
    store, folder = fsspec.filesystem("memory"), f"/tests/{tmp_path.name}"
    store.pipe(f"{folder}/step-3", b"notes of a user")
    run = Run(f"memory:/{folder}", keep_last=1, record=False)
    assert ["step-3 is a file" in each for each in warned(lambda: [run.restore({})])] == [True]
    messages = warned(lambda: [run.save(step, state_of(step)) for step in (1, 10, 11)])
    assert [each.split(":")[0] for each in messages] == ["step 3 was not removed"]
    assert warned(lambda: [run.save(2, state_of(2))])
    assert run.discard_after(2) == [11]
    assert store.cat(f"{folder}/step-3") == b"notes of a user"


def test_a_link_to_a_step_elsewhere_is_a_step(tmp_path: Path) -> None:
    save_steps(tmp_path / "elsewhere", 7)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-7").symlink_to(tmp_path / "elsewhere/step-7")
    run = Run(tmp_path / "run")
    assert restored(run) == 7
    run.save(1, state_of(1))
    assert run.discard_after(1) == [7]
    assert steps_in(tmp_path / "elsewhere") == [7]


# ---- Links to steps of the same run ----


def linked(run: Path) -> Path:
    """Adds step 9, which leads to step 1 through step 8 and a folder that is a link as well."""
    (run.parent / "alias").symlink_to(run)
    (run / "step-8").symlink_to(run.parent / "alias/step-1")
    (run / "step-9").symlink_to("step-8")
    return run


def test_a_step_that_is_a_link_protects_the_step_to_which_it_leads(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 1, 2)
    run = Run(linked(tmp_path / "run"), keep_last=2)
    for step, remain in ((10, [1, 8, 9, 10]), (11, [10, 11])):
        run.save(step, state_of(step))
        assert steps_in(tmp_path / "run") == remain
        for each in set(remain) - {1, 8, 9}:
            state = state_of(0)
            run.restore(state, step=each)
            assert state["step"] == each


def test_a_lease_of_a_link_protects_the_step_to_which_it_leads(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 1, 2)
    run = Run(linked(tmp_path / "run"), keep_last=1)
    with run.lease(9) as path:
        run.save(10, state_of(10))
        assert steps_in(tmp_path / "run") == [1, 8, 9, 10]
        assert os.path.exists(f"{path}/.metadata")
    run.save(11, state_of(11))
    assert steps_in(tmp_path / "run") == [11]


def test_a_run_does_not_go_back_to_a_link_whose_step_would_be_removed(tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run", 1, 7)
    (tmp_path / "run/step-3").symlink_to("step-7")
    with pytest.raises(CheckpointError, match=r"step 3 is a link to step 7\. Nothing was removed"):
        run.discard_after(5)
    assert steps_in(tmp_path / "run") == [1, 3, 7]
    assert run.discard_after(1) == [7, 3]
    assert discard_after([Location(tmp_path / "run")], 1) == []
