"""Detects the format of a checkpoint."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.formats.absent import no_checkpoint
from torch_ckpt.formats.dcp import open_dcp
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.reading import reading
from torch_ckpt.formats.rules import Rules
from torch_ckpt.formats.safetensors.opening import (
    is_safetensors,
    open_safetensors,
    open_safetensors_directory,
)
from torch_ckpt.formats.torch_save import is_archive, is_legacy, open_torch_save
from torch_ckpt.known_frameworks import FRAMEWORKS, first_match
from torch_ckpt.options import Verification

__all__ = ["open_model_files", "open_stored"]

_MODEL_INDEX = ".safetensors.index.json"
"""End of the name of Hugging Face's index of the files of a model."""
# Files of a model that may not be complete yet, unless an index names them.
_OF_SAVE = re.compile(r"model-[0-9a-f]{16}-\d+-of-\d+\.safetensors")
_OF_RANK = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # By DCP, with boxes.


def open_stored(
    path: Location,
    prefix: str = "",
    *,
    verify: Verification,
    trust_pickle: bool,
    rules: Rules | None = None,
) -> Opened:
    """Opens a checkpoint of any format: a file, or a directory.

    ``prefix`` is the prefix of DCP's metadata file. ``rules`` define how the shards of
    model-parallel ranks form parameters. Raises NotFoundError without a checkpoint.
    """
    with reading(path):
        return _open(path, prefix, verify=verify, trust_pickle=trust_pickle, rules=rules)


def _open(
    path: Location, prefix: str, *, verify: Verification, trust_pickle: bool, rules: Rules | None
) -> Opened:
    if rules is not None:
        return _open_with_rules(path, rules, verify=verify, trust_pickle=trust_pickle)
    try:  # First, because each check of a path is a request to a store.
        return open_dcp(path, prefix, verify=bool(verify), trust_pickle=trust_pickle)
    except NotFoundError:
        is_file = path.is_file()
        if prefix and not is_file:
            raise
    except StorageError as error:
        if error.errno != errno.ENOTDIR:  # The error for a name "in" a file.
            raise
        is_file = True
    if is_file:
        if prefix:  # Only DCP directories can have metadata of single ranks.
            raise NotFoundError(f"cannot load the checkpoint of one rank from {path}: it is a file")
        return _open_file(path, verify=verify, trust_pickle=trust_pickle)
    return _open_directory(path, verify=verify, trust_pickle=trust_pickle)


def _open_with_rules(
    path: Location, rules: Rules, *, verify: Verification, trust_pickle: bool
) -> Opened:
    """Opens a checkpoint of a framework that stores shards of model-parallel ranks."""
    with_rules = [row for row in FRAMEWORKS if row.rules]
    for row in with_rules if not path.is_file() else ():
        options = {"verify": verify, "trust_pickle": trust_pickle, "rules": rules}
        opened: Opened | None = row.function(row.rules)(path, (), **options)
        if opened is not None:
            return opened
    titles = " or ".join(row.title for row in with_rules)
    raise UnsupportedError(f"cannot load {path} with rules: it is not a checkpoint of {titles}")


def _open_directory(path: Location, *, verify: Verification, trust_pickle: bool) -> Opened:
    """Opens a directory that has no checkpoint of DCP."""
    try:
        names = path.names()
    except NotFoundError:
        raise no_checkpoint(path) from None

    options = {"verify": verify, "trust_pickle": trust_pickle}
    if (opened := _opened_by_framework("first", path, names, options)) is not None:
        return opened
    _check_one_framework(path, names)
    if (opened := _opened_by_framework("alone", path, names, options)) is not None:
        return opened
    if safetensors := _model_files(path, names):
        for row in FRAMEWORKS:
            find = row.function(row.training_state) if row.training_state else None
            if find is not None and (state := find(path, names)) is not None:
                raise _two_formats(path, safetensors, state, row.title)
        return open_safetensors_directory(path, safetensors)
    if (opened := _opened_by_framework("last", path, names, options)) is not None:
        return opened
    raise no_checkpoint(path)


def _opened_by_framework(
    asked: str, path: Location, names: Sequence[str], options: Mapping[str, Any]
) -> Opened | None:
    """Opens a directory with the first framework of this phase that recognises it."""
    for row in FRAMEWORKS:
        for files in row.files:
            if files.asked == asked and first_match(files.names, names) is not None:
                opened: Opened | None = row.function(files.open)(path, names, **options)
                if opened is not None:
                    return opened
    return None


def _check_one_framework(path: Location, names: Sequence[str]) -> None:
    """Raises CorruptionError if a directory has files that are specific to two frameworks."""
    found = [
        f"of {row.title}, such as {name}"
        for row in FRAMEWORKS
        for files in row.files
        if files.asked == "alone" and (name := first_match(files.names, names)) is not None
    ]
    if len(found) > 1:
        raise CorruptionError(f"cannot load {path}: it has files {', and '.join(found)}")


def open_model_files(path: Location) -> Opened | None:
    """Opens the safetensors files of a directory, and ignores all others; ``None`` without any."""
    with reading(path):
        names = [] if path.is_file() else _model_files(path, path.names())
        return open_safetensors_directory(path, names) if names else None


def _model_files(path: Location, names: Sequence[str]) -> list[str]:
    """Returns the files of the model in a directory, and their index.

    As in transformers, files of a distributed save are preferred, unless other files are newer: a
    save of a whole model removes older files of a distributed save after its commit.
    """
    ends = (".safetensors", _MODEL_INDEX)
    files = sorted(name for name in names if name.endswith(ends) and not name.startswith(PENDING))
    of_ranks = [name for name in files if _OF_RANK.fullmatch(name)]
    files = [name for name in files if name not in of_ranks]
    indexes = [name for name in files if name.endswith(_MODEL_INDEX)]
    if not indexes:
        files = [name for name in files if not _OF_SAVE.fullmatch(name)]
    last = indexes or files
    if of_ranks and not (last and _newest_s(path, last) > _newest_s(path, of_ranks)):
        return of_ranks
    return files


def _newest_s(path: Location, names: Sequence[str]) -> float:
    return max((path / name).modified_s() or 0.0 for name in names)


def _two_formats(
    path: Location, safetensors: Sequence[str], state: Location, title: str
) -> UnsupportedError:
    """Returns the error for a folder of Hugging Face's Trainer with weights and a training state.

    Neither can be preferred: the weights are no training state, and with ZeRO-3 the safetensors
    files may contain no elements.
    """
    weights = next((name for name in safetensors if name.endswith(_MODEL_INDEX)), safetensors[0])
    return UnsupportedError(
        f"cannot load {path}: it has both the weights of a model as safetensors and a training "
        f"state of {title}; pass {path / weights} for the weights, or {state} for the training "
        "state"
    )


def _open_file(path: Location, *, verify: Verification, trust_pickle: bool) -> Opened:
    if path.name.endswith(_MODEL_INDEX):
        return open_safetensors_directory(path.parent, [path.name])
    nbytes, start = path.read_range(0, 512)
    if is_archive(start):
        return open_torch_save(path, verify=verify, trust_pickle=trust_pickle)
    if is_safetensors(start) or path.name.endswith(".safetensors"):
        return open_safetensors(path)
    if is_legacy(start):
        raise UnsupportedError(
            f"cannot load {path}: it has the legacy format of torch.save, not a zip archive; "
            "convert it with torch.save(torch.load(path), path)"
        )
    if not nbytes:
        raise CorruptionError(f"cannot load {path}: it is empty")
    raise UnsupportedError(
        f"cannot load {path}: it is neither a safetensors file nor a file of torch.save"
    )
