"""A cache of the plans of earlier saves, for saves of the same tensors.

If a rank lists the same items as in an earlier save, it sends 36 bytes instead of the list: a
digest of the list, and a token of the earlier plan. The coordinator stores the lists of the ranks
by digest, together with the global plans. So one save can combine ranks that send a list with ranks
that send a digest. If the coordinator has a global plan of exactly these lists, a rank whose token
names this plan reuses its work. Every other rank receives an assignment.

A plan divides tensors whose replicas were equal. With its token, a rank therefore sends a digest of
their present values: 12 bytes for each set of replicas. If the digests differ, all ranks replan.
The new plan does not divide the tensors that differ, even when they become equal again.

A lookup removes the rank's entry from the cache, and a successful plan adds it again. So an invalid
entry can fail at most one save.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch_ckpt._core import _native
from torch_ckpt.coordination.orchestrate import is_replanning
from torch_ckpt.planning.item_views import ColumnItems, GlobalPlanEntry
from torch_ckpt.planning.replica_check import EqualReplicas
from torch_ckpt.process_state import PROCESS

__all__ = [
    "PlanCache",
    "RankPlanEntry",
    "digest_of",
    "new_entry",
    "plan_cache",
    "token_of",
]

_MAX_PLANS = 8  # Different saves, of which a training run has few.
_MAX_BOXES = 32 << 20  # About 2 GiB of global plans. The newest plan may exceed the limit.

_V = TypeVar("_V")


@dataclass(frozen=True)
class RankPlanEntry:
    """A rank's cached work of an earlier save, and which of its items had equal replicas.

    The token identifies the global plan and the rank within it.
    """

    token: bytes
    work: _native.Work
    equal: Sequence[EqualReplicas] = ()


class _Recent(Generic[_V]):
    """The most recently used values, by key."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, _V] = OrderedDict()

    def newest_first(self) -> list[_V]:
        return list(reversed(self._values.values()))

    def find(self, key: bytes) -> _V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def add(self, key: bytes, value: _V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > _MAX_PLANS:
            self.drop_oldest()

    def pop(self, key: bytes) -> _V | None:
        return self._values.pop(key, None)

    def drop_oldest(self) -> None:
        self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()


class PlanCache:
    """The plans of this process's most recent saves, for all state dicts and process groups.

    Attributes:
        hits: Number of saves in which this rank used a cached plan.
        misses: Number of saves in which this rank received a new plan.

    Example::

        planner = FastSavePlanner()
        torch_ckpt.save(state, checkpoint_id="run/step-200", planner=planner)
        print(planner.plan_cache.hits, "saves used a cached plan")
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._of_rank: _Recent[RankPlanEntry] = _Recent()
        self._global: _Recent[GlobalPlanEntry] = _Recent()
        # Saves run in several threads, and in signal handlers that interrupt them.
        self._lock = threading.RLock()

    def forget(self) -> None:
        """Drops all plans."""
        with self._lock:
            self._of_rank.clear()
            self._global.clear()

    def find(self, digest: bytes) -> RankPlanEntry | None:
        """Removes and returns this rank's entry for the digest of a list, or ``None``."""
        if is_replanning():
            return None
        with self._lock:
            return self._of_rank.pop(digest)

    def peek(self, digest: bytes) -> RankPlanEntry | None:
        """Returns this rank's entry for the digest of a list, without removing it, or ``None``."""
        with self._lock:
            return self._of_rank.find(digest)

    def add(self, digest: bytes, entry: RankPlanEntry) -> None:
        """Adds this rank's entry. Called after the coordinator has returned the rank's plan."""
        with self._lock:
            self._of_rank.add(digest, entry)

    def listed(self, digest: bytes) -> ColumnItems | None:
        """Returns the item list of any rank with this digest, or ``None``."""
        with self._lock:
            entries = self._global.newest_first()
        return next((entry.listed[digest] for entry in entries if digest in entry.listed), None)

    def find_global(self, digests: Sequence[bytes]) -> GlobalPlanEntry | None:
        """Returns the global plan of lists with these digests, in rank order."""
        with self._lock:
            return self._global.find(digest_of(*digests))

    def add_global(self, digests: Sequence[bytes], entry: GlobalPlanEntry) -> None:
        """Adds the global plan of lists with these digests, in rank order."""
        with self._lock:
            self._global.add(digest_of(*digests), entry)
            entries = self._global.newest_first()
            while len(entries) > 1 and sum(e.plan.box_count for e in entries) > _MAX_BOXES:
                self._global.drop_oldest()
                entries.pop()

    def count(self, *, is_hit: bool) -> None:
        """Counts a save, after this rank has received its plan."""
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit


def new_entry(plan: _native.GlobalPlan, listed: Sequence[ColumnItems]) -> GlobalPlanEntry:
    """Returns the cache entry of a plan of the items of all ranks, with a new identifier."""
    paths = list(dict.fromkeys(items.paths for items in listed if items.paths is not None))
    # Without the digests of values, which are valid for one save only.
    lists = {
        items.digest: ColumnItems(items.encoded, items.paths, items.digest) for items in listed
    }
    return GlobalPlanEntry(plan, paths, os.urandom(16), lists)


def token_of(entry: GlobalPlanEntry, rank: int) -> bytes:
    """Returns the token of a rank's work: 20 bytes. The first 16 identify the plan."""
    return entry.generation + rank.to_bytes(4, "little")


def digest_of(*strings: bytes) -> bytes:
    """Returns a 16-byte digest of these byte strings, their lengths and their order."""
    digest = hashlib.blake2b(digest_size=16)
    for data in strings:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


PROCESS.plan_cache = PlanCache()


def plan_cache() -> PlanCache:
    """Returns the plan cache of this process, because planners usually exist for one save only."""
    cache: PlanCache = PROCESS.plan_cache
    return cache
