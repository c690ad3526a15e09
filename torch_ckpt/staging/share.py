"""Which tensors a rank need not stage: those that others write."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt._core import _native
from torch_ckpt.planning.item_views import ColumnItems, PlannedItems
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.save_planner import FastSavePlanner

__all__ = ["Share", "Sharing", "share_of"]


@dataclass(frozen=True)
class Share:
    """A rank's share of what the ranks of a save hold: what it has written in the last one.

    Attributes:
        digest: Of all that it listed.
        plan: Names the global plan that gave it to the rank: 16 bytes.
        work: What the rank has written.
    """

    digest: bytes
    plan: bytes
    work: _native.Work


@dataclass(frozen=True)
class Sharing:
    """A save in which each rank stages its share alone, if all ranks agree.

    Attributes:
        planner: That of the save.
        all_equal: Returns whether all ranks have called it with the same bytes. Each calls it once.
    """

    planner: FastSavePlanner
    all_equal: Callable[[bytes], bool]

    def left_out(self, state_dict: dict[str, Any], share: Share | None) -> set[int]:
        """``id`` of the tensors that this rank will not write.

        Planning the same lists again gives the same plan. So what a rank wrote in the last save it
        writes again if every rank lists the same as then. If one rank does not, all stage all.
        """
        others = None if share is None else _not_written(state_dict, share, self.planner)
        answer = secrets.token_bytes(16) if share is None or others is None else share.plan
        return others or set() if self.all_equal(answer) else set()


def share_of(plan: SavePlan, planner: SavePlanner) -> Share | None:
    """What a rank writes by a final plan; ``None`` if the next save may have another.

    Only of :class:`FastSavePlanner` itself: a subclass may store an item from any tensor.
    """
    items: Any = plan.items
    if type(planner) is not FastSavePlanner or not isinstance(items, PlannedItems):
        return None
    token = None if planner.digest is None else plan_cache().token(planner.digest)
    if planner.digest is None or token is None:
        return None
    return Share(planner.digest, token[:16], items.work)


def _not_written(
    state_dict: dict[str, Any], share: Share, planner: FastSavePlanner
) -> set[int] | None:
    """``id`` of the tensors that are not in this share; ``None`` if the state is another."""
    probe = copy.copy(planner)
    probe.enable_plan_caching = False
    probe.set_up_planner(state_dict)
    if not isinstance(probe.create_local_plan().items, ColumnItems):
        return None
    sources = probe.sources(range(probe.item_count))
    if probe.digest != share.digest or sources is None:
        return None
    needed = {id(sources[item]) for item in set(share.work.items)}
    tensors = (source for source in sources if isinstance(source, torch.Tensor))
    return {id(tensor) for tensor in tensors} - needed
