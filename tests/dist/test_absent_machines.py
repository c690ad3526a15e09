"""Runs whose machines have different steps: one of them was away, or is new."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_machines import run_on, state_of, steps_in
from ranks import RankError, Worlds
from support.logs import logged

from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.ladder.machine_directories import MachineDirectories
from torch_ckpt.ladder.promotion import OldSteps

pytestmark = pytest.mark.timeout(120)

Saves = dict[int, int]
"""Each step to save -> the step whose state it gets, so that saves of a step differ."""


def saves_and_dies(
    folder: Path, machines: Sequence[int], promoted: Saves, saves: Saves, options: dict[str, Any]
) -> int | None:
    """Continues the run, and saves steps, of which only the ``promoted`` ones reach the run."""
    restored = None
    with contextlib.suppress(KeyError), run_on(folder, machines, **options) as run:
        restored = run.restore(state_of(0))
        for step, content in promoted.items():
            run.save(step, state_of(content), metrics={"loss": content})
            run.wait(promoted=True)
        run._saves._promotion.cancel()
        for step, content in saves.items():
            run.save(step, state_of(content), metrics={"loss": content})
        raise KeyError("all are killed")
    return restored


def restored(folder: Path, machines: Sequence[int], at: int | None = None) -> tuple[Any, Any]:
    """Returns the restored step, and the one whose state it has; with ``at``, that step's."""
    with run_on(folder, machines, keep_local=9) as run:
        state = state_of(0)
        step = run.restore(state, step=at)
        for name, value in state_of(state["step"]).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[name].to_local(), value.to_local()), name
        run.wait(promoted=True)
        return step, state["step"]


def saves_again_and_dies(
    folder: Path, machines: Sequence[int], step: int, content: int, options: dict[str, Any]
) -> None:
    """Saves a step again that it has restored, and does not promote it."""
    with contextlib.suppress(KeyError), run_on(folder, machines, **options) as run:
        assert run.restore(state_of(0)) == step
        run._saves._promotion.cancel()
        run.save(step, state_of(content), metrics={"loss": content})
        raise KeyError("all are killed")


def ids_in(folder: Path, machines: Sequence[int], step: int) -> set[str | None]:
    places = [folder / "run", *(folder / f"machine-{m}" for m in machines)]
    return {committed_id(Location(place / f"step-{step}")) for place in places}


@pytest.mark.parametrize("machines", [[0, 1, 2], [2, 0, 1]], ids=["last", "first"])
def test_the_old_part_of_a_machine_that_was_away_hides_no_newer_save(
    worlds: Worlds, tmp_path: Path, machines: list[int]
) -> None:
    options = {"keep_local": 9}
    assert (
        worlds.agree(3, saves_and_dies, tmp_path, [0, 1, 2], {1: 1}, {2: 2, 3: 3}, options) is None
    )
    assert worlds.agree(2, saves_and_dies, tmp_path, [0, 1], {}, {2: 20, 3: 30}, options) == 1
    assert steps_in(tmp_path / "run") == [1]
    assert worlds.agree(3, restored, tmp_path, machines) == (3, 30)
    assert steps_in(tmp_path / "run") == [3, 2, 1]
    for step in (2, 3):
        assert len(ids_in(tmp_path, machines, step)) == 1
    assert worlds.agree(3, restored, tmp_path, machines, 2) == (2, 20)


def _chooses(folder: Path, machines: Sequence[int]) -> list[Any]:
    with run_on(folder, machines, keep_local=9, keep_last=9, monitor="loss") as run:
        found: list[Any] = [run.latest_step(), run.best_step(), run.step_at("9998-01-01")]
        with pytest.raises(CheckpointError, match="no whole step at"):
            run.step_at("2001-01-01")
        dist.barrier()
        run.wait(promoted=True)
        return [*found, steps_in(folder / "run")]


def test_a_new_first_machine_knows_the_steps_of_the_others(worlds: Worlds, tmp_path: Path) -> None:
    options = {"keep_local": 9}
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5}, {6: 2, 7: 7}, options)
    metadata = tmp_path / "machine-0" / "step-6" / ".metadata"
    os.utime(metadata, (1_600_000_000, 1_600_000_000))
    machines = [2, 0, 1]
    assert worlds.agree(3, _chooses, tmp_path, machines) == [7, 6, 7, [7, 6, 5]]
    new = tmp_path / "machine-2" / "step-6"
    assert (new / ".metadata").stat().st_mtime == 1_600_000_000
    assert not list(new.glob("*.distcp"))
    assert worlds.agree(3, restored, tmp_path, machines) == (7, 7)


def _retains(folder: Path, machines: Sequence[int], steps: Sequence[int]) -> tuple[list[Any], str]:
    whole_in_run = OldSteps.whole_in_run

    def later(old: OldSteps) -> set[int]:
        """Compares local steps with the run once the first machine has removed old ones there."""
        time.sleep(0.2 if dist.get_rank() else 0.0)
        return whole_in_run(old)

    OldSteps.whole_in_run = later  # type: ignore[method-assign]
    try:
        options = {"keep_local": 1, "keep_last": 1, "keep_best": 1, "monitor": "loss"}
        with logged() as log:
            with run_on(folder, machines, **options) as run:
                found = [run.restore(state_of(0)), run.best_step()]
                for step in steps:
                    run.save(step, state_of(step), metrics={"loss": step})
                    run.wait(promoted=True)
                found.append(run.best_step())
            return found, "\n".join(log)
    finally:
        OldSteps.whole_in_run = whole_in_run  # type: ignore[method-assign]


def test_all_machines_retain_the_best_step_that_a_new_first_machine_lacks(
    worlds: Worlds, tmp_path: Path
) -> None:
    options = {"keep_last": 1, "keep_best": 1, "monitor": "loss"}
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5}, {6: 2, 7: 7}, options)
    for steps in ([9], [10]):
        for found, log in worlds.run(3, _retains, tmp_path, [2, 0, 1], steps):
            assert found[1:] == [6, 6]
            assert "has lost files" not in log  # All know the metric of step 6.
        assert steps_in(tmp_path / "run") == [steps[-1], 6]
        for machine in range(3):
            assert steps_in(tmp_path / f"machine-{machine}") == [steps[-1]]


def _discards(folder: Path, machines: Sequence[int]) -> list[int]:
    with run_on(folder, machines, keep_local=9) as run:
        return run.discard_after(5)


def test_a_new_first_machine_names_the_discarded_steps_of_the_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    options = {"keep_local": 9}
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5}, {6: 6, 7: 7}, options)
    assert worlds.agree(3, _discards, tmp_path, [2, 0, 1]) == [7, 6]
    for machine in range(2):
        assert steps_in(tmp_path / f"machine-{machine}") == [5]


def _opens_without_room(
    folder: Path, machines: Sequence[int], full: int, error: type[Exception] = CheckpointError
) -> tuple[int | None, str, list[int]]:
    """Opens the run while the machine of a rank cannot write parts of steps of others."""
    write_part = MachineDirectories._write_part

    def fails(*arguments: Any) -> None:
        if dist.get_rank() == full:
            raise error("the disk is full")
        write_part(*arguments)

    MachineDirectories._write_part = fails  # type: ignore[method-assign, assignment]
    try:
        with logged() as log, run_on(folder, machines, keep_local=9) as run:
            run.wait(promoted=True)
            return run.latest_step(), "\n".join(log), steps_in(folder / "run")
    finally:
        MachineDirectories._write_part = write_part  # type: ignore[method-assign]


def test_a_run_opens_if_a_new_first_machine_cannot_write(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5}, {6: 6}, {"keep_local": 9})
    found = worlds.run(3, _opens_without_room, tmp_path, [2, 0, 1], 0)
    assert [step for step, *_ in found] == [6] * 3
    for _, log, _ in found:
        assert "not all machines have the metadata of step 6: " in log
        assert "the disk is full" in log
    assert worlds.agree(3, restored, tmp_path, [2, 0, 1]) == (6, 6)


def test_a_new_machine_that_cannot_write_stops_no_promotion_of_the_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    options = {"keep_local": 9}
    worlds.run(3, saves_and_dies, tmp_path, [2, 0, 1], {5: 5}, {6: 6}, options)
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {}, {6: 60}, options)
    found = worlds.run(4, _opens_without_room, tmp_path, [2, 0, 1, 3], 3)
    assert [(step, promoted) for step, _, promoted in found] == [(6, [6, 5])] * 4


def test_a_run_does_not_open_if_a_rank_is_late_as_it_gets_the_metadata(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5}, {6: 6}, {"keep_local": 9})
    with pytest.raises(RankError, match=": the disk is full"):
        worlds.run(3, _opens_without_room, tmp_path, [2, 0, 1], 0, RankTimeoutError)


def test_the_metric_of_a_later_save_that_machines_lack_does_not_count(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, saves_and_dies, tmp_path, [0, 1], {5: 5, 6: 6}, {}, {"keep_local": 9})
    with_new = {"keep_local": 9, "monitor": "loss"}
    worlds.run(2, saves_again_and_dies, tmp_path, [0, 2], 6, 2, with_new)
    assert worlds.agree(2, _chooses, tmp_path, [0, 1]) == [6, 5, 6, [6, 5]]
