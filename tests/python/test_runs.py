"""Run on one process: which steps are found, which are kept, and when they are saved."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import failure_of
from forks import run_python
from support.flips import flip
from support.run_steps import (
    data_file,
    names_in_run,
    removes_until_killed,
    restored,
    save_steps,
    state_of,
    steps_in,
)
from support.slow_values import Slow
from waits import until

from torch_ckpt import CheckpointError, FastReader, Run, load
from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import pending_name
from torch_ckpt.ladder.removal import remove_directory
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.runs import save_interval
from torch_ckpt.runs.save_interval import SaveSchedule
from torch_ckpt.storage.verify import check_whole

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


# ---- Which steps are found ----


def test_the_newest_of_all_steps_is_restored_and_nothing_of_a_new_run(tmp_path: Path) -> None:
    assert Run(tmp_path / "absent").latest_step() is None
    assert restored(Run(tmp_path / "absent")) is None
    save_steps(tmp_path, 9, 10, 20, 101)
    os.utime(tmp_path / "step-20/.metadata", (2e9, 2e9))

    run = Run(tmp_path)

    assert run.latest_step() == 101
    assert restored(run) == 101
    state = state_of(-1)
    assert run.restore(state, step=9) == 9
    assert state["w"][0] == 9


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)


DAMAGE: dict[str, Callable[[Path, int], object]] = {
    "torn metadata": lambda run, step: truncate(run / f"step-{step}/.metadata", 100),
    "empty metadata": lambda run, step: truncate(run / f"step-{step}/.metadata", 0),
    "garbage as metadata": lambda run, step: (run / f"step-{step}/.metadata").write_bytes(
        random.Random(step).randbytes(5000)
    ),
    "lost metadata, not the index": lambda run, step: (run / f"step-{step}/.metadata").unlink(),
    "metadata that name missing files": lambda run, step: data_file(run, step).unlink(),
    "a short data file": lambda run, step: truncate(data_file(run, step), 4096),
    "a data file that is too long": lambda run, step: truncate(data_file(run, step), 1 << 20),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_steps_are_passed_over_with_a_warning(tmp_path: Path, kind: str) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        DAMAGE[kind](tmp_path, step)
    run = Run(tmp_path)

    for found in (run.latest_step, lambda: restored(run)):
        with pytest.warns(UserWarning, match="step 4 is passed over") as caught:
            assert found() == 2
        assert any("step 3 is passed over" in str(warning.message) for warning in caught)


def test_a_stock_checkpoint_is_a_step_unless_a_file_is_short(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.distributed.checkpoint.save(
            state_of(step),
            storage_writer=torch.distributed.checkpoint.FileSystemWriter(tmp_path / f"step-{step}"),
        )
    assert restored(Run(tmp_path)) == 2

    truncate(data_file(tmp_path, 2), 4096)

    with pytest.warns(UserWarning, match=r"step 2 is passed over in /.*: .* has 4096 bytes"):
        assert Run(tmp_path).latest_step() == 1


def test_a_flipped_bit_is_found_by_a_full_check_or_by_the_load_which_falls_back(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1, 2)
    data = data_file(tmp_path, 2)
    flip(data, data.stat().st_size // 2)

    assert Run(tmp_path).latest_step() == 2
    with pytest.warns(UserWarning, match="step 2 is passed over.*CorruptionError"):
        assert restored(Run(tmp_path)) == 1
    with pytest.warns(UserWarning, match="step 2 is passed over"):
        assert Run(tmp_path, verify="full").latest_step() == 1


def test_a_full_check_reads_a_step_once_below_one_that_is_not_committed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-3").mkdir()
    checked: list[str] = []
    steps = StepDirectories(Location(tmp_path))

    def check(path: Location) -> None:
        checked.append(path.name)
        check_whole(path)

    steps.check = check

    assert list(steps.steps()) == [2, 1]

    assert [checked.count(f"step-{step}") for step in (2, 1)] == [1, 1]


def test_training_does_not_begin_anew_where_all_steps_are_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / f"step-{step}/.metadata", 10)

    for find in (lambda run: run.latest_step(), lambda run: run.restore(state_of(-1))):
        with (
            pytest.warns(UserWarning, match="step 1 is passed over"),
            pytest.raises(
                CorruptionError, match="2 are damaged or lack files, the newest is step 2"
            ),
        ):
            find(Run(tmp_path))


def test_what_was_never_committed_and_other_names_are_no_steps_and_older_ones_cost_nothing(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1000)
    for step in range(1000):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/.metadata").write_bytes(b"junk")
    (tmp_path / "step-2000").mkdir()
    (tmp_path / "step-2000/__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-2000" / pending_name("0" * 16)).touch()
    for name in ("step-07", "step-x", "step-8.tmp", "best", "step--9"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-1002").write_text("a file")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # None of the older ones is looked at.
        (tmp_path / "step-1002").unlink()
        assert Run(tmp_path).latest_step() == 1000


# ---- Which steps are kept ----


@pytest.mark.parametrize(("last", "every"), [(1, None), (3, None), (2, 5), (1, 1), (100, 3)])
def test_the_last_steps_and_every_so_many_are_kept(
    tmp_path: Path, last: int, every: int | None
) -> None:
    steps = [1, 2, 3, 5, 8, 10, 11, 15, 16, 20, 21]

    save_steps(tmp_path, *steps, keep_last=last, keep_every=every)

    expected = set(steps[-last:]) | {step for step in steps if every and step % every == 0}
    assert steps_in(tmp_path) == sorted(expected)
    assert not [name for name in names_in_run(tmp_path) if not name.startswith("step-")]


def test_the_newest_whole_step_is_kept_whatever_is_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    for step in (3, 4, 5):
        data_file(tmp_path, step).unlink()

    Retention(keep_last=1).apply(StepDirectories(Location(tmp_path)), 5)

    assert steps_in(tmp_path) == [2, 3, 4, 5]
    with pytest.warns(UserWarning, match="passed over"):
        assert restored(Run(tmp_path)) == 2


def test_steps_saved_after_going_back_are_retained_beside_newer_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 7, 8, 9)

    save_steps(tmp_path, 3, 4, 5, keep_last=2)

    assert steps_in(tmp_path) == [4, 5, 7, 8, 9]

    save_steps(tmp_path, 6, 8, 10, keep_last=2)

    assert steps_in(tmp_path) == [8, 9, 10]  # The run has left step 9, and has not passed it by 2.


def test_what_failed_saves_have_left_is_removed_with_old_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for step in (0, 5, 20):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/__0_0.distcp").write_bytes(b"half")
        (tmp_path / f"step-{step}" / pending_name("0" * 16)).touch()

    save_steps(tmp_path, 10, keep_last=1, keep_every=5)

    assert steps_in(tmp_path) == [10, 20]  # A step that is newer may be one that is being saved.


@pytest.mark.parametrize("count", [0, 2])
def test_a_removal_that_is_killed_leaves_no_half_step_and_the_next_save_ends_it(
    tmp_path: Path, count: int
) -> None:
    save_steps(tmp_path, 1, 2, 3)

    assert removes_until_killed(tmp_path, count) == -signal.SIGKILL

    left = sorted(name for name in names_in_run(tmp_path) if not name.startswith("step-"))
    assert [name.rpartition("-")[0] for name in left] == [".removed-step-1", ".removed-step-2"]
    assert StepDirectories(Location(tmp_path)).damaged() == []
    assert steps_in(tmp_path) == [3]
    assert restored(Run(tmp_path)) == 3
    save_steps(tmp_path, 4)
    assert names_in_run(tmp_path) == ["step-3", "step-4"]


def test_a_step_that_is_removed_as_it_is_looked_at_is_not_taken_for_damaged(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 0)
    for step in range(1, 300):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}")
    paths = [tmp_path / f"step-{step}" for step in range(300)]
    removing = threading.Thread(target=lambda: [remove_directory(Location(path)) for path in paths])
    removing.start()
    for path in paths:
        with contextlib.suppress(NotFoundError):
            while True:
                check_whole(Location(path))
    removing.join()


LOADS_IN_A_LOOP = """
import sys, warnings
from pathlib import Path
import torch
from support.run_steps import state_of
from torch_ckpt import FastReader, load
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import listed_steps
from torch.distributed.checkpoint.api import CheckpointException
warnings.simplefilter("ignore")
tier = StepDirectories(Location(sys.argv[1]))
right = gone = 0
Path(sys.argv[2] + ".begun").touch()
while not Path(sys.argv[2]).exists():
    assert not tier.damaged(), tier.damaged()
    for step in reversed(listed_steps(tier.directory)):  # The oldest first: those that go.
        state = state_of(-1, 400_000)
        try:
            load(state, storage_reader=FastReader(tier.path(step).checkpoint_id))
        except CheckpointException as error:
            [(cause, _)] = error.failures.values()
            assert isinstance(cause, NotFoundError), cause
            gone += 1
            Path(sys.argv[2] + ".gone").touch()
        else:
            assert (state["w"] == step).all() and state["step"] == step
            right += 1
print(right, gone)
"""


def test_a_reader_beside_a_run_that_removes_steps_gets_right_values_or_a_typed_error(
    tmp_path: Path,
) -> None:
    directory, end = tmp_path / "run", tmp_path / "end"
    arguments = ("-c", LOADS_IN_A_LOOP, directory, end)
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(run_python, *arguments, folder=tmp_path, timeout_s=120)
        try:
            until((tmp_path / "end.begun").exists)
            run = Run(directory, keep_last=2)
            begin, has_gone = time.monotonic(), tmp_path / "end.gone"
            step = 0
            while time.monotonic() < begin + (1 if has_gone.exists() else 60):
                step += 1
                run.save(step, state_of(step, 400_000))
        finally:
            end.touch()
        done = reader.result(60)
    assert done.returncode == 0, done.stdout
    right, gone = map(int, done.stdout.split())
    assert right > 0
    assert gone > 0, "no step went away while it was loaded: the test has tried nothing"


# ---- Saves in the background ----


@contextlib.contextmanager
def slow_state(step: int, *, fails: bool = False) -> Iterator[dict[str, Any]]:
    """A state whose save does not end before the context does."""
    Slow.may_go_on.clear()
    Slow.fails = fails
    try:
        yield {**state_of(step), "slow": Slow()}
    finally:
        Slow.may_go_on.set()


@pytest.mark.parametrize("on_busy", ["skip", "error"])
def test_a_busy_run_skips_a_save_and_counts_it_or_raises(tmp_path: Path, on_busy: Any) -> None:
    run = Run(tmp_path, asynchronous=True, on_busy=on_busy)
    with slow_state(1) as state:
        assert run.save(1, state)
        if on_busy == "skip":
            assert not run.save(2, state_of(2))
        else:
            with pytest.raises(CheckpointError, match="step 2 was not saved: another save"):
                run.save(2, state_of(2))
    run.wait()
    assert run.save(3, state_of(3))
    run.close()

    assert (run.saved, run.skipped) == (2, on_busy == "skip")
    assert steps_in(tmp_path) == [1, 3]


def test_a_busy_run_waits_and_saves_in_order(tmp_path: Path) -> None:
    with Run(tmp_path, asynchronous=True) as run, slow_state(1) as state:
        run.save(1, state)
        threading.Timer(0.2, Slow.may_go_on.set).start()
        begin = time.monotonic()
        run.save(2, state_of(2))
        assert time.monotonic() - begin > 0.1
        assert (tmp_path / "step-1/.metadata").exists()
    assert run.saved == 2


def test_a_background_save_holds_the_values_of_its_step(tmp_path: Path) -> None:
    with Run(tmp_path, asynchronous=True) as run, slow_state(1) as state:
        run.save(1, state)
        state["w"].fill_(-5)

    loaded = {**state_of(-1), "slow": None}
    assert Run(tmp_path).restore(loaded) == 1
    assert torch.equal(loaded["w"], state_of(1)["w"])


@pytest.mark.parametrize("call", ["save", "wait", "close", "latest_step", "restore", "exit"])
def test_a_failed_background_save_is_told_at_the_next_call_with_its_step(
    tmp_path: Path, call: str
) -> None:
    run = Run(tmp_path, asynchronous=True)
    run.save(6, state_of(6))
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: run.save(8, state_of(8)),
        "wait": run.wait,
        "close": run.close,
        "latest_step": run.latest_step,
        "restore": lambda: run.restore(state_of(-1)),
        "exit": lambda: run.__exit__(None, None, None),
    }
    with slow_state(7, fails=True) as state:
        run.save(7, state)

    with pytest.raises(CheckpointError, match=r"step 7 was not saved: .*cannot be pickled"):
        calls[call]()

    if call not in ("close", "exit"):
        assert run.latest_step() == 6  # It is told once.
        run.save(8, state_of(8))
        run.close()
        assert steps_in(tmp_path) in ([6, 8], [6, 7, 8])
    assert run.saved == (1 if call in ("close", "exit") else 2)


def test_an_error_of_training_is_not_hidden_by_that_of_a_save(tmp_path: Path) -> None:
    def train() -> None:
        with Run(tmp_path, asynchronous=True) as run:
            with slow_state(7, fails=True) as state:
                run.save(7, state)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "step 7 was not saved" in notes_of(caught.value)


def test_a_closed_run_refuses_to_go_on_and_a_removed_step_is_not_found(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 1, 2, keep_last=1)
    with run.lease(2):
        run.close()
    run.close()
    calls: list[Callable[[], object]] = [
        lambda: run.save(3, state_of(3)),
        lambda: run.should_save(3),
        lambda: run.reserve(state_of(3)),
        lambda: run.restore(state_of(3)),
        lambda: run.restore(state_of(3), step=2),
        lambda: run.discard_after(2),
        lambda: run.lease(2).__enter__(),
        lambda: run.saving_on_exception(dict).__enter__(),
        lambda: run.saving_on_signal(dict).__enter__(),
        lambda: run.on_event(print),
        lambda: run.wait(promoted=True),
        *(run.wait, run.latest_step, run.best_step),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this run is closed"):
            call()
    error = failure_of(load, state_of(-1), storage_reader=FastReader(tmp_path / "step-1"))
    assert isinstance(error, NotFoundError)
    assert "no checkpoint is committed" in str(error)


EXITS_WITH_SAVES = """
import os, sys, time, torch, warnings
warnings.simplefilter("ignore")
import torch_ckpt
class Object:
    def __init__(self, fails):
        self.fails = fails
    def __deepcopy__(self, _):
        return self
    def __reduce__(self):
        time.sleep(0.5)
        if self.fails:
            raise ValueError("cannot be pickled")
        return int, (7,)
for name in ("ends", "fails"):
    run = torch_ckpt.Run(sys.argv[1] + "/" + name, asynchronous=True)
    state = {"w": torch.full((5000,), 3.0), "step": 3, "slow": Object(name == "fails")}
    run.save(3 if name == "ends" else 4, state)
    assert not (run.directory / "step-3/.metadata").exists()
if os.fork() == 0:
    sys.exit()  # The saves are not those of the child, which says nothing of them.
os.wait()
"""


def test_a_process_that_exits_ends_its_saves_and_reports_those_that_fail(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    printed = run_python(EXITS_WITH_SAVES, tmp_path)

    assert Run(tmp_path / "ends").latest_step() == 3
    assert Run(tmp_path / "fails").latest_step() is None
    [line] = printed.splitlines()
    assert line.startswith("torch_ckpt: step 4 was not saved")
    assert "cannot be pickled" in line


# ---- When to save ----


def test_steps_that_are_multiples_are_to_be_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3)
    asked = [step for step in range(10) if run.should_save(step)]
    assert asked == [0, 3, 6, 9]
    run.save(9, state_of(9))
    assert not run.should_save(9)


class Clock:
    """Time, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(save_interval.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("share", [0.01, 0.035, 0.3])
def test_saving_takes_the_stated_share_of_time_and_no_longer_than_it_must(
    monkeypatch: pytest.MonkeyPatch, share: float, rng: random.Random
) -> None:
    """A training whose saves become slower and faster by and by."""
    clock = Clock(monkeypatch)
    schedule = save_interval.SaveSchedule(None, share)
    step_s, save_s, saves, since = 0.05, 0.4, 0, 0.0
    for step in range(1, 20_000):
        clock.now += step_s
        if not schedule.is_due(step, during_save=False):
            continue
        if saves:
            steps_s = clock.now - since
            assert save_s <= share * (steps_s + save_s) * (1 + 1e-6)
            assert save_s >= share * (steps_s - step_s + save_s) * (1 - 1e-6) or steps_s < 0.06
        save_s *= rng.uniform(0.7, 1.4)
        schedule.attempted(step)
        clock.now += save_s
        schedule.agreed(step, schedule.own_interval(step, save_s))
        since = clock.now
        saves += 1
    assert saves > 3


def test_the_interval_allows_for_steps_that_a_background_save_slows_down_and_for_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    measured = save_interval.CostClock()
    measured.step_ended(0, during_save=False)
    for step in range(1, 21):
        beside = step <= 8
        clock.now += 0.15 if beside else 0.1
        measured.step_ended(step, during_save=beside)
    measured.background_save_ended(1.2)

    cost = measured.saved(20, 0.02)

    assert cost.step_s == pytest.approx(0.1)
    assert cost.slowed_s == pytest.approx(8 * 0.05)
    assert cost.interval(0.1) == pytest.approx(0.42 * 0.9 / 0.1 / 0.1, abs=1)
    assert cost.interval(0.9) == 12  # As many steps as it takes.


def test_a_real_run_keeps_to_its_share(tmp_path: Path) -> None:
    run = Run(tmp_path, max_overhead=0.2, keep_last=1)
    begin, spent_s, shares = 0.0, 0.0, []
    for step in itertools.count(1):
        if len(shares) == 4:
            break
        time.sleep(0.002)
        if not run.should_save(step):
            continue
        before = time.monotonic()
        if spent_s:
            shares.append(spent_s / (before - begin))
        begin = begin or before
        run.save(step, state_of(step, 1 << 18))
        spent_s += time.monotonic() - before
    assert min(shares) < 0.4, shares  # Steps and saves of a machine differ by chance.


def test_a_save_that_fails_is_not_tried_again_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    run = Run(tmp_path / "run")
    tried = []
    for step in range(35):
        if run.should_save(step):
            tried.append(step)
            with pytest.raises(BaseException, match="run"):
                run.save(step, state_of(step))
    assert tried == [10, 20, 30]


# ---- When training raises ----


class Training:
    """A model whose forward pass, data or optimizer may raise."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def steps(self, run: Run, raise_in: str, *, save_at: int = -1) -> None:
        with run.saving_on_exception(self.state_dict, timeout_s=5):
            for step in range(1, 10):
                self.optimizer.zero_grad()
                self.model(torch.ones(2, 3)).sum().backward()
                if step == 5 and raise_in == "forward":
                    raise ZeroDivisionError("training")
                if step == 5 and raise_in == "optimizer":
                    self.optimizer.param_groups[0]["lr"] = "no number"
                self.optimizer.step()
                run.should_save(step)
                if step == save_at:
                    run.save(step, self.state_dict())


def notes_of(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def test_the_last_whole_step_is_saved_when_training_raises(tmp_path: Path) -> None:
    training, expected = Training(), Training()
    with pytest.raises(ZeroDivisionError, match="training") as caught:
        training.steps(Run(tmp_path), "forward")
    assert "step 4 was saved" in notes_of(caught.value)

    for _ in range(4):
        expected.optimizer.zero_grad()
        expected.model(torch.ones(2, 3)).sum().backward()
        expected.optimizer.step()
    loaded = Training()
    assert Run(tmp_path).restore(loaded.state_dict()) == 4
    assert torch.equal(loaded.model.weight, expected.model.weight)


@pytest.mark.parametrize(
    ("raise_in", "save_at", "said"),
    [
        ("optimizer", -1, "begun another step after step 4"),
        ("forward", 4, "step 4, the last completed step, was saved"),
        ("in the way", -1, "step 4 was not saved after this error: "),
    ],
)
def test_what_else_may_become_of_the_last_step_when_training_raises(
    tmp_path: Path, raise_in: str, save_at: int, said: str
) -> None:
    if raise_in == "in the way":
        (tmp_path / "run").write_text("in the way")
    run = Run(tmp_path / "run")
    with pytest.raises(TypeError if raise_in == "optimizer" else ZeroDivisionError) as caught:
        Training().steps(run, raise_in.replace("in the way", "forward"), save_at=save_at)
    assert said in notes_of(caught.value)
    assert run.saved == (save_at == 4)
    if raise_in == "optimizer":
        assert not list(tmp_path.rglob("*"))


# ---- Arguments ----


def test_arguments_out_of_range_are_refused_by_name(tmp_path: Path) -> None:
    out_of_range: list[tuple[str, Any]] = [
        *(("every", 0), ("keep_last", 0), ("keep_every", -1), ("max_overhead", 0)),
        *(("max_overhead", 1), ("on_busy", "queue"), ("verify", "no"), ("timeout_s", 0)),
    ]
    for name, value in out_of_range:
        with pytest.raises(ValueError, match=name):
            Run(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="step=-1"):
        Run(tmp_path).save(-1, state_of(0))


@pytest.mark.parametrize("every", [3, None])
def test_a_save_that_all_ranks_refuse_leaves_their_schedules_equal(every: int | None) -> None:
    refusing, other = (SaveSchedule(every, 0.1) for _ in range(2))
    for schedule in (refusing, other):
        schedule.is_due(2, during_save=False)
        schedule.attempted(2)
    refusing.attempted(None)
    other.attempted(3)
    for schedule in (refusing, other):
        with pytest.raises(ValueError, match="refused"), schedule.unless_refused():
            raise ValueError("refused")
    due = [[s.is_due(step, during_save=False) for step in range(3, 40)] for s in (refusing, other)]
    assert due[0] == due[1]
    assert any(due[0])
