"""Errors of classes that are no use to a message: other ranks hear of them at once, too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run
from torch_ckpt.errors import add_name, portable_error, text_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

SOON_S, TIMEOUT_S = 5.0, 12.0


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class StrExits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class StrIsNone(Exception):
    def __str__(self) -> Any:
        return None


class PicklingExits(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


ERRORS: list[Callable[[], Exception]] = [
    *(StrRaises, StrExits, StrIsNone, PicklingExits),
    lambda: ValueError("\ud800"),
    lambda: ValueError("x" * 10_000_000),
    lambda: ValueError(torch.ones(3)),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_every_error_has_a_text_that_is_short_and_can_be_encoded(number: int) -> None:
    for error in (ERRORS[number](), portable_error(ERRORS[number]())):
        add_name(error, "save", "model.w")  # type: ignore[arg-type]
        text = text_of(error)
        assert len(text.encode()) < 100_000
        assert text


class Model:
    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


class Value:
    """Pickles unless a test makes it raise."""

    def __reduce__(self) -> Any:
        return Value, ()


PLACES: list[tuple[type, str]] = [
    *((Model, "state_dict"), (Model, "load_state_dict"), (Value, "__reduce__")),
    *((FastSavePlanner, "create_local_plan"), (FastWriter, "write_data")),
    *((FastLoadPlanner, "create_local_plan"), (FastReader, "read_data")),
]


def raise_everywhere(path: Path, full: bool) -> None:
    """Lets rank 1 raise each error at each place of a save and of a load.

    Unless ``full``, each place raises two of the errors, of which the next place raises one too.
    """
    run = Run(path / "run", timeout_s=TIMEOUT_S, record=True)
    state = {"m": Model(), "own": torch.ones(3), f"value.{dist.get_rank()}": Value()}
    loaded = {"m": Model(), "own": torch.ones(3)}
    at: dict[str, Any] = {"checkpoint_id": path / "a", "timeout_s": TIMEOUT_S}
    calls = [
        lambda: torch_ckpt.save(state, **at),
        lambda: torch_ckpt.load(loaded, **at),
        lambda: run.save(1, state),
        lambda: run.restore(loaded),
    ]
    for call in calls:
        call()
    for number, (owner, method) in enumerate(PLACES):
        for make in ERRORS if full else (ERRORS * 2)[number : number + 2]:
            for call in calls:
                begin = time.monotonic()
                with raising(owner, method, make), contextlib.suppress(BaseException):
                    call()
                seconds: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(seconds, time.monotonic() - begin)
                assert max(seconds) < SOON_S, f"{owner.__name__}.{method}, {make}: {seconds}"


@contextlib.contextmanager
def raising(owner: type, method: str, make: Callable[[], Exception]) -> Iterator[None]:
    if dist.get_rank() != 1:
        yield
        return
    with mock.patch.object(owner, method, side_effect=make()):
        yield


def test_an_error_without_a_text_fails_a_call_on_all_ranks_at_once(
    worlds: Worlds, tmp_path: Path, full: bool
) -> None:
    worlds.run(2, raise_everywhere, tmp_path, full, timeout_s=100)


def fail_before_the_writer_begins(path: Path) -> list[str]:
    """Saves with one writer, and then fails the next save before the writer has begun it."""
    writer = FastWriter(path / "first")
    torch_ckpt.save({"own": torch.ones(3)}, storage_writer=writer, timeout_s=TIMEOUT_S)
    dist.barrier()
    writer.reset(path / "second")
    fails = mock.patch.object(FastSavePlanner, "set_up_planner", side_effect=ValueError("it fails"))
    with fails, contextlib.suppress(BaseException):
        torch_ckpt.save({"own": torch.ones(3)}, storage_writer=writer, timeout_s=TIMEOUT_S)
    dist.barrier()
    return sorted(each.name for each in (path / "first").glob("*.distcp"))


def test_a_save_that_fails_early_removes_nothing_of_the_one_before(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, fail_before_the_writer_begins, tmp_path)
    loaded = {"own": torch.zeros(3)}
    torch_ckpt.load(loaded, checkpoint_id=tmp_path / "first")
    assert loaded["own"].eq(1).all()
