"""A reader of a run finds a step, however the saves and removals of a training fall between.

A training saves a step and removes the former one, so that the run has a whole step at every
moment. Before each access of the reader to files, it may go on by any number of its own steps.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_command
from support.run_steps import state_of

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.cli.arguments import checkpoint_at
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps

pytestmark = pytest.mark.timeout(300)

STEPS = (1, 2, 3, 4)  # The first two are there.
OLDEST = 0  # Is retained in some runs, by keep_every.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps, which a training moves to its directory when it saves them."""
    folder = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings(), Run(folder, record=False) as run:
        for step in (OLDEST, *STEPS):
            run.save(step, state_of(step, 10), metrics={"loss": 10.0 - step})
    return folder


def put(saved: Path, run: Path, step: int, *, metadata: bool = True) -> None:
    target = run / f"step-{step}"
    target.mkdir(exist_ok=True)
    for path in (saved / f"step-{step}").iterdir():
        if metadata or path.name != ".metadata":
            os.link(path, target / path.name)


def pending_of(saved: Path, run: Path, step: int) -> Path:
    """The file that a save leaves until it commits, and a removal from the beginning."""
    [index] = (saved / f"step-{step}").glob(".index.*")
    return run / f"step-{step}/.metadata{index.suffix}.tmp"


def on_a_disk(saved: Path, run: Path) -> Iterator[None]:
    """A directory gets its name when it is complete, and loses it before it is removed."""
    for old, new in itertools.pairwise(STEPS[1:]):
        (run / ".partial").mkdir()
        put(saved, run / ".partial", new)
        (run / f".partial/step-{new}").rename(run / f"step-{new}")
        (run / ".partial").rmdir()
        yield
        (run / f"step-{old}").rename(run / f".removed-step-{old}-0")
        yield
        shutil.rmtree(run / f".removed-step-{old}-0")
        yield


def on_a_store(saved: Path, run: Path) -> Iterator[None]:
    """Nothing is renamed: a step begins and ends with its metadata."""
    for old, new in itertools.pairwise(STEPS[1:]):
        pending = pending_of(saved, run, new)
        pending.parent.mkdir()
        pending.touch()
        put(saved, run, new, metadata=False)
        yield
        os.link(saved / f"step-{new}/.metadata", run / f"step-{new}/.metadata")
        pending.unlink()
        yield
        (run / f"step-{old}/.metadata").rename(pending_of(saved, run, old))
        yield
        shutil.rmtree(run / f"step-{old}")
        yield


Trainings = Callable[[Path, Path], Iterator[None]]
Schedule = dict[int, int]
"""Access of the reader -> how far the training goes before."""


def watched(call: Callable[[], Any], before: Callable[[int], None]) -> Any:
    """Calls a function, and ``before`` it accesses files, with the number of the access."""
    count, is_watching = 0, True

    def watch(method: Any) -> Any:
        def access(*arguments: Any, **options: Any) -> Any:
            nonlocal count, is_watching
            if is_watching:
                is_watching = False
                before(count)
                count, is_watching = count + 1, True
            return method(*arguments, **options)

        return access

    with pytest.MonkeyPatch.context() as patch:
        for name in ("names", "exists", "nbytes", "read_range", "modified_s"):
            patch.setattr(Location, name, watch(getattr(Location, name)))
        patch.setattr(_native, "open_checkpoint", watch(_native.open_checkpoint))
        patch.setattr(StepDirectories, "reader_of", watch(StepDirectories.reader_of))
        return call()


def latest(run: Path) -> Any:
    return Run(run, record=False).latest_step()


def restored(run: Path) -> Any:
    state = state_of(-1, 10)
    step = Run(run, record=False).restore(state)
    if step is not None:
        assert torch.equal(state["w"], state_of(step, 10)["w"])
    return step


def best(run: Path) -> Any:
    return Run(run, record=False, monitor="loss").best_step()


def newest_committed(run: Path) -> Any:
    return next(iter(committed_steps(Location(run))), None)


def inspected(run: Path) -> Any:
    found = checkpoint_at(Location(run))
    return None if found.name == run.name else int(found.name.removeprefix("step-"))


def newest_listed(run: Path) -> Any:
    status, printed = run_command("ls", "--json", run)
    return json.loads(printed)["newest"] if status == 0 else printed


READS = {
    **{"latest_step": latest, "best_step": best, "restore": restored, "ls": newest_listed},
    **{"committed_steps": newest_committed, "inspect": inspected},
}


def schedules(accesses: int, acts: int) -> Iterator[Schedule]:
    """All in which the training goes on at two places, and some in which it does so at more."""
    for begin in range(accesses):
        for first in range(1, acts + 1):
            yield {begin: first}
            for again in range(begin + 1, accesses):
                for second in range(first + 1, acts + 1):
                    yield {begin: first, again: second}
    rng = random.Random(0)
    for _ in range(200):
        places = sorted(rng.choices(range(accesses), k=acts))
        yield {at: number for number, at in enumerate(places, 1)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_oldest", [False, True])
@pytest.mark.parametrize("training", [on_a_disk, on_a_store])
@pytest.mark.parametrize("read", READS)
def test_a_reader_finds_a_step_that_a_training_has_not_left_behind(
    read: str, training: Trainings, has_oldest: bool, saved: Path, tmp_path: Path, full: bool
) -> None:
    def attempt(schedule: Schedule) -> tuple[Any, int]:
        """Returns the step that the reader finds, and how often it has accessed files."""
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        for step in [OLDEST] * has_oldest + [STEPS[1]]:
            put(saved, run, step)
        acts, done, accesses = training(saved, run), 0, 0

        def go_on(access: int) -> None:
            nonlocal done, accesses
            accesses = access + 1
            while done < schedule.get(access, 0):
                next(acts, None)
                done += 1

        return watched(lambda: READS[read](run), go_on), accesses

    found, accesses = attempt({})
    assert found == STEPS[1]
    acts = 2 * (3 if training is on_a_disk else 4)
    wrong = {}
    tried = list(schedules(accesses + 4, acts))
    for schedule in random.Random(1).sample(
        tried, min(len(tried), (40 if read == "ls" else 100) if full else 30)
    ):
        try:
            found, _ = attempt(schedule)
        except NotFoundError as error:
            found = error
        if found not in STEPS[1:]:
            wrong[str(schedule)] = found if isinstance(found, int | None) else str(found)[:300]
    assert wrong == {}
