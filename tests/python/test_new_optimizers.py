"""A new optimizer has no state before its first step. A load fills it all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.tensors import bits

import torch_ckpt

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), 0.01, amsgrad=True),
    "AdamW fused": lambda net: torch.optim.AdamW(net.parameters(), 0.01, fused=True),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), 0.01),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), 0.01),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters(), 0.01),
    "groups": lambda net: torch.optim.NAdam(
        [{"params": [param], "lr": 0.01 * (n + 1)} for n, param in enumerate(net.parameters())]
    ),
}


def trained(make: Make, steps: int) -> dict[str, Any]:
    """A net whose second layer is frozen, after some steps of training."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    net[1].requires_grad_(False)
    state = {"net": net, "nested": [{"optim": make(net)}]}
    train(state, steps)
    return state


def train(state: dict[str, Any], steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        optim = state["nested"][0]["optim"]
        optim.zero_grad()
        state["net"](torch.randn(3, 5)).square().sum().backward()
        optim.step()


def values_of(state: dict[str, Any]) -> list[tuple[str, bytes]]:
    optim = state["nested"][0]["optim"].state_dict()["state"]
    found = [*state["net"].state_dict().items()]
    found += [(f"{n}.{key}", value) for n, own in optim.items() for key, value in own.items()]
    return [
        (name, bits(value) if isinstance(value, torch.Tensor) else repr(value).encode())
        for name, value in found
        if value is not None
    ]


def by_run(state: dict[str, Any], path: Path) -> None:
    with torch_ckpt.Run(path.parent, record=False) as run:
        assert run.restore(state, strict=True) == 1


def by_async_load(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_load(state, checkpoint_id=path).result()


def by_dcp(state: dict[str, Any], path: Path) -> None:
    with torch_ckpt.installed():
        dcp.load(state, checkpoint_id=path, no_dist=True)


LOADS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "run": by_run,
    "load": lambda state, path: torch_ckpt.load(state, checkpoint_id=path, strict=True),
    "async_load": by_async_load,
    "installed": by_dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_with_the_momenta(tmp_path: Path, name: str, how: str) -> None:
    """Values after a load and more steps are those of a training without a restart."""
    state, resumed = trained(OPTIMIZERS[name], 3), trained(OPTIMIZERS[name], 0)
    with torch_ckpt.Run(tmp_path, record=False) as run:
        run.save(1, state)
    LOADS[how](resumed, tmp_path / "step-1")
    assert values_of(resumed) == values_of(state)
    train(state, 2)
    train(resumed, 2)
    assert values_of(resumed) == values_of(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_parameter_without_elements_gets_its_state(tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(1))]
    optim, new = torch.optim.Adam(params), torch.optim.Adam(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optim.step()
    torch_ckpt.save({"optim": optim}, checkpoint_id=tmp_path)
    torch_ckpt.load({"optim": new}, checkpoint_id=tmp_path, strict=True)
    assert [*new.state[params[0]]] == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_state_that_was_only_read_is_created(tmp_path: Path) -> None:
    """A read of the state of a parameter creates an empty one."""
    state, resumed = trained(OPTIMIZERS["Adam"], 1), trained(OPTIMIZERS["Adam"], 0)
    torch_ckpt.save(state, checkpoint_id=tmp_path)
    assert not resumed["nested"][0]["optim"].state[resumed["net"][0].weight]
    torch_ckpt.load(resumed, checkpoint_id=tmp_path, strict=True)
    assert values_of(resumed) == values_of(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_optimizer_without_a_stored_state_stays_without_one(tmp_path: Path) -> None:
    state = trained(OPTIMIZERS["Adam"], 0)
    torch_ckpt.save(state, checkpoint_id=tmp_path)
    torch_ckpt.load(state, checkpoint_id=tmp_path, strict=True)
    assert not state["nested"][0]["optim"].state


class Own(torch.optim.SGD):
    """An optimizer with a state dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": torch.ones(2)}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", ["LBFGS", "own state dict"])
def test_other_states_are_named_as_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """States in lists, or with unknown names, are not created."""

    def make(net: torch.nn.Module) -> torch.optim.Optimizer:
        if name == "LBFGS":
            return torch.optim.LBFGS(net.parameters())
        return Own(net.parameters(), 0.1, momentum=0.9)

    state = trained(make, 0)
    optim, net = state["nested"][0]["optim"], state["net"]

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss: torch.Tensor = net(torch.ones(3, 5)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optim.step(closure)
    new = trained(make, 0)
    before = copy.deepcopy(new["nested"][0]["optim"].state_dict())
    torch_ckpt.save(state, checkpoint_id=tmp_path)
    torch_ckpt.load(new, checkpoint_id=tmp_path)
    assert new["nested"][0]["optim"].state_dict().keys() == before.keys()
    assert not new["nested"][0]["optim"].state
    assert "this optimizer has no state before its first step" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("shapes", [(7, 3), (5, 5)])
def test_states_of_parameters_in_another_order_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shapes: tuple[int, int]
) -> None:
    """A state is stored by the number of its parameter: it would get that of another one."""

    def make(*, reverse: bool) -> dict[str, Any]:
        net = torch.nn.Sequential(torch.nn.Linear(5, shapes[0]), torch.nn.Linear(*shapes))
        params = sorted(net.parameters(), key=lambda param: param.dim(), reverse=reverse)
        return {"net": net, "nested": [{"optim": torch.optim.Adam(params)}]}

    state, new = make(reverse=False), make(reverse=True)
    train(state, 1)
    torch_ckpt.save(state, checkpoint_id=tmp_path)
    torch_ckpt.load(new, checkpoint_id=tmp_path)
    assert not new["nested"][0]["optim"].state
    assert "not loaded: nested.0.optim.state.0.step" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_hook_may_leave_the_groups_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, new = trained(OPTIMIZERS["Adam"], 1), trained(OPTIMIZERS["Adam"], 0)
    optim = new["nested"][0]["optim"]
    groups = optim.state_dict()["param_groups"]
    optim.register_state_dict_post_hook(lambda _, own: {"state": own["state"]})
    optim.register_load_state_dict_pre_hook(lambda _, own: {**own, "param_groups": groups})
    torch_ckpt.save(state, checkpoint_id=tmp_path)
    report = torch_ckpt.load(new, checkpoint_id=tmp_path)
    assert not optim.state
    assert "nested.0.optim.state.0.step" in report.unused
