"""Replacements for DCP's writer and readers of Hugging Face's models.

DCP's writer saves one file per rank, and its consolidation copies them to the final files. Here,
all ranks write the final files. Without consolidation, DCP's files contain boxes of tensors, and
their names begin with ``shard-``, by which transformers and DCP's tools find them. Here, these
files contain whole tensors, as one box each, so that a save replaces one file by one file.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from torch_ckpt.errors import MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.recognise import open_model_files
from torch_ckpt.formats.safetensors.layout import ModelLayout, TensorFacts
from torch_ckpt.formats.safetensors.quantized import Dequantize, StockRules, is_float
from torch_ckpt.integrations.replacing import has_only
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.safetensors_facts import facts_of, listed
from torch_ckpt.storage.safetensors_writer import Arrangement, SafetensorsWriter

__all__ = ["ModelReader", "arguments_of", "dequantize_of", "is_replaced", "model_writer", "path_of"]

_LOG = logging.getLogger("torch_ckpt")

_UNLIMITED_NBYTES = 2**62

_ARGUMENTS: dict[type, frozenset[str]] = {
    HuggingFaceStorageWriter: frozenset(
        {
            "path",
            "fqn_to_index_mapping",
            "thread_count",
            "save_distributed",
            "enable_consolidation",
            "thread_count_consolidation",
            "consolidated_output_path",
        }
    ),
    HuggingFaceStorageReader: frozenset({"path", "thread_count"}),
    QuantizedHuggingFaceStorageReader: frozenset(
        {"path", "thread_count", "target_dtype", "block_size"}
    ),
}
"""The arguments of DCP's classes that this module supports or can ignore."""


def model_writer(
    path: str | os.PathLike[str],
    *,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    has_boxes: bool = False,
    **options: Any,
) -> SafetensorsWriter:
    """Returns a writer of the same files as DCP's ``HuggingFaceStorageWriter``.

    Args:
        path: Directory of the model.
        fqn_to_index_mapping: The number of each tensor's file, from 1; one file by default.
        has_boxes: Whether to write files of a distributed save without consolidation.
        options: Options of :class:`SafetensorsWriter`.

    Raises:
        UnsupportedError: ``path`` is a URL of a store.
    """
    writer = SafetensorsWriter(path, max_shard_nbytes=_UNLIMITED_NBYTES, **options)
    if not writer.location.file_system.writes_at_offsets:
        raise UnsupportedError(
            f"cannot write {path} as HuggingFaceStorageWriter does: it is on a store; use "
            "torch_ckpt.SafetensorsWriter"
        )
    writer.arrange = functools.partial(_by_number, fqn_to_index_mapping, has_boxes)
    return writer


def _by_number(
    numbers: Mapping[str, int] | None, has_boxes: bool, path: object, plans: list[SavePlan]
) -> Arrangement:
    """Arranges tensors in files with numbers, like DCP's writer."""
    of_file: dict[int, list[TensorFacts]] = {}
    missing: list[str] = []
    for facts in facts_of(plans):
        if numbers is not None and facts.fqn not in numbers:
            missing.append(facts.fqn)
        else:
            of_file.setdefault(1 if numbers is None else numbers[facts.fqn], []).append(facts)
    if missing:
        raise MismatchError(
            f"cannot write {path}: fqn_to_index_mapping has no number for {listed(missing)}"
        )
    fqns = {facts.fqn for file in of_file.values() for facts in file}
    if unsaved := [fqn for fqn in numbers or () if fqn not in fqns]:
        _LOG.warning(
            "%s: fqn_to_index_mapping has %d names that no rank saves: %s. The model consists of "
            "the files with the numbers %s",
            *(path, len(unsaved), listed(unsaved), sorted(of_file)),
        )
    files = [of_file[number] for number in sorted(of_file)]
    layout = ModelLayout.of(
        [facts for file in files for facts in file],
        max_shard_nbytes=_UNLIMITED_NBYTES,
        groups=[len(file) for file in files],
        states_boxes=has_boxes,
    )
    if len(layout.files) != max(len(files), 1):
        raise UnsupportedError(
            f"cannot write {path}: a file has more tensors than the format can list; assign them "
            "to more files by fqn_to_index_mapping"
        )
    count = max(numbers.values(), default=1) if numbers else 1
    prefix = "shard-00001-" if has_boxes else ""
    names = [
        f"{prefix}model-{number:05d}-of-{count:05d}.safetensors"
        for number in (sorted(of_file) or [1])
    ]
    return Arrangement(layout, names=names, states_boxes=has_boxes)


class ModelReader(FastReader):
    """Reads the safetensors files of a directory, even if it also has a checkpoint."""

    def _open(self, path: Location, prefix: str) -> Opened:
        opened = None if prefix else open_model_files(path)
        return super()._open(path, prefix) if opened is None else opened


def is_replaced(given: object) -> bool:
    """Returns whether an object is of one of DCP's classes, whose arguments are all known."""
    arguments = _ARGUMENTS.get(type(given))
    if type(given) is QuantizedHuggingFaceStorageReader and not is_float(given.target_dtype):
        return False
    return arguments is not None and has_only(type(given), arguments)


def dequantize_of(given: object) -> Dequantize | StockRules:
    """Returns the argument of :class:`FastReader` that serves a reader of DCP."""
    if isinstance(given, QuantizedHuggingFaceStorageReader):
        return StockRules(given.target_dtype, given.block_size)
    return "auto"


def path_of(given: HuggingFaceStorageWriter) -> str | os.PathLike[str]:
    """Returns the directory of the final files of a writer of DCP."""
    output: str | None = getattr(given, "consolidated_output_path", None)
    return output if given.save_distributed and output else given.path


def arguments_of(given: HuggingFaceStorageWriter) -> dict[str, Any]:
    """Returns the arguments for :func:`model_writer` that correspond to a writer of DCP."""
    is_consolidated = bool(getattr(given, "consolidated_output_path", None))
    return {
        "fqn_to_index_mapping": given.fqn_to_index_mapping,
        "has_boxes": given.save_distributed and not is_consolidated,
        "thread_count": given.thread_count,
        "sync_files": given.sync_files,
        "overwrite": given.overwrite,
    }
