"""What each rank sends to the coordinator about a model: its tensors, and which share memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt._core import _native
from torch_ckpt.errors import MismatchError, UnsupportedError
from torch_ckpt.formats.safetensors.layout import UNTIED, TensorFacts
from torch_ckpt.planning.item_views import AssignedItems
from torch_ckpt.planning.replicas import work_of
from torch_ckpt.planning.ties import common_ties
from torch_ckpt.storage.safetensors_base import BaseReport
from torch_ckpt.storage.safetensors_pieces import dtype_name

__all__ = ["RankFacts", "facts_of", "listed", "ties_of"]

_MAX_NAMED = 3  # Names in an error message.
_WAY_OUT = "save objects separately, for example with FastWriter"


@dataclass(frozen=True)
class RankFacts:
    """``SavePlan.storage_data`` of one rank for the coordinator.

    ``ties`` are groups of names for one tensor, and ``base`` is the rank's comparison with the
    base.
    """

    ties: Sequence[Sequence[str]]
    base: BaseReport | None


def ties_of(plans: Sequence[SavePlan]) -> dict[str, str]:
    """Returns the tied names to omit; none unless :class:`FastSavePlanner` made all plans."""
    items: list[Any] = [plan.items for plan in plans]
    ties = [facts.ties for plan in plans if isinstance(facts := plan.storage_data, RankFacts)]
    common = common_ties(ties, items) if len(ties) == len(plans) else {}
    return {name: first for name, first in common.items() if name not in UNTIED}


def facts_of(plans: Sequence[SavePlan]) -> list[TensorFacts]:
    """Returns the facts of all tensors. Raises UnsupportedError for an object."""
    columns: list[Any] = [plan.items for plan in plans]
    planned = next((c.plan for c in columns if isinstance(c, AssignedItems)), None)
    return _facts_of_items(plans) if planned is None else _facts_of_columns(planned.plan)


def _facts_of_columns(plan: _native.GlobalPlan) -> list[TensorFacts]:
    facts: list[TensorFacts] = []
    objects: list[str] = []
    for fqn in plan.fqns:
        found = plan.find(fqn)
        assert found is not None
        if found[1] is None:
            objects.append(fqn)
        else:
            facts.append(TensorFacts(fqn, found[1][0], tuple(found[1][4])))
    _raise_if_any(objects)
    return facts


def _facts_of_items(plans: Sequence[SavePlan]) -> list[TensorFacts]:
    found: dict[str, TensorFacts] = {}
    objects: list[str] = []
    for item in itertools.chain.from_iterable(map(work_of, plans)):
        fqn, data = item.index.fqn, item.tensor_data
        if data is None:
            objects.append(fqn)
            continue
        if data.properties.layout != torch.strided:
            raise UnsupportedError(
                f"cannot store {fqn!r} as safetensors: its layout is {data.properties.layout}"
            )
        facts = TensorFacts(fqn, dtype_name(data.properties.dtype), tuple(data.size))
        if found.setdefault(fqn, facts) != facts:
            raise MismatchError(
                f"cannot store {fqn!r}: ranks disagree on it: {facts.dtype} of "
                f"{list(facts.sizes)}, and {found[fqn].dtype} of {list(found[fqn].sizes)}"
            )
    _raise_if_any(objects)
    return list(found.values())


def _raise_if_any(objects: Sequence[str]) -> None:
    if objects:
        raise UnsupportedError(
            f"cannot store {listed(objects)} as safetensors: the format supports only tensors; "
            f"{_WAY_OUT}"
        )


def listed(fqns: Sequence[str]) -> str:
    """Returns the first names of a list, for an error message."""
    more = f" and {len(fqns) - _MAX_NAMED} more" if len(fqns) > _MAX_NAMED else ""
    return ", ".join(map(repr, fqns[:_MAX_NAMED])) + more
