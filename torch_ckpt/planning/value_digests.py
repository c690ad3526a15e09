"""Digests of the values of tensors, on any device."""

from __future__ import annotations

import array
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import bytes_of, to_plain
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.planning.replica_check import CheckReplicas

__all__ = ["THREADS", "full_digests", "has_memory", "has_other_ranks", "value_digests"]

THREADS = min(4, os.cpu_count() or 1)
"""Threads that compute digests while training waits."""


def has_other_ranks() -> bool:
    """Returns whether the save of this thread may have several ranks."""
    call = current_call()
    if call is not None:
        return bool(call.group.size > 1)
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def value_digests(
    sources: Sequence[Any], mode: CheckReplicas, items: Iterable[int] | None = None
) -> bytes:
    """Returns the digest of the values of each tensor: 8 bytes each.

    Equal values have equal digests, independently of strides and devices. Values are compared bit
    for bit. The digest is zero for objects, for tensors that only torch can store, for tensors
    without memory, and for all tensors except ``items``. ``"sample"`` reads up to 8 KiB of each
    tensor.
    """
    numbers = range(len(sources)) if items is None else list(items)
    chosen = [sources[number] for number in numbers]
    try:
        batch = _tensor_view.inspect(chosen, writable=False)
    except ValueError:  # Staged copies of tensors that other ranks write have no memory.
        chosen = [source if has_memory(source) else None for source in chosen]
        batch = _tensor_view.inspect(chosen, writable=False)
    found = array.array("Q", batch.digests(mode == "full", THREADS))
    elsewhere = [at for at, digest in enumerate(found) if not digest and _needs_copy(chosen[at])]
    if elsewhere:
        digests = _digests_of_copies([chosen[at] for at in elsewhere], mode)
        for at, digest in zip(elsewhere, digests, strict=True):
            found[at] = digest
    if items is None:
        return found.tobytes()
    out = array.array("Q", bytes(len(sources) * found.itemsize))
    for number, digest in zip(numbers, found, strict=True):
        out[number] = digest
    return out.tobytes()


def full_digests(
    tensors: Sequence[Any], positions: Sequence[int], *, threads: int, niceness: int
) -> list[tuple[int, int]]:
    """Returns the digests of all elements of the tensors at these positions, each in two halves.

    Equal values have equal digests, as for :func:`value_digests`.
    """
    chosen = [tensors[position] for position in positions]
    batch = _tensor_view.inspect(chosen, writable=False)
    found = batch.full_digests(range(len(chosen)), threads, niceness)
    for at, tensor in enumerate(chosen):
        if found[at] == (0, 0) and _needs_copy(tensor):
            copy = _tensor_view.inspect([to_plain(tensor)], writable=False)
            (found[at],) = copy.full_digests([0], threads, niceness)
    return found


def has_memory(source: Any) -> bool:
    """Returns whether a value can be read: ``False`` if only another rank has staged the tensor."""
    if not isinstance(source, torch.Tensor) or not source.numel():
        return True
    if _tensor_view.tensor_kind(source) == _tensor_view.TensorKind.TORCH_ONLY:
        return True
    return _tensor_view.extent(source)[2] <= source.untyped_storage().nbytes()


def _needs_copy(source: Any) -> bool:
    kind = _tensor_view.TensorKind.NEEDS_COPY
    return isinstance(source, torch.Tensor) and _tensor_view.tensor_kind(source) == kind


def _digests_of_copies(tensors: Sequence[torch.Tensor], mode: CheckReplicas) -> array.array[int]:
    """Returns the digests of tensors on other devices, and of lazily conjugated or negated ones.

    Some devices lack the operations for sampling. A save must not fail for this reason.
    """
    digests = array.array("Q")
    if mode == "full":
        for tensor in tensors:
            batch = _tensor_view.inspect([to_plain(tensor)], writable=False)
            digests.frombytes(batch.digests(True, THREADS))
        return digests
    devices = {tensor.device for tensor in tensors}
    samples: dict[int, torch.Tensor] = {}
    for device in devices:
        here = [at for at, tensor in enumerate(tensors) if tensor.device == device]
        try:
            copies = samples_of([tensors[at] for at in here])
        except (RuntimeError, NotImplementedError):
            continue
        samples.update(zip(here, copies, strict=True))
    # Samples are so short that all of their bytes are digested.
    batch = _tensor_view.inspect(list(map(samples.get, range(len(tensors)))), writable=False)
    digests.frombytes(batch.digests(False, 1))
    return digests


def samples_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sampled bytes of strided tensors on one device, copied to the host together.

    The bytes of each sample are a 1-D tensor.
    """
    blocks: list[torch.Tensor] = []  # Rows of equal length of long tensors.
    whole: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device=tensors[0].device)]
    of_tensor: list[tuple[bool, int]] = []  # Whether in `blocks`; number of rows or bytes.
    for tensor in tensors:
        values = tensor.detach()
        firsts, count = _native.sample_of(values.numel(), values.itemsize)
        if count == values.numel():
            whole.append(bytes_of(values))
            of_tensor.append((False, values.nbytes))
            continue
        blocks += _blocks_of(values, firsts, count)
        of_tensor.append((True, len(firsts)))
    bytes_of_whole = torch.cat(whole).cpu()
    rows = torch.cat(blocks).cpu() if blocks else bytes_of_whole
    samples: list[torch.Tensor] = []
    row = byte = 0
    for is_long, length in of_tensor:
        if is_long:
            samples.append(rows[row : row + length].view(-1))
            row += length
        else:
            samples.append(bytes_of_whole[byte : byte + length])
            byte += length
    return samples


def _blocks_of(values: torch.Tensor, firsts: Sequence[int], count: int) -> list[torch.Tensor]:
    """Returns the sampled blocks of a tensor, as rows of bytes."""
    if values.is_contiguous() and not values.is_conj() and not values.is_neg():
        flat = values.view(-1)
        step = firsts[1]  # All blocks except the last are at equal distances.
        rows = flat.as_strided((len(firsts) - 1, count), (step, 1))
        return [rows.view(torch.uint8), flat[firsts[-1] :].view(1, -1).view(torch.uint8)]
    begins = torch.tensor(firsts, device=values.device)[:, None]
    positions = begins + torch.arange(count, device=values.device)
    found = values[torch.unravel_index(positions, values.shape)]
    return [found.resolve_conj().resolve_neg().contiguous().view(torch.uint8)]
