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
from torch_ckpt.planning.item_views import PlannedItems
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replica_check import EqualReplicas, agree, combined, numbers_of
from torch_ckpt.planning.save_planner import FastSavePlanner, NoColumnsError
from torch_ckpt.planning.value_digests import value_digests

__all__ = ["LeftOut", "Share", "Sharing", "share_of"]

_PLAN_NBYTES = 16


@dataclass(frozen=True)
class Share:
    """The items that a rank wrote in the last save of ``ranks``.

    ``digest`` is the digest of all items that the rank listed. ``plan`` identifies the global plan
    (16 bytes). ``equal`` are the items whose replicas were equal.
    """

    digest: bytes
    plan: bytes
    work: _native.Work
    equal: Sequence[EqualReplicas]
    ranks: Sequence[int]


@dataclass(frozen=True)
class LeftOut:
    """The tensors that a rank need not stage in a save, by ``id``: it does not write them.

    ``digest`` is the digest of all items that the rank listed, and ``values`` of the values of each
    item; ``None`` if they are not compared. The save uses both to plan, because it cannot read
    unstaged tensors. ``sources`` are all tensors: while they are alive, each ``id`` belongs to one
    of them.
    """

    tensors: frozenset[int] = frozenset()
    digest: bytes = b""
    values: bytes | None = None
    sources: Sequence[Any] = ()


@dataclass(frozen=True)
class Sharing:
    """A save in which each rank stages only its share, if the shares of all ranks are still valid.

    ``decide`` applies a function to the answers of all ranks, and returns the result on every rank.
    Every rank calls it once, with its own answer.
    """

    planner: FastSavePlanner
    decide: Callable[[bytes, Callable[[Sequence[bytes]], bool]], bool]
    ranks: Sequence[int]

    def left_out(self, state_dict: dict[str, Any], share: Share | None) -> LeftOut:
        """Returns the tensors that this rank does not stage in this save.

        Planning is deterministic. If every rank lists the same items as in the last save, and the
        same replicas are equal, every rank writes its last share again. Otherwise all ranks stage
        everything.
        """
        if share is not None and share.ranks != self.ranks:
            share = None  # Ranks outside this save wrote some of the tensors.
        found = None if share is None else _unwritten(state_dict, share, self.planner)
        answer = secrets.token_bytes(_PLAN_NBYTES)
        if share is not None and found is not None:
            values = b"" if found.values is None else combined(found.values, share.equal)
            answer = share.plan + values
        is_shared = self.decide(answer, _are_valid)
        return found if is_shared and found is not None else LeftOut()


def _are_valid(answers: Sequence[bytes]) -> bool:
    """Returns whether all ranks have shares of one plan, and equal replicas."""
    plans = {answer[:_PLAN_NBYTES] for answer in answers}
    return len(plans) == 1 and agree(answer[_PLAN_NBYTES:] for answer in answers)


def share_of(plan: SavePlan, planner: SavePlanner, ranks: Sequence[int]) -> Share | None:
    """Returns a rank's share in a final plan; ``None`` if the next save cannot reuse it.

    Shares of subclasses of :class:`FastSavePlanner` cannot be reused, because these may resolve an
    item to any tensor.
    """
    items: Any = plan.items
    if type(planner) is not FastSavePlanner or not isinstance(items, PlannedItems):
        return None
    entry = None if planner.digest is None else plan_cache().peek(planner.digest)
    if planner.digest is None or entry is None:
        return None
    return Share(planner.digest, entry.token[:_PLAN_NBYTES], items.work, entry.equal, ranks)


def _unwritten(
    state_dict: dict[str, Any], share: Share, planner: FastSavePlanner
) -> LeftOut | None:
    """Returns the tensors outside the share; ``None`` if the rank's list or plan has changed."""
    probe = copy.copy(planner)
    probe.enable_plan_caching = False
    probe.set_up_planner(state_dict)
    try:
        digest = probe.list_items().digest
    except NoColumnsError:
        return None
    sources = probe.sources(range(probe.item_count))
    newest = plan_cache().peek(share.digest)
    has_changed = newest is not None and newest.token[:_PLAN_NBYTES] != share.plan
    if digest != share.digest or sources is None or has_changed:
        return None
    values = None
    if planner.check_replicas != "off":
        values = value_digests(sources, planner.check_replicas, numbers_of(share.equal))
    needed = {id(sources[item]) for item in set(share.work.items)}
    tensors = {id(source) for source in sources if isinstance(source, torch.Tensor)}
    return LeftOut(frozenset(tensors - needed), digest, values, sources)
