"""RunCallback: saves and resumes a Hugging Face ``Trainer`` through a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils.import_utils import is_peft_available

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.rank_state import RankState
from torch_ckpt.runs.run import Run

__all__ = ["RunCallback"]


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Saves the training of a ``Trainer`` in a :class:`Run`, and resumes from it.

    A step contains the state that ``Trainer`` itself would save: model, optimizer, schedule,
    scaler, random states and ``TrainerState``. For a PEFT model, it contains only the trained
    parameters. All ranks save a step sharded, and any number of ranks can load it. A step is saved
    when ``save_strategy`` requires it, and when :meth:`Run.should_save` returns ``True``. The last
    step is always saved: whatever ``on_busy`` is, its save waits for the previous one. The results
    of an evaluation are stored as metrics of the step. The run removes old steps;
    ``save_total_limit`` and ``save_on_each_node`` have no effect.

    ``load_best_model_at_end`` needs a run that retains the best step, such as
    ``Run(path, keep_best=1, monitor="eval_loss")``. It loads the best saved step.

    A callback alone cannot resume, because ``Trainer`` chooses its position in the data before the
    first event of a callback. Call :meth:`train` instead of ``trainer.train()``. During training,
    it replaces the six methods of the trainer that write and read the files of a checkpoint.

    Args:
        run: The run that saves the steps.

    Raises:
        UnsupportedError: The trainer uses DeepSpeed, ``save_only_model``, ``push_to_hub``,
            ``enable_jit_checkpoint``, or ``load_best_model_at_end`` with a run that does not retain
            the best step. Raised when the trainer is constructed with this callback, or by
            :meth:`train`. Also raised by ``trainer.train()`` outside :meth:`train`.

    Example::

        callback = RunCallback(Run("runs/bert", asynchronous=True, keep_last=3))
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        callback.train(trainer)  # From the newest step, if there is one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._is_training = False  # Whether the trainer saves to the run.

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Refuses a trainer whose options a run cannot fulfil."""
        _refuse(args, self.run)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Refuses a training that saves nothing to the run.

        Raises:
            UnsupportedError: :meth:`train` did not begin the training.
        """
        if not self._is_training:
            raise UnsupportedError(
                "cannot save to the run in trainer.train(): call callback.train(trainer) instead"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Requests a save from the trainer if the run's next save is due."""
        if self.run.should_save(state.global_step):
            control.should_save = True
        return control

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Waits for the background save."""
        self.run.wait()

    def train(self, trainer: Trainer, **options: Any) -> Any:
        """Trains from the newest step of the run, or from the beginning.

        Args:
            trainer: Trainer with this callback.
            **options: Options of ``trainer.train``, except ``resume_from_checkpoint``.

        Returns:
            The result of ``trainer.train``.

        Raises:
            UnsupportedError: A run cannot fulfil an option of the trainer.
            ValueError: The trainer does not have this callback, or ``resume_from_checkpoint`` is
                given.
        """
        if "resume_from_checkpoint" in options:
            raise ValueError("cannot pass resume_from_checkpoint: the run has the newest step")
        if self not in trainer.callback_handler.callbacks:
            raise ValueError("the trainer does not have this callback: pass it as callbacks=[...]")
        _refuse(trainer.args, self.run)
        storage = _TrainerStorage(trainer, self.run)
        step = self.run.latest_step()
        with contextlib.ExitStack() as stack:
            stack.enter_context(storage.replacing_files())
            stack.enter_context(mock.patch.object(self, "_is_training", True))
            if step is None:
                return trainer.train(**options)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            storage.write_trainer_state(step, Path(folder))
            return trainer.train(resume_from_checkpoint=folder, **options)


class _TrainerStorage:
    """Saves the state of a trainer, and loads it in the order that the trainer requires."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self._trainer: Any = trainer  # Attributes that are optional in its types exist.
        self._run = run
        self._step: int | None = None
        self._random: dict[str, Any] | None = None

    @contextlib.contextmanager
    def replacing_files(self) -> Iterator[None]:
        """Replaces the trainer's file methods within a block, so that it uses the run."""

        def nothing(*_: Any, **__: Any) -> None: ...

        methods = {
            "_save_checkpoint": self.save,
            "_load_from_checkpoint": nothing,  # There is no optimizer yet; `load` follows.
            "_load_optimizer_and_scheduler": self.load,
            "_load_scaler": nothing,
            "_load_rng_state": self.set_random_state,
            "_load_best_model": self.load_best,
        }
        with contextlib.ExitStack() as stack:
            for name, method in methods.items():
                stack.enter_context(mock.patch.object(self._trainer, name, method))
            yield

    def write_trainer_state(self, step: int, folder: Path) -> None:
        """Writes ``TrainerState`` to a file, where the trainer reads its position in the data."""
        self._step = step
        state = {"trainer": ""}
        self._run.restore(state, step=step, strict=False)
        (folder / TRAINER_STATE_NAME).write_text(state["trainer"])

    def save(self, model: Any, trial: Any) -> None:
        """Saves the last completed step of the trainer."""
        trainer = self._trainer
        state = trainer.state
        trainer.store_flos()
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        state.stateful_callbacks = _states_of(callbacks)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = f"{self._run.directory}/step-{state.global_step}"
        metrics = _metrics_at(state.global_step, state.log_history)
        monitor = self._run.retention.monitor
        is_evaluated = bool(metrics) and (monitor is None or monitor in metrics)
        with contextlib.ExitStack() as stack:
            if trainer.control.should_training_stop:  # The last step is not skipped.
                stack.enter_context(mock.patch.object(self._run, "on_busy", "wait"))
            self._run.save(
                state.global_step, self._state_dict(), metrics=metrics if is_evaluated else None
            )

    def load_best(self) -> None:
        """Loads the model of the best saved step, at the end of the training."""
        best = self._run.best_step()
        if best is None:
            return
        trainer = self._trainer
        trainer.state.best_model_checkpoint = f"{self._run.directory}/step-{best}"
        model, options = trainer.model, self._options
        weights = {"model": self._saved(get_model_state_dict(model, options=options))}
        self._run.restore(weights, step=best, strict=False)
        set_model_state_dict(model, weights["model"], options=_lenient(options))

    def load(self, checkpoint: str | None) -> None:
        """Loads the step of ``TrainerState``, once model, optimizer and schedule exist."""
        if checkpoint is None:
            return
        state = self._state_dict()
        self._run.restore(state, step=self._step)
        trainer = self._trainer
        set_state_dict(
            trainer.model,
            _plain(trainer.optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_lenient(self._options),
        )
        trainer.lr_scheduler.load_state_dict(state["scheduler"][0])
        if state["scaler"][0]:
            trainer.accelerator.scaler.load_state_dict(state["scaler"][0])

    def set_random_state(self, checkpoint: str | None) -> None:
        """Sets the random states, once the trainer has reached its position in the data."""
        if checkpoint is not None and self._random is not None:
            _set_random_state(self._random)

    @property
    def _options(self) -> StateDictOptions:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        return StateDictOptions(ignore_frozen_params=_is_peft_model(model))

    def _saved(self, model_state: dict[str, Any]) -> dict[str, Any]:
        """Returns the values to save: of a PEFT model, without the frozen parameters."""
        options = self._options
        if not options.ignore_frozen_params:
            return model_state
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        # DCP's option leaves the second names of tied parameters.
        parameters = model.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        return {name: value for name, value in model_state.items() if name not in frozen}

    def _state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        model, optimizer = get_state_dict(
            trainer.model, _plain(trainer.optimizer), options=self._options
        )
        scaler = trainer.accelerator.scaler
        return {
            "model": self._saved(model),
            "optimizer": optimizer,
            # A planner stores a tuple as one object, so its content may change shape.
            "scheduler": (trainer.lr_scheduler.state_dict(),),
            "scaler": (scaler.state_dict() if scaler is not None else {},),
            "trainer": _text_of(trainer.state),
            "random": RankState(_random_state, self._store_random_state, on_resize="drop"),
        }

    def _store_random_state(self, state: dict[str, Any]) -> None:
        self._random = state


def _refuse(args: TrainingArguments, run: Run) -> None:
    """Raises an error for each option that a run cannot fulfil."""
    refused = [
        name
        for name in ("deepspeed", "save_only_model", "push_to_hub", "enable_jit_checkpoint")
        if getattr(args, name, None)
    ]
    if refused:
        raise UnsupportedError(
            f"cannot save a Trainer with {', '.join(refused)} through RunCallback: a step of a run "
            "is the whole state of a training, in one checkpoint of DCP"
        )
    if args.load_best_model_at_end:
        metric = str(args.metric_for_best_model)
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        mode = "max" if args.greater_is_better else "min"
        retention = run.retention
        if retention.keep_best is None or (retention.monitor, retention.mode) != (metric, mode):
            raise UnsupportedError(
                "cannot use load_best_model_at_end with this run, which does not retain the best "
                f"step: pass Run(..., keep_best=1, monitor={metric!r}, mode={mode!r})"
            )


def _states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns the states of callbacks by class: a list for several callbacks of one class."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _metrics_at(step: int, log_history: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Returns the results of the evaluation at a step; empty if there was none."""
    return {
        name: value
        for entry in log_history
        if entry.get("step") == step
        for name, value in entry.items()
        if name.startswith("eval_") and isinstance(value, int | float)
    }


def _is_peft_model(model: object) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _lenient(options: StateDictOptions) -> StateDictOptions:
    """Returns options for a state dict that lacks the frozen parameters."""
    return dataclasses.replace(options, strict=not options.ignore_frozen_params)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer without Accelerate's wrapper, which DCP does not support."""
    plain = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(plain, torch.optim.Optimizer)
    return plain


def _text_of(state: TrainerState) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, TRAINER_STATE_NAME)
        state.save_to_json(path)
        return json.dumps(json.loads(Path(path).read_text()))


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
