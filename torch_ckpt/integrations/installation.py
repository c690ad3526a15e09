"""``installed`` and ``install``: DCP's own functions use this package."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint import (
    _storage_utils,
    format_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.background import Order, save_in_process, save_in_thread
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, Call, group_of
from torch_ckpt.coordination.statefuls import state_dicts_of
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.filesystems.location import Location
from torch_ckpt.integrations import hugging_face_storage
from torch_ckpt.integrations.after_import import after_import
from torch_ckpt.integrations.hugging_face_storage import ModelReader, model_writer
from torch_ckpt.integrations.replacing import Callee, first_value, has_only, replacing
from torch_ckpt.known_frameworks import FRAMEWORKS, Framework, Switch
from torch_ckpt.options import IoOptions, Verification
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging.staged import Staged
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

__all__ = ["install", "installed"]

_LOG = logging.getLogger("torch_ckpt")

_Path = str | os.PathLike[str]

_WRITER_ARGUMENTS = (
    "single_file_per_rank",
    "sync_files",
    "thread_count",
    "per_thread_copy_ahead",
    "overwrite",
)

_ARGUMENTS: dict[type, frozenset[str]] = {
    FileSystemWriter: frozenset(
        {
            *("path", "cache_staged_state_dict", "_extensions", "serialization_format"),
            *_WRITER_ARGUMENTS,
        }
    ),
    FileSystemReader: frozenset({"path", "_extension_registry"}),
    DefaultSavePlanner: frozenset(
        {
            *("flatten_state_dict", "flatten_sharded_tensors", "enable_plan_caching"),
            *("dedup_replicated_tensors", "dedup_save_to_lowest_rank"),
        }
    ),
    DefaultLoadPlanner: frozenset(
        {"flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load"}
    ),
}
"""The known arguments of DCP's classes. A class with other arguments is not replaced."""

# Attributes of DCP's own objects after a call, which programs read.
_FOUND_BY_SAVE_PLANNER = (
    *("state_dict", "mappings", "is_coordinator", "plan", "global_plan", "metadata"),
)
_FOUND_BY_LOAD_PLANNER = (
    *("original_state_dict", "state_dict", "mappings", "is_coordinator", "metadata"),
)
_FOUND_BY_READER = ("storage_data", "load_id")
_FOUND_BY_WRITER = ("rank", "use_collectives")


@functools.cache  # A nested block replaces the same ones.
def _calls() -> list[Callee]:
    """Returns the bodies of DCP's functions, which DCP's logger calls."""
    functions = state_dict_saver.save, state_dict_saver.async_save, state_dict_loader.load
    return [Callee(function) for function in functions]


@contextlib.contextmanager
def installed(
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    io: IoOptions | None = None,
    verify: Verification = True,
    trust_pickle: bool = False,
) -> Iterator[None]:
    """Makes ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` use this package.

    Within the context, DCP's functions behave as follows:

    - A call with a ``checkpoint_id`` and no storage argument uses :class:`FastWriter` or
      :class:`FastReader`.
    - A call with a ``FileSystemWriter`` or ``FileSystemReader`` uses a :class:`FastWriter` or
      :class:`FastReader` with the same path and arguments. ``cache_staged_state_dict`` has no
      effect, because the staging memory is always reused.
    - A call with a ``HuggingFaceStorageWriter``, ``HuggingFaceStorageReader`` or
      ``QuantizedHuggingFaceStorageReader`` uses a :class:`SafetensorsWriter` that writes the same
      files, or a :class:`FastReader`. All ranks write the final files, so there is no
      consolidation and no folder ``sharded``. ``thread_count_consolidation``, and ``thread_count``
      of the readers, have no effect.
    - A call without a planner, or with a ``DefaultSavePlanner`` or ``DefaultLoadPlanner``, uses
      :class:`FastSavePlanner` or :class:`FastLoadPlanner` with the same arguments.
    - Every exchange between ranks has a deadline. If a ``state_dict()`` or ``load_state_dict()`` of
      the program raises on one rank, the call fails on all ranks.
    - ``from_pretrained(..., distributed_config=)`` of transformers reads with a
      :class:`FastReader`.
    - Megatron-Core's strategies for ``torch_dist`` save and load with this package, like those of
      :mod:`torch_ckpt.frameworks.megatron.strategies`.

    After a call, the program's planner, reader or writer has the results of the object that
    replaced it, in attributes such as ``plan``, ``metadata`` and ``storage_data``. The checkpoint
    has the ``save_id`` of the program's writer.

    Subclasses and other classes work as before. The first use of such a writer or reader in a
    process logs a warning, and each replacement logs a message at level DEBUG (logger
    ``torch_ckpt``). A ``checkpoint_id`` whose URL scheme is not known raises an
    :class:`~torch_ckpt.errors.UnsupportedError`.

    The change applies to the whole process. Contexts can be nested; the innermost one applies.

    Args:
        timeout_s: Deadline of each exchange between ranks, in seconds: how long the first rank
            that arrives waits for the last one.
        io: Memory budgets and I/O modes of the writers and readers.
        verify: Whether the readers verify the bytes that they read. See :class:`FastReader`.
        trust_pickle: Whether the readers unpickle objects of any class, which can run arbitrary
            code. See :class:`FastReader`.

    Raises:
        ValueError: ``timeout_s`` is not a positive number.

    Example::

        with torch_ckpt.installed():
            dcp.save(state, checkpoint_id="run/step-100")
    """
    try:
        timeout_s = duration("timeout_s", timeout_s)
    except ValueError:
        group_of(None).call(timeout_s)  # Raises this error, and fails the call of the other ranks.
        raise
    replaced = _Replaced(timeout_s, io or IoOptions(), verify, trust_pickle)
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (_storage_utils, "FileSystemWriter", _Chosen(replaced.new_writer)),
            (_storage_utils, "FileSystemReader", _Chosen(replaced.new_reader)),
            (FileSystemWriter, "stage", replaced.stage),
            (state_dict_saver, "DefaultStager", _ProcessStager),
            *(
                (call, "function", replaced.whole(first_value(call, "function")))
                for call in _calls()
            ),
            (state_dict_saver, "_save_state_dict", replaced.save),
            (state_dict_loader, "_load_state_dict", replaced.load),
            (format_utils, "_save_state_dict", replaced.save),
            (format_utils, "_load_state_dict", replaced.load),
            (
                state_dict_saver,
                "_ThreadBasedAsyncCheckpointExecutor",
                functools.partial(_Executor, replaced, save_in_thread),
            ),
            (
                state_dict_saver,
                "_ProcessBasedAsyncCheckpointExecutor",
                functools.partial(_Executor, replaced, save_in_process),
            ),
        ):
            stack.enter_context(replacing(owner, name, replacement))

        options = {
            "timeout_s": timeout_s,
            "io": io,
            "verify": verify,
            "trust_pickle": trust_pickle,
        }
        for row in FRAMEWORKS:
            if row.switch is not None:
                switch = functools.partial(_enter, stack, row, row.switch, options)
                stack.enter_context(after_import(row.switch.after, switch))
        yield


def _enter(
    stack: contextlib.ExitStack, row: Framework, switch: Switch, options: Mapping[str, Any]
) -> None:
    """Replaces the functions of a framework that was just imported, within the block."""
    stack.enter_context(row.function(switch.enter)(**options))


def install(
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    io: IoOptions | None = None,
    verify: Verification = True,
    trust_pickle: bool = False,
) -> None:
    """Makes DCP's functions use this package until the process ends, as in :func:`installed`.

    A later call replaces the options of an earlier one.

    Args:
        timeout_s: Deadline of each exchange between ranks, in seconds: how long the first rank
            that arrives waits for the last one.
        io: Memory budgets and I/O modes of the writers and readers.
        verify: Whether the readers verify the bytes that they read. See :class:`FastReader`.
        trust_pickle: Whether the readers unpickle objects of any class, which can run arbitrary
            code. See :class:`FastReader`.

    Raises:
        ValueError: ``timeout_s`` is not a positive number.

    Example::

        torch_ckpt.install()
        trainer.fit(model)  # Its calls of dcp.save and dcp.load use this package.
    """
    context = installed(timeout_s=timeout_s, io=io, verify=verify, trust_pickle=trust_pickle)
    context.__enter__()
    PROCESS.installed.append(context)  # An unreferenced context would end.


class _Replaced:
    """The replacements of DCP's functions, and of the objects that are passed to them."""

    def __init__(
        self, timeout_s: float, io: IoOptions, verify: Verification, trust_pickle: bool
    ) -> None:
        self.timeout_s = timeout_s
        self._io, self._verify, self._trust_pickle = io, verify, trust_pickle
        self._stage = first_value(FileSystemWriter, "stage")
        self._save: Callable[..., Metadata] = first_value(state_dict_saver, "_save_state_dict")
        self._load = first_value(state_dict_loader, "_load_state_dict")
        # DCP stages and saves with the same writer, so both must use the same replacement.
        self._writers: weakref.WeakKeyDictionary[
            StorageWriter, tuple[FastWriter, dict[str, Any]]
        ] = weakref.WeakKeyDictionary()

    # ---- Objects ----

    def new_writer(self, path: _Path) -> FastWriter:
        """Returns a writer for a path."""
        return FastWriter(path, io=self._io)

    def new_reader(self, path: _Path) -> FastReader:
        """Returns a reader for a path."""
        return self._reader(path, None)

    def writer(self, given: Any) -> Any:
        """Returns the replacement of a writer of DCP; returns other writers unchanged."""
        if not self.replaces(given):
            self._warn_unless(FastWriter, given)
            return given
        new: Callable[..., FastWriter] = FastWriter
        hidden = {}
        if type(given) is FileSystemWriter:
            path = given.path
            arguments = {name: getattr(given, name) for name in _WRITER_ARGUMENTS}
            hidden = {"_extensions": given.transforms.extensions}
        else:
            new, path = model_writer, hugging_face_storage.path_of(given)
            arguments = hugging_face_storage.arguments_of(given)
        before = self._writers.get(given)
        if before is None or before[1] != arguments:
            ours = new(path, **arguments, **hidden, io=self._io)
            self._writers[given] = ours, arguments
            _log_replaced(given, ours)
        else:
            ours = before[0]
        if ours.path != Location(path).checkpoint_id:
            ours.reset(path)
        ours.given_save_id = given.save_id
        return ours

    def reader(self, given: Any) -> Any:
        """Returns the replacement of a reader of DCP; returns other readers unchanged."""
        if type(given) is FileSystemReader and _is_known(given):
            ours = self._reader(given.path, given.transforms.extension_registry)
        elif hugging_face_storage.is_replaced(given):
            ours = self._reader(given.path, None, ModelReader)
            ours.dequantize = hugging_face_storage.dequantize_of(given)
        else:
            self._warn_unless(FastReader, given)
            return given
        _log_replaced(given, ours)
        return ours

    def _reader(
        self, path: _Path, registry: Any, kind: type[FastReader] = FastReader
    ) -> FastReader:
        return kind(
            path, registry, io=self._io, verify=self._verify, trust_pickle=self._trust_pickle
        )

    def replaces(self, given: Any) -> bool:
        """Returns whether a writer has a replacement."""
        if type(given) is FileSystemWriter and _is_known(given):
            return given.serialization_format == SerializationFormat.TORCH_SAVE
        return hugging_face_storage.is_replaced(given)

    def _warn_unless(self, expected: type, given: object) -> None:
        if isinstance(given, expected) or type(given) in PROCESS.unreplaced:
            return
        PROCESS.unreplaced.add(type(given))
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            return  # The first rank has the same.
        _LOG.warning(
            "%s.%s is used as it is: torch_ckpt replaces only FileSystemWriter with the format of "
            "torch.save, FileSystemReader, and the writer and readers of Hugging Face's models, "
            "each with known arguments, and none of their subclasses",
            type(given).__module__,
            type(given).__qualname__,
        )

    # ---- Functions ----

    def whole(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the body of one of DCP's functions within one call of the ranks.

        DCP calls the first ``state_dict()`` before the functions that are replaced below, and the
        last ``load_state_dict()`` after them.
        """

        @functools.wraps(stock)
        def function(*arguments: Any, **options: Any) -> Any:
            group = group_of(
                options.get("process_group"), no_dist=bool(options.get("no_dist", False))
            )
            with group.call(self.timeout_s) as call, call.current():
                token = _begun.set(call)
                try:
                    return stock(*arguments, **options)
                finally:
                    _begun.reset(token)

        return function

    @contextlib.contextmanager
    def call(self, process_group: dist.ProcessGroup | None, no_dist: bool) -> Iterator[Call]:
        """Continues the call that has begun in this thread, or else begins one for the block."""
        group, call = group_of(process_group, no_dist=no_dist), _begun.get()
        if call is not None and call.group.connections is group.connections:
            _begun.set(None)
            yield call
        else:
            with group.call(self.timeout_s) as call:
                yield call

    @property
    def stage(self) -> Callable[[FileSystemWriter, dict[str, Any]], Any]:
        """The replacement of ``FileSystemWriter.stage``."""

        def stage(given: FileSystemWriter, state_dict: dict[str, Any]) -> Any:
            ours = self.writer(given) if self.replaces(given) else given
            if isinstance(ours, FastWriter):
                return ours.stage(state_dicts_of(state_dict))
            return self._stage(given, state_dict)

        return stage

    def save(
        self,
        state_dict: dict[str, Any],
        storage_writer: StorageWriter,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: SavePlanner | None = None,
        use_collectives: bool = True,
    ) -> Metadata:
        """The replacement of ``state_dict_saver._save_state_dict``."""
        given, writer, planner = planner, self.writer(storage_writer), _save_planner(planner)
        with (
            _giving_back(writer, storage_writer, _FOUND_BY_WRITER),
            _giving_back(planner, given, _FOUND_BY_SAVE_PLANNER),
        ):
            if coordinator_rank:
                saved: Metadata = self._save(
                    *(state_dict, writer, process_group, coordinator_rank, no_dist, planner),
                    use_collectives=use_collectives,
                )
                return saved
            with self.call(process_group, no_dist) as call:
                return orchestrate.save(
                    state_dict, writer, planner, call, use_collectives=use_collectives
                )

    def load(
        self,
        state_dict: dict[str, Any],
        storage_reader: StorageReader,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: LoadPlanner | None = None,
    ) -> None:
        """The replacement of ``state_dict_loader._load_state_dict``."""
        given, reader, planner = planner, self.reader(storage_reader), _load_planner(planner)
        with (
            _giving_back(reader, storage_reader, _FOUND_BY_READER),
            _giving_back(planner, given, _FOUND_BY_LOAD_PLANNER),
        ):
            if coordinator_rank:
                self._load(state_dict, reader, process_group, coordinator_rank, no_dist, planner)
                return
            with self.call(process_group, no_dist) as call:
                orchestrate.load(state_dict, reader, planner, call)


_begun: ContextVar[Call | None] = ContextVar("torch_ckpt_begun", default=None)
"""The call of ``dcp.save``, ``async_save`` or ``load`` in this thread, until it is continued."""


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The class that DCP chooses for each ``checkpoint_id``. DCP then tries no other class."""

    new: Callable[[_Path], Any]

    def __call__(self, path: _Path) -> Any:
        return self.new(path)

    def validate_checkpoint_id(self, checkpoint_id: _Path) -> bool:
        """Returns ``True``: the constructor raises the error for a store without support."""
        return True


class _Executor:
    """A replacement for DCP's executors of asynchronous saves.

    Chooses the writer here, because :func:`installed` may no longer apply when the thread or
    process starts to save.
    """

    def __init__(self, replaced: _Replaced, begin: Callable[..., Future[Metadata]]) -> None:
        self._replaced, self._begin = replaced, begin

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: _Path | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        """Starts a save, like DCP's executors."""
        with self._replaced.call(process_group, no_dist) as call:
            writer: StorageWriter | None = None
            if storage_writer is not None:
                writer = self._replaced.writer(storage_writer)
                if checkpoint_id and writer is not storage_writer:
                    storage_writer.reset(checkpoint_id)  # DCP resets the replacement alone.
                    writer = self._replaced.writer(storage_writer)
            elif checkpoint_id:
                writer = self._replaced.new_writer(checkpoint_id)
            if isinstance(writer, FastWriter):
                writer.begin_in_background(checkpoint_id)
            given, planner = planner, _save_planner(planner)
            order = Order(checkpoint_id, writer, planner, use_collectives)
            state = staging_future_or_state_dict
            if not isinstance(state, _StagedState):
                saved = self._begin(order, state, call)
            else:
                # The use of the memory ends with the thread, even if a planner or an error still
                # refers to the tensors.
                begin_save = state.staged.begin_save
                saved = self._begin(order, dict(state), call, initializer=begin_save)

            def give_back(done: Future[Metadata]) -> None:
                _give_back(writer, storage_writer, _FOUND_BY_WRITER)
                _give_back(planner, given, _FOUND_BY_SAVE_PLANNER)

            saved.add_done_callback(give_back)
            return saved


class _StagedState(dict[str, Any]):
    """A state dict in the staging memory of this process."""

    def __init__(self, state: dict[str, Any], staged: Staged) -> None:
        super().__init__(state)
        self.staged = staged


class _ProcessStager(AsyncStager):
    """The stager of asynchronous saves if the caller passes neither writer nor stager."""

    _synchronize_after_execute = False

    def __init__(self, *_: Any) -> None: ...

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies a state dict into the staging memory of this process."""
        return _StagedState(*PROCESS.stager.begin(state_dicts_of(state_dict)))

    def synchronize_staging(self) -> None:
        """Does nothing, because :meth:`stage` returns after the copy."""

    def close(self) -> None:
        """Does nothing, because later saves reuse the memory."""


def _save_planner(given: SavePlanner | None) -> SavePlanner:
    names = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank")
    return cast(SavePlanner, _planner(given, DefaultSavePlanner, FastSavePlanner, names))


def _load_planner(given: LoadPlanner | None) -> LoadPlanner:
    names = ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load")
    return cast(LoadPlanner, _planner(given, DefaultLoadPlanner, FastLoadPlanner, names))


def _planner(given: Any, stock: type, ours: Callable[..., Any], names: Sequence[str]) -> Any:
    """Returns our planner for ``None`` or a stock planner; returns other planners unchanged."""
    if given is None:
        return ours()
    if type(given) is not stock or not _is_known(given):
        return given
    replacement = ours(**{name: getattr(given, name) for name in names})
    _log_replaced(given, replacement)
    return replacement


def _is_known(given: object) -> bool:
    """Returns whether the arguments of an object's class are all known."""
    return has_only(type(given), _ARGUMENTS[type(given)])


@contextlib.contextmanager
def _giving_back(ours: object, given: object, names: Sequence[str]) -> Iterator[None]:
    """Copies our object's results to the program's object after the block, even if it raises."""
    try:
        yield
    finally:
        _give_back(ours, given, names)


def _give_back(ours: object, given: object, names: Sequence[str]) -> None:
    if given is None or given is ours:
        return
    for name in names:
        if hasattr(ours, name):
            setattr(given, name, getattr(ours, name))


def _log_replaced(given: object, ours: object) -> None:
    _LOG.debug("%s is replaced by %s", type(given).__name__, type(ours).__name__)
