"""Memory runs: the memory of tensors that a stager copies, each part of a storage at most once."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_ckpt._core import _tensor_view

__all__ = ["CopiedTensor", "MemoryRun", "copy_elements", "drop_memory", "runs_of"]

_LONGEST_ELEMENT_NBYTES = 16


class CopiedTensor(NamedTuple):
    """A tensor of the training process, and its copy, which initially has no memory."""

    live: torch.Tensor
    copy: torch.Tensor


@dataclass
class MemoryRun:
    """Memory of the training process that is copied together, for one or several tensors.

    The memory is the range ``[begin, end)`` of a storage, in bytes. If the elements of a tensor are
    far apart, it is only these elements: the run is *packed*, and all its tensors have the same
    elements. ``tensors`` lists the tensors with their offsets in the storage in bytes; ``number``
    is the lowest position of any of them in the list of all tensors.
    """

    begin: int
    end: int
    number: int
    tensors: list[tuple[CopiedTensor, int]] = field(default_factory=list)
    is_packed: bool = False

    @property
    def nbytes(self) -> int:
        """Length of the copy, in bytes."""
        return self.tensors[0][0].live.nbytes if self.is_packed else self.end - self.begin

    def live(self) -> torch.Tensor:
        """Returns a tensor whose elements, in row-major order, are the bytes to copy."""
        live = self.tensors[0][0].live
        if self.is_packed:
            strides = _packed_strides(live)
            return live.permute(sorted(range(live.dim()), key=lambda dim: -strides[dim]))
        if len(self.tensors) == 1 and live.is_contiguous():
            return live
        flat = torch.empty(0, dtype=torch.uint8, device=live.device)
        return flat.set_(live.untyped_storage(), self.begin, (self.nbytes,), (1,))

    def set_memory(self, memory: torch.Tensor) -> None:
        """Places the copies in ``memory``, at the same offsets as the tensors in the range."""
        storage = memory.untyped_storage()
        for (live, copy), begin in self.tensors:
            if self.is_packed:
                copy.set_(storage, 0, live.size(), _packed_strides(live))
            else:
                offset = (begin - self.begin) // live.itemsize
                copy.set_(storage, offset, live.size(), live.stride())
            if live.requires_grad:
                copy.requires_grad_()

    def use_live_memory(self) -> None:
        """Makes the copies views of the live tensors."""
        for (live, copy), _ in self.tensors:
            copy.data = live.detach()
            if live.requires_grad:
                copy.requires_grad_()


def copy_elements(live: torch.Tensor, memory: torch.Tensor, *, wait: bool = True) -> None:
    """Copies the elements of a tensor on any device, in row-major order, to bytes in host memory.

    With ``wait``, waits for a copy from another device.
    """
    elements = memory.view(live.dtype).view(live.size())
    elements.copy_(live.detach(), non_blocking=not wait)


def drop_memory(tensors: Iterable[CopiedTensor]) -> None:
    """Gives copies the sizes and strides of their tensors, but no memory. Reading them raises."""
    for live, copy in tensors:
        copy.data = torch.empty_strided(live.size(), live.stride(), dtype=live.dtype, device="cpu")
        copy.untyped_storage().resize_(0)
        if live.requires_grad:
            copy.requires_grad_()


def runs_of(tensors: Iterable[CopiedTensor], *, keeps_sharing: bool = False) -> list[MemoryRun]:
    """Returns the memory of tensors in disjoint runs, of as few bytes as possible.

    Overlapping views share a range. If that range would be longer than all of their elements, views
    with gaps between elements are packed instead. With ``keeps_sharing``, they are packed only if
    no element is then copied twice.

    The runs are in the order of the tensors, which is the same in every save. Copies of tensors
    without elements need no run; they are ready after this call. Raises ValueError if the storage
    of a tensor is too small for it.
    """
    extents: list[_Extent] = []
    for number, tensor in enumerate(tensors):
        storage, begin, end = _tensor_view.extent(tensor.live)
        if begin == end:
            drop_memory([tensor])
            continue
        if end > tensor.live.untyped_storage().nbytes():
            raise ValueError(
                f"cannot stage a {tensor.live.dtype} tensor of sizes {tuple(tensor.live.size())}: "
                f"its storage has {tensor.live.untyped_storage().nbytes()} bytes of {end}"
            )
        extents.append((storage, begin, end, number, tensor))
    extents.sort(key=lambda extent: extent[:2])
    ranges, firsts = _ranges_of(extents)
    runs = dict(enumerate(ranges))
    packed: list[MemoryRun] = []
    for number in {bisect.bisect(firsts, at) - 1 for at, e in enumerate(extents) if _has_gaps(e)}:
        overlapping = extents[firsts[number] : firsts[number] + len(ranges[number].tensors)]
        if ranges[number].nbytes > _elements_nbytes(overlapping):
            separate = _packed(overlapping)
            if keeps_sharing and _have_common_elements(separate):
                continue
            del runs[number]
            packed += separate
    return sorted([*runs.values(), *packed], key=lambda run: run.number)


# Storage, begin and end in the storage in bytes, number of the tensor, tensor.
_Extent = tuple[int, int, int, int, CopiedTensor]


def _ranges_of(extents: Sequence[_Extent]) -> tuple[list[MemoryRun], list[int]]:
    """Returns a run for each group of overlapping extents, and the position of its first extent."""
    runs: list[MemoryRun] = []
    firsts: list[int] = []
    previous = 0
    for at, extent in enumerate(extents):
        storage, begin, end, number, tensor = extent
        if not runs or storage != previous or begin >= runs[-1].end:
            runs.append(MemoryRun(begin, end, number, [(tensor, begin)]))
            firsts.append(at)
            previous = storage
        else:
            _add(runs[-1], extent)
    return runs, firsts


def _add(run: MemoryRun, extent: _Extent) -> None:
    """Adds a tensor to a run with which it overlaps."""
    _, begin, end, number, tensor = extent
    run.begin -= run.begin % _LONGEST_ELEMENT_NBYTES  # Offsets must be multiples of every dtype's.
    run.end = max(run.end, end)
    run.number = min(run.number, number)
    run.tensors.append((tensor, begin))


def _packed(extents: Sequence[_Extent]) -> list[MemoryRun]:
    """Returns the runs of overlapping extents whose range would be longer than all elements."""
    ranges, _ = _ranges_of([extent for extent in extents if not _has_gaps(extent)])
    begins = [run.begin for run in ranges]
    runs: dict[Any, MemoryRun] = {}
    for extent in filter(_has_gaps, extents):
        _, begin, end, number, tensor = extent
        at = bisect.bisect(begins, begin) - 1
        if at >= 0 and end <= ranges[at].end:
            _add(ranges[at], extent)
            continue
        run = runs.setdefault(_elements_of(extent), MemoryRun(begin, end, number, is_packed=True))
        run.number = min(run.number, number)
        run.tensors.append((tensor, begin))
    return [*ranges, *runs.values()]


def _have_common_elements(runs: Sequence[MemoryRun]) -> bool:
    """Returns whether an element is in two of the runs of one storage."""
    if len(runs) < 2:
        return False  # The offsets would take more memory than the elements.
    packed = [run for run in runs if run.is_packed]
    if len({run.tensors[0][0].live.itemsize for run in packed}) > 1:
        return True  # Elements of one dtype may overlap parts of others.
    offsets = [torch.unique(_offsets_in(run)) for run in packed]
    if len(torch.unique(torch.cat(offsets))) < sum(map(len, offsets)):
        return True
    ranges = [(run.begin, run.end) for run in runs if not run.is_packed]
    return any(((o >= begin) & (o < end)).any() for o in offsets for begin, end in ranges)


def _offsets_in(run: MemoryRun) -> torch.Tensor:
    """Returns the offset of each element of a packed run in the storage, in bytes."""
    live = run.tensors[0][0].live
    offsets = torch.tensor([run.begin], device="cpu")
    for length, stride in zip(live.size(), live.stride(), strict=True):
        steps = torch.arange(length, device="cpu") * (stride * live.itemsize)
        offsets = (offsets[:, None] + steps).reshape(-1)
    return offsets


def _has_gaps(extent: _Extent) -> bool:
    return extent[2] - extent[1] > extent[4].live.nbytes


def _elements_nbytes(extents: Sequence[_Extent]) -> int:
    """Returns the bytes of all elements. Tensors with the same elements count once."""
    lengths = {_elements_of(e): min(e[2] - e[1], e[4].live.nbytes) for e in extents}
    return sum(lengths.values())


def _elements_of(extent: _Extent) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors with the same elements."""
    live = extent[4].live
    return extent[1], live.dtype, live.size(), live.stride()


def _packed_strides(live: torch.Tensor) -> tuple[int, ...]:
    """Returns strides without gaps that preserve the order of the tensor's dimensions."""
    return torch.empty_like(live, device="meta").stride()
