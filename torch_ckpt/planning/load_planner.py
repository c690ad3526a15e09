"""FastLoadPlanner: stock DCP's default load planner, which has the engine search the index."""

from __future__ import annotations

import dataclasses
import pickle
from collections import UserList
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, overload

import torch
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import MismatchError, NotFoundError
from torch_ckpt.formats.index import index_of
from torch_ckpt.planning.columns import has_sharded_tensors, overrides, table_of
from torch_ckpt.planning.rank_state import find_rank_states

__all__ = ["FastLoadPlanner", "LocalReads", "PlannedReads", "TravellingReads"]


class PlannedReads(Sequence[ReadItem]):
    """``LoadPlan.items`` of one rank, as columns; pickled as DCP's items."""

    def __init__(self, reads: _native.Reads, sources: list[Any]) -> None:
        self.reads = reads
        self.sources = sources
        """What each item that the rank has listed is loaded into; ``None`` if only DCP can tell."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __len__(self) -> int:
        return len(self.reads)

    @overload
    def __getitem__(self, at: int) -> ReadItem: ...
    @overload
    def __getitem__(self, at: slice) -> list[ReadItem]: ...
    def __getitem__(self, at: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return _to_read_item(self.reads.describe(at if at >= 0 else at + len(self)))

    def __iter__(self) -> Iterator[ReadItem]:
        return (_to_read_item(self.reads.describe(at)) for at in range(len(self)))


class LocalReads(Sequence[ReadItem]):
    """Stands for the reads of a rank, which has kept them, while its plan travels."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int | slice) -> Any:
        raise RuntimeError("only the reader that planned these reads has them, and for one load")


class TravellingReads(UserList[ReadItem]):
    """Any other reads of a rank, while its plan travels: who does not look at them unpickles none.

    The coordinator has the plans of all ranks, and stock's planners pass them on as they are.
    """

    def __init__(self, items: Iterable[ReadItem] = ()) -> None:
        self._items: list[ReadItem] | None = list(items)
        self._pickled = b""
        self._length = 0

    @classmethod
    def of(cls, items: Sequence[ReadItem]) -> TravellingReads:
        """Packs reads; what comes back equals ``list(items)``."""
        return cls._packed(pickle.dumps(list(items)), len(items))

    @classmethod
    def _packed(cls, pickled: bytes, length: int) -> TravellingReads:
        reads = cls()
        reads._items, reads._pickled, reads._length = None, pickled, length
        return reads

    def are(self, sent: TravellingReads) -> bool:
        """Whether they are those that were sent, and nobody has looked at them on their way."""
        return self._items is None and self._pickled == sent._pickled

    @property
    def data(self) -> list[ReadItem]:
        """The reads themselves, which ``UserList`` does everything else with."""
        if self._items is None:
            self._items = pickle.loads(self._pickled)
        return self._items

    @data.setter
    def data(self, items: list[ReadItem]) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._length if self._items is None else len(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._items is None:
            return TravellingReads._packed, (self._pickled, self._length)
        return list, (self._items,)

    def __copy__(self) -> TravellingReads:
        return TravellingReads(self.data)


def _to_read_item(described: tuple[Any, ...]) -> ReadItem:
    fqn, is_object, offsets, number, box_offsets, dest, storage, lengths = described
    if is_object:
        return ReadItem(
            type=LoadItemType.BYTE_IO,
            dest_index=MetadataIndex(fqn),
            dest_offsets=torch.Size((0,)),
            storage_index=MetadataIndex(fqn),
            storage_offsets=torch.Size((0,)),
            lengths=torch.Size((0,)),
        )
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, torch.Size(offsets)),
        dest_offsets=torch.Size(dest),
        storage_index=MetadataIndex(fqn, torch.Size(box_offsets), number),
        storage_offsets=torch.Size(storage),
        lengths=torch.Size(lengths),
    )


_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")


class FastLoadPlanner(DefaultLoadPlanner):
    """Plans what ``DefaultLoadPlanner`` plans, many times faster, where there is an index.

    The engine looks up what this rank wants, so that the time and the memory depend on that and not
    on all that is stored. Of a checkpoint of stock DCP it plans as ``DefaultLoadPlanner`` does, and
    wherever something is wrong it raises what that raises. What a subclass overrides is called; one
    that overrides a method which makes plans gets DCP's own items.

    Args:
        flatten_state_dict: As in DCP.
        flatten_sharded_tensors: As in DCP.
        allow_partial_load: As in DCP: whether what is not stored stays as it is.

    Example::

        planner = FastLoadPlanner()
        dcp.load(state, storage_reader=FastReader("run/step-100"), planner=planner)
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict, and has each `RankState` in it look up what there is."""
        with gc_paused():
            find_rank_states(state_dict, metadata, is_flattened=self.flatten_state_dict)
            _init_state_dict(state_dict)
            self.original_state_dict = state_dict
            if not self.flatten_state_dict:
                if self.flatten_sharded_tensors:
                    state_dict = _flatten_sharded_tensors(state_dict)
            else:
                flat, paths = _tensor_view.flatten(state_dict)
                if self.flatten_sharded_tensors and has_sharded_tensors(flat):
                    flat, paths = _tensor_view.flatten(_flatten_sharded_tensors(state_dict))
                state_dict, self.mappings = flat, paths
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._reads: PlannedReads | None = None  # What this rank has planned.

    def create_local_plan(self) -> LoadPlan:
        """Finds what this rank wants among what is stored."""
        index = index_of(self.metadata)
        if index is not None:
            try:
                with gc_paused():
                    table, sources = table_of(self.state_dict, for_load=True)
                    reads = _native.Reads(index, table, self.allow_partial_load)
                    planned = PlannedReads(reads, sources)
                    if overrides(self, FastLoadPlanner, _PLANNING):
                        return LoadPlan(list(planned))
                self._reads = planned
                return LoadPlan(cast(list[ReadItem], planned))
            except (ValueError, TypeError, AttributeError, MismatchError, NotFoundError):
                pass  # DCP's planner knows what to raise, or what to make of it.
        return super().create_local_plan()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Takes the plan that has come back from the coordinator."""
        items: Any = new_plan.items
        if isinstance(items, LocalReads) and self._reads is not None:
            new_plan = dataclasses.replace(new_plan, items=cast(list[ReadItem], self._reads))
        return super().finish_plan(new_plan)

    def loads_plainly(self) -> bool:
        """Whether nobody has another idea of where what is read goes, and what is done with it."""
        names = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
        return not overrides(self, DefaultLoadPlanner, names)
