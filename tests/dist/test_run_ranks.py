"""Ranks of a run agree: on the latest step, on when to save, on what failed, and in time."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds, on_ranks
from states import assert_same
from support.flips import flip
from support.logs import logged
from support.run_steps import names_in_run
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waits import until

from torch_ckpt import CheckpointError, Run
from torch_ckpt.errors import RankTimeoutError

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20
SHORT_S = 2.0


def state_of(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(6000.0).reshape(600, 10) + step
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(3)
def test_ranks_save_and_restore_a_run(path: Path, asynchronous: bool) -> None:
    with Run(path, asynchronous=asynchronous, keep_last=2, timeout_s=TIMEOUT_S) as run:
        assert run.restore(state_of(-1)) is None
        for step in (3, 6, 9):
            run.save(step, state_of(step))
        assert run.latest_step() == 9
    state = state_of(-1)
    with Run(path, timeout_s=TIMEOUT_S) as run:
        assert run.restore(state) == 9
        assert_same(state, state_of(9))
        assert run.restore(state, step=6) == 6
        assert_same(state, state_of(6))
    assert names_in_run(path) == ["step-6", "step-9"]


@on_ranks(2)
def test_all_ranks_fall_back_to_the_step_that_is_sound_on_each(path: Path) -> None:
    with Run(path, timeout_s=TIMEOUT_S) as run, quiet():
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        if dist.get_rank() == 1:
            [data] = (path / "step-3").glob("__1_*.distcp")
            flip(data, -3000)  # In the tensor that the second rank alone reads.
            os.truncate(path / "step-2/.metadata", 50)
        dist.barrier()
        state = state_of(-1)
        assert (run.latest_step(), run.restore(state)) == (3, 1)
        assert_same(state, state_of(1))
        os.makedirs(path / "elsewhere", exist_ok=True)
    # What the first rank sees is what counts.
    own = path if dist.get_rank() == 0 else path / "elsewhere"
    with Run(own, timeout_s=TIMEOUT_S) as run, quiet():
        assert run.latest_step() == 3


class SlowToList:
    """What one rank takes long to list, and so to save."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def asks_when_to_save(path: Path, asynchronous: bool) -> list[int]:
    asked = []
    with Run(path, max_overhead=0.5, asynchronous=asynchronous, timeout_s=TIMEOUT_S) as run:
        for step in range(1, 250):
            time.sleep(0.004 if dist.get_rank() else 0.006)
            if run.should_save(step):
                asked.append(step)
                run.save(step, {**state_of(step), "slow": SlowToList()})
    return asked


@pytest.mark.thin("True")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_agree_when_to_save_though_they_measure_other_costs(
    worlds: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    first, second = worlds.run(2, asks_when_to_save, tmp_path, asynchronous)
    assert first == second
    assert len(first) > 1
    # What the slow one needs: 0.1 s are 25 of its steps, of 4 ms or a little more.
    assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(first))


class Blocking:
    """An object that one rank does not pickle, in the background, before there is a file."""

    def __init__(self, go: Path) -> None:
        self.go = go

    def __deepcopy__(self, _: object) -> Blocking:
        return self

    def __reduce__(self) -> Any:
        while dist.get_rank() == 1 and not self.go.exists():
            time.sleep(0.01)
        return float, (1.0,)


@on_ranks(2)
def test_ranks_skip_the_same_saves(path: Path) -> None:
    go = path / "go"
    with Run(path / "run", asynchronous=True, on_busy="skip", timeout_s=TIMEOUT_S) as run:
        state = {**state_of(1), f"object{dist.get_rank()}": Blocking(go)}
        second, third = state_of(2), state_of(3)  # For which the ranks meet.
        assert run.save(1, state)
        if dist.get_rank() == 1:
            run.wait()  # By itself this rank would not skip.
        else:
            threading.Timer(0.5, go.touch).start()
        assert not run.save(2, second)
        run.wait()
        assert run.save(3, third)
        run.wait()
        assert (run.saved, run.skipped) == (2, 1)
    assert names_in_run(path / "run") == ["step-1", "step-3"]


def raised(call: Any, *arguments: Any) -> tuple[str, str, float]:
    begin = time.monotonic()
    try:
        call(*arguments)
    except BaseException as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        return type(error).__name__, text, time.monotonic() - begin
    return "", "", time.monotonic() - begin


@on_ranks(2)
def test_ranks_at_different_steps_save_nothing(path: Path) -> None:
    with Run(path, timeout_s=TIMEOUT_S) as run:
        kind, text, _ = raised(run.save, 5 + dist.get_rank(), state_of(5))
    assert kind == "ValueError"
    assert "step=5 on rank 0, and step=6 on rank 1" in text
    assert not names_in_run(path)


class Refuses:
    """Cannot be copied, or not be loaded, on one rank."""

    def __init__(self, when: str) -> None:
        self.when = when

    def state_dict(self) -> dict[str, Any]:
        if self.when == "listed" and dist.get_rank() == 1:
            raise ValueError("refused")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.when == "loaded" and dist.get_rank() == 1:
            raise ValueError("refused")


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_what_fails_on_one_rank_fails_on_all_in_time(path: Path, asynchronous: bool) -> None:
    found = []
    with Run(path, asynchronous=asynchronous, timeout_s=TIMEOUT_S) as run:
        run.save(1, {**state_of(1), "other": Refuses("never")})
        found.append(raised(run.save, 2, {**state_of(2), "other": Refuses("listed")}))
        found.append(raised(run.restore, {**state_of(-1), "other": Refuses("loaded")}))
        run.save(3, state_of(3))  # The run goes on.
        assert run.latest_step() == 3
    for kind, text, seconds in found:
        assert kind in ("ValueError", "RankTimeoutError", "CheckpointException"), text
        assert "refused" in text
        assert seconds < TIMEOUT_S / 2


def trains_until_one_raises(path: Path, raising: list[int]) -> tuple[str, str, float]:
    def train() -> None:
        with run.saving_on_exception(lambda: state_of(4), timeout_s=SHORT_S):
            run.should_save(4)
            if dist.get_rank() in raising:
                raise ZeroDivisionError

    run = Run(path, timeout_s=TIMEOUT_S)
    found = raised(train)
    dist.barrier()
    return found


def test_a_rank_that_raises_alone_gives_up_saving_soon_and_says_so(
    worlds: Worlds, tmp_path: Path
) -> None:
    (kind, text, seconds), other = worlds.run(2, trains_until_one_raises, tmp_path, [0])
    assert kind == "ZeroDivisionError"
    assert (
        "step 4 was not saved after this error: RankTimeoutError: rank 1 is slow, stuck or gone"
        in text
    )
    assert SHORT_S <= seconds < SHORT_S + 5
    assert other[0] == ""
    assert not names_in_run(tmp_path)


def test_ranks_that_all_raise_save_the_last_step(worlds: Worlds, tmp_path: Path) -> None:
    for kind, text, _ in worlds.run(2, trains_until_one_raises, tmp_path, [0, 1]):
        assert kind == "ZeroDivisionError"
        assert "step 4 was saved after this error" in text
    assert names_in_run(tmp_path) == ["step-4"]


def dies(path: Path) -> tuple[str, str, float]:
    run = Run(path, timeout_s=SHORT_S)
    run.save(1, state_of(1))
    if dist.get_rank() == 1:
        time.sleep(2.5 * SHORT_S)  # To the others it is as good as dead.
        return "", "", 0.0
    return raised(run.latest_step)


def test_a_rank_that_does_not_come_is_named_in_time(worlds: Worlds, tmp_path: Path) -> None:
    kind, text, seconds = worlds.run(2, dies, tmp_path)[0]
    assert kind == "RankTimeoutError"
    assert "rank 1" in text
    assert seconds < SHORT_S + 5


@on_ranks(2)
def test_a_save_that_fails_in_the_background_of_one_rank_is_told_to_all(path: Path) -> None:
    class Unpicklable(Blocking):
        def __reduce__(self) -> Any:
            raise ValueError("cannot be pickled")

    with Run(path, asynchronous=True, timeout_s=TIMEOUT_S) as run:
        state: dict[str, Any] = state_of(1)
        if dist.get_rank() == 1:
            state["object"] = Unpicklable(path)
        run.save(1, state)
        kind, text, _ = raised(run.save, 2, state_of(2))
        run.save(3, state_of(3))
    assert kind == CheckpointError.__name__
    assert (
        "step 1 was not saved: rank 1: ValueError: cannot save 'object': cannot be pickled" in text
    )


def train(directory: Path, kills: list[list[int]], attempt: int) -> None:
    """Trains to the end, or until this rank is to be killed, as the save of a step goes on."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = Run(directory / "run", every=2, keep_last=2, asynchronous=True, timeout_s=TIMEOUT_S)
    start = run.restore({"model": model}) or 0
    for step in range(start + 1, 13):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for tensor in [total, *(parameter.grad for parameter in model.parameters())]:
            dist.all_reduce(tensor)
        optimizer.step()
        if rank == 0:
            with (directory / "losses").open("a") as log:
                print(json.dumps([attempt, step, total.item()]), file=log, flush=True)
        if run.should_save(step):
            run.save(step, {"model": model})
        if attempt < len(kills) and kills[attempt] == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
    run.close()


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from test_run_ranks import train
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
train(Path(sys.argv[1]), json.loads(sys.argv[2]), attempt)
dist.destroy_process_group()
"""


def losses_in(directory: Path) -> list[tuple[int, int, float]]:
    """Attempt, step and loss of each step."""
    return [tuple(json.loads(line)) for line in (directory / "losses").read_text().splitlines()]


@pytest.mark.slow
def test_a_training_that_torchrun_restarts_goes_on_from_its_latest_step(
    worlds: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    worlds.run(2, train, tmp_path / "whole", [], 0)
    expected = {step: loss for _, step, loss in losses_in(tmp_path / "whole")}
    assert sorted(expected) == list(range(1, 13))
    killed, script = tmp_path / "killed", tmp_path / "train.py"
    killed.mkdir()
    script.write_text(SCRIPT)
    kills = json.dumps([[1, 6]])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = ["--max-restarts=1", "--monitor-interval=0.1"]

    done = subprocess.run(
        [sys.executable, *launcher, *options, script, killed, kills],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/dist"))),
            "OMP_NUM_THREADS": "1",
            # Or gloo finds addresses of the ranks that were killed in the store of torchrun.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    found = losses_in(killed)
    assert {step for _, step, _ in found} == set(expected)
    assert all(loss == expected[step] for _, step, loss in found)
    begun = min(step for attempt, step, _ in found if attempt == 1)
    assert begun in (5, 7)  # After step 4, or 6 if its save was complete when the rank was killed.
    assert names_in_run(killed / "run") == ["step-10", "step-12"]


@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True}, {"asynchronous": True, "agent": True}]
)
@on_ranks(2)
def test_ranks_agree_on_the_best_step(path: Path, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    with Run(path, keep_best=1, monitor="loss", timeout_s=TIMEOUT_S, **options) as run:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            # Those of the first rank count.
            run.save(step, state_of(step), metrics={} if rank else {"loss": loss})
            run.wait()
        assert run.best_step() == 2
        state = state_of(-1)
        assert run.restore(state, step=2) == 2
        assert_same(state, state_of(2))
    dist.barrier()
    assert sorted(p.name for p in path.glob("step-*")) == ["step-2", "step-3"]


# ---- Going back, and ending ----


@pytest.mark.parametrize("is_rank_1_ahead", [False, True])
@on_ranks(3)
def test_all_ranks_save_one_step_and_end_if_one_of_them_gets_a_signal(
    path: Path, is_rank_1_ahead: bool
) -> None:
    run, state = Run(path, timeout_s=TIMEOUT_S), state_of(0)
    rank = dist.get_rank()

    def train() -> None:
        nonlocal state
        with run.saving_on_signal(lambda: state, grace_s=TIMEOUT_S):
            for step in itertools.count(1):
                if step == 40 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if rank == (0 if is_rank_1_ahead else 1):
                    time.sleep(0.001)  # The others are ahead, until they exchange.
                state = state_of(step)
                run.should_save(step)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    state = state_of(-1)
    step = Run(path, timeout_s=TIMEOUT_S).restore(state)
    assert step is not None
    assert 40 <= step <= 40 + 2 * 16
    assert_same(state, state_of(step))
    assert names_in_run(path) == [f"step-{step}"]


@on_ranks(2)
def test_ranks_go_back_together_and_one_of_them_warns(path: Path) -> None:
    run = Run(path, timeout_s=TIMEOUT_S)
    for step in (3, 6, 9):
        run.save(step, state_of(step))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.restore(state_of(-1), step=3) == 3
        run.save(4, state_of(4))
    texts = [str(w.message)[:25] for w in caught if w.category is UserWarning]
    assert texts == ["step 3 was restored, but "][dist.get_rank() :]
    assert run.discard_after(4) == [9, 6]
    assert run.restore(state_of(-1)) == 4
    with pytest.raises(ValueError, match="step=3 on rank 0, and step=4 on rank 1"):
        run.discard_after(3 + dist.get_rank())
    assert run.latest_step() == 4


@on_ranks(2)
def test_all_ranks_raise_if_a_warning_of_going_back_is_an_error(path: Path) -> None:
    run = Run(path, timeout_s=TIMEOUT_S)
    for step in (3, 6):
        run.save(step, state_of(step))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind, text, _ = raised(functools.partial(run.restore, state_of(-1), step=3))
    assert (kind, text[:20]) == ("UserWarning", "step 3 was restored,")
    assert run.latest_step() == 6


@on_ranks(2)
def test_a_signal_in_the_last_steps_ends_all_ranks_with_the_status_of_that_signal(
    path: Path,
) -> None:
    run, signals = Run(path, timeout_s=TIMEOUT_S), [signal.SIGUSR1, signal.SIGTERM]

    def train() -> None:
        with run.saving_on_signal(lambda: state_of(25), signals=signals):
            for step in range(1, 26):
                time.sleep(0.001)
                if step == 20 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.should_save(step)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    step = Run(path, timeout_s=TIMEOUT_S).restore(state_of(-1))
    assert step is not None
    assert step >= 20


@on_ranks(2)
def test_a_rank_with_a_signal_ends_and_reports_why_nothing_was_saved(path: Path) -> None:
    run = Run(path, timeout_s=TIMEOUT_S)

    def train() -> None:
        with run.saving_on_signal(lambda: state_of(2), grace_s=1.0):
            run.should_save(1)
            if dist.get_rank() == 1:  # It is stuck.
                until((path / "ended").exists)
                return
            os.kill(os.getpid(), signal.SIGTERM)
            run.should_save(2)

    begin = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(RankTimeoutError):
            train()
        return
    with logged(logging.WARNING) as messages, pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    assert time.monotonic() - begin < 10
    (path / "ended").touch()
    assert "step 2 was not saved: RankTimeoutError: rank 1" in messages[-1]


@pytest.mark.parametrize(("call", "signalled"), [("should_save", 0), ("save", 1)])
@on_ranks(2)
def test_a_signal_ends_the_wait_for_a_stuck_rank_after_the_time_that_it_leaves(
    path: Path, call: str, signalled: int
) -> None:
    """The signal arrives while the rank waits for the other one."""
    run, state = Run(path, timeout_s=TIMEOUT_S), {"w": torch.ones(3)}
    if dist.get_rank() != signalled:  # It is stuck.
        time.sleep(3)
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def train() -> None:
        with run.saving_on_signal(lambda: state, grace_s=0.5):
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
            if call == "should_save":
                run.should_save(1)
            else:
                run.save(1, state)

    begin = time.monotonic()
    try:
        with pytest.raises((SystemExit, RankTimeoutError)) as ended:
            train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    if call == "should_save":
        assert isinstance(ended.value, SystemExit)
    else:
        assert "a signal ends this process" in str(ended.value)
        assert received == [signal.SIGTERM]


@on_ranks(2)
def test_retention_removes_what_ranks_have_left_of_a_failed_save(path: Path) -> None:
    """In a directory that exists, the files of ranks that had not failed."""

    class Unpicklable:
        def __deepcopy__(self, _: object) -> Unpicklable:
            return self

        def __reduce__(self) -> Any:
            raise ValueError("cannot be pickled")

    (path / "step-1").mkdir(parents=True, exist_ok=True)
    run = Run(path, keep_last=1, timeout_s=TIMEOUT_S)
    object_ = Unpicklable() if dist.get_rank() == 1 else None
    kind, text, _ = raised(run.save, 1, {**state_of(1), f"of rank {dist.get_rank()}": object_})
    assert "cannot be pickled" in text, kind
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (2, 3):
            run.save(step, state_of(step))
    dist.barrier()
    assert names_in_run(path) == ["step-3"]


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_training_of_all_ranks_goes_on_if_the_disk_of_one_is_full(
    path: Path, asynchronous: bool
) -> None:
    """The kernel limits the length of files of the second rank."""
    state = {"w": torch.ones(3 << 20), f"own{dist.get_rank()}": torch.ones(3 << 20)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = []
    with Run(path, asynchronous=asynchronous, timeout_s=TIMEOUT_S, on_failure="warn") as run:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            found += [run.save(1, state), run.save(2, state)]
            while run._saves.is_busy:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found.append(run.save(3, state))
        run.wait()
        assert found == [asynchronous, asynchronous, True]
        assert run.failures == 2
        assert run.latest_step() == 3


@on_ranks(2)
def test_a_failed_save_keeps_no_state_alive(path: Path) -> None:
    rank = dist.get_rank()
    with Run(path, timeout_s=TIMEOUT_S) as run:
        tensor = torch.ones(5000)
        alive = weakref.ref(tensor)
        state = {f"w{rank}": tensor, **({"bad": threading.Lock()} if rank else {})}
        is_saved = False
        with contextlib.suppress(CheckpointException):  # An error that is caught has the frames.
            is_saved = run.save(1, state)
        assert not is_saved
        del tensor, state
        until(lambda: gc.collect() < 0 or alive() is None)  # The record is written first.


@on_ranks(2)
def test_ranks_of_which_some_wait_for_promotion_and_others_close_learn_it_at_once(
    path: Path,
) -> None:
    """Both wait for promotions: those that wait would then close alone."""
    for waits in (0, 1):
        run = Run(path / f"{waits}", local=path / f"local-{waits}", timeout_s=TIMEOUT_S)
        run.save(1, {"w": torch.ones(10)})
        run.wait()
        call = functools.partial(run.wait, promoted=True) if dist.get_rank() == waits else run.close
        began = time.monotonic()
        with pytest.raises(RankTimeoutError, match=r"different calls: .*promotion.*to close"):
            call()
        assert time.monotonic() - began < TIMEOUT_S / 2


LAST: dict[str, Callable[[Run], object]] = {
    "save": lambda run: run.save(2, {"w": torch.ones(10)}),
    "restore": lambda run: run.restore({"w": torch.ones(10)}),
    "latest_step": lambda run: run.latest_step(),
    "best_step": lambda run: run.best_step(),
    "step_at": lambda run: run.step_at("9998-01-01"),
    "discard_after": lambda run: run.discard_after(1),
    "wait": lambda run: run.wait(promoted=True),
}


@on_ranks(2)
def test_ranks_that_call_different_methods_learn_it_at_once(path: Path) -> None:
    run = Run(path, timeout_s=TIMEOUT_S, monitor="loss")
    run.save(1, {"w": torch.ones(10)}, metrics={"loss": 1})
    for names in itertools.permutations(LAST, 2):
        began = time.monotonic()
        with pytest.raises(RankTimeoutError, match=r"ranks make different calls: rank . is"):
            LAST[names[dist.get_rank()]](run)
        assert time.monotonic() - began < TIMEOUT_S / 2
        dist.barrier()
    assert run.restore({"w": torch.ones(10)}) == 1


@pytest.mark.parametrize("closes", [0, 1])
@pytest.mark.parametrize("name", LAST)
@on_ranks(2)
def test_a_rank_that_makes_a_call_beside_one_that_closes_learns_it_at_once(
    path: Path, closes: int, name: str
) -> None:
    run = Run(path, timeout_s=TIMEOUT_S, monitor="loss")
    run.save(1, {"w": torch.ones(10)}, metrics={"loss": 1})
    if dist.get_rank() == closes:
        run.close()
    else:
        began = time.monotonic()
        with pytest.raises(RankTimeoutError, match=f"different calls: rank {closes} .*to close"):
            LAST[name](run)
        assert time.monotonic() - began < TIMEOUT_S / 2
    dist.barrier()
