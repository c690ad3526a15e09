"""FastLoadPlanner: DCP's default load planner, with the native engine's index search."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import cpu_as_default, gc_paused
from torch_ckpt._core.unpickling import allow_in_messages
from torch_ckpt.errors import MismatchError, NotFoundError, UnsupportedError, naming_cycle
from torch_ckpt.formats.index import index_of
from torch_ckpt.planning.columns import has_sharded_tensors, overrides, table_of
from torch_ckpt.planning.cover import check_reads, naming_checkpoint
from torch_ckpt.planning.differences import with_differences
from torch_ckpt.planning.dtensor_boxes import lookup_box, with_boxes
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.planning.loaded_objects import store_object, store_value
from torch_ckpt.planning.rank_state import find_rank_states
from torch_ckpt.planning.targets import allocated, check_targets
from torch_ckpt.planning.ties import has_no_elements, tied_names
from torch_ckpt.planning.unrestored import LeftNames, RequestedNames, Unrestored, scope_of

__all__ = ["FastLoadPlanner", "LocalReads", "PlannedReads", "commits_in_turn", "keeps_reads"]


class PlannedReads(Sequence[ReadItem]):
    """``LoadPlan.items`` of one rank, as native columns. Pickles as a list of DCP's items."""

    def __init__(self, reads: _native.Reads, sources: list[Any], table: _native.ItemTable) -> None:
        self.reads = reads
        self.table = table
        self.sources = sources
        """The destination of each item that the rank listed; ``None`` if only DCP resolves it."""

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


@allow_in_messages
class LocalReads(Sequence[ReadItem]):
    """A placeholder for a rank's reads in the plan that the rank sends to the coordinator.

    The reads themselves remain on the rank.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int | slice) -> Any:
        raise RuntimeError(
            "cannot access the reads of this plan: only the reader that planned them has them, "
            "for one load"
        )


@dataclasses.dataclass
class CheckedPlan(LoadPlan):
    """The plan of one rank, and the names that it requests, for the coordinator.

    The names are not in ``planner_data``, because that belongs to subclasses of the planner.
    """

    requested: RequestedNames | None = None
    left: LeftNames | None = None
    """What the coordinator sends back."""


def _to_read_item(described: tuple[Any, ...]) -> ReadItem:
    fqn, is_object, offsets, hint, number, box_offsets, dest, storage, lengths = described
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
        dest_index=MetadataIndex(fqn, torch.Size(offsets), hint),
        dest_offsets=torch.Size(dest),
        storage_index=MetadataIndex(fqn, torch.Size(box_offsets), number),
        storage_offsets=torch.Size(storage),
        lengths=torch.Size(lengths),
    )


_LOG = logging.getLogger("torch_ckpt")


def _unnamed(plans: Sequence[LoadPlan]) -> str:
    """Returns the message for plans that lack the names that a strict load compares."""
    rank = next(n for n, plan in enumerate(plans) if getattr(plan, "requested", None) is None)
    return (
        f"cannot load strictly: the {type(plans[rank]).__name__} of rank {rank} does not have the "
        "names that the rank requests. Use a FastLoadPlanner on all ranks; a subclass changes the "
        "plan of its create_local_plan() by dataclasses.replace(plan, items=...)"
    )


_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan")


def keeps_reads(planner: object) -> bool:
    """Returns whether a planner does not change the reads that each rank planned."""
    for kind in (FastLoadPlanner, DefaultLoadPlanner):
        if isinstance(planner, kind):
            return not overrides(planner, kind, ("create_global_plan", "finish_plan"))
    return False


def commits_in_turn(planner: object) -> bool:
    """Returns whether a planner may have state between resolving and committing a tensor."""
    kind = FastLoadPlanner if isinstance(planner, FastLoadPlanner) else DefaultLoadPlanner
    resolves = ("resolve_tensor", "lookup_tensor", "transform_tensor")
    return overrides(planner, kind, ("commit_tensor",)) and overrides(planner, kind, resolves)


class FastLoadPlanner(DefaultLoadPlanner):
    """Makes the same plans as DCP's ``DefaultLoadPlanner``, many times faster.

    If the checkpoint has an index, the engine finds the requested tensors in it. Time and memory
    then depend on the rank's state dict, and not on the size of the checkpoint. Without an index,
    or if the state dict does not match the checkpoint, ``DefaultLoadPlanner`` plans instead. If its
    error names only the first difference, the raised error lists all, with similar names.

    Before anything is loaded, the coordinator logs a warning (logger ``torch_ckpt``) that lists the
    names of the checkpoint that no rank requests and, in a partial load, the requested names that
    the checkpoint lacks. It does not list names under a top-level key that the state dict omits,
    nor names in the files of other programs (safetensors, DeepSpeed, ``torch.save``).

    Objects are set under the state dict's own keys, which need not be strings. Tensors on the meta
    device are replaced by tensors with memory, as in DCP; without a process group, on the CPU.

    A subclass can override any method of ``DefaultLoadPlanner``. If it overrides
    ``create_local_plan``, ``create_global_plan`` or ``finish_plan``, plans contain DCP's own items.

    Args:
        flatten_state_dict: Whether to flatten nested dicts and lists, as in DCP.
        flatten_sharded_tensors: Whether to flatten nested sharded tensors, as in DCP.
        allow_partial_load: Whether values that the checkpoint lacks stay unchanged, as in DCP. If
            false, they are an error.
        strict: What to do about the names that the warning lists: raise an error that lists them
            (``True``), log the warning (``None``), or nothing (``False``). With ``True``, names in
            the files of other programs count too. After a load, :attr:`report` lists them.

    Raises:
        MismatchError: ``strict`` is ``True``, and such names exist. Raised by a load, in the
            ``CheckpointException`` of every rank.
        ValueError: Tensors of the state dict cannot be written to, because they are expanded, are
            mapped read-only, or have no memory. The message names them. Raised in the same way.

    Example::

        planner = FastLoadPlanner()
        dcp.load(state, storage_reader=FastReader("run/step-100"), planner=planner)
    """

    is_whole = False
    """Whether missing top-level keys of the state dict count as differences, as in a run."""

    report: LoadReport | None = None
    """What the last load did, once it has succeeded. ``None`` before, if :class:`FastReader` does
    not read, or if a subclass or the planner of another rank makes plans without names."""

    allocated: Mapping[str, Any] = {}
    """The tensors with memory that replace those on the meta device, by name."""

    _resized: Sequence[str] = ()  # Names of tensors that a subclass loads with another shape.
    _left: LeftNames | None = None
    _reads: PlannedReads | None = None  # The reads of this rank.
    _rank_states: Sequence[str] = ()  # FQNs.

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool | None = None,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.strict = strict

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flattens the state dict, and finds the stored states of each ``RankState`` in it."""
        with gc_paused(), naming_cycle("load", state_dict):
            self._rank_states = find_rank_states(
                state_dict, metadata, is_flattened=self.flatten_state_dict
            )
            self.original_state_dict = state_dict
            if not self.flatten_state_dict:
                if self.flatten_sharded_tensors:
                    state_dict = _flatten_sharded_tensors(state_dict)
            else:
                flat, paths = _tensor_view.flatten(state_dict)
                if self.flatten_sharded_tensors and has_sharded_tensors(flat):
                    flat, paths = _tensor_view.flatten(_flatten_sharded_tensors(state_dict))
                state_dict, self.mappings = flat, paths
            # DCP's function for this also replaces values of unknown types by `None`.
            self.allocated = allocated(state_dict)
            for fqn, tensor in self.allocated.items():
                state_dict[fqn] = tensor
                store_value(self.original_state_dict, self.mappings.get(fqn, (fqn,)), tensor)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._reads = self._left = self.report = None

    def create_local_plan(self) -> LoadPlan:
        """Returns the reads of this rank.

        Raises:
            RuntimeError: The checkpoint lacks names. The message lists all differences.
            ValueError: Tensors have other shapes in the checkpoint, or cannot be written.
        """
        if self.allow_partial_load and self.metadata is not None:
            self._drop_tied(self.metadata)  # A tied name is loaded under the stored one.
        plan = self._plan_or_differences()
        if self.metadata is None:
            return plan
        if self._reads is None or _tensor_view.write_faults(self._reads.sources):
            stored = self.metadata.state_dict_metadata
            check_targets(self.state_dict, [fqn for fqn in self.state_dict if fqn in stored])
        if self._reads is not None:
            self.use_reads(self._reads)
        names = RequestedNames.of(
            self.state_dict, self.metadata, is_partial=self.allow_partial_load
        )
        return CheckedPlan(plan.items, plan.storage_data, plan.planner_data, names)

    def use_reads(self, planned: PlannedReads) -> None:
        """Called with the reads of this rank if the engine plans, once targets are checked."""

    def _plan_or_differences(self) -> LoadPlan:
        try:
            with cpu_as_default():
                return self._plan()
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError) or self.metadata is None:
                raise
            if self._drop_tied(self.metadata):
                return self._plan_or_differences()
            raise with_differences(error, self.state_dict, self.metadata) from None

    def _plan(self) -> LoadPlan:
        index = index_of(self.metadata)
        if index is not None and self.metadata is not None:
            try:
                with gc_paused(), naming_checkpoint(self.metadata):
                    table, sources = table_of(self.state_dict, for_load=True)
                    reads = _native.Reads(index, table, self.allow_partial_load)
                    planned = PlannedReads(reads, sources, table)
                    if overrides(self, FastLoadPlanner, _PLANNING):
                        return LoadPlan(list(planned))
                self._reads = planned
                return LoadPlan(cast(list[ReadItem], planned))
            except (ValueError, TypeError, AttributeError, MismatchError, NotFoundError):
                pass  # DCP's planner raises the error, or supports more than the engine.
        state_dict = self.state_dict
        self.state_dict = with_boxes(state_dict)
        try:
            plan = super().create_local_plan()
            if self.metadata is not None:
                check_reads(plan.items, self.state_dict, self.metadata)
            return plan
        except BaseException:  # Ties are detected in the tensors of the program.
            self.state_dict = state_dict
            raise

    lookup_tensor = lookup_box

    def _drop_tied(self, metadata: Metadata) -> bool:
        """Drops names that the checkpoint lacks, if they share the tensor of a stored name.

        Returns whether a name was dropped.
        """
        stored = metadata.state_dict_metadata
        missing = {fqn for fqn in self.state_dict if fqn not in stored}
        if not missing:
            return False
        dropped = {fqn for fqn in missing if has_no_elements(self.state_dict[fqn])}
        for group in tied_names(self.state_dict):
            if not missing.issuperset(group):
                dropped |= missing.intersection(group)
        self.state_dict = {f: v for f, v in self.state_dict.items() if f not in dropped}
        return bool(dropped)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Warns of values that the load of all ranks omits, or raises an error if it is strict.

        Raises:
            MismatchError: The load is strict, and would omit values.
            UnsupportedError: The load is strict, and the plan of a rank lacks the requested names.
        """
        plans = super().create_global_plan(global_plan)
        checked = [plan for plan in plans if isinstance(plan, CheckedPlan)]
        ranks = [plan.requested for plan in checked if plan.requested is not None]
        if len(ranks) < len(plans) or self.metadata is None:
            if self.strict and self.metadata is not None:
                raise UnsupportedError(_unnamed(plans))
            return plans
        left = LeftNames.of(ranks)
        if self.strict is not False:
            self._warn_of(ranks, self.metadata)
        return [dataclasses.replace(plan, requested=None, left=left) for plan in checked]

    def _warn_of(self, ranks: Sequence[RequestedNames], metadata: Metadata) -> None:
        """Warns of values that the load omits, or raises MismatchError if it is strict."""
        job_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        is_counted = scope_of(
            self.original_state_dict if self.flatten_state_dict else {},
            metadata,
            self._rank_states,
            # Ranks that do not load together may request the other names.
            strict=self.strict if self.is_whole or len(ranks) == job_size else bool(self.strict),
            is_whole=self.is_whole,
        )
        unrestored = Unrestored.of(ranks, metadata, is_counted)
        lines = unrestored.warnings()
        if self.strict and lines:
            raise MismatchError(unrestored.error())
        is_alone = len(ranks) == 1 < job_size and not self.is_whole
        if not (is_alone and dist.get_rank()):  # If each rank loads alone, the first one logs.
            for line in lines:
                _LOG.warning("%s", line)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Takes the names that all ranks leave from the coordinator's plan, for the report."""
        self._left = new_plan.left if isinstance(new_plan, CheckedPlan) else None
        return super().finish_plan(new_plan)

    def end_load(self, converted: Collection[str]) -> None:
        """Makes the report. Called by :class:`FastReader` after it has read all items.

        ``converted`` contains the names of tensors that were stored in another dtype.
        """
        if self._left is None or self.metadata is None:
            return
        self.report = LoadReport(
            tuple(self._left.missing),
            self._left.unused_of(self.metadata),
            tuple(fqn for fqn in self.state_dict if fqn in converted) if converted else (),
            tuple(self._resized),
        )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickles an object without restriction, and stores it under the state dict's own keys.

        :class:`FastReader` unpickles objects itself, unless a subclass overrides this method.
        """
        store_object(self, read_item.dest_index.fqn, torch.load(value, weights_only=False))

    def loads_plainly(self) -> bool:
        """Returns whether no subclass overrides how tensors are resolved and committed."""
        names = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
        return not overrides(self, FastLoadPlanner, names)
