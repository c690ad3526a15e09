"""Processes that save to a local directory, and are killed while they promote."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forks import run_python
from waits import until

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.verify import examine

pytestmark = pytest.mark.timeout(600)

RATE = 64 << 20  # A step is promoted in about 0.1 s.
STEP_NBYTES = 8 << 20


def _state(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((1 << 18,), float(10 * step + i)) for i in range(8)}


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _restored(run: Run) -> int:
    state = _state(-1)
    step = run.restore(state) or 0
    if step:
        assert all(torch.equal(state[name], value) for name, value in _state(step).items())
    return step


def _trains_until_killed(folder: Path, after_s: float) -> None:
    """Forks a process that restores, saves steps, and records each that was saved."""
    pid = os.fork()
    if pid:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return
    try:
        run = Run(
            folder / "run",
            local=folder / "local",
            keep_last=3,
            promote_bytes_per_s=RATE,
            writer={"thread_count": 2},
        )
        for step in range(_restored(run) + 1, 1000):
            run.save(step, _state(step))
            with (folder / "saved").open("a") as log:
                log.write(f"{step}\n")
            time.sleep(0.03)
    finally:
        os._exit(1)


def test_a_process_that_is_killed_at_any_moment_loses_no_step(tmp_path: Path, full: bool) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(100 if full else 8):
        _trains_until_killed(tmp_path, moments.uniform(0.02, 0.9))
        local, run = Location(tmp_path / "local"), Location(tmp_path / "run")
        log = tmp_path / "saved"
        saved = [int(line) for line in log.read_text().split()[-1:]] if log.exists() else []
        for directory in (local, run):
            for step in committed_steps(directory):
                assert not examine(directory / f"step-{step}").damage
        with Run(tmp_path / "run", local=tmp_path / "local", keep_last=3) as again:
            restored = _restored(again)
            assert restored >= max(saved, default=0)
            again.save(restored + 1, _state(restored + 1))  # Until then, it removes nothing.
        in_run = committed_steps(run)
        assert in_run[0] == restored + 1
        assert not restored or in_run[1] == restored  # What was left has been promoted.
        names = [name for name in run.names() if not name.startswith("term-")]
        # Three steps, the id, the events, and what the last kill has left.
        assert len(names) <= 6, names
        assert _nbytes(tmp_path / "run") < 3.5 * STEP_NBYTES  # And no data of another step.


_TRAINING = """
import os, sys, time, torch
from torch_ckpt import Run
folder = sys.argv[1]
state = {"w": torch.zeros(1 << 22)}
with Run(f"{folder}/run", local=f"{folder}/local", promote_bytes_per_s=int(sys.argv[2])) as run:
    with run.saving_on_signal(lambda: state, grace_s=float(sys.argv[3])):
        for step in range(1, 10_000):
            state["w"].fill_(step)
            if step == 3:
                open(f"{folder}/trains", "w").write(str(os.getpid()))
            time.sleep(0.01)
            run.should_save(step)
"""


@pytest.mark.thin("1048576-3.0-False")
@pytest.mark.parametrize(
    ("rate", "grace_s", "promoted"), [(1 << 30, 30.0, True), (1 << 20, 3.0, False)]
)
def test_a_signal_promotes_as_much_as_the_grace_allows(
    tmp_path: Path, rate: int, grace_s: float, promoted: bool
) -> None:
    with ThreadPoolExecutor() as pool:
        training = pool.submit(
            run_python, "-c", _TRAINING, tmp_path, rate, grace_s, folder=tmp_path
        )
        trains = tmp_path / "trains"
        until(lambda: training.done() or (trains.exists() and trains.read_text()))
        assert not training.done(), training.result()
        os.kill(int(trains.read_text()), signal.SIGTERM)
        begin = time.monotonic()
        ended = training.result()
    assert ended.returncode == 143, ended.stdout
    assert time.monotonic() - begin < grace_s + 20  # The machine may be busy.
    (step,) = committed_steps(Location(tmp_path / "local"))
    assert committed_steps(Location(tmp_path / "run")) == ([step] if promoted else [])
    assert ("still being promoted" in ended.stdout) == (not promoted)
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        state = {"w": torch.zeros(1 << 22)}
        assert run.restore(state) == step
        assert torch.equal(state["w"], torch.full((1 << 22,), float(step)))
    assert committed_steps(Location(tmp_path / "run")) == [step]
