"""New optimizers of sharded parameters: a load creates their state in any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks
from states import assert_same
from trained_nets import BEGUN_RATE, TRAINED_RATE, EvenNet, build, full_state, give_state

import torch_ckpt

pytestmark = pytest.mark.timeout(150)
LAYOUTS = ["fsdp2", "hsdp", "tp", "fsdp2_tp", "plain"]


@on_ranks(4)
def test_a_state_is_created_in_every_layout(path: Path) -> None:
    for before, after in zip(LAYOUTS, [*LAYOUTS[1:], LAYOUTS[0]], strict=True):
        net, optimizer = build(EvenNet, before, seed=0, rate=TRAINED_RATE)
        give_state(net, optimizer)
        torch_ckpt.save({"net": net, "optim": optimizer}, checkpoint_id=path / before)
        saved = full_state(net, optimizer)
        net, optimizer = build(EvenNet, after, seed=1, rate=BEGUN_RATE)
        state = {"net": net, "optim": optimizer}
        torch_ckpt.load(state, checkpoint_id=path / before, strict=True)
        assert_same(full_state(net, optimizer), saved)
