"""Finds out which format a checkpoint has."""

from __future__ import annotations

from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.dcp import open_dcp
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.safetensors import (
    is_safetensors,
    open_safetensors,
    open_safetensors_directory,
)
from torch_ckpt.formats.torch_save import is_archive, is_legacy, open_torch_save

__all__ = ["open_stored"]


def open_stored(path: Location, prefix: str = "", *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens a checkpoint of any format: a directory of DCP or of safetensors, or a single file.

    Args:
        path: The directory or file.
        prefix: What the name of DCP's metadata begins with.
        verify: Whether damage is looked for.
        trust_pickle: Whether pickles may ask for anything.

    Raises:
        NotFoundError: There is no checkpoint.
        CorruptionError: It is damaged.
        UnsupportedError: It is of another format, or asks for more than it may have.
    """
    if path.is_file():
        if prefix:  # Which only ranks of DCP have.
            raise NotFoundError(f"{path} is a file: no rank has saved alone there")
        return _open_file(path, verify=verify, trust_pickle=trust_pickle)
    try:
        return open_dcp(path, prefix, verify=verify, trust_pickle=trust_pickle)
    except NotFoundError:
        names = [] if prefix else _safetensors_in(path)
        if not names:
            raise
    return open_safetensors_directory(path, names)


def _open_file(path: Location, *, verify: bool, trust_pickle: bool) -> Opened:
    nbytes, start = path.read_part(0, 512)
    if is_archive(start):
        return open_torch_save(path, verify=verify, trust_pickle=trust_pickle)
    if is_safetensors(start) or path.name.endswith(".safetensors"):
        return open_safetensors(path)
    if is_legacy(start):
        raise UnsupportedError(
            f"cannot load {path}: it has the legacy format of torch.save, which is no zip archive; "
            "torch.save(torch.load(path), path) writes it anew"
        )
    if not nbytes:
        raise CorruptionError(f"cannot load {path}: it is empty")
    raise UnsupportedError(
        f"cannot load {path}: it is no safetensors file, and none that torch.save has written"
    )


def _safetensors_in(directory: Location) -> list[str]:
    """The names of all safetensors files and their indexes, sorted."""
    try:
        names = directory.names()
    except NotFoundError:
        return []
    return sorted(n for n in names if n.endswith((".safetensors", ".safetensors.index.json")))
