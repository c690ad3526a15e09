"""A failed promotion is one error, with one type and message, on all ranks and in each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from local_machines import run_on, state_of
from ranks import Worlds
from waits import until

from torch_ckpt import Run
from torch_ckpt.errors import RankTimeoutError, StorageError

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("memory")]

SOON_S = 10.0  # For a machine that is busy.
PLACES = {"one directory": [0, 0, 0], "a directory for each machine": [0, 1, 1]}


CALLS: dict[str, Callable[[Run], object]] = {
    "save": lambda run: run.save(2, state_of(2)),
    "wait": lambda run: run.wait(promoted=True),
    "close": Run.close,
}


def errors_of(folder: Path, machines: Sequence[int], calls: Sequence[str]) -> list[str]:
    """A file is in the place of a step in the directory of the run."""
    if dist.get_rank() == 0:
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / "step-1").touch()
    dist.barrier()
    run = run_on(folder, machines)
    run.save(1, state_of(1))
    found = []
    for call in calls:
        if call == "save":
            until(lambda: (report := run._promotion.report()) is None or report.failure is not None)
            dist.barrier()
        with pytest.raises(StorageError) as caught:
            CALLS[call](run)
        assert type(caught.value) is StorageError
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("calls", [("save", "wait", "close"), ("close",)], ids="-".join)
def test_a_failed_promotion_is_the_same_error_on_all_ranks_and_in_each_call(
    worlds: Worlds, tmp_path: Path, places: str, calls: Sequence[str]
) -> None:
    seen = worlds.run(3, errors_of, tmp_path, PLACES[places], calls)
    assert len({message for found in seen for message in found}) == 1, seen
    assert "step 1 was not promoted" in seen[0][0]


def save_and_leave(folder: Path, machines: Sequence[int], is_leaving: bool) -> None:
    with run_on(folder, machines) as run:
        run.save(1, state_of(1))
        if is_leaving:
            raise LookupError("the data is lost")


def close_beside_an_error(folder: Path, machines: Sequence[int], leaving: int) -> str:
    """One rank leaves its block by an error, and lives on."""
    begin, is_leaving = time.monotonic(), dist.get_rank() == leaving
    with pytest.raises(LookupError if is_leaving else RankTimeoutError) as caught:
        save_and_leave(folder, machines, is_leaving)
    assert time.monotonic() - begin < SOON_S
    dist.barrier()
    with run_on(folder, machines) as run:
        assert run.restore(state_of(0)) == 1
    return str(caught.value)


@pytest.mark.thin(1)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_a_rank_that_leaves_a_run_by_an_error_does_not_let_the_others_wait_in_close(
    worlds: Worlds, tmp_path: Path, places: str, leaving: int
) -> None:
    seen = worlds.run(3, close_beside_an_error, tmp_path, PLACES[places], leaving)
    for rank, message in enumerate(seen):
        assert "the data is lost" in message
        assert rank == leaving or f"rank {leaving} failed" in message
    assert (tmp_path / "run" / "step-1" / ".metadata").exists()
