"""Writes a model in FP8: each block of 128 rows and columns of a weight gets a scale.

The numbers and the scales are those that transformers computes from the same weights. A weight
``x.weight`` is stored in float8_e4m3fn, beside ``x.weight_scale_inv`` in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.model_config import own_config, stated_config
from torch_ckpt.formats.recognise import open_model_files
from torch_ckpt.formats.safetensors.layout import TensorFacts
from torch_ckpt.storage.stored_values import Box, pieces_of

__all__ = [
    "Quantize",
    "QuantizedValues",
    "check_config",
    "check_not_stated",
    "check_quantize",
    "quantized_facts",
    "write_config",
]

Quantize = Literal["fp8-block-128"]
"""The names of the ways to quantise a model."""

_BLOCK = 128
_DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(_DTYPE).max
_SUFFIX = "_scale_inv"
_WIDE = frozenset({"float32", "bfloat16", "float16"})
_STAYS = re.compile(
    r"(^|[._])(\w*norm\w*|\w*embed\w*|wte|wpe|lm_head|\w*head|output|score|classifier|\w*router\w*"
    r"|gate)\.weight$"
)
"""Names of weights that stay as they are: norms, embeddings, heads and routers."""
_SLAB_NBYTES = 32 << 20  # Bytes of a weight that are in memory to compute its scales.

_Load = Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]]


def check_quantize(quantize: str | None) -> None:
    """Raises ValueError if there is no such way to quantise a model."""
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(f"{quantize=} is not one of {', '.join(get_args(Quantize))}")


def _is_quantizable(fqn: str, dtype: str, sizes: Sequence[int]) -> bool:
    """Returns whether a tensor is quantised: a matrix of whole blocks whose name does not stay."""
    return (
        dtype in _WIDE
        and len(sizes) == 2
        and all(size and size % _BLOCK == 0 for size in sizes)
        and fqn.endswith(".weight")
        and _STAYS.search(fqn) is None
    )


def quantized_facts(tensors: Iterable[TensorFacts]) -> list[TensorFacts]:
    """Returns the tensors as they are stored, each quantised one with its scales.

    Raises:
        UnsupportedError: A tensor is quantised already.
    """
    tensors = list(tensors)
    names = {facts.fqn for facts in tensors}
    out: list[TensorFacts] = []
    for facts in tensors:
        if facts.fqn + _SUFFIX in names or facts.dtype.startswith("float8"):
            raise UnsupportedError(
                f"cannot quantise {facts.fqn!r}: it is quantised already, in {facts.dtype}; "
                "pass the weights in float32, bfloat16 or float16, without scales"
            )
        if not _is_quantizable(facts.fqn, facts.dtype, facts.sizes):
            out.append(facts)
            continue
        grid = tuple(size // _BLOCK for size in facts.sizes)
        out.append(TensorFacts(facts.fqn, str(_DTYPE).removeprefix("torch."), facts.sizes))
        out.append(TensorFacts(facts.fqn + _SUFFIX, "float32", grid))
    return out


class QuantizedValues:
    """The tensors of a model as they are stored, computed from the wide ones.

    Args:
        load: Loads boxes of the wide tensors.
        wide: The wide tensors.
    """

    def __init__(self, load: _Load, wide: Iterable[TensorFacts]) -> None:
        self._load = load
        self._weights = {
            facts.fqn: facts
            for facts in wide
            if _is_quantizable(facts.fqn, facts.dtype, facts.sizes)
        }
        self._factors: dict[str, torch.Tensor] = {}

    def load(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Loads boxes of the stored tensors."""
        wide = [box for box in boxes if not self._is_scale(box[0])]
        loaded = self._load(wide)
        loaded.reverse()
        out: list[torch.Tensor] = []
        for name, (offsets, sizes) in boxes:
            if self._is_scale(name):
                factors = self._factors_of(name.removesuffix(_SUFFIX))
                parts = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                out.append(1.0 / factors[parts])
                continue
            tensor = loaded.pop()
            if name in self._weights:
                tensor = _quantized(tensor, self._factors_of(name), offsets)
            out.append(tensor)
        return out

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in self._weights

    def _factors_of(self, fqn: str) -> torch.Tensor:
        """Returns the factors of a weight's blocks. Their inverses are stored, as its scales."""
        factors = self._factors.get(fqn)
        if factors is None:
            rows, columns = self._weights[fqn].sizes
            factors = torch.empty(rows // _BLOCK, columns // _BLOCK, device="cpu")
            row_nbytes = columns * torch.float32.itemsize * _BLOCK
            for (first, _), (count, _) in pieces_of((len(factors), 1), row_nbytes, _SLAB_NBYTES):
                slab = ((first * _BLOCK, 0), (count * _BLOCK, columns))
                factors[first : first + count] = _factors(self._load([(fqn, slab)])[0])
            self._factors[fqn] = factors
        return factors


def _factors(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    factors = _MAX / largest
    # Zero times an infinite factor is NaN.
    return torch.where((largest > 0) & factors.isfinite(), factors, torch.ones_like(largest))


def _quantized(box: torch.Tensor, factors: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    rows, columns = (
        torch.arange(offset, offset + size, device="cpu") // _BLOCK
        for offset, size in zip(offsets, box.shape, strict=True)
    )
    return box.float().mul_(factors[rows][:, columns]).clamp_(-_MAX, _MAX).to(_DTYPE)


def check_config(folder: Location, tensors: Iterable[TensorFacts]) -> None:
    """Checks that :func:`write_config` can add its entry to the config of a model."""
    _new_config(folder, tensors, {})


def write_config(folder: Location, tensors: Iterable[TensorFacts], base: Mapping[str, Any]) -> None:
    """Adds ``quantization_config`` to the ``config.json`` of a model, before its files appear.

    No commit can replace the config and the files at the same moment. So the config is written
    first, and only if it is true of the files that the folder has until the commit.

    Args:
        folder: The folder of the model.
        tensors: The wide tensors of the model.
        base: The config if the folder has none.

    Raises:
        UnsupportedError: The folder has a model that is not quantised in the same way, or a config
            that is not a JSON object.
        CheckpointError: The config of the folder cannot be read or written.
    """
    text = _new_config(folder, tensors, base)
    if text is not None:
        (folder / "config.json").replace(text, sync=True)


def check_not_stated(folder: Location, tensors: Iterable[TensorFacts]) -> None:
    """Checks that the config of a folder does not state that tensors without scales are FP8.

    Raises:
        UnsupportedError: ``quant_method`` is ``fp8``, and no tensor is float8.
    """
    stated = (own_config(folder) or {}).get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != "fp8":
        return
    if not any(facts.dtype.startswith("float8") for facts in tensors):
        raise UnsupportedError(
            f"cannot save to {folder}: its config.json states quant_method 'fp8', and no tensor is "
            "float8; save to another folder, remove quantization_config from config.json, or pass "
            "quantize='fp8-block-128'"
        )


def _new_config(
    folder: Location, tensors: Iterable[TensorFacts], base: Mapping[str, Any]
) -> bytes | None:
    """Returns the new contents of a config; ``None`` if it has the entry already."""
    stays = [
        facts.fqn.removesuffix(".weight")
        for facts in tensors
        if facts.fqn.endswith(".weight")
        and len(facts.sizes) == 2
        and not _is_quantizable(facts.fqn, facts.dtype, facts.sizes)
    ]
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": sorted(stays),
    }
    stated = stated_config(folder)
    if stated is not None and stated.get("quantization_config") == quantization:
        return None
    if (fqn := _first_other(folder, frozenset(stays))) is not None:
        raise UnsupportedError(
            f"cannot save to {folder} with quantize: it has a model that is not quantised in the "
            f"same way, such as {fqn!r}, and a crash could leave its files beside a config.json "
            "that describes the new ones; save to another folder, or remove the model first"
        )
    config = {**(stated or base), "quantization_config": quantization}
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _first_other(folder: Location, stays: Container[str]) -> str | None:
    """Returns a tensor of the model in a folder that the config would describe wrongly."""
    try:
        opened = open_model_files(folder)
    except (NotFoundError, CorruptionError):  # No loader reads it.
        return None
    for fqn, entry in opened.metadata.state_dict_metadata.items() if opened else ():
        if isinstance(entry, TensorStorageMetadata):
            is_matrix = fqn.endswith(".weight") and len(entry.size) == 2
            is_stated = is_matrix and fqn.removesuffix(".weight") not in stays
            if is_stated != (entry.properties.dtype == _DTYPE):
                return fqn
    return None
