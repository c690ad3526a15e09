"""Flipped bits, as a disk or memory at fault leaves them."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["flip", "flip_value", "flipped"]


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """Data with one bit flipped, in the byte at an offset; a negative one is from the end."""
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Flips one bit of a file, as :func:`flipped` does."""
    file.write_bytes(flipped(file.read_bytes(), at, bit))


def flip_value(file: Path, value: torch.Tensor, offset: int = 0) -> None:
    """Flips one bit of a tensor in a file, in the byte at an offset of its elements."""
    payload = value.contiguous().view(torch.uint8).numpy().tobytes()
    flip(file, file.read_bytes().index(payload) + offset)
