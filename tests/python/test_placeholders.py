"""A parameter whose elements are elsewhere is not saved as an empty tensor without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of

import torch_ckpt
from torch_ckpt import FastWriter, Run, SafetensorsWriter
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.process_state import PROCESS

SAVES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "torch_ckpt.save": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "dcp.save": lambda state, path: dcp.save(state, storage_writer=FastWriter(path)),
    "async": lambda state, path: torch_ckpt.async_save(
        state, storage_writer=FastWriter(path)
    ).result(),
    "safetensors": lambda state, path: torch_ckpt.save(
        state, storage_writer=SafetensorsWriter(path)
    ),
    "safetensors, stock planner": lambda state, path: dcp.save(
        state, storage_writer=SafetensorsWriter(path)
    ),
}


@pytest.fixture(autouse=True)
def nothing_warned() -> Iterator[None]:
    PROCESS.warned_placeholders.clear()
    plan_cache().forget()
    yield
    PROCESS.warned_placeholders.clear()


def zero3() -> torch.nn.Module:
    """A module as ``deepspeed.zero.Init`` leaves it: small parameters are whole."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for name in ("weight", "bias"):
        parameter: Any = getattr(net[0], name)
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.data = torch.empty(0)
    return net


@pytest.mark.parametrize("save", [name for name in SAVES if name != "async"])
def test_a_placeholder_of_a_parameter_is_refused_by_name(save: str, tmp_path: Path) -> None:
    state = dict(zero3().named_parameters())
    error = failure_of(SAVES[save], state, tmp_path / "x")
    assert type(error) is UnsupportedError
    assert "cannot save '0.weight': it is a placeholder for a parameter of sizes [4, 4]" in str(
        error
    )
    assert not (tmp_path / "x" / "model.safetensors").exists()
    assert not (tmp_path / "x" / ".metadata").exists()


@pytest.mark.parametrize("save", SAVES)
def test_empty_weights_are_named_once(
    save: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = zero3().state_dict()  # Without the attributes.
    for step in range(3):
        state["step"] = torch.tensor(step)
        SAVES[save](state, tmp_path / str(step))
    (line,) = [line for line in caplog.messages if "without elements" in line]
    assert "0.weight, 0.bias." in line
    assert "1.weight" not in line


def test_empty_weights_are_named_by_a_run_with_an_agent(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run", asynchronous=True, agent=True) as run:
        run.save(1, {"model": zero3().state_dict()})
        run.wait()
    assert len([line for line in caplog.messages if "without elements" in line]) == 1


def test_tensors_that_are_empty_by_nature_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the state that Transformer Engine saves for each module."""
    state = {
        "extra_state": torch.empty(0, dtype=torch.uint8),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
    }
    for number, save in enumerate(SAVES.values()):
        save(state, tmp_path / str(number))
    assert not [line for line in caplog.messages if "without elements" in line]
