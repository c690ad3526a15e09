"""A real Trainer of Lightning's saves and resumes through the plugin, and repeats its losses."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.slow_values import Slow

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from torch_ckpt import CheckpointError
from torch_ckpt.errors import NotFoundError
from torch_ckpt.frameworks.lightning.checkpoint_io import FastCheckpointIO

pytestmark = [
    pytest.mark.framework("lightning"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 15
STOP_AFTER = 8


class Stopped(Exception):
    """Stands for whatever ends a process."""


class Tiny(LightningModule):
    """A module with dropout-free training, an optimizer with state and a schedule."""

    def __init__(self, stop_after: int = STEPS + 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)
        self.stop_after = stop_after
        self.losses: list[tuple[int, float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        if self.global_step == self.stop_after:
            raise Stopped
        loss = self.layer(batch).square().mean()
        self.losses.append((self.global_step, loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def fit(
    folder: Path, plugin: FastCheckpointIO, *, stop_after: int = STEPS + 1, resume: Any = None
) -> Tiny:
    """Trains; ``model.trainer`` is how."""
    torch.manual_seed(7)
    model = Tiny(stop_after)
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin],
        callbacks=[
            ModelCheckpoint(
                folder, every_n_train_steps=3, save_top_k=2, monitor="step", mode="max",
                filename="{step}", save_last=True,
            )
        ],
    )  # fmt: skip
    try:
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=resume)
    except Stopped:
        assert stop_after < STEPS
    return model


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow
def test_training_that_is_stopped_and_resumed_repeats_its_losses(
    tmp_path: Path, asynchronous: bool
) -> None:
    whole = fit(tmp_path / "whole", FastCheckpointIO(asynchronous=asynchronous))
    plugin = FastCheckpointIO(asynchronous=asynchronous)
    stopped = fit(tmp_path / "run", plugin, stop_after=STOP_AFTER)
    plugin.teardown()
    assert stopped.losses == whole.losses[:STOP_AFTER]

    resumed = fit(tmp_path / "run", FastCheckpointIO(asynchronous=asynchronous), resume="last")

    assert resumed.losses == whole.losses[6:]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    names = {"last.ckpt", "step=12.ckpt", "step=15.ckpt"}
    assert set(os.listdir(tmp_path / "run")) == names  # Nothing of what was removed is left.
    for name in names:
        assert (tmp_path / "run" / name / ".metadata").exists()


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    plugin = FastCheckpointIO()
    shared = torch.arange(3.0)
    checkpoint = {
        "state_dict": OrderedDict({"a.b": shared, "a": {"b": shared + 1}}),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(4)}}, "groups": [{"lr": 1}]}],
        "empty": [{}, [], ()],
        "skeleton": shared + 2,
        "pair": (shared > 1, None),
        "text": "some",
        7: 1.5,
    }  # fmt: skip
    plugin.save_checkpoint(checkpoint, tmp_path / "x.ckpt")

    loaded = plugin.load_checkpoint(tmp_path / "x.ckpt")

    assert repr(loaded) == repr(checkpoint)
    assert plugin.load_checkpoint(tmp_path / "x.ckpt", map_location="meta")["skeleton"].is_meta
    plugin.remove_checkpoint(tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotFoundError):
        plugin.load_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_removed_only_once_that_which_replaces_it_is_complete(
    tmp_path: Path, fails: bool
) -> None:
    plugin = FastCheckpointIO(asynchronous=True)
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "1.ckpt")
    plugin.teardown()
    Slow.fails = fails
    Slow.may_go_on.clear()

    plugin.save_checkpoint({"w": torch.ones(3), "slow": Slow()}, tmp_path / "2.ckpt")
    plugin.remove_checkpoint(tmp_path / "1.ckpt")

    assert (tmp_path / "1.ckpt/.metadata").exists()
    Slow.may_go_on.set()
    if fails:
        with pytest.raises(CheckpointError, match="cannot be pickled"):
            plugin.teardown()
    else:
        plugin.teardown()
    assert (tmp_path / "1.ckpt").exists() == fails
    assert (tmp_path / "2.ckpt/.metadata").exists() != fails
