"""The plan of a joint save, which the agent of each machine computes from the lists of all."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.replica_check import DIGEST_NBYTES, warn_of

__all__ = ["JointPlan", "joint_plan"]


@dataclass
class JointPlan:
    """The plan of all ranks, and the paths of their items in the nested state dicts."""

    plan: _native.GlobalPlan
    paths: list[bytes | None]


def joint_plan(
    files: Manifests, save: list[object], world_size: int, directory: Location
) -> JointPlan | None:
    """Returns the plan of all ranks, equal on all machines; ``None`` if a list was removed.

    ``save`` contains the facts of the save that must be equal on all machines. Raises
    CheckpointError if they differ, or if the machines together lack a rank.
    """
    items: dict[int, bytes] = {}
    values: dict[int, bytes] = {}
    paths: dict[int, bytes | None] = {}
    ranks_per_node = 0
    for node in range(files.node_count):
        got = files.get(node, "lists")
        if got is None:
            return None
        facts, blobs = got
        if facts["save"] != save:
            raise CheckpointError(
                f"cannot save {directory}: machine {node} has a different save, "
                f"{facts['save']} instead of {save}"
            )
        ranks_per_node = ranks_per_node or len(facts["ranks"])
        items.update(zip(facts["ranks"], blobs[::3], strict=True))
        values.update(zip(facts["ranks"], blobs[2::3], strict=True))
        for rank, has_paths, rank_paths in zip(
            facts["ranks"], facts["has_paths"], blobs[1::3], strict=True
        ):
            paths[rank] = rank_paths if has_paths else None
    ranks = sorted(items)
    if ranks != list(range(world_size)):
        raise CheckpointError(
            f"cannot save {directory}: the machines have ranks {ranks} of {world_size}"
        )
    plan = _native.GlobalPlan(
        [items[rank] for rank in ranks],
        ranks_per_node,
        split=True,
        dedup=True,
        # Empty if no machine compares replicas.
        digests=[values[rank] or _unknown(items[rank]) for rank in ranks]
        if any(values.values())
        else [],
    )
    warn_of(plan.differences)
    return JointPlan(plan, [paths[rank] for rank in ranks])


def _unknown(items: bytes) -> bytes:
    """Returns unknown digests, for the items of a rank that compares no replicas."""
    return bytes(DIGEST_NBYTES * len(_native.ItemTable.decode(items)))
