"""A run whose layout changes again and again follows the loss curve of one that never changed.

In double precision, so that layouts differ by rounding alone, and a tolerance can be far below what
any one value that is wrong, stale or lost does to the losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix_layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from matrix_layouts import LAYOUTS, TIMEOUT_S, VOCABULARY, WORLD, Model, Net
from ranks import Worlds
from torch.distributed.tensor import DTensor

import torch_ckpt
from torch_ckpt import FastReader, FastWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = ["fsdp_4", "tp_2", "ddp_2", "fsdp_tp_2x2", "fsdp_3", "hsdp_2x2", "fsdp_4"]
STEPS = 3  # In each layout.
BATCH, CONTEXT = 12, 6  # Over all ranks.
# Relative. Losses of two layouts differ by 1e-16 or 1e-15; one wrong value makes it 1e-9 and more.
TOLERANCE = 1e-13

Change = Callable[[dict[str, Any]], None]


# ---- On the ranks --------------------------------------------------------------------------------


def new_model(layout: str, seed: int) -> Model:
    torch.manual_seed(seed)
    return matrix_layouts.build(LAYOUTS[layout], Net().double())


def train(layout: str, model: Model, first_step: int, steps: int) -> list[float]:
    """Losses of these steps: means over batches that depend on the step alone, of four."""
    copies = {"tp": 1, "fsdp_tp": 2}.get(layout.rpartition("_")[0], LAYOUTS[layout].ranks)
    own = dist.get_rank() * copies // LAYOUTS[layout].ranks
    losses = []
    for step in range(first_step, first_step + steps):
        generator = torch.Generator().manual_seed(step % 4)
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        tokens = tokens.chunk(copies)[own]
        logits = model.net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=matrix_layouts.group_of(LAYOUTS[layout]))
        losses.append(total.item() / LAYOUTS[layout].ranks)
    return losses


def save(layout: str, model: Model, path: Path, ours: bool, change: Change | None = None) -> None:
    state = model.state_dict()
    if change:
        change(state)
    group = matrix_layouts.group_of(LAYOUTS[layout])
    of = torch_ckpt if ours else dcp
    of.save(state, storage_writer=FastWriter(path), process_group=group)


def load(layout: str, model: Model, path: Path, ours: bool) -> None:
    state = model.state_dict()
    group = matrix_layouts.group_of(LAYOUTS[layout])
    of = torch_ckpt if ours else dcp
    of.load(state, storage_reader=FastReader(path), process_group=group)
    model.load_state_dict(state)


def uninterrupted(steps: int) -> list[float]:
    """Losses of a run in the first layout."""
    layout = RUN[0]
    matrix_layouts.meet([layout])
    member = dist.get_rank() < LAYOUTS[layout].ranks
    return train(layout, new_model(layout, seed=0), 0, steps) if member else []


def through_layouts(
    layouts: list[str], steps: list[int], folder: Path, change: str | None = None
) -> list[float]:
    """Losses of a run that is saved and loaded between layouts, each begun from other values.

    Args:
        layouts: One after another.
        steps: In each.
        folder: For checkpoints.
        change: What of `CHANGES` is done to the first checkpoint.
    """
    matrix_layouts.meet(layouts)
    losses: list[float] = []
    for number, (layout, count) in enumerate(zip(layouts, steps, strict=True)):
        if dist.get_rank() < LAYOUTS[layout].ranks:
            model = new_model(layout, seed=number)
            if number:
                load(layout, model, folder / f"{number}", ours=number % 2 == 0)
            losses += train(layout, model, sum(steps[:number]), count)
            if number + 1 < len(layouts):
                wrong = CHANGES[change] if change and number == 0 else None
                save(layout, model, folder / f"{number + 1}", number % 2 == 1, wrong)
        dist.barrier()  # What was saved is committed.
    return losses


# ---- What may go wrong ---------------------------------------------------------------------------


def first_row(state: dict[str, Any], group: str, name: str) -> torch.Tensor:
    """The first row of a tensor of rows on the rank that holds it, and nothing on others."""
    tensor = state[group][name]
    assert isinstance(tensor, DTensor)
    return tensor.to_local()[: int(dist.get_rank() == 0)]


def one_weight(state: dict[str, Any]) -> None:
    first_row(state, "model", "blocks.0.attention.q.weight")[:, 3] *= 1.001


def one_moment(state: dict[str, Any]) -> None:
    first_row(state, "optim", "state.blocks.1.up.weight.exp_avg")[:, 3] *= 1.01


def one_square(state: dict[str, Any]) -> None:
    first_row(state, "optim", "state.blocks.1.experts.bank.exp_avg_sq")[:, 3, 5] *= 1.01


def lost_moments(state: dict[str, Any]) -> None:
    first_row(state, "optim", "state.head.weight.exp_avg").zero_()


def stale_count(state: dict[str, Any]) -> None:
    state["optim"]["state.norm.weight.step"] -= 1


def another_rate(state: dict[str, Any]) -> None:
    state["optim"]["param_groups.blocks.1.up.bias.lr"] *= 1.001


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (one_weight, one_moment, one_square, lost_moments, stale_count, another_rate)
}


# ---- Tests ---------------------------------------------------------------------------------------


@functools.cache
def expected_losses(worlds: Worlds) -> list[float]:
    return worlds.run(WORLD, uninterrupted, STEPS * len(RUN), timeout_s=TIMEOUT_S)[0]


def farthest(losses: list[float], expected: list[float]) -> float:
    """The greatest relative difference of losses of the same steps."""
    assert len(losses) == len(expected)
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def test_losses_after_each_change_of_layout_are_those_of_an_uninterrupted_run(
    worlds: Worlds, tmp_path: Path
) -> None:
    expected = expected_losses(worlds)
    steps = [STEPS] * len(RUN)
    losses = worlds.run(WORLD, through_layouts, RUN, steps, tmp_path, timeout_s=TIMEOUT_S)[0]
    assert losses[:STEPS] == expected[:STEPS]
    assert farthest(losses, expected) < TOLERANCE


def test_a_run_that_only_passed_through_other_layouts_goes_on_bit_for_bit(
    worlds: Worlds, tmp_path: Path
) -> None:
    expected = expected_losses(worlds)
    steps = [STEPS, *[0] * (len(RUN) - 2), STEPS]
    losses = worlds.run(WORLD, through_layouts, RUN, steps, tmp_path, timeout_s=TIMEOUT_S)[0]
    assert losses == expected[: 2 * STEPS]


@pytest.mark.parametrize("change", CHANGES)
def test_one_wrong_value_leaves_the_tolerance(worlds: Worlds, tmp_path: Path, change: str) -> None:
    expected = expected_losses(worlds)
    losses = worlds.run(
        WORLD, through_layouts, RUN[:2], [STEPS] * 2, tmp_path, change, timeout_s=TIMEOUT_S
    )[0]
    assert farthest(losses, expected[: 2 * STEPS]) > 1000 * TOLERANCE
