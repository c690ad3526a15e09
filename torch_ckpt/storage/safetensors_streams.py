"""Writes the files of a model from a checkpoint. On a store, each file is one stream, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.formats.safetensors.layout import ModelFile, ModelLayout
from torch_ckpt.storage.stored_values import Box, in_batches, pieces_of

__all__ = ["copy_file_of"]

_BATCH_NBYTES = 32 << 20  # Tensors that are loaded together while the previous ones are written.


def copy_file_of(
    load: Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]],
    file: ModelFile,
    layout: ModelLayout,
    job: _native.SharedFileJob,
) -> None:
    """Writes a file of a model, in order, from the boxes of tensors that ``load`` returns.

    While some tensors are written, a thread loads the next ones.
    """
    job.put(0, file.header)
    boxes = in_batches(_pieces(file, layout), _BATCH_NBYTES)
    with ThreadPoolExecutor(1, "torch_ckpt-read") as executor:

        def begin() -> tuple[list[tuple[str, Box]], Future[list[torch.Tensor]]] | None:
            batch = next(boxes, None)
            return None if batch is None else (batch, executor.submit(load, batch))

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
