"""A real Trainer of Hugging Face's, stopped and resumed through a run, repeats its losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from torch_ckpt import CheckpointError, Run
from torch_ckpt.integrations.trainer import RunCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 14
STOP_AFTER = 9


class Stopped(Exception):
    """Stands for whatever ends a process."""


class StopAfter(TrainerCallback):
    """Raises once a step is done, its save included."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


def trainer_of(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1)
    )
    tokens = torch.randint(31, (22, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        warmup_steps=3,
        seed=5,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def losses_of(trainer: Trainer) -> list[tuple[int, float, float]]:
    return [
        (entry["step"], entry["loss"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@pytest.mark.parametrize(
    ("accumulated", "every", "asynchronous"),
    [(1, 4, False), (1, 4, True), (3, 3, True)],  # 11 batches an epoch: within one, and between.
)
def test_a_trainer_that_is_stopped_and_resumed_repeats_its_losses(
    tmp_path: Path, accumulated: int, every: int, asynchronous: bool
) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    whole = trainer_of(tmp_path / "whole", **options)
    whole.train()

    callback = RunCallback(Run(tmp_path / "run", every=every, asynchronous=asynchronous))
    stopped = trainer_of(tmp_path / "a", callback, StopAfter(STOP_AFTER), **options)
    with pytest.raises(Stopped):
        callback.train(stopped)
    callback.run.close()
    callback = RunCallback(Run(tmp_path / "run", every=every, keep_last=1))
    resumed = trainer_of(tmp_path / "b", callback, **options)
    torch.rand(100)  # Another process is at another place in its random numbers.
    callback.train(resumed)

    assert losses_of(resumed) == losses_of(whole)
    assert len(losses_of(resumed)) == STEPS
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name
    assert callback.run.latest_step() == STEPS // every * every
    assert not (tmp_path / "b").exists() or not os.listdir(tmp_path / "b")


def test_the_save_strategy_of_the_trainer_saves_to_the_run(tmp_path: Path) -> None:
    callback = RunCallback(Run(tmp_path / "run", every=1000))
    trainer = trainer_of(tmp_path / "out", callback)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 5
    trainer.state.save_steps = 5
    callback.train(trainer)

    assert sorted(os.listdir(tmp_path / "run")) == ["step-10", f"step-{STEPS}", "step-5"]


def test_what_cannot_be_done_through_a_run_is_refused(tmp_path: Path) -> None:
    callback = RunCallback(Run(tmp_path / "run"))
    trainer = trainer_of(tmp_path / "out", callback)
    trainer.args.load_best_model_at_end = True
    with pytest.raises(CheckpointError, match="load_best_model_at_end"):
        callback.train(trainer)
    with pytest.raises(ValueError, match="does not have this callback"):
        RunCallback(Run(tmp_path / "run")).train(trainer)
