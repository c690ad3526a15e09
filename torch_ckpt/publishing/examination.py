"""Facts of the versions in a directory, and a check of every byte of a version."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ckpt.commits.delta import DELTA
from torch_ckpt.commits.leases import leases_of
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.chain import read_line
from torch_ckpt.publishing.parts import Part
from torch_ckpt.publishing.version_files import (
    WHOLE,
    Version,
    kind_of,
    listed_versions,
    path_of,
    read_version,
)
from torch_ckpt.publishing.whole import load_values

__all__ = ["damage_of", "facts_of"]

_BATCH_NBYTES = 256 << 20
"""Bytes of tensors that are checked at a time."""


def facts_of(root: Location) -> list[dict[str, Any]]:
    """Returns the facts of each version, the newest first.

    ``share`` is its size in bytes as a part of the tensors' size; ``None`` if that is unknown.
    """
    leases = leases_of(root)
    found = []
    for number in listed_versions(root):
        path, kind = path_of(root, number), ""
        facts: dict[str, Any] = {"version": number, "reason": None, "share": None}
        try:
            kind = kind_of(path)
            facts["state"] = "files present" if kind else "unfinished"
            facts["nbytes"] = sum((path / name).nbytes() for name in path.names())
            if kind:
                version = read_version(root, number, kind=kind)
                _check_present(path, version)
                facts["share"] = facts["nbytes"] / max(version.nbytes, 1)
        except NotFoundError as error:
            facts |= {"state": "damaged" if kind else "unfinished", "reason": text_of(error)}
        except CorruptionError as error:
            facts |= {"state": "damaged", "reason": text_of(error)}
        written = (path / kind).modified_s() if kind else None
        facts["age_s"] = None if written is None else max(time.time() - written, 0.0)
        facts["kind"] = {DELTA: "delta", WHOLE: "whole"}.get(kind)
        facts["leases"] = leases.get(number, 0)
        facts.setdefault("nbytes", 0)
        found.append(facts)
    return found


def _check_present(path: Location, version: Version) -> None:
    for file in version.files:
        if (nbytes := (path / file.name).nbytes()) != file.nbytes:
            raise CorruptionError(f"{path / file.name} has {nbytes} bytes, and not {file.nbytes}")


def damage_of(
    root: Location, number: int, watch: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Reads all values of a version, with those of the versions that it is added to.

    Returns what is damaged. ``watch`` is called with the bytes that are checked, and all.
    """
    damage: list[str] = []
    try:
        version = read_version(root, number)
        versions = read_line(root, version, version.line)
    except CheckpointError as error:
        return [text_of(error)]
    done, total = 0, version.nbytes
    watch(0, total)
    for batch in _batches(version):
        try:
            load_values(root, versions, batch)
        except CheckpointError as error:
            # One by one, so that each damaged tensor is named.
            for part in batch if len(batch) > 1 else ():
                try:
                    load_values(root, versions, [part])
                except CheckpointError as own:
                    damage.append(text_of(own))
            if len(batch) == 1:
                damage.append(text_of(error))
        done += sum(part.nbytes for part in batch)
        watch(done, total)
    return list(dict.fromkeys(damage))


def _batches(version: Version) -> Iterator[list[Part]]:
    batch: list[Part] = []
    for fqn, (dtype, sizes) in version.tensors.items():
        if not math.prod(sizes):
            continue
        shape = torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
        batch.append(Part(fqn, sizes, (0,) * len(sizes), shape))
        if sum(part.nbytes for part in batch) >= _BATCH_NBYTES:
            yield batch
            batch = []
    if batch:
        yield batch
