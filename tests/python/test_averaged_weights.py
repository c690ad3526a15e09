"""Averaged weights: saves while a program exchanges them with the model's, beside stock DCP.

An evaluation uses the averaged weights: it exchanges the storages of the model's parameters with
those of the average, and back. Meanwhile a background save of the former step is in progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import assert_same
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_ckpt
from torch_ckpt import Run

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("memory"),
    pytest.mark.filterwarnings("ignore"),
]


class Average:
    """Averaged weights with a counter, on which the decay depends, outside of their module."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.averaged = AveragedModel(
            model, multi_avg_fn=lambda *given: get_ema_multi_avg_fn(self.decay)(*given)
        )

    @property
    def decay(self) -> float:
        return min(0.9, (1 + self.updates) / (10 + self.updates))

    def update(self, model: nn.Module) -> None:
        self.averaged.update_parameters(model)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "averaged": self.averaged.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.averaged.load_state_dict(state["averaged"])


def by_data(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


def by_copies(one: torch.Tensor, other: torch.Tensor) -> None:
    before = one.detach().clone()
    with torch.no_grad():
        one.copy_(other)
        other.copy_(before)


EXCHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "data": by_data,
    "swap_tensors": torch.utils.swap_tensors,
    "copies": by_copies,
}


class Training:
    """A model of a few MB, its optimizer and its average; a ``Stateful``."""

    def __init__(self, exchange: str = "data") -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.average = Average(self.model)
        self.exchange = EXCHANGES[exchange]

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.randn(4, 512)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.model)

    @contextlib.contextmanager
    def with_averaged(self) -> Iterator[nn.Module]:
        """Exchanges the weights with the averaged ones within the block."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    def _exchange(self) -> None:
        averaged = self.average.averaged.module.parameters()
        for one, other in zip(self.model.parameters(), averaged, strict=True):
            self.exchange(one, other)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.average.load_state_dict(state["average"])


def trained_state() -> dict[str, Any]:
    """A target of loads: AdamW has a state after its first step only."""
    training = Training()
    training.step()
    return training.state_dict()


def by_run(**options: Any) -> Callable[[Path], Callable[[int, Any], Callable[[], Any]]]:
    def begin(path: Path) -> Callable[[int, Any], Callable[[], Any]]:
        run = Run(path, **options)

        def save(step: int, state: Any) -> Callable[[], Any]:
            run.save(step, state)
            return run.close if step == STEPS else run.wait

        return save

    return begin


def by_futures(**options: Any) -> Callable[[Path], Callable[[int, Any], Callable[[], Any]]]:
    def begin(path: Path) -> Callable[[int, Any], Callable[[], Any]]:
        def save(step: int, state: Any) -> Callable[[], Any]:
            where = path / f"step-{step}"
            return torch_ckpt.async_save(state, checkpoint_id=where, **options).result

        return save

    return begin


STEPS = 4
SAVES = {
    "direct": by_run(),
    "thread": by_run(asynchronous=True),
    "thread, all written": by_run(asynchronous=True, reuse="off"),
    "agent": by_run(asynchronous=True, agent=True),
    "async_save": by_futures(),
    "process": by_futures(async_checkpointer_type=AsyncCheckpointerType.PROCESS),
}


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("way", SAVES)
def test_a_save_has_the_weights_of_its_call_while_they_are_exchanged(
    tmp_path: Path, way: str, exchange: str
) -> None:
    training = Training(exchange)
    state = {"training": training}
    save = SAVES[way](tmp_path / "ours")
    for step in range(1, STEPS + 1):
        training.step()
        stocks = FileSystemWriter(tmp_path / "stock" / f"step-{step}")
        dcp.save(state, storage_writer=stocks, no_dist=True)
        wait = save(step, state)
        for _ in range(3):  # Evaluations.
            with training.with_averaged() as model, torch.no_grad():
                model.eval()(torch.randn(2, 512))
            model.train()
        training.step()  # And training.
        wait()
    for step in range(1, STEPS + 1):
        ours, stocks = ({"training": trained_state()} for _ in range(2))
        torch_ckpt.load(ours, checkpoint_id=tmp_path / "ours" / f"step-{step}")
        path = tmp_path / "stock" / f"step-{step}"
        dcp.load(stocks, storage_reader=FileSystemReader(path), no_dist=True)
        assert_same(ours, stocks)
        assert ours["training"]["average"]["updates"] == 2 * step - 1


@pytest.mark.parametrize("way", ["direct", "agent"])
def test_a_resumed_average_continues_as_an_uninterrupted_one(tmp_path: Path, way: str) -> None:
    training = Training()
    state = {"training": training}
    save = SAVES[way](tmp_path)
    for step in range(1, STEPS + 1):
        training.step()
        save(step, state)()
    torch.manual_seed(9)
    for _ in range(3):
        training.step()

    resumed = Training("swap_tensors")
    with resumed.with_averaged():  # A load fills the tensors that are there now.
        pass
    assert Run(tmp_path).restore({"training": resumed}) == STEPS
    assert resumed.average.updates == STEPS
    torch.manual_seed(9)
    for _ in range(3):
        resumed.step()
    assert_same(resumed.state_dict(), training.state_dict())
    assert resumed.average.decay == training.average.decay
