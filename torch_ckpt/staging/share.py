"""Determines which replicated tensors a rank need not stage, because other ranks write them."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
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
    """The items that a rank wrote in the last save.

    Attributes:
        digest: Digest of all items that the rank listed.
        plan: Identifier of the global plan: 16 bytes.
        work: The items that the rank wrote.
        ranks: The ranks that saved.
    """

    digest: bytes
    plan: bytes
    work: _native.Work
    ranks: Sequence[int]


@dataclass(frozen=True)
class Sharing:
    """A save in which each rank stages only its share, if the shares of all ranks are still valid.

    Attributes:
        planner: The planner of the save.
        all_equal: Returns whether all ranks called it with the same bytes. Every rank calls it
            once.
        ranks: The ranks that save.
    """

    planner: FastSavePlanner
    all_equal: Callable[[bytes], bool]
    ranks: Sequence[int]

    def left_out(self, state_dict: dict[str, Any], share: Share | None) -> set[int]:
        """Returns the ``id`` of each tensor that this rank does not write in this save.

        Planning is deterministic. If every rank lists the same items as in the last save, every
        rank writes its last share again. If any rank lists other items, all ranks stage everything.
        """
        if share is not None and share.ranks != self.ranks:
            share = None  # Ranks that do not take part now wrote some of the tensors.
        unwritten = None if share is None else _unwritten(state_dict, share, self.planner)
        answer = secrets.token_bytes(16) if share is None or unwritten is None else share.plan
        return unwritten or set() if self.all_equal(answer) else set()


def share_of(plan: SavePlan, planner: SavePlanner, ranks: Sequence[int]) -> Share | None:
    """Returns a rank's share in a final plan; ``None`` if the next save cannot reuse it.

    Subclasses of :class:`FastSavePlanner` have no reusable share, because they may resolve an item
    to any tensor.
    """
    items: Any = plan.items
    if type(planner) is not FastSavePlanner or not isinstance(items, PlannedItems):
        return None
    token = None if planner.digest is None else plan_cache().token(planner.digest)
    if planner.digest is None or token is None:
        return None
    return Share(planner.digest, token[:16], items.work, ranks)


def _unwritten(
    state_dict: dict[str, Any], share: Share, planner: FastSavePlanner
) -> set[int] | None:
    """Returns the ``id`` of each tensor outside the share; ``None`` if the rank's list changed."""
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
