"""Which tensors a rank need not stage: those that others have written in the save before."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt.plan_cache import PLAN_CACHE
from torch_ckpt.planned import ListedItems, PlannedItems
from torch_ckpt.save_planner import FastSavePlanner
from torch_ckpt.staged import PlannedPart

__all__ = ["not_needed", "part_of"]


def part_of(plan: SavePlan, planner: SavePlanner) -> PlannedPart | None:
    """What a rank writes by a final plan; ``None`` if that is all it has, or may soon be another.

    Only of :class:`FastSavePlanner` itself: a subclass may store an item from any tensor.
    """
    items: Any = plan.items
    if type(planner) is not FastSavePlanner or not isinstance(items, PlannedItems):
        return None
    if planner.digest is None or not PLAN_CACHE.knows(planner.digest):
        return None
    part = PlannedPart(planner.digest, items.work)
    return part if len(part.work) < planner.item_count else None


def not_needed(state_dict: dict[str, Any], part: PlannedPart) -> set[int]:
    """``id`` of the tensors that a rank will not write if it writes this part of them again.

    None where the state dict is not what the part is of, or the plan is not known any more: then
    nobody knows yet what the rank will write. If the plan turns out to be another all the same,
    for another rank has changed what it saves, the save fails: what has no memory is not written.
    """
    if not PLAN_CACHE.knows(part.digest):
        return set()
    planner = FastSavePlanner(enable_plan_caching=False)
    planner.set_up_planner(state_dict)
    if not isinstance(planner.create_local_plan().items, ListedItems):
        return set()
    sources = planner.sources(range(planner.item_count))
    if planner.digest != part.digest or sources is None:
        return set()
    wanted = set(part.work.items)
    needed = {id(sources[item]) for item in wanted}
    tensors = (source for source in sources if isinstance(source, torch.Tensor))
    return {id(tensor) for tensor in tensors} - needed
