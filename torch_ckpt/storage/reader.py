"""FastReader: a storage reader for stock DCP that loads through the native engine."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch.distributed as dist
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.coordination.addresses import this_machine
from torch_ckpt.coordination.group import time_limit_s
from torch_ckpt.coordination.orchestrate import calling_planner
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import (
    CheckpointError,
    NotFoundError,
    UnsupportedError,
    portable_errors,
)
from torch_ckpt.filesystems.location import Location, can_reach
from torch_ckpt.formats.index import index_of
from torch_ckpt.formats.metadata import UnreadableMetadata
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.recognise import open_stored
from torch_ckpt.formats.rules import Rules
from torch_ckpt.formats.safetensors.quantized import (
    Dequantize,
    StockRules,
    with_quantization,
)
from torch_ckpt.options import IoOptions, Verification
from torch_ckpt.planning.cover import check_plan
from torch_ckpt.planning.dtensor_boxes import load_plan_in_boxes
from torch_ckpt.planning.load_planner import (
    FastLoadPlanner,
    LocalReads,
    PlannedReads,
    keeps_reads,
)
from torch_ckpt.planning.unscaled import check_scaled
from torch_ckpt.records.record import note
from torch_ckpt.storage.exchange import (
    Assigned,
    ExchangeMode,
    Wanted,
    can_exchange,
    joined,
    pack_names,
    share_reads,
    these_processes,
)
from torch_ckpt.storage.load_source import LoadSource
from torch_ckpt.storage.loading import Load
from torch_ckpt.storage.progress import Phases, is_first, progress_bar

__all__ = ["FastReader"]

_LOG = logging.getLogger("torch_ckpt")


class FastReader(StorageReader):
    """Loads checkpoints of ``FastWriter``, of stock DCP and of other formats.

    Pass it to :func:`torch.distributed.checkpoint.load` in place of ``FileSystemReader``. A rank
    reads only the byte ranges that its tensors need, with many reads in flight. Contiguous ranges
    are read directly into the tensors. If the package was built with CUDA, CUDA tensors are filled
    from pinned buffers while the next ranges are read. Other devices, casts to another dtype, and
    tensors that only torch can unpickle need a temporary tensor. Casts work as in stock DCP.

    The reader detects the format of ``path``:

    - a directory of ``FastWriter`` or of stock ``FileSystemWriter``;
    - a ``torch_dist`` directory of Megatron-Core; tensors that versions 0.14 and 0.15 stored
      flattened have their original shapes;
    - a file of ``torch.save`` with a dict, which may be nested. Its FQNs are the same as in DCP for
      this state dict. Values other than tensors are loaded as well;
    - a safetensors file;
    - a directory of safetensors files: those that a ``*.safetensors.index.json`` of Hugging Face
      lists, or all files without such a list. A directory of ``HuggingFaceStorageWriter``, with
      one file per rank, works too;
    - a directory of DeepSpeed: ZeRO stages 1 to 3, or a universal folder;
    - a directory of meta-pytorch's ``torch_checkpointing``;
    - a directory of the sharded state dicts that each rank saved with ``torch.save``, as accelerate
      (``use_dcp=False``) and verl name them.

    Args:
        path: Directory or file of the checkpoint. A relative path is resolved against the working
            directory, and symbolic links once per load.
        _extension_registry: Registry of stream transforms; stock DCP's registry by default.
        io: Memory budgets and I/O modes.
        verify: Whether to verify the bytes that are read. If the checkpoint has an index, its
            checksums cover every read. Otherwise each record of ``torch.save`` has one CRC-32,
            which is checked only if a load reads almost the whole record. With ``"full"``, a load
            also reads the rest of each record that it needs, and checks it, once for each open
            checkpoint. Safetensors files have no checksums.
        trust_pickle: Whether pickles may contain any class and run any code, as in stock DCP. By
            default, ``.metadata`` may contain only the classes that stock DCP writes. Objects and
            files of ``torch.save`` may contain the classes of ``torch.load(weights_only=True)``,
            and plain data such as NumPy arrays, dates, paths and ``deque``. Register your own
            classes with ``torch.serialization.add_safe_globals``. A planner that overrides
            ``load_bytes`` always receives the stored bytes; ``super().load_bytes`` unpickles them
            without restriction. ``True`` also removes the limits on how far files may expand.
        exchange: Whether one rank reads the bytes that several ranks need, and sends them to the
            others over separate connections, not the process group. ``"auto"``: if this saves at
            least 16 MiB and 1/16 of all reads from storage, and at most 256 ranks share bytes. It
            usually does for replicas, unless the page cache has all of their bytes. ``"off"``:
            never. A load with ``no_dist=True`` never exchanges bytes.
        dequantize: Whether quantised tensors of safetensors are multiplied by their scales while
            they are loaded. ``"auto"``: if ``quantization_config`` of ``config.json`` states how,
            and the target is float32, bfloat16 or float16. A target of the stored dtype gets the
            stored elements. ``True``: always, also where the names alone show how. Each tensor is
            shown in the dtype of the model, and its scales are not shown. ``False``: never. A load
            never converts a quantised tensor to a wider dtype without its scales. See
            https://torch-ckpt.github.io/torch-ckpt/quantized/.
        rules: How to merge the shards of model-parallel ranks in a DeepSpeed checkpoint into
            parameters: :class:`torch_ckpt.formats.rules.Rules`, or their text. By default, as the
            checkpoint itself describes.

    Raises:
        NotFoundError: ``path`` has no committed checkpoint, or a data file is missing.
        CorruptionError: A file is damaged: it is too short, a frame is invalid, or a checksum
            differs. The message names the file, the offset and the FQN.
        MismatchError: A tensor needs elements that the stored tensor does not have.
        StorageError: The disk or store failed.
        UnsupportedError: A pickle requests a forbidden class or function, which the message names,
            or the format of a file is not supported. Or a quantised tensor has a wider target, and
            cannot be dequantised.
        CancelledError: Another rank failed before it sent this rank its bytes.
        ValueError: ``exchange`` is neither ``"auto"`` nor ``"off"``, ``verify`` is neither a
            boolean nor ``"full"``, ``dequantize`` is neither a boolean nor ``"auto"``, or ``rules``
            cannot be parsed.

    Example::

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=FastReader("run/step-100"))
        dcp.load(model.state_dict(), storage_reader=FastReader("model.safetensors"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        io: IoOptions | None = None,
        verify: Verification = True,
        trust_pickle: bool = False,
        exchange: ExchangeMode = "auto",
        dequantize: Dequantize = "auto",
        rules: Rules | str | None = None,
    ) -> None:
        super().__init__()
        if exchange not in get_args(ExchangeMode):
            raise ValueError(f"{exchange=} is not one of {', '.join(get_args(ExchangeMode))}")
        if verify not in (True, False, "full"):
            raise ValueError(f"{verify=} is not True, False or 'full'")
        if dequantize not in (True, False, "auto"):
            raise ValueError(f"{dequantize=} is not True, False or 'auto'")
        self._given = Location(path)
        self.location = self._given.absolute()
        self.dequantize: Dequantize | StockRules = dequantize
        self.io = io or IoOptions()
        self.verify = verify
        self.trust_pickle = trust_pickle
        self.exchange: ExchangeMode = exchange
        self.rules = Rules.parse(rules) if isinstance(rules, str) else rules
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._opened = self._not_open()
        self._records: _native.Records | None = None
        self._files: frozenset[str] | None = None  # Files that this rank can read; None for all.
        self._reads: Any = None  # The reads of this rank's plan, if they are not sent.
        self._load: Load | None = None  # Set between planning and reading.
        self._phases = Phases("opening")
        self._ranks = 0  # Number of ranks that load together; 0 except on the coordinator.
        self._exchanged: str | None = None  # Token of the last exchange that this rank joined.
        self._shared_save_id: str | None = None  # Id of the save that all ranks load.
        self._metadata_error: Exception | None = None  # Why the shared metadata is unreadable.

    def __getstate__(self) -> dict[str, Any]:
        # A copy opens the checkpoint itself.
        closed = dict.fromkeys(("_metadata", "_records", "_reads", "_load"))
        return {**self.__dict__, **closed, "_opened": self._not_open()}

    def _not_open(self) -> Opened:
        return Opened(Metadata({}), self.location, None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this reader can open the path or URL."""
        return can_reach(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory or file of the checkpoint."""
        return self.path

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory or file of the checkpoint: a path on this machine, or a URL."""
        return self._given.checkpoint_id

    @property
    def fs(self) -> FileSystem:
        """Stock's access to local files, for programs that use that of ``FileSystemReader``."""
        return FileSystem()

    @property
    def storage_data(self) -> Mapping[Any, Any]:
        """The extents of the open checkpoint by ``MetadataIndex``; empty before a load."""
        return {} if self._metadata is None else self._metadata.storage_data

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the reader for another checkpoint, or for a new load of the same one."""
        if checkpoint_id:
            self._given = Location(checkpoint_id)
            self.location = self._given.absolute()
        self._opened = self._not_open()
        self._metadata = self._metadata_error = self._load = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads the metadata of the checkpoint.

        Args:
            *args: Unused. Stock DCP inspects the signature.
            **kwargs: ``rank`` selects the metadata of a rank that saved without coordination.
        """
        watch_storage()
        self._phases = Phases("opening")
        rank = kwargs.get("rank")
        # After a failure, DCP discards the error and requests the metadata of the rank. If the
        # shared metadata is damaged, that could silently load an old checkpoint of one rank.
        if rank is None:
            self._metadata_error = None
        elif not isinstance(self._metadata_error, NotFoundError | None):
            return UnreadableMetadata(self._metadata_error)
        self._shared_save_id = None
        try:
            metadata = self._read_metadata("" if rank is None else f"__{rank}")
        except Exception as error:
            if rank is not None and self._metadata_error is not None:
                is_missing = isinstance(error, NotFoundError)
                return UnreadableMetadata(self._metadata_error if is_missing else error)
            # A copy: the traceback refers to this frame, and so to the callers' frames.
            self._metadata_error = copy.copy(error) if rank is None else None
            raise
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        metadata.storage_meta.checkpoint_id = self.path  # The directory may have been moved.
        if rank is None:
            index = index_of(metadata)  # DCP's id belongs to a writer, which may save again.
            self._shared_save_id = metadata.storage_meta.save_id if index is None else index.save_id
        return metadata

    def show_planning(self, ranks: int) -> contextlib.AbstractContextManager[None]:
        """Shows on the terminal that a load is planned, if the block takes longer than 3 s.

        Called by the coordinator of this many ranks.
        """
        if not is_first(ranks):
            return contextlib.nullcontext()
        return progress_bar("planning to load", self.location)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load on this rank."""
        if isinstance(metadata, UnreadableMetadata):
            raise metadata.error
        self._phases.begin("planning")
        self._metadata, self._ranks = metadata, int(is_coordinator)
        state_dict = getattr(calling_planner(), "state_dict", None)
        if isinstance(state_dict, dict):
            check_scaled(state_dict, metadata, self._opened)

    def _read_metadata(self, prefix: str) -> Metadata:
        """Opens the checkpoint with this prefix, and returns its metadata."""
        # Resolved once: links in the path may change during the load.
        opened = self._open(self.location.resolved(), prefix)
        self._opened = opened = with_quantization(opened, self.dequantize)
        self._records = _native.Records(self.verify == "full", opened.records)
        return opened.metadata

    def _open(self, path: Location, prefix: str) -> Opened:
        """Opens the checkpoint of all ranks, or of one rank."""
        return open_stored(
            path,
            prefix,
            verify=self.verify,
            trust_pickle=self.trust_pickle,
            rules=self.rules,
        )

    def _reachable_files(self) -> frozenset[str] | None:
        """Returns the names of the data files that this rank can read; ``None`` for all.

        Other ranks read the other files, and send their bytes. Subclasses may override this method.
        It is called once per load, when the checkpoint is open.
        """
        return None

    def _set_files(self) -> None:
        """Sets the data files of the open checkpoint that this rank can read."""
        files = self._reachable_files()
        if files is not None:
            if self._opened.index is None:
                raise UnsupportedError(
                    f"cannot load {self.path}: without an index, all ranks must have all files"
                )
            every = {name for name, _ in self._opened.index.files}
            files = None if files >= every else files & every
        self._files = files

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the save id of the open checkpoint, and the reads of this rank, to the plan.

        Raises:
            NotFoundError: The rank cannot read a file that it wants, and exchanges no reads.
        """
        if not isinstance(plan.items, PlannedReads):
            plan = load_plan_in_boxes(plan, calling_planner())
            check_plan(plan, calling_planner())
        items: Any = plan.items
        self._set_files()
        wanted = Wanted(self._shared_save_id, str(self.path))
        # Without a save id, the ranks may have opened different files.
        if self.exchange == "off" or self._shared_save_id is None or not can_exchange():
            self._check_reach(items)
        else:
            with gc_paused(), portable_errors():
                self._load = Load(self._source(), items)
                encoded = self._load.wanted_bytes()
            wanted = dataclasses.replace(
                wanted,
                encoded=encoded,
                machine=this_machine(),
                processes=these_processes(),
                pid=os.getpid(),
                rank=dist.get_rank(),
                budget_nbytes=self.io.exchange_nbytes,
                verify=bool(self.verify),
                files=None if self._files is None else pack_names(self._files),
            )
        self._reads = None
        if isinstance(items, PlannedReads) or keeps_reads(calling_planner()):
            self._reads, items = items, LocalReads(len(items))
        return dataclasses.replace(plan, items=items, storage_data=wanted)

    def _check_reach(self, items: Sequence[ReadItem]) -> None:
        """Checks that this rank can read all files that it wants.

        Raises:
            NotFoundError: It cannot read some file.
        """
        if self._files is None or (away := Load(self._source(), items).away()) is None:
            return
        if self.exchange == "off":
            reason = 'exchange="off" lets no other rank read it'
        elif self._shared_save_id is None:
            reason = "a checkpoint of one rank is read by that rank alone"
        else:
            reason = "there is no other rank to read it"
        raise NotFoundError(f"cannot load {self.path}: it does not have {away}, and {reason}")

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Assigns the reads that several ranks want.

        Raises:
            CheckpointError: The ranks have opened different checkpoints, because a save replaced
                the checkpoint in between. Or ranks that cannot read all files cannot exchange
                bytes.
            NotFoundError: No rank can read a file that a rank wants.
        """
        self._ranks = len(plans)
        wanted = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Wanted)]
        if len(wanted) < len(plans):
            return plans  # The planner has made new plans, so each rank reads by itself.
        save_id = wanted[0].save_id
        others = [rank for rank, reads in enumerate(wanted) if reads.save_id != save_id]
        if others:
            other = wanted[others[0]]
            why = "did a save replace the checkpoint during the load?"
            if other.path != wanted[0].path:
                why = f"rank {others[0]} loads {other.path}, and rank 0 {wanted[0].path}"
            raise CheckpointError(
                f"cannot load {self.path}: rank {others[0]} has opened save {other.save_id}, and "
                f"rank 0 save {save_id}; {why}"
            )
        try:
            assignments = share_reads(wanted)
        except CheckpointError as error:
            raise type(error)(f"cannot load {self.path}: {error}") from error
        return [
            dataclasses.replace(plan, storage_data=assigned)
            for plan, assigned in zip(plans, assignments, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan into the tensors of the state dict."""
        self._phases.begin("reading")
        if isinstance(plan.items, LocalReads) and self._reads is not None:
            plan.items, self._reads = self._reads, None  # The plan may be read again.
        items: Any = plan.items
        with contextlib.ExitStack() as stack:
            stack.enter_context(gc_paused())
            stack.enter_context(portable_errors())
            exchange: _native.ExchangeStream | None = None
            assigned = plan.storage_data
            # In a second read_data of the same plan, the other ranks no longer participate.
            if isinstance(assigned, Assigned) and assigned.token != self._exchanged:
                self._exchanged = assigned.token
                exchange = stack.enter_context(
                    joined(
                        assigned,
                        fs=self.location.file_system,
                        budget_nbytes=self.io.exchange_nbytes,
                        timeout_s=time_limit_s(),
                    )
                )
            load, self._load = self._load, None
            if load is None or load.items is not items:  # The planner may have changed the plan.
                load = Load(self._source(), items)
            if is_first(self._ranks):
                bar = progress_bar("reading", self.location, load.wanted_nbytes, load.loaded_nbytes)
                stack.enter_context(bar)
            try:
                load.run(planner, exchange)
            finally:
                note(bytes=load.loaded_nbytes())
                note(requests=load.job.requests, waited=load.job.waited_s)
        if isinstance(planner, FastLoadPlanner):
            planner.end_load(load.copies.cast)
        self._log_loaded(load.loaded_nbytes(), exchange)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _log_loaded(self, nbytes: int, exchange: _native.ExchangeStream | None) -> None:
        details = [
            f"rank {dist.get_rank()} of {self._ranks} ranks" if self._ranks > 1 else "1 rank",
            "without an exchange" if exchange is None else "with an exchange",
        ]
        self._phases.end("loaded", nbytes, self.location, *details, is_first=is_first(self._ranks))

    def _source(self) -> LoadSource:
        if self._metadata is None:
            raise RuntimeError("cannot plan or read a load: set_up_storage_reader was not called")
        return LoadSource(
            self._metadata,
            self._opened,
            self.io,
            bool(self.verify),
            self.trust_pickle,
            self.transforms,
            self._records,
            self._files,
        )
