"""FastCheckpointManager: saves and resumes the training of torchtitan through a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger as sl
from torchtitan.tools import filesystem

from torch_ckpt.api import load, save
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.integrations.hugging_face_storage import (
    ModelReader,
    dequantize_of,
    is_replaced,
    model_writer,
)
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.runs.run import Run
from torch_ckpt.storage.reader import FastReader

__all__ = ["FastCheckpointManager"]

_LOG = logging.getLogger("torch_ckpt")

_HONOURED = frozenset(
    {
        "enable",
        "folder",
        "interval",
        "initial_load_path",
        "initial_load_model_only",
        "initial_load_in_hf",
        "initial_load_in_hf_quantized",
        "last_save_model_only",
        "last_save_in_hf",
        "export_dtype",
        "keep_latest_k",
        "load_step",  # The trainer passes it to `load`.
        "exclude_from_loading",
        "enable_first_step_checkpoint",
        "create_seed_checkpoint",  # The trainer then saves step 0 as its last step.
        "load_only",
    }
)
"""The options of torchtitan's configuration that have an effect here."""

_STATED = {
    "directory": "folder",
    "every": "interval",
    "keep_last": "keep_latest_k",
    "asynchronous": "async_mode",
}
"""The options of a run that torchtitan's configuration states, by the name that it has there."""

_REFUSED = {
    **dict.fromkeys(("keep_best", "monitor", "mode"), "torchtitan passes no metrics"),
    "max_overhead": "checkpoint.interval decides when to save",
    "process_group": "all ranks save",
}
"""The options of a run that ``Config.run`` may not have, with the reasons."""


class FastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager of torchtitan whose steps are those of a :class:`Run`.

    The run finds, stages, saves and removes the steps. They are DCP checkpoints in
    ``<dump_folder>/<folder>/step-<N>``, with the same names as in torchtitan's
    ``CheckpointManager``: each can load the checkpoints of the other. torchtitan constructs the
    manager; the arguments are those of its ``CheckpointManager``.

    Args:
        config: Options of the manager.
        dataloader: The data loader, whose position is saved.
        model_parts: The parts of the model on this rank.
        optimizers: The optimizers.
        lr_schedulers: The learning rate schedules.
        states: Other state of the trainer.
        sd_adapter: Converts state dicts to and from the format of Hugging Face.
        base_folder: Directory that contains the folder of the checkpoints.

    Raises:
        UnsupportedError: An option that this class does not know is not at its default.
        ValueError: Options contradict each other, or refer to something that does not exist.

    Example::

        config.checkpoint = FastCheckpointManager.Config(
            enable=True, interval=500, keep_latest_k=3, async_mode="async"
        )
        config.build().train()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of all checkpoint managers of torchtitan, and those of the run."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Whether saves are asynchronous. Both modes are the same: staging memory is pinned for
        CUDA tensors, and a save returns once the state is copied."""

        run: dict[str, Any] = field(default_factory=dict)
        """More arguments of the :class:`Run`, such as ``{"agent": True}``."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in ("disabled", "async", "async_with_pinned_mem"):
                raise ValueError(f"Invalid async_mode: {self.async_mode}")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        if not self.enable:
            return
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self.sd_adapter = sd_adapter
        self.save_future = None  # The run has the future.
        self._config = config
        _refuse(config, self.states, sd_adapter)
        self.run = Run(
            filesystem.join(base_folder, config.folder),
            every=config.interval,
            keep_last=config.keep_latest_k or None,
            asynchronous=config.async_mode != "disabled",
            **config.run,
        )
        """The run. Custom training loops can use its further methods."""
        self.folder, self.keep_latest_k = str(self.run.directory), config.keep_latest_k

    # ---- Saving ----

    @sl.log_trace_span("checkpoint_save")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        is_due = self.run.should_save(curr_step)  # Must be called in every step.
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_due or is_first or last_step):
            return False
        sl.add_step_tag("checkpoint_save")
        if not last_step:
            return self.run.save(curr_step, self._full_state())
        if config.last_save_in_hf:
            self._export(curr_step)
            return True
        self.run.on_busy = "wait"  # The last step is not skipped.
        model_only = config.last_save_model_only
        is_saved = self.run.save(curr_step, self._exported() if model_only else self._full_state())
        self.run.wait()  # The process may end now.
        return is_saved

    def _full_state(self) -> dict[str, Any]:
        others = {name: value for name, value in self.states.items() if name != MODEL}
        return {**others, **self.states[MODEL].state_dict()}

    def _exported(self) -> dict[str, Any]:
        """Returns the state of the model in the dtype of the last save."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        return {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.states[MODEL].state_dict().items()
        }

    def _export(self, step: int) -> None:
        """Writes the model of the last step as Hugging Face names and stores it."""
        self.maybe_wait_for_saving()
        writer = model_writer(
            str(Location(self.run.directory) / f"step-{step}"),
            fqn_to_index_mapping=self.sd_adapter.fqn_to_index_mapping,
        )
        model = self.sd_adapter.to_hf(self._exported())
        save(model, storage_writer=writer, timeout_s=self.run.timeout_s)

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: a save returns once the state is copied."""

    def maybe_wait_for_saving(self) -> None:
        """Waits for the background save, if there is one, and raises its error."""
        if self.enable:
            self.run.wait()

    _wait_for_saving = maybe_wait_for_saving

    # ---- Loading ----

    @sl.log_trace_span("checkpoint_load")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = self.run.latest_step() if step == -1 else step
        if newest is None:
            return self._load_initial()
        model_only = newest == 0  # Step 0 is a seed checkpoint.
        state = self._state_to_load(model_only)
        is_part = model_only or bool(self._config.exclude_from_loading)
        given = newest if model_only or step != -1 else None
        try:
            found = self.run.restore(state, step=given, strict=False if is_part else None)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if step != -1 and all(isinstance(cause, FileNotFoundError) for cause in causes):
                raise FileNotFoundError(
                    f"--checkpoint.load_step={step} not found in {self.folder}"
                ) from error
            if self._config.last_save_model_only and not model_only:
                error.add_note(
                    "with checkpoint.last_save_model_only, the last step of a training has the "
                    "model alone; an older step has all: give it as checkpoint.load_step"
                )
            raise
        self.states[MODEL].load_state_dict(state)  # Some of its tensors may be copies.
        return found is not None

    def _load_initial(self) -> bool:
        """Loads the initial checkpoint, if there is one: the run has no step yet."""
        config = self._config
        path = config.initial_load_path
        if config.initial_load_in_hf:
            self._load_hugging_face(path or self.sd_adapter.hf_assets_path)
            return True
        if not path:
            _LOG.info("%s has no step, and checkpoint.initial_load_path is not set", self.folder)
            return False
        model_only = config.initial_load_model_only
        state = self._state_to_load(model_only)
        is_part = model_only or bool(config.exclude_from_loading)
        self._load_from(FastReader(path, **config.run.get("reader", {})), state, is_part=is_part)
        self.states[MODEL].load_state_dict(state)
        return True

    def _load_hugging_face(self, path: str) -> None:
        adapter, config = self.sd_adapter, self._config
        state = adapter.to_hf(self.states[MODEL].state_dict())
        reader = adapter.get_hf_storage_reader(path, config.initial_load_in_hf_quantized)
        if is_replaced(reader):  # All other readers read by themselves.
            dequantize = dequantize_of(reader)
            reader = ModelReader(path)
            reader.dequantize = dequantize
        self._load_from(reader, state, is_part=True)
        self.states[MODEL].load_state_dict(adapter.from_hf(state))

    def _load_from(self, reader: StorageReader, state: dict[str, Any], *, is_part: bool) -> None:
        planner = FastLoadPlanner(strict=False if is_part else None)
        load(state, storage_reader=reader, planner=planner, timeout_s=self.run.timeout_s)

    def _state_to_load(self, model_only: bool) -> dict[str, Any]:
        model: Mapping[str, Any] = self.states[MODEL].state_dict()
        left_out = {MODEL, *self._config.exclude_from_loading}
        if model_only:
            left_out |= self.states.keys()
        others = {name: value for name, value in self.states.items() if name not in left_out}
        return {**others, **model}

    def _close(self) -> None:
        if hasattr(self, "run"):  # Else the constructor has raised.
            self.run.close()


def _refuse(config: FastCheckpointManager.Config, states: Mapping[str, Any], adapter: Any) -> None:
    """Raises an error for each option that has no effect here, or a wrong value."""
    for option in fields(BaseCheckpointManager.Config):
        value = getattr(config, option.name)
        if option.name not in _HONOURED and value != _default(option):
            raise UnsupportedError(
                f"cannot honour checkpoint.{option.name}={value!r}: FastCheckpointManager does not "
                "know this option of torchtitan"
            )
    for name in config.run:
        if name in _STATED:
            raise ValueError(f"run[{name!r}] is given: checkpoint.{_STATED[name]} states it")
        if name in _REFUSED:
            raise ValueError(f"run[{name!r}] is given, and has no use: {_REFUSED[name]}")
    if config.run.get("agent") and config.async_mode == "disabled":
        raise ValueError("run['agent'] needs checkpoint.async_mode='async'")
    for name in config.exclude_from_loading:
        if name not in states:
            raise ValueError(
                f"checkpoint.exclude_from_loading has {name!r}, which is none of "
                f"{', '.join(sorted(states))}"
            )
    for name in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(config, name) and adapter is None:
            raise ValueError(f"checkpoint.{name} needs a model with a state dict adapter")
    if config.initial_load_in_hf and not (config.initial_load_path or adapter.hf_assets_path):
        raise ValueError(
            "checkpoint.initial_load_in_hf needs checkpoint.initial_load_path or hf_assets_path"
        )


def _default(option: Any) -> Any:
    return option.default_factory() if option.default is MISSING else option.default
