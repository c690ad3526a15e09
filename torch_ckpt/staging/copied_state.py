"""Copies a state dict's structure and objects; what its tensors hold is for others to copy."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ckpt._core import _tensor_view
from torch_ckpt._core.tensors import to_plain
from torch_ckpt.planning.replicas import PICKLED_DTYPES

__all__ = ["CopiedState", "CopiedTensor", "MemoryRun", "drop_memory", "runs_of"]

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), torch.dtype})
_UNKNOWN = object()
_LONGEST_ELEMENT_NBYTES = 16


class CopiedTensor(NamedTuple):
    """A tensor of the training process, and the one that takes its place, of no memory yet."""

    live: torch.Tensor
    copy: torch.Tensor


class CopiedState(StateDictStager):
    """A copy of a state dict: all of it but the memory of its tensors.

    Tensors become plain CPU tensors, DTensors DTensors of such, and wrapper subclasses wrap copies
    of their inner tensors. What only torch can copy (other subclasses, quantised and sparse
    tensors, lazily conjugated ones) and what objects hold, which may look at it as they are put
    together, is copied at once.

    Attributes:
        state: The copy, whole once :meth:`put_together` was called.
        tensors: Those that lack memory.

    Raises:
        Exception: Whatever an object raises that cannot be copied.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        super().__init__()
        self.tensors: list[CopiedTensor] = []
        # Objects see no tensor that still lacks its values.
        self._memo_of_objects: dict[int, Any] = {}
        self._later: list[tuple[Any, Any, _Later]] = []  # Container, key, value.
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
        y = memo.get(id(x), _UNKNOWN)
        if y is not _UNKNOWN:
            return y
        if is_tensor:
            copied = self._copied_for_object if memo is self._memo_of_objects else self._copied
            y = memo[id(x)] = copied(x, memo)
        elif kind is dict or kind is OrderedDict:
            y = memo[id(x)] = kind()
            again = self.deepcopy_with_tensor_offload
            for key, value in x.items():
                self._put(y, again(key, memo), again(value, memo))
            if kind is OrderedDict:  # Of a module, with versions of what is in it.
                vars(y).update(again(vars(x), self._memo_of_objects))
        elif kind is list:
            y = memo[id(x)] = [None] * len(x)
            for at, value in enumerate(x):
                self._put(y, at, self.deepcopy_with_tensor_offload(value, memo))
        else:
            of_objects = self._memo_of_objects
            return super().deepcopy_with_tensor_offload(x, of_objects)  # type: ignore[no-untyped-call]
        self._keep_alive(x, memo)  # type: ignore[no-untyped-call]
        return y

    def put_together(self) -> None:
        """Makes the wrapper subclasses, once their inner tensors have their values."""
        later, self._later = self._later, []
        with torch.no_grad():
            for container, key, value in later:
                container[key] = value.get()

    def _put(self, container: Any, key: Any, value: Any) -> None:
        container[key] = value
        if type(value) is _Later:
            self._later.append((container, key, value))

    def _copied_for_object(self, x: torch.Tensor, memo: Any) -> torch.Tensor:
        is_plain = _tensor_view.tensor_kind(x) != _tensor_view.TensorKind.TORCHS_OWN
        if not is_plain or x.is_conj() or x.is_neg():
            return _copied_at_once(x)
        # Stock keeps attributes, and views of one storage together.
        y: torch.Tensor = self._offload_tensor(x, memo)  # type: ignore[no-untyped-call]
        if isinstance(x, torch.nn.Parameter):
            attributes = vars(y)
            y = torch.nn.Parameter(y, x.requires_grad)
            vars(y).update(attributes)
            return y
        return y.requires_grad_(x.requires_grad)

    def _copied(self, x: torch.Tensor, memo: Any) -> torch.Tensor | _Later:
        if type(x) is DTensor:
            local = self.deepcopy_with_tensor_offload(x._local_tensor, memo)
            # Its __init__ does nothing, and imports all of torch's compiler for that.
            make = functools.partial(
                DTensor.__new__, DTensor, spec=x._spec, requires_grad=x.requires_grad
            )
            return _Later(lambda: make(local.get())) if type(local) is _Later else make(local)
        if type(x) is AsyncCollectiveTensor:
            return self._copied(x.wait(), memo)
        if is_traceable_wrapper_subclass(x):
            return self._wrapped_again(x, memo)
        if _tensor_view.tensor_kind(x) == _tensor_view.TensorKind.TORCHS_OWN:
            return _copied_at_once(x)
        if x.is_conj() or x.is_neg():
            return to_plain(x)
        y = torch.empty(0, dtype=x.dtype)
        self.tensors.append(CopiedTensor(x, y))
        return y

    def _wrapped_again(self, x: Any, memo: Any) -> _Later:
        names, context = x.__tensor_flatten__()
        # Aliases: others may hold an inner tensor itself, and be left out of what is staged.
        inner = {
            name: self.deepcopy_with_tensor_offload(getattr(x, name).detach(), memo)
            for name in names
        }

        def make() -> torch.Tensor:
            copies = {n: y.get() if type(y) is _Later else y for n, y in inner.items()}
            return _wrapper_like(x, copies, context)

        return _Later(make)


class _Later:
    """A tensor that is made once others have their values, which its class may look at."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._made: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made


def _wrapper_like(x: Any, inner: dict[str, torch.Tensor], context: Any) -> torch.Tensor:
    y: torch.Tensor = type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())
    return y.requires_grad_(x.requires_grad)


def _copied_at_once(x: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own, on the CPU."""
    if x.dtype not in PICKLED_DTYPES:
        return x.detach()  # Torch cannot copy it either; the save refuses it, by name.
    if is_traceable_wrapper_subclass(x):  # Many have no clone of their own.
        names, context = x.__tensor_flatten__()
        return _wrapper_like(x, {n: _copied_at_once(getattr(x, n)) for n in names}, context)
    copied = x.detach().clone() if x.device.type == "cpu" else x.detach().cpu()
    return copied.requires_grad_(x.requires_grad)


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

    def set_memory(self, memory: torch.Tensor) -> None:
        """Has the copies lie in these bytes as the tensors do in the run."""
        storage = memory.untyped_storage()
        for (live, copy), begin in self.tensors:
            offset = (begin - self.begin) // live.itemsize
            copy.set_(storage, offset, live.size(), live.stride())
            if live.requires_grad:
                copy.requires_grad_()

    def use_live_memory(self) -> None:
        """Has the copies be views of the tensors themselves."""
        for (live, copy), _ in self.tensors:
            copy.data = live.detach()
            if live.requires_grad:
                copy.requires_grad_()


def drop_memory(tensors: Iterable[CopiedTensor]) -> None:
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
            drop_memory([tensor])
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
