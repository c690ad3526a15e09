"""Runs that save when a scheduler ends them: the ways of Slurm, Kubernetes and torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT

from torch_ckpt import Run

pytestmark = pytest.mark.timeout(120)

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step)), "step": step}


def restored(directory: Path) -> int | None:
    state = state_of(-1)
    step = Run(directory).restore(state)
    assert step is None or (state["step"] == step and state["w"][0] == step)
    return step


def train(run: Run, *, signal_at: int, save_at: int = -1, steps: int = 10, **options: Any) -> None:
    """Trains, and gets SIGTERM within a step."""
    state = state_of(0)
    with run.saving_on_signal(lambda: state, **options):
        for step in range(1, steps + 1):
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            state["w"].fill_(step)
            state["step"] = step
            if step == save_at:
                run.save(step, state, persist="agent" not in str(type(run._backend)).lower())
            run.should_save(step)


@pytest.mark.parametrize("mode", MODES)
def test_the_step_that_ends_next_is_saved_and_the_process_ends(
    mode: str, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, **MODES[mode]) as run:
        with pytest.raises(SystemExit) as ended:
            train(run, signal_at=4)
        assert ended.value.code == 143
        assert restored(tmp_path) == 4  # On disk, before the process ends.
    assert f"SIGTERM ends the training of {tmp_path}: step 4 was saved" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_in_memory_alone_is_written_and_one_on_disk_is_not_saved_twice(
    mode: str, tmp_path: Path, memory: Path
) -> None:
    with Run(tmp_path, **MODES[mode]) as run:
        with pytest.raises(SystemExit):
            train(run, signal_at=4, save_at=4)
        assert restored(tmp_path) == 4
        assert run.saved == 1


def test_a_step_that_cannot_be_saved_is_reported_and_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(SystemExit) as ended:
        train(Run(tmp_path / "run"), signal_at=2)
    assert ended.value.code == 143
    assert "step 2 was not saved: rank 0: " in caplog.text


def test_a_signal_that_arrives_before_a_block_without_further_steps_ends_the_process_as_before(
    tmp_path: Path,
) -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(True))
    try:
        run = Run(tmp_path)
        with run.saving_on_signal(lambda: state_of(1)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not received
        assert received
        with pytest.raises(RuntimeError, match="in use already"):
            nest(run)
    finally:
        signal.signal(signal.SIGTERM, before)


def nest(run: Run) -> None:
    with run.saving_on_signal(dict), run.saving_on_signal(dict):
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
state = {"w": torch.zeros(3), "step": 0}
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


def until_begun(run: Path, ranks: int = 1) -> None:
    deadline = time.monotonic() + 60
    while not all(run.with_name(f"{run.name}.begun.{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_after(job: subprocess.Popen[str], grace_s: float) -> int:
    """Kills a job if it has not ended in time, as schedulers do; returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    return job.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def test_slurm_signals_each_process_of_a_step(run: Path, script: Path) -> None:
    """``sbatch --signal=USR1@60``, and SIGTERM at the time limit."""
    with started(sys.executable, script, run, "SIGUSR1", "SIGTERM") as job:
        until_begun(run)
        job.send_signal(signal.SIGUSR1)
        status = kill_after(job, 20)
    assert status == 128 + signal.SIGUSR1
    assert restored(run) is not None


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
        until_begun(run)
        job.send_signal(signal.SIGTERM)
        status = kill_after(job, 20)
    assert status == 143
    assert restored(run) is not None


@pytest.mark.slow
def test_kubernetes_signals_process_1_of_a_container(run: Path, script: Path) -> None:
    """SIGTERM to process 1 alone, and SIGKILL to all after the grace period."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("PID namespaces cannot be made here")
    with started(*unshare, sys.executable, script, run) as job:
        until_begun(run)
        [first] = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        status = kill_after(job, 20)
    assert status == 143
    assert restored(run) is not None


@pytest.mark.slow
def test_torchrun_signals_its_workers(run: Path, script: Path) -> None:
    """SIGTERM to ``torchrun``, which sends it to its workers, and SIGKILL after 30 s."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with started(*torchrun, script, run) as job:
        until_begun(run, 2)
        job.send_signal(signal.SIGTERM)
        kill_after(job, 40)
    assert restored(run) is not None
