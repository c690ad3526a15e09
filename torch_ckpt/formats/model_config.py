"""Reads ``config.json``, which describes a model of Hugging Face."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.stored_json import from_json

__all__ = ["model_config"]

_NAME = "config.json"
_MAX_NBYTES = 1 << 20


def model_config(path: Location) -> dict[str, Any]:
    """Returns the ``config.json`` in a checkpoint's directory or beside it, or an empty dict.

    Ignores a file that is longer than 1 MiB, or that is not a JSON object.
    """
    for folder in (path, path.parent):
        with contextlib.suppress(CheckpointError, ValueError):
            nbytes, data = (folder / _NAME).read_range(0, _MAX_NBYTES)
            config = from_json(data, lambda value: value) if nbytes == len(data) else None
            if isinstance(config, dict):
                return config
    return {}
