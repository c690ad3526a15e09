"""Views of the engine's plans as DCP's plans, items and metadata.

The engine plans in columns. The views create DCP's objects on access.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt._core import _native
from torch_ckpt._core.lazy_views import LazyMapping
from torch_ckpt._core.tensors import to_properties
from torch_ckpt._core.unpickling import allow_in_messages
from torch_ckpt.planning.replica_check import EqualReplicas, combined
from torch_ckpt.planning.replicas import cut_item

__all__ = [
    "AssignedItems",
    "ColumnItems",
    "GlobalPlanEntry",
    "PlannedItems",
    "PlannedMetadata",
    "PlannedPaths",
    "to_write_item",
]


@dataclass(frozen=True)
class GlobalPlanEntry:
    """A global plan in the coordinator's cache, and the items of the ranks by digest.

    ``paths`` are the distinct ``planner_data`` of the ranks, encoded. ``generation`` identifies the
    plan: 16 random bytes.
    """

    plan: _native.GlobalPlan
    paths: Sequence[bytes]
    generation: bytes
    listed: Mapping[bytes, ColumnItems]


class PlannedItems(Sequence[WriteItem]):
    """``SavePlan.items`` of one rank.

    A rank sends its items to the coordinator in the engine's encoding, or sends a token instead.
    The coordinator returns an assignment: the numbers of the items that the rank writes, ``None``
    for all. If only the rank itself has the encoded items, ``encoded`` is ``None``, and individual
    items are not accessible.
    """

    def __init__(
        self,
        encoded: bytes | None,
        assignment: bytes | None = None,
        *,
        work: _native.Work | None = None,
    ) -> None:
        self.encoded = encoded
        self.assignment = assignment
        self._work = work

    @property
    def work(self) -> _native.Work:
        """The items as a native table.

        Raises CorruptionError if the assignment is for another list of items, and RuntimeError if
        the items are on another rank, or ``finish_plan`` was not called.
        """
        if self._work is None:
            if self.encoded is None:
                raise RuntimeError(
                    "cannot access the items of this plan: they are on the rank that listed them; "
                    "a subclass of FastSavePlanner must call finish_plan there before it accesses "
                    "items"
                )
            self._work = _native.Work(_native.ItemTable.decode(self.encoded), self.assignment)
        return self._work

    def __len__(self) -> int:
        return len(self.work)

    @overload
    def __getitem__(self, at: int) -> WriteItem: ...
    @overload
    def __getitem__(self, at: slice) -> list[WriteItem]: ...
    def __getitem__(self, at: int | slice) -> WriteItem | list[WriteItem]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return to_write_item(self.work.describe(at if at >= 0 else at + len(self)))

    def __iter__(self) -> Iterator[WriteItem]:
        describe = self.work.describe
        return (to_write_item(describe(at)) for at in range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


@allow_in_messages
class ColumnItems(PlannedItems):
    """All items of a rank, as the rank sends them to the coordinator.

    Args:
        encoded: The items, encoded.
        paths: The paths of their values in the nested state dict, encoded.
        digest: Digest of all inputs of the plan: 16 bytes.
        token: The rank's token from an earlier save of the same list; ``None`` without one.
        values: Digest of the values of each item; ``None`` if they are not compared, or if
            ``combined_values`` contains them.
        combined_values: With a token, the digests of replicas: see
            :func:`~torch_ckpt.planning.replica_check.combined`.

    Attributes:
        by_token: Whether the rank sends only the digest and the token. The writer sets it if the
            coordinator does not access individual items.
        equal: With a token, the items whose replicas were equal when the plan was made.
        planner: Reference to the planner that listed the items; ``None`` on other ranks.
    """

    def __init__(
        self,
        encoded: bytes | None,
        paths: bytes | None = None,
        digest: bytes = b"",
        token: bytes | None = None,
        values: bytes | None = None,
        combined_values: bytes | None = None,
    ) -> None:
        super().__init__(encoded)
        self.paths = paths
        self.digest = digest
        self.token = token
        self.values = values
        self.combined_values = combined_values
        self.by_token = False
        self.equal: Sequence[EqualReplicas] = ()
        self.planner: weakref.ref[SavePlanner] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        values, combined_values = self.values, self.combined_values
        if self.token is not None and values is not None:
            combined_values, values = combined(values, self.equal), None
        items = (None, None) if self.by_token else (self.encoded, self.paths)
        return ColumnItems, (*items, self.digest, self.token, values, combined_values)


@allow_in_messages
class AssignedItems(PlannedItems):
    """The items that a rank writes, as the coordinator returns them.

    The encoded items, all that the rank listed, and the plan are not sent to the rank. Without an
    assignment, the rank's cached work is valid; with one, ``equal`` are its items whose replicas
    are equal. The rank sends the token in the next save of the same list.
    """

    def __init__(
        self,
        encoded: bytes | None,
        assignment: bytes | None,
        token: bytes,
        equal: Sequence[EqualReplicas] = (),
        plan: GlobalPlanEntry | None = None,
    ) -> None:
        super().__init__(encoded, assignment)
        self.token = token
        self.equal = equal
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        return AssignedItems, (None, self.assignment, self.token, self.equal)


def to_write_item(described: _native.WorkItem) -> WriteItem:
    """Returns an item in the form that DCP's planners create."""
    fqn, facts, is_shard, offsets, sizes, rows = described
    if facts is None:
        return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    whole = WriteItem(
        index=MetadataIndex(fqn, chunk.offsets),
        type=WriteItemType.SHARD if is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=chunk, properties=to_properties(*facts[:4]), size=torch.Size(facts[4])
        ),
    )
    return whole if rows is None else cut_item(whole, *rows, is_listed=True)


class PlannedMetadata(LazyMapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """``Metadata.state_dict_metadata`` of a global plan."""

    def __init__(self, plan: _native.GlobalPlan) -> None:
        self.plan = plan
        self._fqns: list[str] | None = None

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        found = self.plan.find(fqn) if isinstance(fqn, str) else None
        if found is None:
            raise KeyError(fqn)
        _, facts, boxes = found
        if facts is None:
            return BytesStorageMetadata()
        return TensorStorageMetadata(
            properties=to_properties(*facts[:4]),
            size=torch.Size(facts[4]),
            chunks=[ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes],
        )

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and self.plan.find(fqn) is not None

    def __iter__(self) -> Iterator[str]:
        if self._fqns is None:
            self._fqns = self.plan.fqns
        return iter(self._fqns)

    def __len__(self) -> int:
        return len(self.plan)


@allow_in_messages
class PlannedPaths(LazyMapping[str, tuple[str | int, ...]]):
    """``planner_data`` of one or several ranks: the paths of values in the nested state dict.

    They are encoded by :func:`_native.encode_paths`. The first path of an FQN has priority.
    """

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self.encoded = list(dict.fromkeys(encoded))
        self._decoded: dict[str, tuple[str | int, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedPaths, (self.encoded,)

    def _all(self) -> dict[str, tuple[str | int, ...]]:
        if self._decoded is None:
            self._decoded = {}
            for encoded in self.encoded:
                for fqn, keys in _native.decode_paths(encoded):
                    self._decoded.setdefault(fqn, tuple(keys))
        return self._decoded

    def __getitem__(self, fqn: str) -> tuple[str | int, ...]:
        return self._all()[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
