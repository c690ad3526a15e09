"""Reads ``config.json``, which describes a model of Hugging Face."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_ckpt.errors import CheckpointError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.stored_json import from_json

__all__ = ["model_config", "model_dtype", "own_config", "quantization_config", "stated_config"]

_NAME = "config.json"
_OF_MODELOPT = "hf_quant_config.json"
_MAX_NBYTES = 16 << 20  # Lists of modules that are not quantised may be long.


def model_config(path: Location) -> dict[str, Any]:
    """Returns the ``config.json`` in a checkpoint's directory or beside it, or an empty dict.

    Ignores a file that is longer than 16 MiB, or that is not a JSON object.
    """
    for folder in (path, path.parent):
        if (config := _read(folder / _NAME)) is not None:
            return config
    return {}


def own_config(folder: Location) -> dict[str, Any] | None:
    """Returns the ``config.json`` in a folder; ``None`` without a valid one."""
    return _read(folder / _NAME)


def stated_config(folder: Location) -> dict[str, Any] | None:
    """Returns the ``config.json`` in a folder; ``None`` without one.

    Raises:
        CheckpointError: The file cannot be read, or is not a JSON object of at most 16 MiB.
    """
    path = folder / _NAME
    try:
        return _read_strictly(path)
    except NotFoundError:
        return None
    except ValueError as error:
        raise UnsupportedError(f"cannot read {path}: {error}") from error


def quantization_config(folder: Location) -> dict[str, Any] | str | None:
    """Returns how the model in a folder is quantised, by its config; ``None`` if that is unknown.

    If the config cannot be read, the text says why. NVIDIA's ModelOpt has a file of its own for it.
    """
    for name, key in ((_NAME, "quantization_config"), (_OF_MODELOPT, "quantization")):
        try:
            found = _read_strictly(folder / name).get(key)
        except NotFoundError:
            continue
        except (CheckpointError, ValueError) as error:
            return f"its {name} cannot be read: {error}"
        if isinstance(found, dict):
            return found if name == _NAME else {"quant_method": "modelopt", **found}
        if found is not None:
            return f"its {key} is {repr(found)[:80]}"
    return None


def model_dtype(folder: Location) -> str:
    """Returns the dtype of the weights of the model in a folder, by its config, or bfloat16."""
    config = own_config(folder) or {}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ("float32", "bfloat16", "float16") else "bfloat16"


def _read(path: Location) -> dict[str, Any] | None:
    with contextlib.suppress(CheckpointError, ValueError):
        return _read_strictly(path)
    return None


def _read_strictly(path: Location) -> dict[str, Any]:
    nbytes, data = path.read_range(0, _MAX_NBYTES)
    if nbytes != len(data):
        raise ValueError(f"it has {nbytes} bytes, and the limit is {_MAX_NBYTES}")
    config = from_json(data, lambda value: value)
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config
