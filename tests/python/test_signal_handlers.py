"""Signal handlers that save at any moment of another save do not wait for what they interrupt."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waits import until

import torch_ckpt
from torch_ckpt import FastWriter, Run, SnapshotStager
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.errors import CheckpointError

LONGEST_S = 10


@pytest.fixture(autouse=True)
def _former_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(
    moments: int,
    seed: int,
    longest_s: float,
    work: Callable[[int], object],
    handler: Callable[[], object],
) -> None:
    """Calls ``work``, each time with an alarm at a random moment. Every call must end soon."""
    handled = []

    def handle(*_: object) -> None:
        handler()
        handled.append(True)

    signal.signal(signal.SIGALRM, handle)
    rng = random.Random(seed)
    for moment in range(moments):
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest_s))
        begin = time.monotonic()
        work(moment)
        until(lambda moment=moment: len(handled) > moment)  # type: ignore[misc]
        assert time.monotonic() - begin < LONGEST_S


@pytest.mark.parametrize("asynchronous", [False, True])
def test_handler_that_saves_a_run_never_waits_for_the_save_that_it_interrupts(
    asynchronous: bool, seed: int, tmp_path: Path, full: bool
) -> None:
    run = Run(tmp_path, asynchronous=asynchronous, keep_last=2, timeout_s=60)
    state = {"w": torch.ones(1 << 18), "objects": list(range(2000))}
    saved, refused = [], []

    def save_in_handler() -> None:
        try:
            run.save(10_000 + len(saved), state)
            saved.append(True)
        except CheckpointError as error:
            refused.append(error)

    moments = 100 if full else 30
    interrupted(moments, seed, 0.03, lambda step: run.save(step, state), save_in_handler)
    assert all("a signal handler has interrupted" in str(error) for error in refused)
    assert len(saved) + len(refused) == moments
    assert refused
    run.close()
    assert Run(tmp_path).restore({"w": torch.zeros(1 << 18), "objects": []}) is not None


def test_handler_that_saves_a_run_waits_for_a_save_of_another_thread(
    seed: int, tmp_path: Path
) -> None:
    run = Run(tmp_path, asynchronous=True, keep_last=2, timeout_s=60)
    state = {"w": torch.ones(1 << 18)}

    def save_in_thread(step: int) -> None:
        thread = threading.Thread(target=run.save, args=(step, state))
        thread.start()
        thread.join()

    interrupted(25, seed, 0.03, save_in_thread, lambda: run.save(7, state))
    run.close()


def test_handler_that_saves_asynchronously_does_not_wait_for_memory_that_it_has_interrupted(
    seed: int, tmp_path: Path, full: bool
) -> None:
    stager = SnapshotStager()
    state: dict[str, Any] = {f"w{i}": torch.ones(1 << 14) for i in range(64)}
    count = iter(range(1000))
    refused = []

    def save() -> None:
        writer = FastWriter(tmp_path / f"{next(count)}", stager=stager)
        torch_ckpt.async_save(state, storage_writer=writer, timeout_s=60).result()

    def save_in_handler() -> None:
        try:
            save()
        except CheckpointError as error:
            refused.append(error)

    interrupted(100 if full else 12, seed, 0.004, lambda _: save(), save_in_handler)
    assert all("a signal handler has interrupted" in str(error) for error in refused)


def test_memory_of_a_save_is_free_although_a_handler_has_interrupted_the_wait_for_its_future(
    tmp_path: Path,
) -> None:
    """The wait holds the lock of the future for a moment, and the thread cannot complete it."""
    stager = SnapshotStager()
    state = {"w": torch.ones(1 << 14)}

    def save(name: str) -> Any:
        writer = FastWriter(tmp_path / name, stager=stager)
        return torch_ckpt.async_save(state, storage_writer=writer, timeout_s=LONGEST_S)

    interrupted_future = save("1")
    with interrupted_future._condition:
        save_in_handler = save("2")

    assert save_in_handler.result(LONGEST_S) is not None
    assert interrupted_future.result(LONGEST_S) is not None


def test_use_by_another_thread_ends_after_the_timeout() -> None:
    exclusive = Exclusive("the run")
    holds, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive.use("save", 1):
            holds.set()
            ends.wait(LONGEST_S)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(LONGEST_S)
    with (
        pytest.raises(CheckpointError, match=r"another thread used the run for 0\.1 s"),
        exclusive.use("load", 0.1),
    ):
        pass
    ends.set()
    thread.join()
    with exclusive.use("load", 1):
        pass
