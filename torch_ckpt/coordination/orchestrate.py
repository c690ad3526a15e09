"""DCP's save and load for the ranks of a :class:`~torch_ckpt.coordination.group.Group`.

These functions work like DCP's own, with any of its writers, readers and planners, but every
exchange has a deadline.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.coordination.current_call import setting
from torch_ckpt.coordination.group import Call
from torch_ckpt.coordination.statefuls import StateDicts, state_dicts_of
from torch_ckpt.errors import CheckpointError

__all__ = [
    "PlanUnknownError",
    "calling_planner",
    "is_replanning",
    "load",
    "read",
    "save",
]

_MAX_FRAMES = 8  # Between the method of a writer or reader and the calling save or load function.


class PlanUnknownError(CheckpointError):
    """Ranks refer to a cached plan that the coordinator does not have. All ranks must replan."""

    is_recorded = False  # The save continues.


_replanning: ContextVar[bool] = ContextVar("torch_ckpt_replanning", default=False)


_planner: ContextVar[SavePlanner | LoadPlanner | None] = ContextVar(
    "torch_ckpt_planner", default=None
)


def calling_planner() -> SavePlanner | LoadPlanner | None:
    """Returns the planner of the save or load that calls this function; ``None`` if unknown.

    For methods that DCP calls without the planner, before the plans are exchanged. Callers must
    also work if the planner is unknown.
    """
    if _planner.get() is not None:
        return _planner.get()
    # In DCP's own functions, no earlier argument of a writer or reader refers to the planner, and
    # this package patches no function of torch. The planner is only a local variable of the caller.
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        planner = frame.f_locals.get("planner")
        if isinstance(planner, SavePlanner | LoadPlanner):
            return planner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def is_replanning() -> bool:
    """Returns whether this thread is replanning, so that it must not use cached plans."""
    return _replanning.get()


def save(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner | None,
    call: Call,
    *,
    use_collectives: bool = True,
) -> Metadata:
    """Saves a state dict, like DCP's ``state_dict_saver._save_state_dict``.

    Saves the state dicts of ``Stateful`` objects at any depth. If any rank refers to a plan that
    the coordinator does not have, all ranks replan. With ``use_collectives``, the ranks plan and
    commit one checkpoint together. Raises CheckpointException, a BaseException, if a rank raised an
    error, and RankTimeoutError if a rank was late, stuck or dead.
    """
    state_dict = state_dicts_of(state_dict)
    chosen = planner or DefaultSavePlanner()
    group = call.group
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        arguments = {"state_dict": state_dict, "is_coordinator": group.is_coordinator}
        if "storage_meta" in inspect.signature(chosen.set_up_planner).parameters:
            arguments["storage_meta"] = writer.storage_meta()
        chosen.set_up_planner(**arguments)  # type: ignore[arg-type]
        set_up: Any = writer.set_up_storage_writer
        _set_up(set_up, group.is_coordinator, rank=group.rank, use_collectives=use_collectives)
        with setting(_planner, chosen):
            return writer.prepare_local_plan(chosen.create_local_plan())

    def plan_for_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        _check_same_call(plans, call)
        planned, metadata = chosen.create_global_plan(plans)
        return writer.prepare_global_plan(planned)

    def write() -> Any:
        call.written_nbytes = getattr(writer, "written_nbytes", None)
        try:
            writes = writer.write_data(chosen.finish_plan(planned), chosen)
            writes.wait()
            return writes.value()
        finally:
            call.written_nbytes = None

    def finish(results: list[Any]) -> Metadata:
        assert metadata is not None
        writer.finish(metadata=metadata, results=results)
        return metadata

    with call.current(), _ended_on_failure(writer):
        if not use_collectives:
            (planned,) = plan_for_all([plan()])
            finished = finish([write()])
            call.barrier("finishing")
            return finished
        try:
            planned = call.reduce_scatter("plan", plan, plan_for_all)
        except CheckpointException as error:
            if not all(isinstance(e, PlanUnknownError) for e, _ in error.failures.values()):
                raise
            with setting(_replanning, True):
                planned = call.reduce_scatter("plan", plan, plan_for_all)
        finished = call.all_reduce("write", write, finish)
        commit_here: Callable[[Metadata], None] | None = getattr(writer, "commit_here", None)
        if commit_here is not None:  # The ranks share no storage.
            call.all_reduce("commit", functools.partial(commit_here, finished), lambda _: None)
        return finished


@contextlib.contextmanager
def _ended_on_failure(writer: StorageWriter) -> Iterator[None]:
    """Notifies a writer of this package if the save has failed, on this rank or another one."""
    try:
        yield
    except BaseException:
        end: Callable[[], None] | None = getattr(writer, "end_failed_save", None)
        if end is not None:
            end()
        raise


def load(
    state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner | None, call: Call
) -> None:
    """Loads a state dict in place, like DCP's ``state_dict_loader._load_state_dict``.

    ``Stateful`` objects at any depth receive their loaded state dicts. Other loaded values replace
    values of the state dict. Raises as :func:`save`. The caller must have entered the call: its
    block ends after the last ``load_state_dict()``, and then waits for all ranks.
    """
    objects = StateDicts(state_dict, for_load=True)
    read(objects, reader, planner, call)
    call.begin_last("restoring")
    objects.restore()


def read(
    objects: StateDicts, reader: StorageReader, planner: LoadPlanner | None, call: Call
) -> None:
    """Loads the state dict of ``objects`` in place, without restoring them.

    Raises as :func:`save`. All ranks have read when it returns.
    """
    chosen = planner or DefaultLoadPlanner()
    group = call.group
    use_collectives = True

    def plan() -> LoadPlan:
        nonlocal use_collectives
        metadata, use_collectives = _metadata_of(reader, group.rank)
        objects.use_stored(metadata)
        chosen.set_up_planner(objects.state, metadata, group.is_coordinator)
        set_up: Any = reader.set_up_storage_reader
        _set_up(
            set_up, metadata, group.is_coordinator, rank=group.rank, use_collectives=use_collectives
        )
        with setting(_planner, chosen):
            return reader.prepare_local_plan(chosen.create_local_plan())

    def plan_for_all(plans: list[LoadPlan]) -> list[LoadPlan]:
        _check_same_call(plans, call)
        return reader.prepare_global_plan(chosen.create_global_plan(plans))

    def read_data() -> None:
        reader.read_data(chosen.finish_plan(planned), chosen).wait()

    # A reader of this package shows the phases of the load on a terminal.
    shown: Any = getattr(reader, "show_planning", None) if group.is_coordinator else None
    with call.current():
        with contextlib.nullcontext() if shown is None else shown(group.size):
            planned = call.reduce_scatter("plan", plan, plan_for_all)
        call.all_reduce("read", read_data, lambda _: None)


def _check_same_call(plans: Sequence[SavePlan | LoadPlan], call: Call) -> None:
    """Raises if some ranks save and others load: both begin with an exchange of plans."""
    ranks: dict[bool, int] = {}  # One rank of each kind. Without collectives, only one plan.
    for name, plan in zip(call.group.names, plans, strict=False):
        ranks.setdefault(isinstance(plan, LoadPlan), name)
    if len(ranks) > 1:
        raise CheckpointError(
            f"ranks make different calls: rank {ranks[False]} saves, and rank {ranks[True]} loads; "
            "all ranks must make the same calls in the same order"
        )


def _metadata_of(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """Reads the metadata of the checkpoint, and whether all ranks saved it together.

    If not, reads the metadata that this rank saved alone.
    """
    try:
        return reader.read_metadata(), True
    except Exception as error:
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        with contextlib.suppress(Exception):
            own: Any = reader.read_metadata
            return own(rank=rank), False
        raise error from None


def _set_up(function: Callable[..., None], *arguments: Any, **optional: Any) -> None:
    """Sets up a writer or reader, with the optional arguments only if it accepts them."""
    accepts = "kwargs" in inspect.signature(function).parameters
    function(*arguments, **(optional if accepts else {}))
