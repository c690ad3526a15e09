"""A real Trainer of Hugging Face's, stopped and resumed through a run, repeats its losses."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_steps import names_in_run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from torch_ckpt import CheckpointError, FastReader, Run
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.transformers.trainer import RunCallback
from torch_ckpt.ladder.step_files import metrics_of
from torch_ckpt.options import OnBusy
from torch_ckpt.storage.writer import FastWriter

pytestmark = [
    pytest.mark.framework("transformers", "accelerate", "peft"),
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
        use_cpu=True,
        disable_tqdm=True,
        warmup_steps=3,
        seed=5,
        **{"save_strategy": "no", **options},
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)
    )


def losses_of(trainer: Trainer) -> list[tuple[int, float, float]]:
    return [
        (entry["step"], entry["loss"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@pytest.mark.parametrize(
    ("accumulated", "every", "asynchronous", "stop"),
    [
        *((1, 4, False, 9), (1, 4, True, 9), (3, 3, True, 9)),
        (1, 11, True, 12),  # Step 11 is the last of an epoch.
        (3, 4, False, 9),  # And so is step 4, of the rest of its batches.
    ],
)
def test_a_trainer_that_is_stopped_and_resumed_repeats_its_losses(
    tmp_path: Path, accumulated: int, every: int, asynchronous: bool, stop: int
) -> None:
    options = {"gradient_accumulation_steps": accumulated}
    whole = trainer_of(tmp_path / "whole", **options)
    whole.train()

    callback = RunCallback(Run(tmp_path / "run", every=every, asynchronous=asynchronous))
    stopped = trainer_of(tmp_path / "a", callback, StopAfter(stop), **options)
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

    assert names_in_run(tmp_path / "run") == ["step-10", f"step-{STEPS}", "step-5"]


class BusyUntilTheEnd(TrainerCallback):
    """Keeps the first background save in progress until the trainer has begun its last save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        commit = FastWriter.finish

        def finish(*arguments: Any, **options: Any) -> Any:
            assert self.goes_on.wait(60)
            return commit(*arguments, **options)

        monkeypatch.setattr(FastWriter, "finish", finish)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop:
            threading.Timer(0.5, self.goes_on.set).start()


@pytest.mark.parametrize("on_busy", ["skip", "error"])
def test_the_last_step_is_saved_while_another_save_is_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_busy: OnBusy
) -> None:
    callback = RunCallback(Run(tmp_path / "run", every=1000, asynchronous=True, on_busy=on_busy))
    saves = 5 if on_busy == "skip" else 10  # With "error", no save but the last meets another.
    options = {"save_strategy": "steps", "save_steps": saves}
    callback.train(trainer_of(tmp_path / "out", callback, BusyUntilTheEnd(monkeypatch), **options))

    assert names_in_run(tmp_path / "run") == sorted(f"step-{each}" for each in (saves, STEPS))
    assert callback.run.skipped == (on_busy == "skip")
    assert callback.run.on_busy == on_busy  # The next training skips again.


class Counting(TrainerCallback, ExportableState):
    """Counts the steps whose number it divides."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += state.global_step % self.divisor == 0

    def state(self) -> dict[str, Any]:
        return {"args": {"divisor": self.divisor}, "attributes": {"count": self.count}}


def test_several_callbacks_of_one_class_resume_with_their_own_states(tmp_path: Path) -> None:
    keep = {"restore_callback_states_from_checkpoint": True}
    callback = RunCallback(Run(tmp_path / "run", every=4))
    counting = [Counting(2), Counting(3), EarlyStoppingCallback(5)]
    evaluate = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    stopped = trainer_of(
        tmp_path / "a", callback, *counting, StopAfter(STOP_AFTER), **keep, **evaluate
    )
    with pytest.raises(Stopped):
        callback.train(stopped)
    callback.run.close()

    callback = RunCallback(Run(tmp_path / "run", every=4))
    counting = [Counting(2), Counting(3), EarlyStoppingCallback(5)]
    resumed = trainer_of(tmp_path / "b", callback, *counting, **keep, **evaluate)
    callback.train(resumed)
    found = {c.divisor: c.count for c in resumed.callback_handler.callbacks if type(c) is Counting}
    assert found == {2: STEPS // 2, 3: STEPS // 3}
    (stopping,) = (
        c for c in resumed.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)
    )
    assert stopping.early_stopping_patience == 5


def best_options(**options: Any) -> dict[str, Any]:
    return {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.5,  # So large that the best step is not the last.
        "save_steps": 2,
        **options,
    }


def test_the_best_model_is_loaded_at_the_end_as_a_trainer_does(tmp_path: Path) -> None:
    theirs = trainer_of(tmp_path / "theirs", save_strategy="steps", **best_options())
    theirs.train()
    best = theirs.state.best_global_step
    assert best is not None
    assert best < STEPS

    callback = RunCallback(
        Run(tmp_path / "run", every=1000, keep_last=1, keep_best=1, monitor="eval_loss")
    )
    ours = trainer_of(tmp_path / "ours", callback, save_strategy="steps", **best_options())
    callback.train(ours)
    assert ours.state.best_global_step == best
    assert ours.state.best_model_checkpoint == f"{tmp_path}/run/step-{best}"
    assert callback.run.best_step() == best
    assert (
        metrics_of(Location(tmp_path / f"run/step-{best}"))["eval_loss"] == ours.state.best_metric
    )
    assert names_in_run(tmp_path / "run") == sorted([f"step-{best}", f"step-{STEPS}"])
    for name, parameter in theirs.model.named_parameters():
        assert torch.equal(parameter, ours.model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("losses", "loaded"),
    [
        ([9, 5, 1, 4, 6, 7, 8], 8),  # The best step is 6, which is not saved.
        ([1, 5, 6, 4, 6, 7, 8], STEPS),  # As a trainer does: no step was the best when saved.
    ],
)
def test_the_best_step_need_not_be_saved(tmp_path: Path, losses: list[int], loaded: int) -> None:
    callback = RunCallback(Run(tmp_path / "run", every=1000, keep_best=1, monitor="eval_score"))
    options = best_options(metric_for_best_model="score", greater_is_better=False, save_steps=4)
    trainer = trainer_of(tmp_path / "out", callback, save_strategy="steps", **options)
    scores = iter(losses)
    trainer.compute_metrics = lambda _: {"score": float(next(scores))}
    callback.train(trainer)

    weights = {name: torch.empty_like(w) for name, w in trainer.model.state_dict().items()}
    callback.run.restore({"model": weights}, step=loaded)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    if loaded != STEPS:
        assert trainer.state.best_model_checkpoint == f"{tmp_path}/run/step-{loaded}"


def test_adapters_of_peft_are_saved_without_the_base_model(tmp_path: Path) -> None:
    import peft

    def adapted(folder: Path, *callbacks: TrainerCallback) -> Trainer:
        trainer = trainer_of(folder, *callbacks)
        model = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["c_attn"]))
        return Trainer(
            model, trainer.args, train_dataset=trainer.train_dataset, callbacks=list(callbacks)
        )

    whole = adapted(tmp_path / "whole")
    whole.train()
    callback = RunCallback(Run(tmp_path / "run", every=4))
    stopped = adapted(tmp_path / "a", callback, StopAfter(STOP_AFTER))
    with pytest.raises(Stopped):
        callback.train(stopped)
    callback.run.close()
    callback = RunCallback(Run(tmp_path / "run", every=4))
    resumed = adapted(tmp_path / "b", callback)
    callback.train(resumed)
    assert losses_of(resumed) == losses_of(whole)
    stored = FastReader(tmp_path / "run" / "step-12").read_metadata().state_dict_metadata
    weights = [fqn for fqn in stored if fqn.startswith("model.")]
    assert weights
    assert all("lora_" in fqn for fqn in weights)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"save_only_model": True}, "save_only_model"),
        ({"push_to_hub": True}, "push_to_hub"),
        (best_options(save_strategy="steps"), "keep_best=1, monitor='eval_loss', mode='min'"),
    ],
)
def test_an_option_that_a_run_cannot_fulfil_is_refused_at_construction(
    tmp_path: Path, options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        trainer_of(tmp_path / "out", RunCallback(Run(tmp_path / "run")), **options)


def test_what_cannot_be_done_through_a_run_is_refused(tmp_path: Path) -> None:
    callback = RunCallback(Run(tmp_path / "run"))
    trainer = trainer_of(tmp_path / "out", callback)
    trainer.args.load_best_model_at_end = True
    with pytest.raises(CheckpointError, match="load_best_model_at_end"):
        callback.train(trainer)
    with pytest.raises(ValueError, match="does not have this callback"):
        RunCallback(Run(tmp_path / "run")).train(trainer)


def test_training_that_would_save_nothing_to_the_run_is_refused(tmp_path: Path) -> None:
    callback = RunCallback(Run(tmp_path / "run", every=4))
    trainer = trainer_of(tmp_path / "out", callback)
    with pytest.raises(UnsupportedError, match=r"callback\.train\(trainer\)"):
        trainer.train()
    assert trainer.state.global_step == 0
    callback.train(trainer)
    with pytest.raises(UnsupportedError):
        trainer.train()
