"""Strategies of Megatron-Core's ``dist_checkpointing`` that save and load with this package.

Works with megatron-core 0.14 and later. Which functions a version has is tested, not its number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt.api import async_save, load, save
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.commits.replacement import replace_file
from torch_ckpt.coordination.background import BackgroundFuture
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import is_index
from torch_ckpt.formats.metadata import dump_metadata
from torch_ckpt.formats.opened import Opened
from torch_ckpt.frameworks.megatron.queues import (
    QueuedSave,
    async_modules,
    poll_threads,
    with_megatron_queue,
)
from torch_ckpt.frameworks.megatron.values import ShardedValues, values_to_save
from torch_ckpt.integrations.replacing import replacing
from torch_ckpt.options import IoOptions, Verification
from torch_ckpt.planning.item_views import PlannedItems
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.rank_work import RankWork
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

__all__ = ["FastLoadStrategy", "FastSaveStrategy", "replaced_strategies"]


class FastSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves ``torch_dist`` checkpoints with :class:`FastWriter`.

    Pass it to ``dist_checkpointing.save`` as ``sharded_strategy``, alone or within
    ``FullyParallelSaveStrategyWrapper``. Megatron and this package read each other's checkpoints.

    Replicas of a tensor must be equal. If replica ids are tuples, as in Megatron's models, each
    tensor is written by the rank with the least to write. If they are integers, they come from
    ``FullyParallelSaveStrategyWrapper``, whose assignment does not change.

    An asynchronous save copies the tensors into host memory, and a thread writes them. No process
    is started. The thread communicates over separate connections. The request is finalized after
    the checkpoint is committed. If a rank failed, finalizing raises its error on every rank.

    Args:
        backend: As in Megatron.
        version: As in Megatron.
        thread_count: Number of files that each rank writes. Megatron sets it from
            ``--dist-ckpt-workers``.
        cached_metadata: Whether ``.metadata`` contains Megatron's ``all_local_plans``, from which
            Megatron's own strategy reuses a plan. This package does not need them.
        separation_hint: Tensors whose keys begin with this text are written to separate files,
            whose names begin with it.
        io: Memory budgets and I/O modes.
        stager: The memory of asynchronous saves. By default, all writers of the process share it.
        timeout_s: Deadline of each exchange between ranks, in seconds.
        **options: Other arguments of Megatron's strategy, which have no effect.

    Example::

        strategy = FastSaveStrategy()
        dist_checkpointing.save(sharded_state_dict, "run/iter_100", sharded_strategy=strategy)
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        io: IoOptions | None = None,
        stager: SnapshotStager | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        super().__init__(
            backend,
            version,
            thread_count=thread_count,
            cached_metadata=cached_metadata,
            separation_hint=separation_hint,
            **options,
        )
        self.timeout_s = timeout_s
        self._io, self._stager = io, stager or PROCESS.stager
        self._writer: _Writer | None = None
        self._background: BackgroundFuture[Metadata] | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
        """Saves the sharded tensors and objects. All ranks call it.

        Args:
            sharded_state_dict: State dict of ``ShardedTensor`` and ``ShardedObject``.
            checkpoint_dir: Directory of the checkpoint.

        Raises:
            CheckpointException: A rank raised an error. It derives from ``BaseException``.
            RankTimeoutError: A rank was late, stuck or gone.
        """
        save(
            _values(sharded_state_dict),
            storage_writer=self._writer_for(checkpoint_dir),
            planner=_save_planner(),
            timeout_s=self.timeout_s,
        )

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> Any:
        """Copies the sharded tensors and objects, and starts to write them. All ranks call it.

        Args:
            sharded_state_dict: State dict of ``ShardedTensor`` and ``ShardedObject``.
            checkpoint_dir: Directory of the checkpoint.
            async_strategy: The queue that finalizes the request: ``"mcore"``, or ``"nvrx"`` for
                that of nvidia-resiliency-ext.

        Returns:
            An ``AsyncRequest`` of that queue. The tensors may change now.

        Raises:
            RankTimeoutError: A rank was late, stuck or gone.
        """
        modules = async_modules(async_strategy)
        poll_threads(modules["AsyncCallsQueue"])
        future = async_save(
            _values(sharded_state_dict),
            storage_writer=self._writer_for(checkpoint_dir),
            planner=_save_planner(),
            timeout_s=self.timeout_s,
        )
        self._background = cast(BackgroundFuture[Metadata], future)
        return QueuedSave(self._background).request(modules["AsyncRequest"])

    def reserve(self, sharded_state_dict: dict[str, Any]) -> None:
        """Allocates the memory of asynchronous saves, which the first one would allocate otherwise.

        Args:
            sharded_state_dict: A state dict with tensors of the same sizes as in later saves.

        Raises:
            StorageError: The memory cannot be allocated.
        """
        self._stager.reserve(values_to_save(sharded_state_dict))

    def _writer_for(self, checkpoint_dir: Any) -> _Writer:
        if self._background is not None:
            # A writer runs one save at a time, and the memory of the former save is needed.
            self._background.has_ended()
        if self._writer is None:
            self._writer = _Writer(checkpoint_dir, io=self._io, stager=self._stager)
        else:
            self._writer.reset(checkpoint_dir)
        self._writer.thread_count = self.thread_count
        self._writer.separation_hint = self.separation_hint
        self._writer.keeps_plans = self.use_cached_ckpt_structure
        return self._writer


class FastLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads ``torch_dist`` checkpoints with :class:`FastReader`, also those that Megatron wrote.

    Pass it to ``dist_checkpointing.load`` as ``sharded_strategy``, alone or within
    ``FullyParallelLoadStrategyWrapper``.

    After a load, ``report`` is its :class:`LoadReport`, also under a strictness such as
    ``log_all`` or ``ignore_all``, which removes keys that the checkpoint lacks before a strategy
    sees them. ``missing`` are keys of this rank. ``unused`` are keys that no rank of the job
    requests, or ``None`` if Megatron has not compared them.

    Args:
        *arguments: Arguments of Megatron's strategy.
        exchange_group: Ranks that load together, usually the data-parallel group. One of them reads
            the bytes that several need, and sends them to the others. All of them must call
            :meth:`load`. If ``None``, each rank reads for itself.
        io: Memory budgets and I/O modes.
        verify: Whether to verify the bytes that are read. See :class:`FastReader`.
        trust_pickle: Whether objects may be of any class, and run any code. By default, they may be
            of the classes that ``torch.load(weights_only=True)`` accepts, which include those that
            Megatron registers.
        timeout_s: Deadline of each exchange between ranks, in seconds.
        **options: Arguments of Megatron's strategy.

    Example::

        strategy = FastLoadStrategy(exchange_group=parallel_state.get_data_parallel_group())
        state = dist_checkpointing.load(sharded_state_dict, "run/iter_100", strategy)
    """

    def __init__(
        self,
        *arguments: Any,
        exchange_group: dist.ProcessGroup | None = None,
        io: IoOptions | None = None,
        verify: Verification = True,
        trust_pickle: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.exchange_group = exchange_group
        self.timeout_s = timeout_s
        self._options: dict[str, Any] = {"io": io, "verify": verify, "trust_pickle": trust_pickle}
        self._opened: dict[Any, Opened] = {}
        self.report: LoadReport | None = None

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Loads sharded tensors and objects.

        Args:
            sharded_state_dict: State dict of ``ShardedTensor`` and ``ShardedObject``. Tensors with
                data are filled in place. The others are allocated on the CPU.
            checkpoint_dir: Directory of the checkpoint.
            async_strategy: No effect.

        Returns:
            The state dict, with tensors and objects in place of the sharded ones.

        Raises:
            CheckpointException: A rank raised an error. It derives from ``BaseException``.
            RankTimeoutError: A rank was late, stuck or gone.
        """
        self.report = None
        values: ShardedValues | None = None
        planner = _LoadPlanner()
        try:
            values = ShardedValues(sharded_state_dict)
            for shard in itertools.chain.from_iterable(values.resized.values()):
                shard.data.detach().zero_()  # Rows that the checkpoint lacks.
            planner.resized = list(values.resized)
        except BaseException as error:
            if self.exchange_group is None:
                raise  # No other rank waits.
            planner.error = error
        report = load(
            {} if values is None else values.state,
            storage_reader=_Reader(checkpoint_dir, self._opened, **self._options),
            planner=planner,
            process_group=self.exchange_group,
            no_dist=self.exchange_group is None,
            timeout_s=self.timeout_s,
        )
        self.cached_global_metadata = planner.metadata
        self.report = None if report is None else _with_dropped_keys(report)
        assert values is not None  # Otherwise the planner has raised the error.
        return values.loaded()

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Removes the files whose names begin with a ``separation_hint``, and their tensors.

        The remaining metadata has no index, as in Megatron's checkpoints. If the process ends
        during the call, repeat it.

        Args:
            checkpoint_dir: Directory of the checkpoint.
            key_prefix: The prefix of the files and keys.

        Raises:
            NotFoundError: The directory has no checkpoint.
            StorageError: A file cannot be written.
        """
        watch_storage()
        directory = Location(checkpoint_dir).resolved()
        files = [name for name in directory.names() if name.startswith(key_prefix)]
        files = [name for name in files if name.endswith(".distcp")]
        if not files:
            warnings.warn(
                f"{directory} has no files that begin with {key_prefix!r}: nothing is removed",
                stacklevel=2,
            )
            return
        # First: until no index is left, a repeated call must find data files to remove.
        files[:0] = filter(is_index, directory.names())
        # Repeated after an interruption, the index may belong to the former metadata.
        stored = FastReader(directory.checkpoint_id, verify=False).read_metadata()
        paths = stored.planner_data
        metadata = Metadata(
            _without(stored.state_dict_metadata, key_prefix),
            planner_data=None if paths is None else _without(paths, key_prefix),
            storage_data={
                index: extent
                for index, extent in (stored.storage_data or {}).items()
                if not index.fqn.startswith(key_prefix)
            },
        )
        replace_file(directory / ".metadata", dump_metadata(metadata))
        remove_files(directory, files)


def _with_dropped_keys(report: LoadReport) -> LoadReport | None:
    """Adds the keys that Megatron's ``load`` has compared, if it has called the strategy.

    It removes keys that the checkpoint lacks before it calls the strategy, and tells no strategy.
    It compares the keys of all ranks, of which only some may load together. Returns ``None`` if
    this version of Megatron has other variables.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (
        frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == serialization.__name__
    ):
        frame = frame.f_back
    if frame is None:
        return dataclasses.replace(report, unused=None)
    found = frame.f_locals
    try:
        stored, own = found["ckpt_sharded_metadata"], found["local_metadata"]
        every, unexpected = found["global_metadata"], found["unexpected_keys"]
    except KeyError:
        return None
    if stored is None:  # Megatron compares nothing: keys that the checkpoint lacks are an error.
        return dataclasses.replace(report, unused=None)
    keys = dict.fromkeys(shard.key for shard in stored.values())
    requested = sorted(unexpected) if own is None else dict.fromkeys(shard.key for shard in own)
    unused = None
    if every is not None:
        of_all = {shard.key for rank in every for shard in rank}
        unused = tuple(key for key in keys if key not in of_all)
    missing = tuple(key for key in requested if key not in keys)
    return dataclasses.replace(report, missing=missing, unused=unused)


def _without(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith(prefix)}


# ---- Planners, writer and reader ----


def _values(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the values to save, or one that fails the save on all ranks."""
    try:
        return values_to_save(sharded_state_dict)
    except BaseException as error:
        return {"": _Failure(error)}


class _Failure:
    """A value whose planning raises an error, which all ranks exchange."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        raise self._error


def _save_planner() -> FastSavePlanner:
    return FastSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class _LoadPlanner(FastLoadPlanner):
    """Loads what the checkpoint has of tensors (``resized``) that may have another shape there.

    ``error`` is why this rank has no state dict. All ranks exchange it.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.resized: list[str] = []
        self.error: BaseException | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Replaces tensors of another shape by the boxes that the checkpoint has."""
        if self.error is not None:
            raise self.error
        assert metadata is not None
        resized: list[str] = []
        for key in self.resized:
            stored = metadata.state_dict_metadata.get(key)
            if isinstance(stored, TensorStorageMetadata):
                if stored.size != state_dict[key].size():
                    resized.append(key)
                state_dict[key] = _within(state_dict[key], stored.size)
        self._resized = resized
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _within(shards: LocalShards, shape: torch.Size) -> LocalShards:
    """Returns the parts of the boxes that lie in a tensor of another shape."""
    boxes = []
    for offsets, tensor in shards.boxes:
        sizes = [
            min(size, max(end - at, 0))
            for at, size, end in zip(offsets, tensor.size(), shape, strict=True)
        ]
        if all(sizes):
            boxes.append((offsets, tensor[tuple(slice(size) for size in sizes)]))
    return LocalShards(shape, boxes, like=shards.boxes[0][1])


class _Writer(FastWriter):
    """Writes files of a ``separation_hint``, and Megatron's plans.

    ``keeps_plans``: whether ``.metadata`` contains the plans of all ranks.
    """

    separation_hint: str | None = None
    keeps_plans = False
    _plans: list[SavePlan] | None = None

    def _groups(self, groups: Sequence[RankWork], prefix: str) -> list[tuple[str, RankWork]]:
        hint = self.separation_hint
        if not hint:
            return super()._groups(groups, prefix)
        named: list[tuple[str, RankWork]] = []
        for group in groups:
            every = range(len(group.work))
            chosen = [at for at in every if group.item(at).index.fqn.startswith(hint)]
            others = sorted(set(every).difference(chosen))
            named += [(prefix, group.part(others)), (f"{hint}{prefix}", group.part(chosen))]
        return named

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._plans = None
        if self.keeps_plans:
            encoded = [getattr(plan.items, "encoded", None) for plan in plans]
            self._plans = [
                SavePlan(
                    list(plan.items if items is None else PlannedItems(items)),
                    storage_data=_StoragePrefix(f"__{rank}_"),
                    planner_data={},
                )
                for rank, (plan, items) in enumerate(zip(plans, encoded, strict=True))
            ]
        return super()._place(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Commits, with the plans of all ranks if they are wanted."""
        if self._plans is not None:
            cast(Any, metadata).all_local_plans = self._plans
        super().finish(metadata, results)


class _Reader(FastReader):
    """Opens a checkpoint once for the loads of one strategy.

    ``opened`` has the last opened checkpoint, by its directory and the time of its commit.
    """

    def __init__(self, path: Any, opened: dict[Any, Opened], **options: Any) -> None:
        super().__init__(path, **options)
        self._opened_before = opened

    def _open(self, path: Location, prefix: str) -> Opened:
        version = (path / f"{prefix}.metadata").modified_s()
        key = (path, prefix, version)
        found = self._opened_before.get(key)
        if version is None or found is None:
            found = super()._open(path, prefix)
            self._opened_before.clear()
            self._opened_before[key] = found
        meta = found.metadata.storage_meta
        if meta is not None:  # The reader writes the id of its load to it.
            found.metadata.storage_meta = StorageMeta(**vars(meta))
        return found


# ---- Megatron's own strategies ----


@contextlib.contextmanager
def replaced_strategies(
    *, timeout_s: float, io: IoOptions | None, verify: Verification, trust_pickle: bool
) -> Iterator[None]:
    """Makes Megatron's own strategies save and load as those of this package, within the context.

    Subclasses work as before. The ranks of Megatron's data-parallel group load together, if it is
    initialized. Where nvidia-resiliency-ext is missing, asynchronous saves that ask for it use
    Megatron's own queue.
    """
    savers: weakref.WeakKeyDictionary[Any, FastSaveStrategy] = weakref.WeakKeyDictionary()
    loaders: weakref.WeakKeyDictionary[Any, FastLoadStrategy] = weakref.WeakKeyDictionary()

    def saver(stock: Any) -> FastSaveStrategy:
        ours = savers.get(stock)
        if ours is None:
            ours = savers[stock] = FastSaveStrategy(
                stock.backend, stock.version, io=io, timeout_s=timeout_s
            )
        for name in ("thread_count", "separation_hint", "use_cached_ckpt_structure"):
            setattr(ours, name, getattr(stock, name))
        return ours

    def loader(stock: Any) -> FastLoadStrategy:
        ours = loaders.get(stock)
        if ours is None:
            ours = loaders[stock] = FastLoadStrategy(
                io=io, verify=verify, trust_pickle=trust_pickle, timeout_s=timeout_s
            )
        ours.exchange_group = _data_parallel_group()
        return ours

    def replaced(kind: Any, name: str, ours_of: Callable[[Any], Any]) -> Any:
        original = getattr(kind, name)

        @functools.wraps(original)
        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            if type(self) is not kind:
                return original(self, *arguments, **named)
            ours = ours_of(self)
            result = getattr(ours, name)(*arguments, **named)
            if name == "load":
                self.cached_global_metadata = ours.cached_global_metadata
                self.report = ours.report
            return result

        return replacing(kind, name, method)

    with contextlib.ExitStack() as stack:
        for name in ("save", "async_save"):
            stack.enter_context(replaced(TorchDistSaveShardedStrategy, name, saver))
        for name in ("load", "remove_sharded_tensors"):
            stack.enter_context(replaced(TorchDistLoadShardedStrategy, name, loader))
        if find := getattr(torch_dist, "get_async_strategy", None):
            ours = with_megatron_queue(find)
            for module in list(sys.modules.values()):  # Those that have imported its name as well.
                if getattr(module, "__dict__", {}).get("get_async_strategy") is find:
                    stack.enter_context(replacing(module, "get_async_strategy", ours))
        yield


def _data_parallel_group() -> dist.ProcessGroup | None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    return cast(
        dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
