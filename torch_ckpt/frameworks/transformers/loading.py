"""``from_pretrained(..., distributed_config=)`` of transformers, reading by this package.

transformers maps the files of a model, and copies the part of each tensor that a rank needs from
the map. If a tensor is sharded by columns, every rank fetches nearly all of its pages. This module
runs the functions of transformers twice. The first run records which boxes they would copy. All
ranks then load their boxes in one collective load, and exchange the bytes that several of them
need. The second run gets the loaded boxes, and converts, renames and merges them as before.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.group import Call, group_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.safetensors.opening import open_safetensors_directory, read_tensors
from torch_ckpt.integrations.replacing import first_value, replacing
from torch_ckpt.options import IoOptions
from torch_ckpt.process_state import PROCESS
from torch_ckpt.storage.exchange import can_exchange
from torch_ckpt.storage.reader import FastReader

__all__ = ["replaced_loading"]

_LOG = logging.getLogger("torch_ckpt")

_MODELS = "transformers.modeling_utils"
_CONVERTING = "transformers.core_model_loading"
_ARGUMENTS = {
    (_MODELS, "convert_and_load_state_dict_in_model"): (
        *("model", "state_dict", "load_config", "disk_offload_index"),
    ),
    (_CONVERTING, "spawn_materialize"): (
        *("thread_pool", "tensor", "device", "dtype", "sharding_op", "tensor_idx"),
    ),
}
"""The functions that are replaced, with the arguments that they must have."""

_Box = tuple[tuple[int, int], ...]
"""Offset and size of each dimension."""


class _File:
    """A file as ``safe_open`` opens it, but mapped only if transformers reads it itself.

    The first access to a map can read megabytes ahead, on each rank.
    """

    def __init__(self, path: Path, open_stock: Callable[[], Any]) -> None:
        self.path = path
        self.tensors = read_tensors(Location(path), 0)[2]
        self._open_stock = open_stock
        self._stock: Any = None

    @property
    def stock(self) -> Any:
        """The file that ``safe_open`` returns."""
        if self._stock is None:
            self._stock = self._open_stock()
        return self._stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stock is not None:
            self._stock.__exit__(*exc_info)

    def keys(self) -> list[str]:
        """Returns the names of the tensors."""
        return list(self.tensors)

    def get_slice(self, fqn: str) -> _Slice:
        """Returns a tensor that is read when it is indexed."""
        return _Slice(self, fqn)


class _Slice:
    """A tensor of a file, like one of ``safe_open(...).get_slice``."""

    def __init__(self, file: _File, fqn: str) -> None:
        self.file, self.fqn = file, fqn
        self.boxes: _Boxes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file.stock.get_slice(self.fqn), name)

    def get_shape(self) -> list[int]:
        """Returns the sizes of the whole tensor."""
        facts = self.file.tensors[self.fqn]
        if isinstance(facts, CheckpointError):
            sizes: list[int] = self.file.stock.get_slice(self.fqn).get_shape()
            return sizes
        return list(facts[1])

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.boxes is None:
            found: torch.Tensor = self.file.stock.get_slice(self.fqn)[index]
            return found
        return self.boxes.get(self.fqn, index)


class _FilesReader(FastReader):
    """Reads the given safetensors files of a directory, and opens them once."""

    def __init__(self, directory: Path, names: list[str], **options: Any) -> None:
        super().__init__(directory, **options)
        self._names = names
        self._found: Opened | None = None

    def _open(self, path: Location, prefix: str) -> Opened:
        if self._found is None:
            self._found = open_safetensors_directory(path, self._names)
        return self._found


@dataclass
class _Wanted:
    """A requested box of a tensor: how often, for which device, and its values after the load."""

    count: int
    device: Any
    tensor: torch.Tensor | None = None


@dataclass
class _Boxes:
    """The boxes that this rank wants of the files, and their one load by all ranks."""

    reader: FastReader
    metadata: Metadata
    call: Call
    wanted: dict[str, dict[_Box, _Wanted]] = field(default_factory=dict)
    device: Any = None  # The device of the tensors that are being requested.
    is_loaded: bool = False

    def _entry(self, fqn: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def get(self, fqn: str, index: Any) -> torch.Tensor:
        """Requests a box, and returns a tensor without memory; after the load, returns the box."""
        entry = self._entry(fqn)
        box = _box_of(index, entry.size)
        boxes = self.wanted.setdefault(fqn, {})
        if not self.is_loaded:
            boxes.setdefault(box, _Wanted(0, self.device)).count += 1
            sizes = [size for _, size in box]
            return torch.empty(sizes, dtype=entry.properties.dtype, device="meta")
        wanted = boxes[box]
        tensor = wanted.tensor
        assert tensor is not None
        wanted.count -= 1
        if not wanted.count:
            del boxes[box]
            return tensor
        return tensor.clone()

    def load(self) -> None:
        """Loads all boxes that were requested. All ranks must call it, each once."""
        if self.is_loaded:
            return
        for fqn, boxes in self.wanted.items():
            dtype = self._entry(fqn).properties.dtype
            for box, wanted in boxes.items():
                sizes = [size for _, size in box]
                wanted.tensor = torch.empty(sizes, dtype=dtype, device=wanted.device)
        orchestrate.load({}, self.reader, _BoxPlanner(self.wanted), self.call)
        self.is_loaded = True


class _BoxPlanner(DefaultLoadPlanner):
    """Plans the reads of boxes, which need not be those of a state dict."""

    def __init__(self, wanted: Mapping[str, Mapping[_Box, _Wanted]]) -> None:
        super().__init__()
        self._wanted = {fqn: list(boxes.items()) for fqn, boxes in wanted.items()}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for fqn, boxes in self._wanted.items():
            chunks = [
                ChunkStorageMetadata(
                    torch.Size([offset for offset, _ in box]), torch.Size([n for _, n in box])
                )
                for box, _ in boxes
            ]
            entry = self.metadata.state_dict_metadata[fqn]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(fqn, entry, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        tensor = self._wanted[read_item.dest_index.fqn][number][1].tensor
        assert tensor is not None
        return narrow_tensor_by_index(tensor, read_item.dest_offsets, read_item.lengths)


def _box_of(index: Any, size: torch.Size) -> _Box:
    """Returns the box that an index of slices selects. Raises TypeError for another index."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        filler = [slice(None)] * (len(size) - len(index) + 1)
        index = (*index[:at], *filler, *index[at + 1 :])
    index = (*index, *[slice(None)] * (len(size) - len(index)))
    box = []
    for each, length in zip(index, size, strict=True):
        if not isinstance(each, slice) or each.step not in (None, 1):
            raise TypeError(f"cannot load the elements {index} of a tensor of {list(size)}")
        begin, end, _ = each.indices(length)
        box.append((begin, max(end - begin, 0)))
    return tuple(box)


class _Replaced:
    """The replacements of the functions of transformers."""

    def __init__(self, timeout_s: float, io: IoOptions | None) -> None:
        modeling, converting = sys.modules[_MODELS], sys.modules[_CONVERTING]
        self._timeout_s, self._io = timeout_s, io
        self._safe_open = first_value(modeling, "safe_open")
        self._convert = first_value(modeling, "convert_and_load_state_dict_in_model")
        self._materialize = first_value(converting, "spawn_materialize")

    def safe_open(self, filename: Any, *args: Any, **options: Any) -> Any:
        """The replacement of ``safe_open``."""

        def open_stock() -> Any:
            return self._safe_open(filename, *args, **options)

        if can_exchange():
            with contextlib.suppress(CheckpointError):  # safe_open raises the error.
                return _File(Path(filename).absolute(), open_stock)
        return open_stock()

    def convert(
        self, model: Any, state_dict: Any, load_config: Any, disk_offload_index: Any = None
    ) -> Any:
        """The replacement of ``convert_and_load_state_dict_in_model``."""
        arguments = (model, state_dict, load_config, disk_offload_index)
        is_sharded = any(isinstance(tensor, DTensor) for tensor in model.state_dict().values())
        if not (is_sharded and can_exchange()):
            return self._convert(*arguments)
        # An error of one rank, also in transformers, ends the call on all.
        with group_of(None, no_dist=False).call(self._timeout_s) as call:
            boxes = self._boxes_of(state_dict, load_config, call)
            reads_alone = call.any_rank(boxes is None, "opening")
            if boxes is None or reads_alone:
                return self._convert(*arguments)
            for tensor in state_dict.values():
                tensor.boxes = boxes
            _LOG.debug("from_pretrained loads by FastReader")
            converted = self._convert(*arguments)
            boxes.load()  # A rank without boxes may read for other ranks.
            return converted

    def _boxes_of(self, tensors: Any, load_config: Any, call: Call) -> _Boxes | None:
        """Returns an empty request for tensors in files of one folder; ``None`` for others."""
        if (
            load_config.hf_quantizer is not None
            or "disk" in (load_config.device_map or {}).values()
            or not all(isinstance(tensor, _Slice) for tensor in tensors.values())
        ):
            return None
        paths = {tensor.file.path for tensor in tensors.values()}
        if len(folders := {path.parent for path in paths}) != 1:
            return None
        names = sorted(path.name for path in paths)
        reader = _FilesReader(folders.pop(), names, io=self._io)
        try:
            metadata = reader.read_metadata()
        except CheckpointError as error:
            _LOG.warning("from_pretrained reads by itself: %s", error)
            return None
        if not tensors.keys() <= metadata.state_dict_metadata.keys():
            return None
        return _Boxes(reader, metadata, call)

    def materialize(
        self,
        thread_pool: Any,
        tensor: Any,
        device: Any = None,
        dtype: Any = None,
        sharding_op: Any = None,
        tensor_idx: int | None = None,
    ) -> Any:
        """The replacement of ``spawn_materialize``."""
        options = {"sharding_op": sharding_op, "tensor_idx": tensor_idx}
        boxes = tensor.boxes if isinstance(tensor, _Slice) else None
        if boxes is None:
            return self._materialize(thread_pool, tensor, device, dtype, **options)
        boxes.device = device
        self._materialize(None, tensor, None, None, **options)()  # Requests boxes.

        def load() -> Any:
            boxes.load()
            return self._materialize(None, tensor, device, dtype, **options)()

        return load


@contextlib.contextmanager
def replaced_loading(*, timeout_s: float, io: IoOptions | None, **_: Any) -> Iterator[None]:
    """Replaces functions of transformers, which must be imported, within a block.

    If the functions of the installed version have other arguments, warns once and replaces nothing.
    """
    for (module, name), arguments in _ARGUMENTS.items():
        function = getattr(sys.modules.get(module), name, None)
        found = () if function is None else tuple(inspect.signature(function).parameters)
        if found != arguments or not hasattr(sys.modules[_MODELS], "safe_open"):
            if _Replaced not in PROCESS.unreplaced:
                PROCESS.unreplaced.add(_Replaced)
                _LOG.warning("from_pretrained reads by itself: %s.%s has changed", module, name)
            yield
            return
    replaced = _Replaced(timeout_s, io)
    modeling, converting = sys.modules[_MODELS], sys.modules[_CONVERTING]
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (modeling, "safe_open", replaced.safe_open),
        (modeling, "convert_and_load_state_dict_in_model", replaced.convert),
        (converting, "spawn_materialize", replaced.materialize),
    ]
    with contextlib.ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(replacing(*replacement))
        yield
