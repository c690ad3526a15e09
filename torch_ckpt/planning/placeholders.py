"""Empty tensors in the place of parameters whose elements are elsewhere, as ZeRO-3 has them.

DeepSpeed partitions the elements of a parameter among the ranks, and leaves ``torch.empty(0)`` on
each. A state dict of the module then saves, without an error, a model that has no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.differences import listed
from torch_ckpt.process_state import PROCESS

__all__ = ["check_placeholders"]

_LOG = logging.getLogger("torch_ckpt")


def check_placeholders(state_dict: Mapping[str, Any]) -> None:
    """Refuses empty tensors that have the sizes of a parameter, and warns of others that may.

    ``Module.state_dict`` drops the attributes with the sizes. What it leaves are floating-point
    tensors of size 0. These are named once, on the first rank: a model may have some of its own.

    Raises:
        UnsupportedError: A tensor is a placeholder. The message names its FQN.
    """
    empty = [
        fqn
        for fqn, value in state_dict.items()
        if isinstance(value, torch.Tensor) and value.shape == (0,) and value.is_floating_point()
    ]
    for fqn in empty:
        if sizes := getattr(state_dict[fqn], "ds_shape", None):
            raise UnsupportedError(
                f"cannot save {fqn!r}: it is a placeholder for a parameter of sizes {list(sizes)}, "
                "whose elements ZeRO-3 of DeepSpeed has partitioned; save it within "
                "deepspeed.zero.GatheredParameters, or save the engine: see docs/deepspeed.md"
            )
    names = frozenset(empty)
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if names and is_first and names not in PROCESS.warned_placeholders:
        PROCESS.warned_placeholders.add(names)
        _LOG.warning(
            "saving floating-point tensors without elements: %s. If they are parameters of ZeRO-3, "
            "their elements are not saved: see docs/deepspeed.md",
            listed(empty),
        )
