"""Plans of former saves, to be used again when the same is saved again.

A rank that finds its plan here sends 32 bytes in its place: a token of what it lists, of the global
plan that its part was made in, and of its place among the ranks. Where the coordinator finds a
global plan with just these tokens, every rank does again what it did then. Otherwise all ranks plan
anew in the same save. What a rank has found is gone until that save has a plan: whatever is wrong
with it, it is wrong once.

The index of a checkpoint has a mark of its plan: the 16 bytes that were drawn for that plan, and 16
of tokens of all ranks. So a plan outlives a restart: what each rank did stands in the index that
the run was loaded from. These tokens are others than those of the plan as it was made, for ranks
report what they have written by other numbers: those of the boxes in the index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch_ckpt._core import _native
from torch_ckpt.coordination.replan import is_replanning
from torch_ckpt.errors import CheckpointError
from torch_ckpt.planning.planned import GlobalPlanEntry

__all__ = [
    "PLAN_CACHE",
    "PlanCache",
    "RankPlanEntry",
    "digest_of",
    "new_entry",
]

_KEPT = 8  # Plans; a training run saves a few different things.
_KEPT_INDEXES = 2  # Open files.
_KEPT_BOXES = 32 << 20  # Of all global plans but the last: about 2 GiB.

_V = TypeVar("_V")


@dataclass(frozen=True)
class RankPlanEntry:
    """What a rank keeps of a save.

    Attributes:
        token: What it sends in place of its plan.
        work: What it wrote.
    """

    token: bytes
    work: _native.Work


class _Recent(Generic[_V]):
    """The values that were used last, by key."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
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
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def pop(self, key: bytes) -> _V | None:
        return self._values.pop(key, None)

    def limit(self, weight: Callable[[_V], int], most: int) -> None:
        """Drops the oldest while all together weigh more, but never the newest."""
        while len(self._values) > 1 and sum(map(weight, self._values.values())) > most:
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
        self._loaded: _Recent[_native.Index] = _Recent(_KEPT_INDEXES)
        self._restored: _Recent[_native.Index] = _Recent(_KEPT_INDEXES)  # By this rank.
        self._lock = threading.Lock()  # Saves go on in threads.

    def forget(self) -> None:
        """Drops all plans."""
        with self._lock:
            self._of_rank.clear()
            self._global.clear()
            self._loaded.clear()
            self._restored.clear()

    def remember(self, index: _native.Index) -> None:
        """Keeps the index of a checkpoint that was loaded, if it knows its plan."""
        if index.plan:
            with self._lock:
                self._loaded.keep(index.save_id.encode(), index)

    def find(self, digest: bytes, table: _native.ItemTable, rank: int) -> RankPlanEntry | None:
        """This rank's part of the last save in which its list had this digest, as far as it knows.

        Args:
            digest: Of all that decides on the plan.
            table: The list.
            rank: Its place among the ranks. After a restart it finds by this what it has stored.
        """
        if is_replanning():
            return None
        with self._lock:
            entry = self._of_rank.pop(digest)
            loaded = self._loaded.newest_first()
        if entry is not None:
            return entry
        for index in loaded:
            with contextlib.suppress(CheckpointError):
                work = _native.Work.restored(table, index, rank)
                with self._lock:
                    key = index.save_id.encode()
                    self._loaded.pop(key)
                    self._restored.keep(key, index)
                return RankPlanEntry(token_of(digest, _as_stored(index.plan[:16]), rank), work)
        return None

    def token(self, digest: bytes) -> bytes | None:
        """This rank's token of the last save in which its list had this digest."""
        with self._lock:
            entry = self._of_rank.find(digest)
        return None if entry is None else entry.token

    def keep(self, digest: bytes, entry: RankPlanEntry) -> None:
        """Keeps this rank's part, once there is a global plan."""
        with self._lock:
            self._of_rank.keep(digest, entry)

    def find_global(self, tokens: Sequence[bytes]) -> GlobalPlanEntry | None:
        """The global plan in which the ranks, in this order, have these tokens."""
        key = digest_of(*tokens)
        with self._lock:
            entry = self._global.find(key)
            restored = self._restored.newest_first()
        if entry is not None:
            return entry
        for index in restored:
            if index.plan[16:] == key:
                with contextlib.suppress(CheckpointError):
                    entry = _restored(index)
                    self.keep_global(entry)
                    return entry
        return None

    def keep_global(self, entry: GlobalPlanEntry) -> None:
        """Keeps a global plan, if it has a key."""
        if entry.key:
            with self._lock:
                self._global.keep(entry.key, entry)
                self._global.limit(lambda kept: kept.plan.box_count, _KEPT_BOXES)

    def count(self, *, is_hit: bool) -> None:
        """Counts a save, of which all ranks have their plans now."""
        with self._lock:
            self._restored.clear()  # Files that were open for this.
            self.hits += is_hit
            self.misses += not is_hit


def _restored(index: _native.Index) -> GlobalPlanEntry:
    paths = []
    if index.paths is not None:
        paths.append(_native.encode_paths({fqn: tuple(keys) for fqn, keys in index.paths}))
    return GlobalPlanEntry(_native.GlobalPlan.restored(index), paths, index.plan[16:], index.plan)


def new_entry(
    plan: _native.GlobalPlan, paths: Sequence[bytes], digests: Sequence[bytes]
) -> tuple[list[bytes], GlobalPlanEntry]:
    """A global plan that is to be found again, and the token of each rank.

    Args:
        plan: That of all ranks.
        paths: ``planner_data`` of all ranks, encoded.
        digests: Of what each rank has listed.
    """
    generation = os.urandom(16)
    tokens = [token_of(digest, generation, rank) for rank, digest in enumerate(digests)]
    stored = _as_stored(generation)
    in_index = [token_of(digest, stored, rank) for rank, digest in enumerate(digests)]
    mark = generation + digest_of(*in_index)
    return tokens, GlobalPlanEntry(plan, paths, digest_of(*tokens), mark)


def _as_stored(generation: bytes) -> bytes:
    """Stands for the same plan, where ranks report by the numbers of boxes in the index."""
    return digest_of(b"as stored", generation)


def token_of(digest: bytes, generation: bytes, rank: int) -> bytes:
    """What a rank sends in place of its plan: 32 bytes, of which the first 16 name the global plan.

    Args:
        digest: Of what it lists, and of all else that decides on the plan.
        generation: What was drawn for the global plan.
        rank: Its place among the ranks.
    """
    return generation + digest_of(digest, generation, str(rank).encode())


def digest_of(*parts: bytes) -> bytes:
    """16 bytes that only these parts, in this order, have."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


PLAN_CACHE = PlanCache()
"""That of this process: planners are made for a save and dropped."""
