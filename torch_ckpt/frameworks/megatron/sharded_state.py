"""ShardedState: a sharded state dict of Megatron-Core as a value that a run saves and restores."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from torch_ckpt.frameworks.megatron.values import ShardedValues

__all__ = ["ShardedState"]


class ShardedState:
    """A sharded state dict of Megatron-Core as a value of the state dict of a :class:`Run`.

    The run saves and restores it like a module, also through the agent. A restore may have another
    number of ranks and another layout. The step is a DCP checkpoint, without the files that
    ``dist_checkpointing.load`` requires. The shapes of tensors must be those of the checkpoint;
    ``allow_shape_mismatch`` has no effect.

    Args:
        sharded_state_dict: State dict as for ``dist_checkpointing.save`` and ``load``. All of its
            tensors must have data. Values that are not sharded are saved by one rank.

    Attributes:
        loaded: After a restore, the state dict as ``dist_checkpointing.load`` returns it, for the
            ``load_state_dict`` of the model and the optimizer. ``None`` before.

    Example::

        with torch_ckpt.Run("runs/gpt", agent=True, asynchronous=True) as run:
            state = ShardedState(model.sharded_state_dict())
            if run.restore({"model": state}) is not None:
                model.load_state_dict(state.loaded)
            ...
            run.save(step, {"model": ShardedState(model.sharded_state_dict())})
    """

    def __init__(self, sharded_state_dict: dict[str, Any]) -> None:
        self._given = sharded_state_dict
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of this rank, for DCP."""
        sharded, self._nonpersistent, self._factories = load_preprocess(self._given)
        sharded, common = extract_sharded_base(sharded)
        for value in nested_values(sharded):
            if isinstance(value, ShardedTensor) and value.data is None:
                raise ValueError(f"cannot save or load {value.key!r}: {value} has no data")
        self._values = ShardedValues(sharded)
        # Planners store a tuple as one object, so its content may change shape.
        return {"common": (common,), "sharded": self._values.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets :attr:`loaded`."""
        (common,) = state_dict["common"]
        self._values.state.update(state_dict["sharded"])
        merge(common, self._nonpersistent)
        merge(common, self._values.loaded())
        self.loaded = apply_factory_merges(common, self._factories)
