"""An error of one value names its FQN, whatever the value is, and however it is saved or loaded."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.unsavable import (
    MAY_BE_SAVED,
    NOT_NAMED_BY_DCP,
    UNSAVABLE,
    Setter,
    endless,
    without_memory,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastWriter, RankState, Run, SafetensorsWriter, SnapshotStager
from torch_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.timeout(180)

FQN = "model.layers.1.x"
SAVE_TIMEOUT_S = 50
Save = Callable[[Any, Path], None]
Ways = Callable[[], AbstractContextManager[Save]]


def around(value: Any) -> dict[str, Any]:
    """A state dict with a value deep inside, between others that can be saved."""
    return {"a": torch.ones(3), "model": {"layers": [{"x": torch.ones(2)}, {"x": value}]}, "z": 1}


@contextlib.contextmanager
def save_now() -> Iterator[Save]:
    yield lambda state, path: torch_ckpt.save(state, checkpoint_id=path)


@contextlib.contextmanager
def save_by_dcp() -> Iterator[Save]:
    yield lambda state, path: dcp.save(state, storage_writer=FastWriter(path), no_dist=True)


def in_background(stager: SnapshotStager | None = None, **options: Any) -> Ways:
    @contextlib.contextmanager
    def saves() -> Iterator[Save]:
        def save(state: Any, path: Path) -> None:
            writer = FastWriter(path, stager=stager)
            saved: Any = torch_ckpt.async_save(state, storage_writer=writer, **options)
            getattr(saved, "upload_completion", saved).result(SAVE_TIMEOUT_S)

        yield save

    return saves


@contextlib.contextmanager
def save_by_dcps_async_save() -> Iterator[Save]:
    def save(state: Any, path: Path) -> None:
        saved: Any = dcp.async_save(state, storage_writer=FastWriter(path), no_dist=True)
        saved.result(SAVE_TIMEOUT_S)

    yield save


@contextlib.contextmanager
def save_installed() -> Iterator[Save]:
    def save(state: Any, path: Path) -> None:
        saved: Any = dcp.async_save(state, storage_writer=FileSystemWriter(path))
        saved.result(SAVE_TIMEOUT_S)

    with torch_ckpt.installed():
        yield save


@contextlib.contextmanager
def save_by_agent() -> Iterator[Save]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(folder, asynchronous=True, agent=True) as run,
    ):
        steps = itertools.count(1)

        def save(state: Any, _: Path) -> None:
            run.save(next(steps), state)
            run.wait()

        yield save


@contextlib.contextmanager
def save_model() -> Iterator[Save]:
    def save(state: Any, path: Path) -> None:
        del state["z"]  # An object.
        torch_ckpt.save(state, storage_writer=SafetensorsWriter(path))

    yield save


@contextlib.contextmanager
def save_model_in_background() -> Iterator[Save]:
    def save(state: Any, path: Path) -> None:
        del state["z"]
        saved: Any = torch_ckpt.async_save(state, storage_writer=SafetensorsWriter(path))
        saved.result(SAVE_TIMEOUT_S)

    yield save


WAYS: dict[str, Ways] = {
    "now": save_now,
    "by DCP": save_by_dcp,
    "in a thread": in_background(),
    "staged in the background": in_background(SnapshotStager(blocking=False)),
    "in a process": in_background(async_checkpointer_type=AsyncCheckpointerType.PROCESS),
    "by DCP's async_save": save_by_dcps_async_save,
    "installed": save_installed,
    "by an agent": save_by_agent,
    "safetensors": save_model,
    "safetensors in a thread": save_model_in_background,
}

DCPS_OWN = {(value, way) for value in NOT_NAMED_BY_DCP for way in ("by DCP", "by DCP's async_save")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thin(0.25)
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_save_names_the_value(way: str, tmp_path: Path) -> None:
    wrong = {}
    with WAYS[way]() as save:
        for number, (value, make) in enumerate(UNSAVABLE.items()):
            error: BaseException | None = None
            try:
                save(around(make()), tmp_path / str(number))
            except BaseException as caught:
                error = caught
            if error is None and value not in MAY_BE_SAVED:
                wrong[value] = "no error"
            if error is not None and FQN not in str(error) and (value, way) not in DCPS_OWN:
                wrong[value] = str(error)
    assert wrong == {}


class Loss(Exception):
    """An error of a program."""


class RaisesWhat:
    """Raises an error of this class when Python copies or pickles it."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __getstate__(self) -> Any:
        raise self.kind("epoch")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The errors of ranks in an error, and what caused each."""
    found = [error]
    if isinstance(error, CheckpointException):
        found = [cause for cause, _ in error.failures.values()]
    for one in found:
        cause: BaseException | None = one
        while cause is not None:
            yield cause
            cause = cause.__cause__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"safetensors"}))  # It has no objects.
def test_an_error_of_the_program_keeps_its_class(way: str, tmp_path: Path) -> None:
    wrong = {}
    with WAYS[way]() as save:
        for kind in (KeyError, NotImplementedError, ValueError, RuntimeError, OSError, Loss):
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                save(around(RaisesWhat(kind)), tmp_path / kind.__name__)
            error = caught.value
            found = [one for one in causes(error) if type(one) is kind and "epoch" in str(one)]
            if any(isinstance(one, UnsupportedError) for one in causes(error)):
                found = []
            if not found or FQN not in str(error) + "".join(map(str, found)):
                wrong[kind.__name__] = [repr(one) for one in causes(error)]
    assert wrong == {}


# ---- Loads ----


def merge(*_: Any) -> Any:
    raise ValueError("no")


class Custom:
    """A class that no load allows."""


LOADED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a setter that raises": (Setter, Setter),
    "a setter that raises, in a tuple": (lambda: (1, Setter()), lambda: (1, Setter())),
    "a setter of a rank that raises": (
        lambda: RankState(lambda: 1, print),
        lambda: RankState(lambda: 1, merge),
    ),
    "a class that is not allowed": (Custom, Custom),
    "a tensor for an object": (lambda: torch.ones(2), lambda: 7),
    "another shape": (lambda: torch.ones(2), lambda: torch.ones(3)),
    "a target without memory": (
        lambda: torch.ones(64),
        lambda: without_memory(torch.ones(64)),
    ),
    "an object with a state for a tensor": (lambda: torch.ones(2), Setter),
    "a list that contains itself": (lambda: [torch.ones(2)], lambda: endless(list)),
    "a dict that contains itself": (lambda: {"w": torch.ones(2)}, lambda: endless(dict)),
    "a tuple of another length": (lambda: (Setter(),), lambda: (Setter(), Setter())),
}


def load(state: Any, path: Path) -> None:
    torch_ckpt.load(state, checkpoint_id=path)


def load_by_dcps_planner(state: Any, path: Path) -> None:
    torch_ckpt.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner())


def load_installed(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.load(state, checkpoint_id=path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", [load, load_by_dcps_planner, load_installed])
@pytest.mark.parametrize("value", LOADED)
def test_a_failed_load_names_the_value(
    value: str, load: Callable[..., None], tmp_path: Path
) -> None:
    saved, loaded = LOADED[value]
    torch_ckpt.save(around(saved()), checkpoint_id=tmp_path)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        load(around(loaded()), tmp_path)
    assert FQN in str(caught.value)
