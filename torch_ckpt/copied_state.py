"""Copies a state dict's structure and objects; what its tensors hold is for others to copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from torch_ckpt import _tensor_view
from torch_ckpt.tensors import to_plain

__all__ = ["CopiedState", "CopiedTensor", "MemoryRun", "give_no_memory", "runs_of"]

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), torch.dtype})
_UNKNOWN = object()
_LONGEST_ELEMENT_NBYTES = 16


class CopiedTensor(NamedTuple):
    """A tensor of the training process, and the one that takes its place, of no memory yet."""

    live: torch.Tensor
    copy: torch.Tensor


class CopiedState(StateDictStager):
    """A copy of a state dict: all of it but the memory of its tensors.

    Tensors become plain CPU tensors, and DTensors DTensors of such. What only torch can copy
    (subclasses, quantised and sparse tensors, lazily conjugated ones) is copied as it is.

    Attributes:
        state: The copy.
        tensors: Those that lack memory.
        within_objects: ``id`` of tensors of the training process that objects refer to.

    Raises:
        Exception: Whatever an object raises that cannot be copied.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        super().__init__()
        self.tensors: list[CopiedTensor] = []
        self.within_objects: set[int] = set()
        self._depth_of_objects = 0
        try:
            with torch.no_grad():
                self.state: dict[str, Any] = self.deepcopy_with_tensor_offload(state_dict)
        finally:
            self.close()  # type: ignore[no-untyped-call]

    def deepcopy_with_tensor_offload(
        self, x: Any, memo: Any = None, _nil: Any = None, non_blocking: bool = False
    ) -> Any:
        """Copies a value of the state dict; stock's calls this for what a value refers to."""
        kind = type(x)
        if kind in _ATOMS:
            return x
        memo = {} if memo is None else memo
        is_tensor = isinstance(x, torch.Tensor)
        if is_tensor and self._depth_of_objects:
            self.within_objects.add(id(x))
        y = memo.get(id(x), _UNKNOWN)
        if y is not _UNKNOWN:
            return y
        if is_tensor:
            y = memo[id(x)] = self._copied(x, memo)
        elif kind is dict or kind is OrderedDict:
            y = memo[id(x)] = kind()
            again = self.deepcopy_with_tensor_offload
            for key, value in x.items():
                y[again(key, memo)] = again(value, memo)
            if kind is OrderedDict:  # Of a module, with versions of what is in it.
                vars(y).update(again(vars(x), memo))
        elif kind is list:
            y = memo[id(x)] = []
            for value in x:
                y.append(self.deepcopy_with_tensor_offload(value, memo))
        else:
            self._depth_of_objects += 1
            try:
                return super().deepcopy_with_tensor_offload(x, memo)  # type: ignore[no-untyped-call]
            finally:
                self._depth_of_objects -= 1
        self._keep_alive(x, memo)  # type: ignore[no-untyped-call]
        return y

    def _copied(self, x: torch.Tensor, memo: Any) -> torch.Tensor:
        if type(x) is DTensor:
            local = self.deepcopy_with_tensor_offload(x._local_tensor, memo)
            # Its __init__ does nothing, and imports all of torch's compiler for that.
            return DTensor.__new__(DTensor, local, x._spec, requires_grad=x.requires_grad)
        if _tensor_view.tensor_kind(x) == _tensor_view.TensorKind.TORCHS_OWN:
            return x.detach().clone()
        if x.is_conj() or x.is_neg():
            return to_plain(x)
        y = torch.empty(0, dtype=x.dtype)
        self.tensors.append(CopiedTensor(x, y))
        return y


@dataclass
class MemoryRun:
    """A run of the training process's memory that is copied as one: what tensors share it.

    Attributes:
        begin: In their storage, in bytes.
        end: Likewise, exclusive.
        number: Of its first tensor among all.
        tensors: Those that lie in it, and where each begins.
    """

    begin: int
    end: int
    number: int
    tensors: list[tuple[CopiedTensor, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.end - self.begin

    def live_bytes(self) -> torch.Tensor:
        """A contiguous tensor that it is the memory of."""
        live = self.tensors[0][0].live
        if len(self.tensors) == 1 and live.is_contiguous():
            return live
        flat = torch.empty(0, dtype=torch.uint8, device=live.device)
        return flat.set_(live.untyped_storage(), self.begin, (self.nbytes,), (1,))

    def give_memory(self, memory: torch.Tensor) -> None:
        """Has the copies lie in these bytes as the tensors do in the run."""
        storage = memory.untyped_storage()
        for (live, copy), begin in self.tensors:
            offset = (begin - self.begin) // live.itemsize
            copy.set_(storage, offset, live.size(), live.stride())
            if live.requires_grad:
                copy.requires_grad_()

    def give_live_memory(self) -> None:
        """Has the copies be views of the tensors themselves."""
        for (live, copy), _ in self.tensors:
            copy.data = live.detach()
            if live.requires_grad:
                copy.requires_grad_()


def give_no_memory(tensors: Iterable[CopiedTensor]) -> None:
    """Has copies be like their tensors in all but memory: whoever reads one raises."""
    for live, copy in tensors:
        copy.data = torch.empty_strided(live.size(), live.stride(), dtype=live.dtype)
        copy.untyped_storage().resize_(0)
        if live.requires_grad:
            copy.requires_grad_()


def runs_of(tensors: Iterable[CopiedTensor]) -> list[MemoryRun]:
    """The memory of tensors, in runs that do not meet: views that overlap share one.

    In the order of the tensors, which is the same from save to save.

    Tensors without elements are in none, and have what memory they need after this.

    Raises:
        ValueError: A tensor has no memory.
    """
    placed: list[tuple[int, int, int, int, CopiedTensor]] = []
    for number, tensor in enumerate(tensors):
        storage, begin, end = _tensor_view.extent(tensor.live)
        if begin == end:
            give_no_memory([tensor])
            continue
        if end > tensor.live.untyped_storage().nbytes():
            raise ValueError(
                f"cannot stage a {tensor.live.dtype} tensor of sizes {tuple(tensor.live.size())}: "
                f"its storage has {tensor.live.untyped_storage().nbytes()} bytes of {end}"
            )
        placed.append((storage, begin, end, number, tensor))
    placed.sort(key=lambda place: place[:2])
    runs: list[MemoryRun] = []
    former = 0
    for storage, begin, end, number, tensor in placed:
        if not runs or storage != former or begin >= runs[-1].end:
            runs.append(MemoryRun(begin, end, number))
        run, former = runs[-1], storage
        run.number = min(run.number, number)
        if run.tensors:  # Elements of another length are to be whole numbers of them apart.
            run.begin -= run.begin % _LONGEST_ELEMENT_NBYTES
        run.end = max(run.end, end)
        run.tensors.append((tensor, begin))
    return sorted(runs, key=lambda run: run.number)
