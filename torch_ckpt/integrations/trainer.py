"""RunCallback: saves and resumes a Hugging Face ``Trainer`` through a run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.rank_state import RankState
from torch_ckpt.runs.run import Run

__all__ = ["RunCallback"]


class RunCallback(TrainerCallback):
    """Saves the training of a ``Trainer`` in a :class:`Run`, and resumes from it.

    A step contains what ``Trainer`` itself would save: model, optimizer, schedule, scaler, random
    states and ``TrainerState``. All ranks save it sharded, and any number of ranks can load it. A
    step is saved when ``save_strategy`` requires it, and when :meth:`Run.should_save` returns
    ``True``. The run removes old steps; ``save_total_limit`` has no effect.

    A callback alone cannot resume, because ``Trainer`` chooses its position in the data before the
    first event of a callback. Call :meth:`train` instead of ``trainer.train()``. While it trains,
    it replaces the five methods of the trainer that write and read the files of a checkpoint.

    Args:
        run: Run that saves the steps.

    Example::

        callback = RunCallback(Run("runs/bert", asynchronous=True, keep_last=3))
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        callback.train(trainer)  # From the newest step, if there is one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

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
            UnsupportedError: The trainer uses DeepSpeed or ``load_best_model_at_end``.
            ValueError: The trainer does not have this callback.
        """
        if self not in trainer.callback_handler.callbacks:
            raise ValueError("the trainer does not have this callback: pass it as callbacks=[...]")
        if trainer.args.load_best_model_at_end or trainer.is_deepspeed_enabled:
            raise UnsupportedError(
                "cannot train with DeepSpeed or load_best_model_at_end: a run saves neither "
                "DeepSpeed's engine nor the best model's files"
            )
        storage = _TrainerStorage(trainer, self.run)
        step = self.run.latest_step()
        with contextlib.ExitStack() as stack:
            stack.enter_context(storage.replacing_files())
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
        }
        with contextlib.ExitStack() as stack:
            for name, method in methods.items():
                stack.enter_context(mock.patch.object(self._trainer, name, method))
            yield

    def write_trainer_state(self, step: int, folder: Path) -> None:
        """Writes ``TrainerState`` to a file, where the trainer reads its position in the data."""
        self._step = step
        state = {"trainer": ""}
        self._run.restore(state, step=step)
        (folder / TRAINER_STATE_NAME).write_text(state["trainer"])

    def save(self, model: Any, trial: Any) -> None:
        """Saves the last completed step of the trainer."""
        trainer = self._trainer
        trainer.store_flos()
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                trainer.state.stateful_callbacks[type(callback).__name__] = callback.state()
        self._run.save(trainer.state.global_step, self._state_dict())

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
        )
        trainer.lr_scheduler.load_state_dict(state["scheduler"][0])
        if state["scaler"][0]:
            trainer.accelerator.scaler.load_state_dict(state["scaler"][0])

    def set_random_state(self, checkpoint: str | None) -> None:
        """Sets the random states, once the trainer has reached its position in the data."""
        if checkpoint is not None and self._random is not None:
            _set_random_state(self._random)

    def _state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        model, optimizer = get_state_dict(trainer.model, _plain(trainer.optimizer))
        scaler = trainer.accelerator.scaler
        return {
            "model": model,
            "optimizer": optimizer,
            # A planner stores a tuple as one object, so its content may change shape.
            "scheduler": (trainer.lr_scheduler.state_dict(),),
            "scaler": (scaler.state_dict() if scaler is not None else {},),
            "trainer": _text_of(trainer.state),
            "random": RankState(_random_state, self._store_random_state, on_resize="drop"),
        }

    def _store_random_state(self, state: dict[str, Any]) -> None:
        self._random = state


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
