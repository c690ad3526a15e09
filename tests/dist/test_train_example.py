"""The training example, killed and resumed, follows the loss curve it would have followed anyway.

Each run is a real one of `examples/train_fsdp.py`, tiny, with its ranks on gloo. Linux only:
torchrun starts each rank in a session of its own, out of reach of a signal to its process group, so
the ranks are found in /proc and killed through pidfds.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
SAVE_EVERY = 8
KILL_AFTER = SAVE_EVERY + 3  # Between the first checkpoint and the second.
RUN_TIMEOUT_S = 120
KILL_TIMEOUT_S = 30

TINY = f"--layers 2 --width 48 --heads 2 --context 32 --steps {STEPS} --save-every {SAVE_EVERY}"


def descendants(pid: int) -> list[int]:
    """Returns the processes below ``pid``, parents before children."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # A process that ended meanwhile.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and all below it at once, and returns when they have ended."""
    if process.poll() is None:
        with contextlib.ExitStack() as stack:
            doomed = []
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    doomed.append(os.pidfd_open(pid))
                    stack.callback(os.close, doomed[-1])
            for pidfd in doomed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            for pidfd in doomed:
                ended, _, _ = select.select([pidfd], [], [], KILL_TIMEOUT_S)
                assert ended, "a killed rank did not end"
    process.wait()


@contextlib.contextmanager
def training(run: Path, *, ranks: int, options: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the example on ``ranks`` ranks (one: without torchrun); leaves no process behind."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    script = [str(ROOT / "examples" / "train_fsdp.py"), "--dir", str(run), "--log-every=1"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    process = subprocess.Popen(
        [
            sys.executable,
            *(launcher if ranks > 1 else []),
            *script,
            *TINY.split(),
            *options.split(),
        ],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(run.parent),  # A killed torchrun leaves its own files there.
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)
        if process.stdout:
            process.stdout.close()


def train_to_the_end(run: Path, *, ranks: int, options: str) -> str:
    """Runs the example and returns what it printed."""
    with training(run, ranks=ranks, options=options) as process:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def train_until_killed(run: Path, *, ranks: int, options: str) -> None:
    """Runs the example and kills all its ranks soon after its first checkpoint."""
    with training(run, ranks=ranks, options=options) as process:
        assert process.stdout is not None
        seen = any(line.startswith(f"step {KILL_AFTER}/") for line in process.stdout)
        kill(process)
    assert seen, f"the run ended before step {KILL_AFTER}"
    assert KILL_AFTER <= len(curve(run)) < STEPS, "the kill came too late to interrupt the run"


def curve(run: Path) -> list[dict[str, Any]]:
    """Returns the run's log: step, loss and learning rate, in full precision, of every step."""
    return [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]


def resume(run: Path, *, ranks: int, options: str) -> int:
    """Resumes a killed run up to its end and returns the step of the checkpoint it went on from."""
    output = train_to_the_end(run, ranks=ranks, options=f"{options} --resume")
    resumed = re.search(r"^resumed from step (\d+)$", output, re.MULTILINE)
    assert resumed, output
    steps = [int(step) for step in re.findall(r"^step (\d+)/", output, re.MULTILINE)]
    assert steps == list(range(int(resumed[1]) + 1, STEPS + 1)), "steps were repeated or left out"
    return int(resumed[1])


@pytest.fixture(scope="module")
def whole_and_killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs on 2 ranks without dropout: one that trained to its end, one that was killed."""
    base = tmp_path_factory.mktemp("runs")
    train_to_the_end(base / "whole", ranks=2, options="")
    train_until_killed(base / "killed", ranks=2, options="")
    return base / "whole", base / "killed"


def test_resume_on_the_same_ranks_repeats_the_losses_bit_for_bit(tmp_path: Path) -> None:
    options = "--dropout 0.1"  # So that the losses depend on each rank's random state as well.
    train_to_the_end(tmp_path / "whole", ranks=2, options=options)
    train_until_killed(tmp_path / "killed", ranks=2, options=options)

    start = resume(tmp_path / "killed", ranks=2, options=options)

    assert start >= SAVE_EVERY
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")


@pytest.mark.parametrize("ranks", [3, 1])
def test_resume_on_other_ranks_matches_the_losses_within_rounding(
    ranks: int, whole_and_killed: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, killed = whole_and_killed
    resumed = shutil.copytree(killed, tmp_path / "resumed")

    start = resume(resumed, ranks=ranks, options="")

    assert start >= SAVE_EVERY
    expected = [pytest.approx(step, rel=1e-5, abs=0) for step in curve(whole)]
    assert curve(resumed) == expected
