"""Plans of former saves, to be used again when the same is saved again.

A rank that finds its plan here sends 16 bytes in its place: a token of what it lists and of the
global plan that its part was made in. Where the coordinator finds a global plan with just these
tokens, of all ranks in their order, every rank does again what it did then. Otherwise all ranks
forget, and plan anew in the same save.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch_ckpt import _native
from torch_ckpt.errors import CheckpointError

__all__ = [
    "PLAN_CACHE",
    "GlobalPlanEntry",
    "PlanCache",
    "PlanUnknownError",
    "RankPlanEntry",
    "digest_of",
]

_KEPT = 8  # Plans; a training run saves a few different things.

_V = TypeVar("_V")


class PlanUnknownError(CheckpointError):
    """Ranks refer to a plan that the coordinator does not have; all are to plan anew."""


@dataclass(frozen=True)
class RankPlanEntry:
    """What a rank keeps of a save.

    Attributes:
        token: What it sends in place of its plan.
        assignment: What it wrote of that, encoded.
        work: The same, ready to be written.
    """

    token: bytes
    assignment: bytes
    work: _native.Work


@dataclass(frozen=True)
class GlobalPlanEntry:
    """What the coordinator keeps of a save.

    Attributes:
        plan: Who writes what.
        paths: ``planner_data`` of all ranks, encoded, each different one once.
    """

    plan: _native.GlobalPlan
    paths: Sequence[bytes]


class _Recent(Generic[_V]):
    """The values that were used last, by key."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, _V] = OrderedDict()

    def find(self, key: bytes) -> _V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def keep(self, key: bytes, value: _V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > _KEPT:
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
        dcp.save(state, storage_writer=FastWriter("run/step-200"), planner=planner)
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
        """This rank's part of the last save in which its list had this digest."""
        with self._lock:
            return self._of_rank.find(digest)

    def keep(self, digest: bytes, entry: RankPlanEntry) -> None:
        """Keeps this rank's part, once there is a global plan."""
        with self._lock:
            self._of_rank.keep(digest, entry)

    def find_global(self, tokens: Sequence[bytes]) -> GlobalPlanEntry | None:
        """The global plan in which the ranks, in this order, have these tokens."""
        with self._lock:
            return self._global.find(digest_of(*tokens))

    def keep_global(self, tokens: Sequence[bytes], entry: GlobalPlanEntry) -> None:
        """Keeps a global plan."""
        with self._lock:
            self._global.keep(digest_of(*tokens), entry)

    def count(self, *, is_hit: bool) -> None:
        """Counts a save."""
        with self._lock:
            self.hits += is_hit
            self.misses += not is_hit


def digest_of(*parts: bytes) -> bytes:
    """16 bytes that only these parts, in this order, have."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


PLAN_CACHE = PlanCache()
"""That of this process: planners are made for a save and dropped."""
