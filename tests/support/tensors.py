"""Random tensors: every dtype that DCP stores, in every kind of memory, and their bits."""

from __future__ import annotations

import functools
import math
import random
import tempfile
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
ONES = -1  # A seed.
PACKED = [torch.float4_e2m1fn_x2]  # An element is a byte, and has two numbers.


class Tagged(torch.Tensor):
    """A tensor subclass, which only torch can store."""


def random_tensor(
    shape: Iterable[int], dtype: torch.dtype, seed: int | None = None
) -> torch.Tensor:
    """A contiguous tensor of random bits, NaNs of all kinds among them.

    Args:
        shape: Its sizes.
        dtype: Its dtype.
        seed: Of the bits. By default, of torch's own generator; ones if it is :data:`ONES`.
    """
    shape = list(shape)
    memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    if seed == ONES:
        memory.fill_(1)
    elif seed is None:
        memory.random_(0, 2 if dtype == torch.bool else 256)
    else:
        randomise(memory, seed, mask=BOOL_MASK if dtype == torch.bool else None)
    return memory.view(dtype).reshape(shape)


def full_value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of that name: random bits, the same in every process."""
    return random_tensor(shape, dtype, zlib.crc32(name.encode()))


def randomise(memory: torch.Tensor, seed: int, *, mask: list[int] | None) -> None:
    """Fills bytes of memory with random bits, of which a mask, over and over, may leave some."""
    at = random.Random(seed).randrange(len(_random_bytes()) // 3)
    for begin in range(0, len(memory), step := len(_random_bytes()) // 2):
        part = memory[begin : begin + step]
        part.copy_(_random_bytes()[at : at + len(part)])
    if mask is not None:
        rest = memory[: len(memory) // len(mask) * len(mask)].view(-1, len(mask))
        rest &= torch.tensor(mask, dtype=torch.uint8)


@functools.cache
def _random_bytes() -> torch.Tensor:
    data = np.random.default_rng(0).integers(0, 256, 24 << 20, dtype=np.uint8)
    return torch.from_numpy(data)


BOOL_MASK = [1]
# Without the lowest bit of the exponent there are no NaNs.
NUMBER_MASKS = {
    torch.float64: [255] * 6 + [0xEF, 255],
    torch.float32: [255, 255, 0x7F, 255],
    torch.float16: [255, 0xFB],
    torch.bfloat16: [0x7F, 255],
}


def mask_of(tensor: torch.Tensor) -> list[int] | None:
    """The bits that values of a tensor may have. Torch loses bits of NaNs that it negates."""
    if tensor.dtype == torch.bool:
        return BOOL_MASK
    if tensor.is_conj() or tensor.is_neg():
        return NUMBER_MASKS.get(tensor.dtype.to_real())
    return None


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as raw bytes."""
    if tensor.is_sparse:
        return bits(tensor._indices()) + bits(tensor._values())
    plain = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
    plain = plain.int_repr() if plain.is_quantized else plain
    if plain.dtype.itemsize == 1:  # Torch cannot copy strided elements of some dtypes.
        plain = plain.view(torch.uint8)
    flat = torch.empty(plain.shape, dtype=plain.dtype)  # Contiguous whatever `plain` is.
    flat.copy_(plain)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def defined_bits(tensor: torch.Tensor) -> bytes:
    """As :func:`bits`, without the signs of zeros in complex numbers.

    If torch negates complex numbers, these signs depend on strides and lengths.
    """
    found = bits(tensor)
    if not tensor.is_complex() or not found:
        return found
    parts = torch.frombuffer(bytearray(found), dtype=tensor.dtype.to_real())
    parts[parts == 0] = 0
    return parts.view(torch.uint8).numpy().tobytes()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same elements."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = torch.frombuffer(bytearray(bits(tensor)), dtype=torch.uint8)
    return memory.view(tensor.dtype).view(tensor.shape)


# ---- Memory layouts ------------------------------------------------------------------------------

Sizes = tuple[int, ...]


class Memory:
    """Makes contiguous tensors of one dtype.

    Args:
        dtype: The dtype.
        seed: Of their bits; torch's own generator if ``None``.
    """

    def __init__(self, dtype: torch.dtype, seed: int | None = None) -> None:
        self.dtype = dtype
        self.seed = seed

    def __call__(self, *shape: int) -> torch.Tensor:
        return random_tensor(shape, self.dtype, self.seed)

    def at_odd_address(self, *shape: int) -> torch.Tensor:
        """A tensor that begins between two elements."""
        made = self(*shape)
        if self.dtype.is_complex or made.numel() == 0:  # Torch itself crashes on complex ones.
            return made
        around = bytearray(3) + bits(made)
        flat = torch.frombuffer(around, dtype=self.dtype, count=made.numel(), offset=3)
        return flat.view(shape)

    def mapped(self, *shape: int) -> torch.Tensor:
        """A tensor in a mapped file."""
        made = self(*shape)
        if made.numel() == 0:
            return made
        with tempfile.NamedTemporaryFile(prefix="torch_ckpt-mapped-") as file:
            file.write(bits(made))
            file.flush()
            flat = torch.from_file(file.name, shared=True, size=made.nbytes, dtype=torch.uint8)
        return flat.view(self.dtype).view(shape)

    def of_parts(self, *shape: int) -> torch.Tensor:
        """Complex numbers whose parts are of this dtype; the tensor itself where none are."""
        if self.dtype not in (torch.float16, torch.float32, torch.float64):
            return self(*shape)
        return torch.view_as_complex(self(*shape, 2))

    def overlapping(self, *shape: int) -> torch.Tensor:
        """Windows that begin one element after another in every dimension."""
        length = sum(n - 1 for n in shape) + 1 if all(shape) else 0
        return self(length).as_strided(shape, [1] * len(shape))


def _imaginary(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.imag if tensor.is_complex() else tensor


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    signed = tensor.dtype.is_signed and tensor.dtype.itemsize > 1  # Torch negates no others.
    return torch._neg_view(tensor) if signed else tensor


def _backwards(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(tuple(reversed(range(tensor.dim()))))


def _of_any_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with another stride where a dimension has one element: none of them counts."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided(tensor.shape, [7 if n == 1 else stride for n, stride in pairs])


# Name -> a tensor of these sizes, of which there is at least one. A new layout joins by one line.
LAYOUTS: dict[str, Callable[[Memory, Sizes], torch.Tensor]] = {
    "contiguous": lambda make, s: make(*s),
    "transposed": lambda make, s: _backwards(make(*s[::-1])),
    "rotated": lambda make, s: make(*s[1:], s[0]).movedim(-1, 0),
    "channels_last": lambda make, s: make(s[0], *s[2:], *s[1:2]).movedim(-1, len(s[:2]) - 1),
    # In two dimensions: in six, the memory is hundreds of times as large.
    "sliced": lambda make, s: make(*s[:-2], *(n + 4 for n in s[-2:]))[
        (..., *(slice(1, 1 + n) for n in s[-2:]))
    ],
    "rows of a longer one": lambda make, s: make(s[0] + 3, *s[1:])[1:-2],
    "stepped": lambda make, s: make(*s[:-2], *(2 * n for n in s[-2:]))[
        (..., *(slice(1, None, 2) for _ in s[-2:]))
    ],
    "last stepped": lambda make, s: make(*s[:-1], 3 * s[-1])[..., ::3],
    "any stride of one element": lambda make, s: _of_any_stride(make(*s)),
    "one element further": lambda make, s: make(math.prod(s) + 1)[1:].view(s),
    "odd address": lambda make, s: make.at_odd_address(*s),
    "odd address, transposed": lambda make, s: _backwards(make.at_odd_address(*s[::-1])),
    "mapped file": lambda make, s: make.mapped(*s),
    "shared memory": lambda make, s: make(*s).share_memory_(),
    "conj": lambda make, s: make(*s).conj(),
    "conj, transposed": lambda make, s: _backwards(make(*s[::-1]).conj()),
    "neg": lambda make, s: _negated(make(*s)),
    "real parts": lambda make, s: torch.real(make.of_parts(*s)),
    "imaginary parts": lambda make, s: _imaginary(make.of_parts(*s)),
    "imaginary parts of conj": lambda make, s: _imaginary(make.of_parts(*s).conj()),
}
# Elements share memory: nothing can be loaded into these.
OVERLAPS: dict[str, Callable[[Memory, Sizes], torch.Tensor]] = {
    "expanded": lambda make, s: make(1, *s[1:]).expand(s),
    "expanded along the last": lambda make, s: make(*s[:-1], 1).expand(s),
    "overlapping": lambda make, s: make.overlapping(*s),
}


def laid_out(
    name: str, sizes: Iterable[int], dtype: torch.dtype, seed: int | None = None
) -> torch.Tensor:
    """A random tensor in a layout of :data:`LAYOUTS` or :data:`OVERLAPS`."""
    shape = tuple(sizes)
    if dtype in PACKED:  # Torch copies no strided elements of these.
        return laid_out("contiguous", shape, torch.uint8, seed).view(dtype)
    if shape == ():
        return laid_out(name, (3,), dtype, seed)[1]
    made = (LAYOUTS | OVERLAPS)[name](Memory(dtype, seed), shape)
    if made.dtype != dtype:  # The parts of a complex tensor.
        return laid_out("contiguous", shape, dtype, seed)
    assert made.shape == shape, name
    return made


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of a dtype: small ones, and ones that are longer than the engine's buffers."""
    # A little over 1 MiB and over 128 KiB, in odd rows: the bytes are no multiple of 4096.
    large = (1031, (1 << 20) // dtype.itemsize // 1031 + 3)
    medium = (131, (128 << 10) // dtype.itemsize // 131 + 3)
    kinds: dict[str, tuple[str, Sizes]] = {
        "contiguous": ("contiguous", (5, 7)),
        "transposed": ("transposed", (5, 7)),
        "sliced view": ("sliced", (5, 5)),
        "expanded": ("expanded", (4, 6)),
        "channels_last": ("channels_last", (2, 3, 4, 5)),
        "0-dim": ("contiguous", ()),
        "zero-size": ("contiguous", (0, 3)),
        "zero-size inside": ("contiguous", (3, 0, 2)),
        "strided step": ("stepped", (13,)),
        "six dimensions": ("transposed", (3, 2, 1, 3, 2, 1)),
        "medium": ("contiguous", medium),
        "medium transposed": ("transposed", medium),
        "medium strided step": ("last stepped", medium),
        "large": ("contiguous", large),
        "large transposed": ("transposed", large),
        "large sliced view": ("sliced", large),
        "large channels_last": ("channels_last", (2, 17, 33, large[1])),
        "large expanded": ("expanded", large),
    }
    return {name: laid_out(layout, sizes, dtype) for name, (layout, sizes) in kinds.items()}
