"""The training example, killed and resumed, repeats the losses of a run that nobody killed.

Each run is a real one of `examples/train_fsdp.py`, tiny, with its ranks on gloo.
"""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from example_runs import kill, output_of, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 80
SAVE_EVERY = 8
KILL_AFTER = SAVE_EVERY + 3  # Between the first checkpoint and the second.

TINY = f"--layers 2 --width 48 --heads 2 --context 32 --steps {STEPS} --save-every {SAVE_EVERY}"


def losses_of(output: Iterable[str]) -> Iterator[tuple[int, float]]:
    """Yields step and loss, in full precision, of the lines that the example prints."""
    for line in output:
        if match := re.match(r"step (\d+)/\d+  loss (\S+)$", line):
            yield int(match[1]), float(match[2])


def train_to_the_end(run: Path, *, ranks: int, options: str = "") -> dict[int, float]:
    """Runs the example to its last step and returns the loss of each step that it made."""
    options = f"--dir {run} {TINY} {options}"
    output = output_of("train_fsdp.py", options, ranks=ranks, folder=run.parent)
    losses = dict(losses_of(output.splitlines()))
    started = re.search(rf"^{ranks} ranks, started from step (\d+)$", output, re.MULTILINE)
    assert started, output
    assert list(losses) == list(range(int(started[1]) + 1, STEPS + 1)), "steps missing or repeated"
    return losses


def train_until_killed(run: Path, *, ranks: int, options: str = "") -> dict[int, float]:
    """Runs the example, and kills all its ranks soon after its first checkpoint is committed."""
    losses = {}
    options = f"--dir {run} {TINY} {options}"
    with running("train_fsdp.py", options, ranks=ranks, folder=run.parent) as process:
        assert process.stdout is not None
        for step, loss in losses_of(process.stdout):
            losses[step] = loss
            if step >= KILL_AFTER and (run / f"step-{SAVE_EVERY}" / ".metadata").exists():
                break
        kill(process)
    assert KILL_AFTER <= len(losses) < STEPS, "the kill did not interrupt the run"
    return losses


@pytest.fixture(scope="module")
def whole_and_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[int, float], dict[int, float], Path]:
    """Losses of a whole run and of a killed one, on 2 ranks; and the killed run's directory."""
    base = tmp_path_factory.mktemp("runs")
    whole = train_to_the_end(base / "whole", ranks=2)
    return whole, train_until_killed(base / "killed", ranks=2), base / "killed"


def test_resume_on_the_same_ranks_repeats_the_losses_bit_for_bit(tmp_path: Path) -> None:
    options = "--dropout 0.1"  # The losses depend on each rank's random state as well.
    whole = train_to_the_end(tmp_path / "whole", ranks=2, options=options)
    killed = train_until_killed(tmp_path / "killed", ranks=2, options=options)
    resumed = train_to_the_end(tmp_path / "killed", ranks=2, options=options)
    assert min(resumed) > SAVE_EVERY
    assert {**killed, **resumed} == whole


@pytest.mark.parametrize("ranks", [3, 1])
def test_resume_on_other_ranks_matches_the_losses_within_rounding(
    ranks: int, whole_and_killed: tuple[dict[int, float], dict[int, float], Path], tmp_path: Path
) -> None:
    whole, killed, run = whole_and_killed
    resumed = train_to_the_end(shutil.copytree(run, tmp_path / "resumed"), ranks=ranks)
    assert min(resumed) > SAVE_EVERY
    assert {**killed, **resumed} == pytest.approx(whole, rel=1e-5, abs=0)
