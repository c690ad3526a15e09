"""Plans of former saves, to be used again when the same is saved again.

A rank that has listed the same before sends 36 bytes in place of its list: a digest of the list,
and a token of what it did with it. The coordinator keeps the lists of the ranks by their digests,
beside the plans that were made of them, so ranks that send their lists and ranks that do not are
planned at once. Where it knows the plan of just these lists, each rank whose token is of that plan
does again what it did then; any other is told anew.

What a rank has found here is gone until its save has a plan: whatever is wrong with it, it is wrong
once.
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
from torch_ckpt.process_state import PROCESS

__all__ = [
    "PlanCache",
    "RankPlanEntry",
    "digest_of",
    "new_entry",
    "plan_cache",
    "token_of",
]

_PLANS = 8  # Of so many different saves; a training run saves a few.
_BOXES = 32 << 20  # Of all global plans but the last: about 2 GiB.

_V = TypeVar("_V")


@dataclass(frozen=True)
class RankPlanEntry:
    """What a rank keeps of a save.

    Attributes:
        token: Names the global plan, and the rank's place in it.
        work: What it wrote.
    """

    token: bytes
    work: _native.Work


class _Recent(Generic[_V]):
    """The values that were used last, by key."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, _V] = OrderedDict()

    def newest_first(self) -> list[_V]:
        return list(reversed(self._values.values()))

    def find(self, key: bytes) -> _V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def keep(self, key: bytes, value: _V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > _PLANS:
            self.drop_oldest()

    def pop(self, key: bytes) -> _V | None:
        return self._values.pop(key, None)

    def drop_oldest(self) -> None:
        self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()


class PlanCache:
    """The plans of this process's last saves: of whatever else it saves, and of every group.

    Attributes:
        hits: Saves of which this process's part was planned before.
        misses: Saves of which it was not.

    Example::

        planner = FastSavePlanner()
        torch_ckpt.save(state, checkpoint_id="run/step-200", planner=planner)
        print(planner.plan_cache.hits, "saves were planned before")
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._of_rank: _Recent[RankPlanEntry] = _Recent()
        self._global: _Recent[GlobalPlanEntry] = _Recent()
        self._lock = threading.Lock()  # Saves go on in threads.

    def forget(self) -> None:
        """Drops all plans."""
        with self._lock:
            self._of_rank.clear()
            self._global.clear()

    def find(self, digest: bytes) -> RankPlanEntry | None:
        """This rank's part of the last save in which its list had this digest, as far as it knows.

        Args:
            digest: Of all that decides on the plan.
        """
        if is_replanning():
            return None
        with self._lock:
            return self._of_rank.pop(digest)

    def token(self, digest: bytes) -> bytes | None:
        """This rank's token of the last save in which its list had this digest."""
        with self._lock:
            entry = self._of_rank.find(digest)
        return None if entry is None else entry.token

    def keep(self, digest: bytes, entry: RankPlanEntry) -> None:
        """Keeps this rank's part, once there is a global plan."""
        with self._lock:
            self._of_rank.keep(digest, entry)

    def listed(self, digest: bytes) -> ColumnItems | None:
        """What a rank has listed before, by its digest."""
        with self._lock:
            known = self._global.newest_first()
        return next((entry.listed[digest] for entry in known if digest in entry.listed), None)

    def find_global(self, digests: Sequence[bytes]) -> GlobalPlanEntry | None:
        """The plan of the ranks whose lists, in this order, have these digests."""
        with self._lock:
            return self._global.find(digest_of(*digests))

    def keep_global(self, digests: Sequence[bytes], entry: GlobalPlanEntry) -> None:
        """Keeps the plan of lists that have these digests."""
        with self._lock:
            self._global.keep(digest_of(*digests), entry)
            known = self._global.newest_first()
            while len(known) > 1 and sum(e.plan.box_count for e in known) > _BOXES:
                self._global.drop_oldest()
                known.pop()

    def count(self, *, is_hit: bool) -> None:
        """Counts a save, of which all ranks have their plans now."""
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit


def new_entry(plan: _native.GlobalPlan, listed: Sequence[ColumnItems]) -> GlobalPlanEntry:
    """A global plan that was just made of these lists."""
    paths = list(dict.fromkeys(items.paths for items in listed if items.paths is not None))
    return GlobalPlanEntry(plan, paths, os.urandom(16), {items.digest: items for items in listed})


def token_of(entry: GlobalPlanEntry, rank: int) -> bytes:
    """What a rank did by a global plan: 20 bytes, of which the first 16 name the plan.

    Args:
        entry: The global plan.
        rank: Its place among the ranks.
    """
    return entry.generation + rank.to_bytes(4, "little")


def digest_of(*parts: bytes) -> bytes:
    """16 bytes that only these parts, in this order, have."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


PROCESS.plan_cache = PlanCache()


def plan_cache() -> PlanCache:
    """That of this process: planners are made for a save and dropped."""
    cache: PlanCache = PROCESS.plan_cache
    return cache
