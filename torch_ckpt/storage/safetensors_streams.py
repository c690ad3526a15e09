"""The files of a model on a store, where each file is one stream of one rank, and is not renamed.

``model.safetensors.index.json`` names the files, and is written last, on the condition that it is
still the one that was there when the save began: this is the commit. The names of the files have
the id of the save, so that a former model keeps its files until then. Without the index, no reader
finds them. Where there is no model yet, a single file needs no index: as ``model.safetensors``, it
appears when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.layout import ModelFile, ModelLayout
from torch_ckpt.storage.gc import Found, end_saves
from torch_ckpt.storage.safetensors_commit import (
    COMMITTED_NAMES,
    INDEX,
    MODEL,
    remove_stale,
    shard_names,
)
from torch_ckpt.storage.stored_values import Box, StoredValues, in_batches, pieces_of

__all__ = ["copy_file_of", "publish_streams", "stream_names"]

_BATCH_NBYTES = 32 << 20  # Tensors that load together, while the former ones are written.


def stream_names(count: int, save_id: str, found: Collection[str]) -> list[str]:
    """Returns the names of a model's files in a directory that has these names."""
    if count == 1 and COMMITTED_NAMES.isdisjoint(found):
        return [MODEL]
    return shard_names(count, f"{save_id}-")


def publish_streams(
    directory: Location, layout: ModelLayout, names: Sequence[str], pending: Location, found: Found
) -> None:
    """Commits the files of a model, and removes those of replaced models and of failed saves.

    Requires: all files are complete. Raises StorageError with EEXIST if another save was committed;
    the files are then removed. After another error, either model may be found.
    """
    other, index = (INDEX, b"") if names == [MODEL] else (MODEL, layout.index(names))
    other_before = (directory / other).identity()
    if index:
        try:
            file_system = directory.file_system
            file_system.publish((directory / INDEX).path, index, found.version)
        except StorageError as error:
            if error.errno == errno.EEXIST:  # Else it may have been published.
                for name in [*names, pending.name]:
                    (directory / name).discard()
            raise
    pending.discard()
    with contextlib.suppress(CheckpointError):  # The commit stands; the next save tries again.
        end_saves(directory, found.pending)
        if other in found.names and other_before == (directory / other).identity():
            (directory / other).remove()
        if not index or (directory / INDEX).read() == index:
            remove_stale(directory, found.names, names)


def copy_file_of(
    values: StoredValues, file: ModelFile, layout: ModelLayout, job: _native.SharedFileJob
) -> None:
    """Writes a file of a model from the tensors of a checkpoint, in order.

    While some tensors are written, a thread loads the next ones.
    """
    job.put(0, file.header)
    boxes = in_batches(_pieces(file, layout), _BATCH_NBYTES)
    with ThreadPoolExecutor(1, "torch_ckpt-read") as executor:

        def begin() -> tuple[list[tuple[str, Box]], Future[list[torch.Tensor]]] | None:
            batch = next(boxes, None)
            return None if batch is None else (batch, executor.submit(values.load, batch))

        ahead = begin()
        while ahead is not None:
            batch, loaded = ahead
            tensors = loaded.result()
            ahead = begin()
            job.write(
                [
                    (
                        _tensor_view.view(tensor, fqn, writable=False),
                        layout.places[fqn].offset,
                        layout.places[fqn].facts.sizes,
                        offsets,
                    )
                    for (fqn, (offsets, _)), tensor in zip(batch, tensors, strict=True)
                ]
            )


def _pieces(file: ModelFile, layout: ModelLayout) -> Iterator[tuple[tuple[str, Box], int]]:
    for fqn in file.fqns:
        facts = layout.places[fqn].facts
        itemsize = getattr(torch, facts.dtype).itemsize
        for box in pieces_of(facts.sizes, itemsize, _BATCH_NBYTES):
            yield (fqn, box), torch.Size(box[1]).numel() * itemsize
