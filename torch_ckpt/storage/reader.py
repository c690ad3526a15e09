"""FastReader: stock DCP's storage reader, through the native engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import uuid
from collections.abc import Sequence
from typing import Any, get_args

import torch.distributed as dist
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import (
    _StorageReaderTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.coordination.connect import this_machine
from torch_ckpt.coordination.group import time_limit_s
from torch_ckpt.errors import CheckpointError, NotFoundError, portable_errors
from torch_ckpt.filesystems.location import Location, can_reach
from torch_ckpt.formats.metadata import UnreadableMetadata
from torch_ckpt.formats.opened import Contents, Opened
from torch_ckpt.formats.recognise import open_stored
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.load_planner import (
    LocalReads,
    PlannedReads,
    TravellingReads,
)
from torch_ckpt.storage.exchange import (
    Assigned,
    ExchangeMode,
    Wanted,
    can_exchange,
    joined,
    share_reads,
    these_processes,
)
from torch_ckpt.storage.loading import Load, Source

__all__ = ["FastReader"]


class FastReader(StorageReader):
    """Reads a checkpoint through the native engine: ours, stock DCP's, or files of other formats.

    Pass it to :func:`torch.distributed.checkpoint.load` in place of ``FileSystemReader``. Only the
    byte ranges that this rank wants are read, many at a time, straight into the tensors where they
    are contiguous. CUDA tensors are copied to from pinned buffers while the next ranges are being
    read, where the package was built with CUDA. Tensors on other devices, of other dtypes than
    stored, or that only torch can unpickle are loaded by way of a temporary, and cast as stock DCP
    casts.

    What ``path`` is, its files tell:

    - a directory that FastWriter or stock ``FileSystemWriter`` has written;
    - a file that ``torch.save`` has written, of a dict that may be nested: its FQNs are those that
      DCP gives to such a state dict, and what is no tensor in it is loaded, too;
    - a safetensors file;
    - a directory of safetensors files: those that a ``*.safetensors.index.json`` of Hugging Face
      lists, or else all, also as ``HuggingFaceStorageWriter`` writes them, a file for each rank.

    Args:
        path: Directory of the checkpoint, or its file.
        _extension_registry: Where stream transforms are looked up; stock's own by default.
        io: Tuning.
        verify: Whether what is read is checked: against the index, or where stock DCP has written
            none, against the CRC-32 of payloads that are read whole; ``torch.save``'s, of storages.
            Safetensors have no checksums.
        trust_pickle: Whether to unpickle whatever the checkpoint asks for, as stock DCP does: this
            can run any code. By default ``.metadata`` may hold only what stock DCP writes, and
            objects and the files of ``torch.save`` only what ``torch.load(weights_only=True)``
            allows (register your own classes with
            ``torch.serialization.add_safe_globals``). A planner with a ``load_bytes`` of its
            own is given the bytes as they are stored in either case, and decides what to do with
            them; ``super().load_bytes`` would unpickle them without restriction.

        exchange: Whether ranks that want the same bytes read them once and pass them on to each
            other, over connections of their own beside those of the process group: ``"auto"`` where
            that saves at least 16 MiB and a sixteenth of all reading (as it does for replicas),
            and at most 256 ranks share anything; ``"off"`` never. A rank that loads alone, as with
            ``no_dist=True``, exchanges nothing.

    Raises:
        NotFoundError: ``path`` holds no committed checkpoint, or a data file is missing.
        CorruptionError: Bytes cannot be what was written: a short file, a broken frame, a wrong
            checksum. Names the file, the offset and the FQN.
        MismatchError: A tensor wants elements that the stored one does not have.
        StorageError: The disk or store failed.
        UnsupportedError: A pickle asks for more than it may have: names the global. Or a file is of
            a format that is not known.
        CancelledError: Another rank failed, which this one was to have bytes from.
        ValueError: ``exchange`` is no such mode.

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
        verify: bool = True,
        trust_pickle: bool = False,
        exchange: ExchangeMode = "auto",
    ) -> None:
        super().__init__()
        if exchange not in get_args(ExchangeMode):
            raise ValueError(f"{exchange=} is none of {', '.join(get_args(ExchangeMode))}")
        self.location = Location(path)
        self.io = io or IoOptions()
        self.verify = verify
        self.trust_pickle = trust_pickle
        self.exchange: ExchangeMode = exchange
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._directory = self.location  # Of the files that metadata name.
        self._index: _native.Index | None = None
        self._contents: Contents | None = None  # Of files that are not slices alone.
        # What this rank reads, while its plan travels, and what travels in its place.
        self._kept: tuple[Sequence[ReadItem], Any] | None = None
        self._load: Load | None = None  # Between plan and reading.
        self._exchanged: str | None = None  # The token of the exchange that it has taken part in.
        self._shared_save_id: str | None = None  # Of the save that all ranks are to load.
        self._unreadable: Exception | None = None  # Why the coordinator's metadata are.

    def __getstate__(self) -> dict[str, Any]:
        # Without what it has read: a copy reads for itself.
        return {
            **self.__dict__,
            "_metadata": None,
            "_index": None,
            "_contents": None,
            "_kept": None,
            "_load": None,
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read there."""
        return can_reach(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory or file of the checkpoint."""
        return self.path

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory or file of the checkpoint: a path of this machine, or else a URL."""
        return self.location.checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint, or to a new load of the same."""
        if checkpoint_id:
            self.location = Location(checkpoint_id)
        self._metadata = self._index = self._contents = self._unreadable = self._load = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what was committed.

        Args:
            *args: Unused; stock DCP probes for it.
            **kwargs: ``rank`` asks for the metadata of a rank that saved without coordination.
        """
        rank = kwargs.get("rank")
        # After any failure DCP asks for the rank's own metadata, and forgets what failed. But where
        # the coordinator's are damaged, what a rank may once have saved is not what was asked for.
        if rank is None:
            self._unreadable = None
        elif self._unreadable is not None and not isinstance(self._unreadable, NotFoundError):
            return UnreadableMetadata(self._unreadable)
        self._shared_save_id = None
        try:
            metadata = self._read_metadata("" if rank is None else f"__{rank}")
        except Exception as error:  # Of any kind: none may end in the metadata of a rank.
            if rank is not None and self._unreadable is not None:
                lost = isinstance(error, NotFoundError)
                return UnreadableMetadata(self._unreadable if lost else error)
            self._unreadable = error if rank is None else None
            raise
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        if rank is None:
            self._shared_save_id = metadata.storage_meta.save_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load on this rank."""
        if isinstance(metadata, UnreadableMetadata):
            raise metadata.error
        self._metadata = metadata

    def _read_metadata(self, prefix: str) -> Metadata:
        """Reads metadata whose name has this prefix, from the index wherever there is one."""
        opened = self._open(prefix)
        self._directory, self._index, self._contents = (
            opened.directory,
            opened.index,
            opened.contents,
        )
        return opened.metadata

    def _open(self, prefix: str) -> Opened:
        """Opens the checkpoint, or that of a rank."""
        return open_stored(
            self.location, prefix, verify=self.verify, trust_pickle=self.trust_pickle
        )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says in the plan which checkpoint this rank has opened, and what it wants of it."""
        items: Any = plan.items
        said = Wanted(self._shared_save_id)
        # Without an id nobody can tell whether all ranks mean the same files.
        if self.exchange != "off" and self._shared_save_id is not None and can_exchange():
            with gc_paused(), portable_errors():
                self._load = Load(self._source(), items)
                encoded = self._load.wanted_bytes()
            said = Wanted(
                self._shared_save_id,
                encoded,
                machine=this_machine(),
                processes=these_processes(),
                pid=os.getpid(),
                rank=dist.get_rank(),
                budget_nbytes=self.io.exchange_nbytes,
                verify=self.verify,
            )
        if isinstance(items, PlannedReads):
            items = LocalReads(len(items))
        elif can_exchange():
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                items = TravellingReads.of(items)  # Others travel as they can.
        self._kept = (plan.items, items)
        return dataclasses.replace(plan, items=items, storage_data=said)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Shares out what several ranks want to read.

        Raises:
            CheckpointError: The ranks have opened different checkpoints, because one was saved
                over the other meanwhile.
        """
        said = [plan.storage_data for plan in plans if isinstance(plan.storage_data, Wanted)]
        if len(said) < len(plans):  # A planner has made new ones.
            return plans  # Nobody can tell what was opened: each reads for itself.
        others = [rank for rank, one in enumerate(said) if one.save_id != said[0].save_id]
        if others:
            raise CheckpointError(
                f"cannot load {self.path}: rank {others[0]} has opened save "
                f"{said[others[0]].save_id}, rank 0 save {said[0].save_id}; was it saved over just "
                "now?"
            )
        shares = share_reads(said)
        return [
            dataclasses.replace(plan, storage_data=share)
            for plan, share in zip(plans, shares, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan into place."""
        items: Any = plan.items
        if self._kept is not None:
            kept, sent = self._kept
            if isinstance(items, LocalReads) or (
                isinstance(items, TravellingReads)
                and isinstance(sent, TravellingReads)
                and items.are(sent)
            ):
                items = kept
        self._kept = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(gc_paused())
            stack.enter_context(portable_errors())
            exchange: _native.ExchangeStream | None = None
            share = plan.storage_data
            # Once: the others are gone the second time.
            if isinstance(share, Assigned) and share.token != self._exchanged:
                self._exchanged = share.token
                exchange = stack.enter_context(
                    joined(
                        share,
                        fs=self.location.file_system,
                        budget_nbytes=self.io.exchange_nbytes,
                        timeout_s=time_limit_s(),
                    )
                )
            load, self._load = self._load, None
            if load is None or load.items is not items:  # The planner may have made other plans.
                load = Load(self._source(), items)
            load.run(planner, exchange)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _source(self) -> Source:
        if self._metadata is None:
            raise RuntimeError("the reader was not set up: set_up_storage_reader comes first")
        return Source(
            self._metadata,
            self._directory,
            self._index,
            self._contents,
            self.io,
            self.verify,
            self.trust_pickle,
            self.transforms,
        )
