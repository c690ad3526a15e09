"""What a run does if storage makes a save fail: it raises, or warns and trains on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from waits import until

from torch_ckpt import Run
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.failures import PromotionFailures, storage_failure

pytestmark = pytest.mark.timeout(120)

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}
SMALL, LARGE = {"w": torch.ones(3)}, {"w": torch.ones(3 << 20)}  # LARGE does not fit the disk.


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_after_failures_and_the_next_save_works(
    mode: str, small_disk: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(small_disk / "run", every=1, on_failure="warn", **MODES[mode]) as run:
        for step, state in enumerate([SMALL, LARGE, LARGE, SMALL], start=1):
            assert run.should_save(step)
            saved = run.save(step, state)
            assert saved == (mode != "direct" or state is SMALL)
        run.wait()
        assert run.failures == 2
        assert run.latest_step() == 4
    told = [record for record in caplog.records if "a save has failed" in record.getMessage()]
    assert len(told) == 1
    assert "No space left" in told[0].getMessage()
    assert "step-1" in os.listdir(small_disk / "run")


@pytest.mark.parametrize("mode", MODES)
def test_failures_in_a_row_are_raised_in_the_end(
    mode: str, small_disk: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(small_disk / "run", on_failure="warn", max_failures=2, **MODES[mode])
    states = [LARGE, SMALL, LARGE, LARGE]
    for step, state in enumerate(states[:3], start=1):  # A success is between two failures.
        run.save(step, state)
    if run.asynchronous:  # Then a failure is known at the next save.
        assert run.save(4, LARGE)
    with pytest.raises(BaseException, match="No space left") as raised:
        run.save(5, LARGE)
    assert "2 saves in a row have failed" in "".join(raised.value.__notes__)
    assert run.failures == 2  # After these, training went on.
    assert Run(small_disk / "run").latest_step() == 2  # The agent has a newer one in memory.
    run.close()


def test_a_failure_is_raised_by_default(small_disk: Path) -> None:
    with Run(small_disk / "run") as run:
        with pytest.raises(BaseException, match="No space left"):
            run.save(1, LARGE)
        assert run.failures == 0


def test_a_wait_raises_whatever_the_option(small_disk: Path) -> None:
    run = Run(small_disk / "run", asynchronous=True, on_failure="warn")
    run.save(1, LARGE)
    with pytest.raises(StorageError, match="step 1 was not saved") as raised:
        run.close()
    assert raised.value.errno == errno.ENOSPC


def test_a_mistake_of_the_program_is_raised_whatever_the_option(tmp_path: Path) -> None:
    with (
        Run(tmp_path, on_failure="warn") as run,
        pytest.raises(BaseException, match="cannot pickle"),
    ):
        run.save(1, {"w": (_ for _ in ())})


def test_the_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_failure='ignore' is not one of raise, warn"):
        Run(tmp_path, on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_failures=0 is not positive"):
        Run(tmp_path, max_failures=0)


def test_a_save_by_the_agent_on_a_full_disk_counts_once(small_disk: Path, memory: Path) -> None:
    """No byte of it can be written, also none of its metrics."""
    run = Run(small_disk / "run", asynchronous=True, agent=True, on_failure="warn", max_failures=2)
    run.save(1, SMALL)
    run.wait()
    with (small_disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while other.write(bytes(4096)):
            pass
    assert run.save(2, SMALL, metrics={"loss": 1.0})
    assert run.save(3, SMALL, metrics={"loss": 1.0})
    assert run.failures == 1
    with pytest.raises(StorageError) as raised:
        run.save(4, SMALL, metrics={"loss": 1.0})
    assert "2 saves in a row have failed" in "".join(raised.value.__notes__)
    run.close()
    # The agent tries once more to write the last step before it ends.
    until(lambda: [path.name for path in (small_disk / "run").glob("step-*")] == ["step-1"])


def failed_on(causes: dict[int, Exception]) -> CheckpointException:
    return CheckpointException("write", {rank: _wrap_exception(e) for rank, e in causes.items()})


def test_storage_is_the_reason_if_all_ranks_that_failed_by_themselves_failed_by_it() -> None:
    full, ended = StorageError("full", errno.ENOSPC), CancelledError("another rank failed")
    assert storage_failure(full) == full
    assert storage_failure(failed_on({0: full})) == full
    assert storage_failure(failed_on({0: ended, 1: full})) == full
    assert storage_failure(failed_on({0: full, 1: ValueError("no")})) is None
    assert storage_failure(failed_on({0: ended})) is None
    assert storage_failure(StorageError("another save was committed", errno.EEXIST)) is None
    assert storage_failure(CheckpointError("another save")) is None


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "torch_ckpt")


def test_a_local_directory_that_cannot_be_listed_names_no_step() -> None:
    failures = PromotionFailures(Location("/run"), "raise", 3)
    failures.add(None, StorageError("cannot list /local", errno.EIO))
    expected = r"^steps were not promoted to /run: StorageError: cannot list /local$"
    with pytest.raises(StorageError, match=expected):
        raise failures.take() or AssertionError
