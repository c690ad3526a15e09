"""Quantised models in safetensors: which tensors have scales, and how loads see them.

A quantised tensor has numbers of 8 or 4 bits, and blocks of numbers share a scale, which is in
another tensor. ``quantization_config`` of ``config.json`` names the method. Names and sizes show
which tensors it applies to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import DTYPE_CODES, gc_paused
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.model_config import model_dtype, quantization_config
from torch_ckpt.formats.opened import Opened, Quantized

__all__ = ["Dequantize", "StockRules", "is_float", "with_quantization"]

Dequantize = bool | Literal["auto"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}
_CODES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"})
_SCALES = frozenset({"float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8"})
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # In which targets get the products.
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")  # In compressed-tensors.
_GROUP_NBYTES = 16  # Bytes of the numbers that share a scale in MXFP4.

_Entry = tuple[str, Any, Sequence[Any]]  # As in a foreign index.


@dataclass(frozen=True)
class StockRules:
    """How DCP's ``QuantizedHuggingFaceStorageReader`` sees a model, whatever its config states."""

    target_dtype: torch.dtype
    block_size: int


@dataclass(frozen=True)
class _Method:
    """How a model is quantised.

    Attributes:
        name: The method, for messages.
        suffix: What the name of a tensor's scales adds to that of the tensor; empty if no tensor of
            8 bits has scales.
        blocks: Rows and columns of the blocks that its config states.
        is_mxfp4: Whether tensors ``x`` are stored as ``x_blocks`` and ``x_scales``.
    """

    name: str
    suffix: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    is_mxfp4: bool = False


_BY_NAME = _Method("no quantization_config", "_scale_inv", ((128, 128),), is_mxfp4=True)
"""For a folder without a config. A scale named in another way may divide or multiply."""


def is_float(dtype: torch.dtype) -> bool:
    """Returns whether the engine can dequantise to a dtype."""
    return dtype in _FLOATS


def with_quantization(opened: Opened, dequantize: Dequantize | StockRules) -> Opened:
    """Returns an open model whose quantised tensors can be loaded into wider dtypes.

    With ``"auto"``, names and dtypes of the metadata are those of the files. With ``True``, each
    quantised tensor is shown once, as the one that it stands for, and no scales are shown.

    Raises:
        UnsupportedError: ``dequantize`` is ``True``, and the method is unknown, or a tensor is
            stored in a way that the method does not have.
    """
    if opened.format != "safetensors" or opened.index is None or dequantize is False:
        return opened
    if isinstance(dequantize, StockRules):
        return _shown(opened, _BY_NAME, dequantize)
    config = quantization_config(opened.directory)
    found = _method(config) if isinstance(config, dict) else config or _BY_NAME
    if isinstance(found, str):
        if dequantize is True:
            raise UnsupportedError(
                f"cannot dequantise {opened.directory}: {found}; load the tensors in their stored "
                "dtypes"
            )
        return dataclasses.replace(opened, unknown_quantization=found)
    if config is None and dequantize == "auto":
        return opened
    return _shown(opened, found, dequantize)


def _method(config: Mapping[str, Any]) -> _Method | str:
    """Returns the method that a config states, or why it is not supported."""
    name = config.get("quant_method")
    if name == "fp8":
        block = config.get("weight_block_size")
        if block is None:
            return _Method("fp8", "_scale_inv")
        if not _is_block(block):
            return f"its weight_block_size is {_short(block)}"
        return _Method("fp8", "_scale_inv", ((block[0], block[1]),))
    if name == "mxfp4":
        return _Method("mxfp4", is_mxfp4=True)
    if name == "compressed-tensors":
        groups = list(_dicts(config.get("config_groups")))
        formats = [one.get("format") for one in (config, *groups)]
        if odd := [one for one in formats if one is not None and one not in _FORMATS]:
            return f"its format of compressed-tensors is {', '.join(map(_short, odd))}"
        return _Method("compressed-tensors", "_scale", tuple(_blocks_of(groups)))
    if name == "modelopt":
        algorithm = config.get("quant_algo")
        if algorithm != "FP8":
            return f"its quant_algo of modelopt is {_short(algorithm)}"
        return _Method("modelopt", "_scale")
    return f"its quant_method is {_short(name)}"


def _short(value: object) -> str:
    return repr(value)[:80]


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size < 2**31 for size in block)
    )


def _dicts(groups: object) -> Iterator[Mapping[str, Any]]:
    values = groups.values() if isinstance(groups, dict) else ()
    return (group for group in values if isinstance(group, dict))


def _blocks_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Returns the blocks that groups of compressed-tensors state."""
    for weights in _dicts({n: group.get("weights") for n, group in enumerate(groups)}):
        blocks: tuple[Any, ...] = (weights.get("block_structure"), [1, weights.get("group_size")])
        for block in blocks:
            if _is_block(block):
                yield block[0], block[1]


def _shown(opened: Opened, method: _Method, how: Dequantize | StockRules) -> Opened:
    index = opened.index
    assert index is not None
    with gc_paused():
        entries: dict[str, _Entry] = {entry[0]: entry for entry in index}
        found = _Found(opened, entries, method, how)
        found.add_all()
        unscaled = found.refused | found.unreadable
        if not found.tensors and not unscaled:
            return opened
        native = _native.QuantizedTensors(found.tensors)
        facts: dict[str, Any] = {"quantized": found.tensors, "native_quantized": native}
        if how == "auto":
            return dataclasses.replace(opened, unscaled=unscaled, **facts)
        if how is True and found.refused:
            raise UnsupportedError(next(iter(found.refused.values())))
        shown = found.shown()
        paths = [(fqn, [fqn]) for fqn, *_ in shown]
        presented = _native.foreign_index(index.save_id, list(index.files), shown, {}, paths)
    metadata = to_metadata(presented, checkpoint_id="")
    metadata.storage_meta = opened.metadata.storage_meta
    return dataclasses.replace(
        opened, metadata=metadata, index=presented, unscaled=unscaled, **facts
    )


class _Found:
    """The quantised tensors of a model, as loads see them."""

    def __init__(
        self,
        opened: Opened,
        entries: dict[str, _Entry],
        method: _Method,
        how: Dequantize | StockRules,
    ) -> None:
        self.opened = opened
        self.entries = entries
        self.method = method
        self.how = how
        self.stock = how if isinstance(how, StockRules) else None
        self.tensors: dict[str, Quantized] = {}
        self.refused: dict[str, str] = {}  # FQN -> why it cannot be dequantised.
        self.unreadable: dict[str, str] = {}  # FQN -> why its scales cannot be read.
        self._names: dict[str, str] = {}  # Stored name -> name that loads see.
        self._sizes: dict[str, Sequence[int]] = {}  # By the name that loads see.
        self._hidden: set[str] = set()
        self._by_place: dict[tuple[int, ...], str] | None = None  # Names of tensors with scales.
        assert opened.index is not None
        self._files = [name for name, _ in opened.index.files]

    def add_all(self) -> None:
        """Finds the tensors that have scales."""
        for fqn, tensor, boxes in self.entries.values():
            if tensor is None:
                continue
            if self.method.is_mxfp4 and fqn.endswith("_blocks") and tensor[0] == "uint8":
                self._add_mxfp4(fqn, tensor[4])
            elif tensor[0] in _CODES and not (self.stock and not fqn.endswith(".weight")):
                self._add_codes(fqn, tensor, boxes)

    def _add_codes(self, fqn: str, tensor: Any, boxes: Sequence[Any]) -> None:
        """Adds a tensor of 8 bits if it has scales."""
        scales, missing = None, "no scales"
        if self.method.suffix:
            name = self._scaled_name(fqn, boxes) + self.method.suffix
            scales, missing = self._scales_of(fqn, name), f"no scales {name!r}"
        if scales is not None:
            self._add_8_bits(fqn, tensor, scales)
        elif self.method != _BY_NAME and (tensor[0] != "int8" or fqn.endswith(".weight")):
            self.unreadable.setdefault(
                fqn,
                f"cannot dequantise {fqn!r} of {self.opened.directory} by {self.method.name}: it "
                f"has {missing}; load it in its stored dtype, torch.{tensor[0]}",
            )

    def _scaled_name(self, fqn: str, boxes: Sequence[Any]) -> str:
        """Returns the name of a tensor, or the one that it is tied to, if that has the scales."""
        if fqn + self.method.suffix in self.entries:
            return fqn
        if self._by_place is None:
            self._by_place = {
                tuple(boxes[0][2:4]): name
                for name, tensor, boxes in self.entries.values()
                if tensor is not None and name + self.method.suffix in self.entries
            }
        return self._by_place.get(tuple(boxes[0][2:4]), fqn)

    def shown(self) -> list[_Entry]:
        """Returns the entries of an index of the tensors as loads see them."""
        out: list[_Entry] = []
        for stored, tensor, boxes in self.entries.values():
            if stored in self._hidden:
                continue
            name = self._names.get(stored)
            if name is None:
                out.append((stored, tensor, boxes))
                continue
            sizes = self._sizes[name]
            box = ([0] * len(sizes), sizes, *boxes[0][2:])
            out.append((name, (self._dtype(), *tensor[1:4], sizes), [box]))
        return out

    def _dtype(self) -> str:
        """Returns the dtype of dequantised tensors in the metadata."""
        if self.stock is not None:
            return str(self.stock.target_dtype).removeprefix("torch.")
        return model_dtype(self.opened.directory)

    def _targets(self, *stored: str) -> list[int]:
        if self.stock is not None:
            return [DTYPE_CODES[self.stock.target_dtype]]
        return [DTYPE_CODES[dtype] for dtype in _FLOATS] + [
            DTYPE_CODES[_DTYPES[name]] for name in stored
        ]

    def _scales_of(self, fqn: str, name: str) -> _Entry | None:
        """Returns the scales with that name, if they can be read."""
        scales = self.entries.get(name)
        if scales is None or scales[1] is not None:
            return scales
        self.unreadable[fqn] = f"cannot dequantise {fqn!r}: {self.opened.unreadable.get(name)}"
        return None

    def _add_mxfp4(self, blocks: str, sizes: Sequence[int]) -> None:
        fqn = blocks.removesuffix("_blocks")
        scales = self._scales_of(blocks, f"{fqn}_scales")
        if scales is None or scales[1][0] != "uint8":
            return
        if self.stock is None and (fqn in self.entries or self.how == "auto"):
            self.refused[blocks] = (
                f"cannot load {fqn!r} of {self.opened.directory}: it is stored as {blocks!r} and "
                f"{scales[0]!r}; pass dequantize=True to load it as one tensor"
            )
            return
        scale_sizes = list(scales[1][4])
        is_group = len(sizes) >= 2 and (sizes[-1] == _GROUP_NBYTES or self.stock is not None)
        if not is_group or list(sizes[:-1]) != scale_sizes or self._is_cut(blocks, scales[0]):
            self._refuse(fqn, blocks, scales)
            return
        count = 2 * sizes[-1]
        numbers = [*sizes[:-2], sizes[-2] * count]
        is_transposed = self.stock is None and len(numbers) >= 3
        shown = [*numbers[:-2], numbers[-1], numbers[-2]] if is_transposed else numbers
        name = fqn if self.stock is None else blocks
        self._names[blocks], self._sizes[name] = name, shown
        self.tensors[name] = (
            DTYPE_CODES[torch.float4_e2m1fn_x2],
            numbers,
            [*[1] * (len(numbers) - 1), count],
            is_transposed,
            self._slice(scales),
            DTYPE_CODES[torch.uint8],
            self._targets(),
        )
        if self.stock is None:
            self._hidden.add(scales[0])

    def _add_8_bits(self, fqn: str, tensor: Any, scales: _Entry) -> None:
        dtype, sizes, scale_dtype = tensor[0], list(tensor[4]), scales[1][0]
        if self.stock is not None and len(sizes) != 2:
            return
        block = self._block(sizes, list(scales[1][4]))
        if block is None or scale_dtype not in _SCALES or self._is_cut(fqn, scales[0]):
            self._refuse(fqn, fqn, scales)
            return
        if why := self._why_odd(fqn, dtype):
            self.refused[fqn] = (
                f"cannot dequantise {fqn!r} of {self.opened.directory}: {why}; load it in its "
                f"stored dtype, torch.{dtype}"
            )
            return
        self._names[fqn], self._sizes[fqn] = fqn, sizes
        self.tensors[fqn] = (
            DTYPE_CODES[_DTYPES[dtype]],
            sizes,
            block,
            False,
            self._slice(scales),
            DTYPE_CODES[_DTYPES[scale_dtype]],
            self._targets(dtype),
        )
        if self.stock is None:
            self._hidden.add(scales[0])

    def _why_odd(self, fqn: str, dtype: str) -> str:
        """Returns why products would not be the weights; empty if they are."""
        if f"{fqn}_zero_point" in self.entries:
            return "it has a zero point"
        if f"{fqn}_g_idx" in self.entries:
            return f"{fqn + '_g_idx'!r} assigns its columns to scales in another order"
        if dtype == "int8" and self.method.suffix == "_scale_inv" and self.stock is None:
            return "an int8 of this method is two numbers of 4 bits"  # So it is in transformers.
        return ""

    def _block(self, sizes: list[int], scales: list[int]) -> list[int] | None:
        """Returns the sizes of a block, or ``None`` if no blocks have so many scales."""
        if math.prod(scales) == 1:
            return [max(size, 1) for size in sizes]
        if len(scales) == len(sizes) - 1 and sizes[:-1] == scales:
            scales = [*scales, 1]
        if len(scales) != len(sizes) or not all(scales):
            return None
        stated = self.method.blocks if self.stock is None else ((self.stock.block_size,) * 2,)
        fitting = {
            tuple(block)
            for block in ([*[1] * (len(sizes) - 2), *pair] for pair in stated)
            if len(sizes) >= 2 and [-(-s // b) for s, b in zip(sizes, block, strict=True)] == scales
        }
        if fitting:
            return list(fitting.pop()) if len(fitting) == 1 else None
        pairs = list(zip(sizes, scales, strict=True))
        # Blocks that are cut off at an edge may have as many scales as other, whole blocks. So a
        # config must state blocks, but transformers computes those of fp8 from the sizes.
        if self.method.suffix == "_scale" and any(count not in (1, size) for size, count in pairs):
            return None
        if any(size % count for size, count in pairs):
            return None
        return [max(size // count, 1) for size, count in pairs]

    def _slice(self, scales: _Entry) -> tuple[str, int, int, str]:
        _, _, file, offset, nbytes, *_ = scales[2][0]
        return self._files[file], offset, nbytes, scales[0]

    def _is_cut(self, *names: str) -> bool:
        """Returns whether one of the tensors is not stored as one box."""
        boxes = (self.entries[name][2] for name in names)
        return any(len(found) != 1 or any(found[0][0]) for found in boxes)

    def _refuse(self, fqn: str, stored: str, scales: _Entry) -> None:
        tensor, cannot = self.entries[stored][1], f"cannot dequantise {fqn!r} of "
        cannot += f"{self.opened.directory} by {self.method.name}"
        for name in (stored, scales[0]):
            if self._is_cut(name):
                self.refused[stored] = (
                    f"{cannot}: {name!r} is cut into {len(self.entries[name][2])} boxes; write the "
                    "model anew by torch-ckpt convert --to safetensors, which stores each tensor "
                    "whole, or load both in their stored dtypes"
                )
                return
        self.refused[stored] = (
            f"{cannot}: {stored!r} has dtype {tensor[0]} and sizes {list(tensor[4])}, and "
            f"{scales[0]!r} has dtype {scales[1][0]} and sizes {list(scales[1][4])}; load both in "
            "their stored dtypes"
        )
