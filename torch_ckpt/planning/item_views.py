"""A save as it was planned by the engine: columns, and DCP's objects where somebody looks."""

from __future__ import annotations

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
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ckpt._core import _native
from torch_ckpt._core.lazy_views import LazyMapping
from torch_ckpt._core.tensors import to_properties
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
    """What the coordinator has planned.

    Attributes:
        plan: Who writes what.
        paths: ``planner_data`` of all ranks, encoded, each different one once.
        generation: Names this plan: 16 bytes at random.
        listed: What the ranks have listed, by digest.
    """

    plan: _native.GlobalPlan
    paths: Sequence[bytes]
    generation: bytes
    listed: Mapping[bytes, ColumnItems]


class PlannedItems(Sequence[WriteItem]):
    """``SavePlan.items`` of one rank.

    What travels of them is bytes: to the coordinator the engine's encoding of all that the rank
    holds, or in its place a token, and back what the rank is to write of that, by number. In
    between they cannot be looked at.

    Args:
        encoded: All items of the rank; ``None`` where they stayed with the rank.
        assignment: Which of them it writes; ``None`` for all.
        work: The same for the engine, if it is known.
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
        """The items as the engine has them.

        Raises:
            CorruptionError: The assignment is for another list.
        """
        if self._work is None:
            if self.encoded is None:
                raise RuntimeError(
                    "this plan says by number what to write, and what of is with the rank: there a "
                    "subclass of FastSavePlanner must call finish_plan before it looks at items"
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


class ColumnItems(PlannedItems):
    """All that a rank holds, on its way to the coordinator.

    Args:
        encoded: The items.
        paths: Where their values stood in the nested state dict, encoded.
        digest: Of all that decides on the plan: 16 bytes.
        token: What the rank did with this list before. It travels with the digest in place of all
            else once somebody has set ``by_token``, who knows that nobody there looks at items.
    """

    def __init__(
        self,
        encoded: bytes | None,
        paths: bytes | None = None,
        digest: bytes = b"",
        token: bytes | None = None,
    ) -> None:
        super().__init__(encoded)
        self.paths = paths
        self.digest = digest
        self.token = token
        self.by_token = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self.by_token:
            return ColumnItems, (None, None, self.digest, self.token)
        return ColumnItems, (self.encoded, self.paths, self.digest, self.token)


class AssignedItems(PlannedItems):
    """What a rank is to write, on its way back.

    Args:
        encoded: All that it listed, as the coordinator knows.
        assignment: Which of that; ``None`` to do again what it did under the token that it sent.
        token: What it may send the next time.
        plan: That of all ranks. Stays with the coordinator.
    """

    def __init__(
        self,
        encoded: bytes | None,
        assignment: bytes | None,
        token: bytes,
        plan: GlobalPlanEntry | None = None,
    ) -> None:
        super().__init__(encoded, assignment)
        self.token = token
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        return AssignedItems, (None, self.assignment, self.token)


def to_write_item(described: _native.WorkItem) -> WriteItem:
    """An item as DCP's planners make it."""
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
    """``Metadata.state_dict_metadata`` of what ``plan`` has planned.

    Args:
        plan: That of all ranks.
    """

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


class PlannedPaths(LazyMapping[str, tuple[str | int, ...]]):
    """``planner_data`` of one rank, or of several: where values stood in the nested state dict.

    Args:
        encoded: As :func:`_native.encode_paths` gives them. The first that has an FQN counts.
    """

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self.encoded = list(dict.fromkeys(encoded))
        self._read: dict[str, tuple[str | int, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedPaths, (self.encoded,)

    def _all(self) -> dict[str, tuple[str | int, ...]]:
        if self._read is None:
            self._read = {}
            for encoded in self.encoded:
                for fqn, keys in _native.decode_paths(encoded):
                    self._read.setdefault(fqn, tuple(keys))
        return self._read

    def __getitem__(self, fqn: str) -> tuple[str | int, ...]:
        return self._all()[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
