"""Converts a checkpoint into another format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.api import save
from torch_ckpt.conversion.pieces import IO, Source
from torch_ckpt.conversion.planner import ConversionPlanner
from torch_ckpt.conversion.store_target import write_to_store
from torch_ckpt.conversion.torch_file import write_torch_file
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import AlreadyExistsError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.formats.model_config import own_config, quantization_config
from torch_ckpt.formats.safetensors.layout import UNTIED
from torch_ckpt.formats.torch_save import is_archive
from torch_ckpt.known_frameworks import FRAMEWORKS, Framework, Target
from torch_ckpt.storage.quantizing import Quantize, check_config, check_quantize, write_config
from torch_ckpt.storage.safetensors_writer import SafetensorsWriter
from torch_ckpt.storage.writer import FastWriter

__all__ = ["TARGETS", "convert"]

_NO_TIES: Mapping[str, str] = MappingProxyType({})


def convert(
    source: Location,
    target: Location,
    to: str,
    *,
    prefix: str = "",
    rules: str | None = None,
    overwrite: bool = False,
    trust_pickle: bool = False,
    ties: Mapping[str, str] | None = _NO_TIES,
    quantize: Quantize | None = None,
    ranks: int | None = None,
) -> dict[str, str]:
    """Converts a checkpoint of any format that :class:`FastReader` loads to one of :data:`TARGETS`.

    Loads the tensors in pieces of at most 8 MiB, and verifies all data that has checksums. The
    target appears when it is complete. Only names with the prefix are converted, and the prefix is
    removed. ``overwrite`` replaces a checkpoint at ``target``. Files of safetensors and
    ``torch.save`` contain each tied tensor once; :func:`find_ties` finds the ties. ``ties`` adds
    further ties, as name -> another name; with ``None``, no tensors are tied. ``quantize`` is that
    of :class:`SafetensorsWriter`; ``config.json`` of the source is the base of the target's.
    ``ranks``: see :func:`~torch_ckpt.frameworks.torch_checkpointing.item_files.write_items`.
    Returns name -> the name of the tensor that it shares in the target.

    Raises:
        AlreadyExistsError: ``target`` has a checkpoint, and ``overwrite`` is false, or the
            checkpoint has another format, or ``target`` is on a store and the format is neither
            DCP's nor safetensors.
        MismatchError: Two tensors that ``ties`` names are not equal, or belong to an optimizer.
        NotFoundError: ``source`` has no checkpoint, no name with the prefix, or lacks a tensor that
            ``ties`` names.
        UnsupportedError: The target's format cannot store a value of the source, or ties.
        CheckpointError: The source cannot be read, or the target cannot be written.
    """
    watch_storage()
    check_quantize(quantize)
    if quantize and to != "safetensors":
        raise UnsupportedError(f"cannot quantise {to}: only safetensors have FP8 with scales")
    if ranks is not None and to != "torch_checkpointing":
        raise UnsupportedError(f"cannot write {to} for {ranks} ranks: any ranks load it")
    if ties and to not in _WITH_TIES:
        raise UnsupportedError(f"cannot tie {next(iter(ties))!r}: {to} stores every name")
    target = target.absolute()
    _check_other_formats(target, to)
    is_torchs = source.is_file() and is_archive(source.read_range(0, 4)[1])
    if to == "torch" and not prefix and is_torchs:
        raise UnsupportedError(
            f"cannot convert {source}: it is a file of torch.save already, and a conversion would "
            "lose what DCP's names lose, such as integer keys"
        )
    existed = target.is_directory()
    with Source(source, prefix, rules=rules, trust_pickle=trust_pickle) as values:
        values.ranks = ranks
        if to == "safetensors" and values.objects:
            raise UnsupportedError(_no_objects(values))
        if ties is not None and to in _WITH_TIES:
            values.find_ties(ties)
        if quantize:
            _check_wide(source)
            values.quantize()
            check_config(target, values.wide)  # Fails before any tensor is written.
        if to not in ("dcp", "safetensors") and not target.file_system.writes_at_offsets:
            write_to_store(target, lambda local: TARGETS[to](values, local, False))
            return values.ties
        try:
            TARGETS[to](values, target, overwrite)
        except BaseException:
            if not existed and target.is_directory() and not target.names():
                target.remove_all()
            raise
        return values.ties


def _check_wide(source: Location) -> None:
    """Raises UnsupportedError if a config states that the source is quantised already."""
    folder = source.parent if source.is_file() else source
    stated = quantization_config(folder)
    if isinstance(stated, dict):
        stated = f"its config.json states quant_method {repr(stated.get('quant_method'))[:80]}"
    if stated is not None:
        raise UnsupportedError(
            f"cannot quantise {source}: {stated}; only models in float32, bfloat16 or float16 can "
            "be quantised"
        )


def _no_objects(values: Source) -> str:
    """Returns why a source with objects cannot be converted, and which prefix would avoid them."""
    objects = list(values.objects)
    more = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
    heads = {name.partition(".")[0] for name in objects}
    found = sorted({name.partition(".")[0] for name in values.tensors if "." in name} - heads)
    choose = f", such as --prefix {found[0]}." if found else ""
    return (
        f"cannot convert {values.path} to safetensors, which have tensors only: it has the object "
        f"{objects[0]!r}{more}; convert the names below a prefix{choose}"
    )


def _check_other_formats(target: Location, to: str) -> None:
    """Checks that the target directory contains no checkpoint of another format.

    Raises AlreadyExistsError if it does: that checkpoint would remain beside the new one.
    """
    if not target.is_directory():
        return
    found = {
        "dcp": bool(metadata_prefixes(target)),
        "safetensors": any(name.endswith(".safetensors") for name in target.names()),
    }
    for row in FRAMEWORKS:
        if row.target is not None:
            found[row.target.name] = row.function(row.target.at)(target) is not None
    for other, exists in found.items():
        if exists and other != to:
            raise AlreadyExistsError(
                f"cannot write {target}: it has a checkpoint of another format, {other}; remove "
                "it, or choose another target"
            )


def _to_dcp(source: Source, target: Location, overwrite: bool) -> None:
    _save(source, FastWriter(target.checkpoint_id, io=IO, overwrite=overwrite))


def _to_safetensors(source: Source, target: Location, overwrite: bool) -> None:
    source.ties = {name: first for name, first in source.ties.items() if name not in UNTIED}
    writer = SafetensorsWriter(target.checkpoint_id, io=IO, overwrite=overwrite)
    writer.ties = source.ties
    if source.wide:
        config = own_config(source.path) or {}
        writer.before_commit = functools.partial(write_config, target, source.wide, config)
    _save(source, writer)


def _save(source: Source, writer: FastWriter) -> None:
    try:
        save({}, storage_writer=writer, planner=ConversionPlanner(source), no_dist=True)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error


def _writer_of(row: Framework, target: Target) -> Callable[[Source, Location, bool], None]:
    def write(source: Source, path: Location, overwrite: bool) -> None:
        row.function(target.write)(source, path, overwrite)

    return write


TARGETS: dict[str, Callable[[Source, Location, bool], None]] = {
    "dcp": _to_dcp,
    "safetensors": _to_safetensors,
    "torch": write_torch_file,
    **{row.target.name: _writer_of(row, row.target) for row in FRAMEWORKS if row.target},
}
"""Format -> the function that writes it."""

_WITH_TIES = ("safetensors", "torch")
