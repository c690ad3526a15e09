"""Megatron's distributed optimizer with our strategies: what Megatron reshards is resharded."""

from __future__ import annotations

import contextlib
import functools
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, Worlds
from states import failures_of

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from torch_ckpt.frameworks.megatron.strategies import FastLoadStrategy, FastSaveStrategy

pytestmark = [pytest.mark.framework("megatron"), pytest.mark.timeout(240)]

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples/megatron_gpt.py"))


class FusedAdam(torch.optim.AdamW):
    """An AdamW that counts steps by group, as that of Transformer Engine does."""

    def __setstate__(self, state: Any) -> None:
        torch.optim.Optimizer.__setstate__(self, state)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state[parameter]:
                    state["step"] = torch.tensor(float(group.get("step", 0)))
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].pop("step", None)


class OnCuda(EXAMPLE["OnCpu"]):  # type: ignore[misc]
    """Tensors of the CPU that Megatron takes for tensors of CUDA devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


@contextlib.contextmanager
def training(tp: int) -> Iterator[tuple[Any, Any]]:
    """A model and its optimizer, trained for one step, so that there is a state."""
    build, functions = EXAMPLE["build"], EXAMPLE["build"].__globals__
    configs = {
        "DistributedDataParallelConfig": functools.partial(
            DistributedDataParallelConfig, use_distributed_optimizer=True
        ),
        "OptimizerConfig": functools.partial(OptimizerConfig, use_distributed_optimizer=True),
    }
    with (
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_device"),
        mock.patch.object(CudaRNGStatesTracker, "fork"),
        mock.patch("torch.optim.AdamW", FusedAdam),
        mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
        mock.patch.dict(functions, configs),
        OnCuda(),
    ):
        parallel_state.initialize_model_parallel(tp, 1)
        try:
            model, optimizer = build(tp, 1)
            EXAMPLE["train"](model, optimizer, 1)
            yield model, optimizer
        finally:
            parallel_state.destroy_model_parallel()


def sharded_state(model: Any, optimizer: Any, kind: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": kind}
    state = {"model": model.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    return state


def save(path: Path, tp: int, kind: str) -> list[float]:
    """Trains, saves, and returns the losses of the next steps."""
    path.mkdir(exist_ok=True)
    with training(tp) as (model, optimizer):
        EXAMPLE["train"](model, optimizer, 2)
        state = sharded_state(model, optimizer, kind, is_loading=False)
        dist_checkpointing.save(state, str(path), FastSaveStrategy())
        return [EXAMPLE["train"](model, optimizer, step) for step in (3, 4, 5)]


def resume(path: Path, tp: int, kind: str) -> list[float]:
    """Loads, and returns the losses of the next steps."""
    with training(tp) as (model, optimizer):
        for step in (7, 8):  # Other weights and moments.
            EXAMPLE["train"](model, optimizer, step)
        state = sharded_state(model, optimizer, kind, is_loading=True)
        loaded = dist_checkpointing.load(state, str(path), FastLoadStrategy())
        model.module.load_state_dict(loaded["model"])
        with torch.no_grad():
            optimizer.load_state_dict(loaded["optimizer"])
        return [EXAMPLE["train"](model, optimizer, step) for step in (3, 4, 5)]


RESHARDED = {
    "fewer data-parallel ranks": ("dp_reshardable", (2, 1), (1, 1)),
    "more data-parallel ranks": ("dp_reshardable", (1, 1), (2, 1)),
    "less tensor parallelism": ("fully_reshardable", (2, 2), (1, 1)),
    "data in place of tensor parallelism": ("fully_reshardable", (2, 2), (2, 1)),
    "tensor in place of data parallelism": ("fully_reshardable", (2, 1), (2, 2)),
}


@pytest.mark.thin("data in place of tensor parallelism")
@pytest.mark.parametrize("case", RESHARDED)
def test_a_distributed_optimizer_resumes_at_another_layout(
    case: str, worlds: Worlds, tmp_path: Path
) -> None:
    kind, (ranks, tp), (later_ranks, later_tp) = RESHARDED[case]
    losses = worlds.run(ranks, save, tmp_path, tp, kind)[0]
    assert losses[0] > losses[1] > losses[2]
    resumed = worlds.run(later_ranks, resume, tmp_path, later_tp, kind)[0]
    assert resumed == pytest.approx(losses, rel=1e-5)


def fail_to_resume(path: Path) -> list[str]:
    return [str(each) for each in failures_of(lambda: resume(path, 2, "dp_reshardable")).values()]


def test_dp_reshardable_does_not_change_tensor_parallelism(pair: Ranks, tmp_path: Path) -> None:
    pair.run(save, tmp_path, 1, "dp_reshardable")
    for messages in pair.run(fail_to_resume, tmp_path):
        assert any("optimizer.distributed.dp_group_idx_" in message for message in messages)
