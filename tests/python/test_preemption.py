"""Runs that save when a scheduler ends them: the ways of Slurm, Kubernetes and torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT
from support.run_steps import restored, state_of

from torch_ckpt import Run
from torch_ckpt.agent.memory import complete_slots, folder_of, run_of
from torch_ckpt.runs.background.save import BackgroundSave

pytestmark = pytest.mark.timeout(120)

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


def train(
    run: Run,
    *,
    signal_at: int,
    save_at: int = -1,
    first: int = 1,
    steps: int = 10,
    persist: bool = True,
    **options: Any,
) -> None:
    """Trains, and gets SIGTERM within a step."""
    state = state_of(0)
    with run.saving_on_signal(lambda: state, **options):
        for step in range(first, steps + 1):
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            state["w"].fill_(step)
            state["step"] = step
            if step == save_at:
                run.save(step, state, persist=persist)
            run.should_save(step)


@contextlib.contextmanager
def catching_sigterm() -> Iterator[list[int]]:
    """The signals that arrive outside of the blocks of a run."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("mode", MODES)
def test_the_step_that_ends_next_is_saved_and_the_process_ends(
    mode: str, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, **MODES[mode]) as run:
        with pytest.raises(SystemExit) as ended:
            train(run, signal_at=4)
        assert ended.value.code == 143
        assert restored(Run(tmp_path)) == 4  # On disk, before the process ends.
    assert f"SIGTERM ends the training of {tmp_path}: step 4 was saved" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_disk_is_not_saved_twice(mode: str, tmp_path: Path, memory: Path) -> None:
    with Run(tmp_path, **MODES[mode]) as run:
        with pytest.raises(SystemExit):
            train(run, signal_at=4, save_at=4)
        assert restored(Run(tmp_path)) == 4
        assert run.saved == 1


def test_a_step_that_is_in_memory_alone_is_written_once(tmp_path: Path, memory: Path) -> None:
    with Run(tmp_path, **MODES["agent"]) as run:
        with pytest.raises(SystemExit):
            train(run, signal_at=4, save_at=4, persist=False)
        assert restored(Run(tmp_path)) == 4
        # The agent has nothing to write when the process ends.
        assert list(complete_slots(folder_of(run_of(tmp_path)), run_of(tmp_path))) == []


@pytest.mark.parametrize("how", ["discard", "restore", "own"])
@pytest.mark.filterwarnings("ignore:step .* is newer")
def test_a_run_that_has_gone_back_saves_a_step_again(how: str, tmp_path: Path) -> None:
    """Its earlier save of a step with that number had another state."""
    run = Run(tmp_path)
    for step in (3, 5):
        run.save(step, state_of(-step))
    if how == "discard":
        run.discard_after(3)
    if how == "restore":
        run.restore(state_of(0), step=3)
    with pytest.raises(SystemExit):
        train(run, signal_at=5, first=4)
    assert restored(Run(tmp_path)) == 5  # And not -5.


def test_a_run_that_goes_back_within_the_block_goes_on_to_check_for_signals(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3, state_of(3))

    def go_back() -> None:
        with run.saving_on_signal(lambda: state_of(4)):
            for step in range(4, 200):
                run.should_save(step)
            run.restore(state_of(0))
            os.kill(os.getpid(), signal.SIGTERM)
            run.should_save(4)
            raise AssertionError

    with pytest.raises(SystemExit):
        go_back()
    assert restored(Run(tmp_path)) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_signal_after_the_last_step_of_the_block_ends_the_process_after_the_save(
    mode: str, tmp_path: Path, memory: Path
) -> None:
    def work() -> None:
        with (
            catching_sigterm() as received,
            Run(tmp_path, **MODES[mode]) as run,
            run.saving_on_signal(lambda: state_of(3)),
        ):
            run.should_save(2)
            run.save(3, state_of(3))
            os.kill(os.getpid(), signal.SIGTERM)  # As in a last evaluation.
        assert not received

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 143
    assert restored(Run(tmp_path)) == 3


def test_a_block_that_raises_something_else_passes_the_signal_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(run: Run) -> None:
        with run.saving_on_signal(lambda: state_of(1)):
            run.save(1, state_of(1))
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a collective failed")

    with catching_sigterm() as received, Run(tmp_path, asynchronous=True) as run:
        with pytest.raises(RuntimeError, match="a collective failed"):
            work(run)
        assert received == [signal.SIGTERM]
        assert restored(Run(tmp_path)) == 1  # The save in flight was waited for.
    assert f"SIGTERM ends the training of {tmp_path} after an error" in caplog.text
    assert "a collective failed" in caplog.text


def test_the_time_that_is_left_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, asynchronous=True)
    run._saves._pending = BackgroundSave(2, Future(), lambda: None)  # It never ends.
    begin = time.monotonic()
    with pytest.raises(SystemExit):
        train(run, signal_at=3, grace_s=4.0)
    assert time.monotonic() - begin < 7.8
    assert "step 3 was not saved: CheckpointError: step 2 is still being saved" in caplog.text
    run._saves._pending = None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grace_s": -5}, "grace_s=-5 is not a positive number"),
        ({"grace_s": float("nan")}, "grace_s=nan is not a positive number"),
        ({"grace_s": 10**400}, "grace_s=10*[^ ]* is not a positive number"),
        ({"grace_s": "60"}, "grace_s='60' is not a positive number"),
        ({"signals": [signal.SIGUSR1, signal.SIGKILL]}, "SIGKILL cannot be handled"),
    ],
    ids=["negative", "nan", "huge", "text", "signal"],
)
def test_options_are_checked(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    run = Run(tmp_path)
    for _ in range(2):  # No block is in use afterwards.
        with pytest.raises(ValueError, match=reason):
            train(run, signal_at=-1, **options)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_step_that_cannot_be_saved_is_reported_and_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(SystemExit) as ended:
        train(Run(tmp_path / "run"), signal_at=2)
    assert ended.value.code == 143
    assert "step 2 was not saved: " in caplog.text


def test_a_signal_in_a_block_without_steps_ends_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    with pytest.raises(SystemExit) as ended:
        signalled(run)
    assert ended.value.code == 143
    assert "no step had ended, so nothing was saved" in caplog.text
    assert os.listdir(tmp_path) == []


def test_blocks_do_not_nest(tmp_path: Path) -> None:
    """Not those of two runs either: the first one to save would end the process."""
    run, other = Run(tmp_path / "run"), Run(tmp_path / "other")
    for inner in (run, other):
        with pytest.raises(RuntimeError, match="in use already: after a signal, the process ends"):
            nest(run, inner)
    nest(other, None)  # No block is in use afterwards.


def test_after_the_block_signals_have_the_handlers_from_before(tmp_path: Path) -> None:
    """Also if a signal is named twice, or the program installs a handler again that it has found
    within the block."""
    run = Run(tmp_path)
    with catching_sigterm() as received:
        former = signal.getsignal(signal.SIGTERM)
        with run.saving_on_signal(dict, signals=[signal.SIGTERM, signal.SIGTERM]):
            within = signal.getsignal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is former
        signal.signal(signal.SIGTERM, within)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


def signalled(run: Run) -> None:
    with run.saving_on_signal(dict):
        os.kill(os.getpid(), signal.SIGTERM)


def nest(run: Run, inner: Run | None) -> None:
    with run.saving_on_signal(dict):
        if inner is not None:
            with inner.saving_on_signal(dict):
                pass


def test_forked_children_get_the_signal_as_before(tmp_path: Path) -> None:
    """Such as workers of a DataLoader, which are terminated when an epoch ends."""
    with Run(tmp_path).saving_on_signal(lambda: state_of(1)):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            time.sleep(20)
            os._exit(0)
        os.read(read, 1)  # Python drops signals that arrive while it forks.
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_other_threads_cannot_catch_signals(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            with Run(tmp_path).saving_on_signal(lambda: state_of(1)):
                pass
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


# ---- How schedulers end jobs ----

TRAINING = """
import os, signal, sys, time, torch, warnings
warnings.simplefilter("ignore")
import torch_ckpt
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
state = {"w": torch.zeros(5000), "step": 0}  # As `state_of` makes it.
numbers = [getattr(signal, name) for name in sys.argv[2:]] or [signal.SIGTERM]
with torch_ckpt.Run(sys.argv[1], timeout_s=60) as run:
    with run.saving_on_signal(lambda: state, grace_s=20, signals=numbers):
        for step in range(1, 100_000):
            time.sleep(0.01)
            state["w"] += 1
            state["step"] = step
            if step == 5:
                open(sys.argv[1] + ".begun." + os.environ.get("RANK", "0"), "w").close()
            run.should_save(step)
"""


@contextlib.contextmanager
def started(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A job in a session of its own, which ends with the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def until_begun(job: subprocess.Popen[str], run: Path, ranks: int = 1) -> None:
    deadline = time.monotonic() + 60
    while not all(run.with_name(f"{run.name}.begun.{rank}").exists() for rank in range(ranks)):
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_after(job: subprocess.Popen[str], grace_s: float) -> int:
    """Kills a job if it has not ended in time, as schedulers do; returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    return job.wait()


def assert_is_last_step(run: Path, job: subprocess.Popen[str]) -> None:
    """The step that the log names as the last one is restored."""
    _, log = job.communicate()
    match = re.search(r"ends the training of .*: step (\d+) was saved", log)
    assert match, log
    assert restored(Run(run)) == int(match[1]) >= 5


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


@pytest.mark.slow
def test_slurm_signals_each_process_of_a_step(run: Path, script: Path) -> None:
    """``sbatch --signal=USR1@60``, and SIGTERM at the time limit."""
    with started(sys.executable, script, run, "SIGUSR1", "SIGTERM") as job:
        until_begun(job, run)
        job.send_signal(signal.SIGUSR1)
        status = kill_after(job, 20)
    assert status == 128 + signal.SIGUSR1
    assert_is_last_step(run, job)


BATCH = """
trap 'kill -TERM "$child"' TERM
"$@" &
child=$!
wait "$child"
wait "$child"
"""


@pytest.mark.slow
def test_slurm_signals_the_batch_shell_which_passes_the_signal_on(run: Path, script: Path) -> None:
    """``sbatch --signal=B:TERM@60``."""
    with started("bash", "-c", BATCH, "batch", sys.executable, script, run) as job:
        until_begun(job, run)
        job.send_signal(signal.SIGTERM)
        status = kill_after(job, 20)
    assert status == 143
    assert_is_last_step(run, job)


@pytest.mark.slow
def test_kubernetes_signals_process_1_of_a_container(run: Path, script: Path) -> None:
    """SIGTERM to process 1 alone, and SIGKILL to all after the grace period."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("PID namespaces cannot be made here")
    with started(*unshare, sys.executable, script, run) as job:
        until_begun(job, run)
        [first] = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        status = kill_after(job, 20)
    assert status == 143
    assert_is_last_step(run, job)


@pytest.mark.slow
def test_torchrun_signals_its_workers(run: Path, script: Path) -> None:
    """SIGTERM to ``torchrun``, which sends it to its workers, and SIGKILL after 30 s."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with started(*torchrun, script, run) as job:
        until_begun(job, run, 2)
        job.send_signal(signal.SIGTERM)
        kill_after(job, 40)
    assert_is_last_step(run, job)
