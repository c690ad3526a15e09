"""The contents of a DeepSpeed checkpoint's files: models, optimizers, and DeepSpeed's classes.

The classes are read as plain data, so DeepSpeed need not be installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ckpt.formats.allowed_classes import StandIns
from torch_ckpt.formats.data_classes import NeedsState
from torch_ckpt.frameworks.rank_files.files import File, Stored, Value

__all__ = ["STAND_INS", "Model", "Optimizer", "Shapes", "sizes_of"]

_MAX_NUMEL = 2**60

Shapes = dict[str, tuple[int, ...]]
"""FQN -> sizes of the parameters of one flat group, in the order of their elements."""


def _fields() -> NeedsState:
    """Builds a dict of the attributes of an object."""

    def make(state: Any) -> dict[str, Any]:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("its state is not a dict of attributes")
        return dict(state)

    return NeedsState(make)


def _number(value: int) -> int:
    if type(value) is not int:
        raise ValueError("its value is not an int")
    return value


STAND_INS: StandIns = {
    "deepspeed.utils.tensor_fragment.fragment_address": _fields,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _fields,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _fields,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": _fields,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _number,
}


@dataclass
class Model:
    """The model files of one model-parallel rank, of which ``file`` is one.

    ``groups`` are the parameters of each flat group of the optimizer. ``tensors`` are buffers,
    frozen parameters and extra states. ``aliases`` is FQN -> FQN of the parameter that it shares.
    ``rest`` contains values of the engine or of the client.
    """

    groups: list[Shapes]
    tensors: dict[str, Value]
    aliases: dict[str, str]
    rest: dict[str, Stored]
    buffers: Sequence[str]
    file: File

    def sizes(self) -> Shapes:
        """Returns the sizes of each parameter of the optimizer."""
        return {fqn: sizes for shapes in self.groups for fqn, sizes in shapes.items()}


@dataclass
class Optimizer:
    """The state of an optimizer.

    ``weights`` are the weights that the optimizer updates: in fp32 with mixed precision. ``states``
    is FQN -> name of a state -> its value. ``params`` of ``param_groups`` are FQNs; the groups are
    stored at the keys ``groups_at`` of ``file``. ``rest`` contains values of the engine, such as
    the loss scale.
    """

    weights: Mapping[str, Value]
    states: dict[str, dict[str, Value]]
    param_groups: list[dict[str, Any]]
    rest: dict[str, Stored]
    file: File
    groups_at: tuple[str | int, ...]


def sizes_of(file: File, fqn: str, sizes: Any) -> tuple[int, ...]:
    """Returns the sizes of a parameter from a file. Raises CorruptionError if they are invalid."""
    valid = isinstance(sizes, Sequence) and all(type(size) is int and size >= 0 for size in sizes)
    if not valid or math.prod(max(size, 1) for size in sizes) > _MAX_NUMEL:
        raise file.damage(f"the shape of {fqn!r} is {str(sizes)[:200]}")
    return tuple(sizes)
