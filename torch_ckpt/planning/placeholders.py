"""Detects the empty placeholders of parameters that DeepSpeed's ZeRO-3 has partitioned.

ZeRO-3 partitions the elements of a parameter among the ranks, and replaces the parameter by
``torch.empty(0)`` on each. Without this check, a save of the module's state dict would succeed, and
contain no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt.errors import SITE, UnsupportedError
from torch_ckpt.planning.differences import listed
from torch_ckpt.process_state import PROCESS

__all__ = ["check_placeholders"]

_LOG = logging.getLogger("torch_ckpt")


def check_placeholders(state_dict: Mapping[str, Any]) -> None:
    """Refuses placeholders, and warns of empty tensors that may be placeholders.

    An attribute of a placeholder states the sizes of its parameter. ``Module.state_dict`` drops the
    attribute, so that a floating-point tensor of sizes ``[0]`` remains. A model may also have such
    tensors for other reasons, so the first rank only warns, once for the same names.

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
                "whose elements DeepSpeed's ZeRO-3 has partitioned; save it within "
                f"deepspeed.zero.GatheredParameters, or save the engine: see {SITE}deepspeed/"
            )
    names = frozenset(empty)
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if names and is_first and names not in PROCESS.warned_placeholders:
        PROCESS.warned_placeholders.add(names)
        _LOG.warning(
            "saving floating-point tensors without elements: %s. If they are parameters of ZeRO-3, "
            "their elements are not saved: see %s",
            listed(empty),
            f"{SITE}deepspeed/",
        )
