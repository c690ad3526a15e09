"""Copies of a state dict's structure and objects, whose tensors have no memory yet."""

from __future__ import annotations

import copyreg
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from copy import deepcopy
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ckpt._core import _tensor_view
from torch_ckpt._core.tensors import MemoryFaultError, check_memory, to_plain
from torch_ckpt.planning.dispatch import attributes_of, copy_attributes
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.planning.replicas import PICKLED_DTYPES
from torch_ckpt.staging.memory_faults import in_state_dict
from torch_ckpt.staging.memory_runs import CopiedTensor, copy_elements, runs_of

__all__ = ["CopiedFile", "CopiedState", "full_copy", "tensors_in"]

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None), torch.dtype})
_CONTAINERS = frozenset({list, set, frozenset, deque})
_UNKNOWN = object()


class CopiedState(StateDictStager):
    """A copy of a state dict, except for the memory of its tensors.

    Copies of tensors are CPU tensors, which retain only the attributes that DCP reads. Copies of
    DTensors are DTensors of CPU tensors. Copies of wrapper subclasses wrap copies of their inner
    tensors. Two kinds of tensors are copied immediately, with their values:

    - Tensors that only torch can copy: other subclasses, quantized, sparse and lazily conjugated
      tensors.
    - Tensors inside objects, because the constructors of the objects may read them. Tensors in
      containers and in attributes are copied without the rest of their storages. If an object
      customizes its copies, the storages of its tensors are copied whole, as by torch.

    The copy, ``state``, is complete after :meth:`build_wrappers`. The copies of ``tensors`` lack
    memory. Raises the error of an object that cannot be copied.
    """

    keeps_sharing = False
    """Whether an element that several of ``tensors`` share must be copied only once."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        super().__init__()
        self.tensors: list[CopiedTensor] = []
        # Separate from the memo of tensors, because objects must not contain tensors without
        # values.
        self._memo_of_objects: dict[int, Any] = {}
        self._deferred: list[tuple[Any, Any, _Deferred]] = []  # Container, key, value.
        self.described: list[torch.Tensor] = []  # Copies with attributes that DCP reads.
        try:
            with torch.no_grad():
                self.state: dict[str, Any] = self.deepcopy_with_tensor_offload(state_dict)
        except MemoryFaultError as fault:
            raise in_state_dict(fault, state_dict) from None
        finally:
            self.close()  # type: ignore[no-untyped-call]

    def deepcopy_with_tensor_offload(
        self, x: Any, memo: Any = None, _nil: Any = None, non_blocking: bool = False
    ) -> Any:
        """Copies a value of the state dict. Torch's stager calls it for nested values, too."""
        kind = type(x)
        if kind in _ATOMS:
            return x
        memo = {} if memo is None else memo
        is_tensor = isinstance(x, torch.Tensor)
        y = memo.get(id(x), _UNKNOWN)
        if y is not _UNKNOWN:
            return y
        if is_tensor:
            copy = self._copy_for_object if memo is self._memo_of_objects else self._copy
            y = memo[id(x)] = copy(x, memo)
        elif kind is dict or kind is OrderedDict:
            y = memo[id(x)] = kind()
            recurse = self.deepcopy_with_tensor_offload
            for key, value in x.items():
                self._put(y, recurse(key, memo), recurse(value, memo))
            if kind is OrderedDict:  # State dicts of modules have version numbers as attributes.
                vars(y).update(recurse(vars(x), self._memo_of_objects))
        elif kind is list:
            y = memo[id(x)] = [None] * len(x)
            for at, value in enumerate(x):
                self._put(y, at, self.deepcopy_with_tensor_offload(value, memo))
        else:
            of_objects = self._memo_of_objects
            if memo is not of_objects:
                self._copy_contained(x)
            return super().deepcopy_with_tensor_offload(x, of_objects)  # type: ignore[no-untyped-call]
        self._keep_alive(x, memo)  # type: ignore[no-untyped-call]
        return y

    def build_wrappers(self) -> None:
        """Creates wrapper subclasses. Call it after their inner tensors have values."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():
            for container, key, value in deferred:
                container[key] = value.get()
        if self.described:
            self.state = _DescribedState(self.state, self.described)

    def _put(self, container: Any, key: Any, value: Any) -> None:
        container[key] = value
        if type(value) is _Deferred:
            self._deferred.append((container, key, value))

    def _copy_contained(self, x: object) -> None:
        """Copies the tensors in containers and attributes. Overlapping views share memory."""
        memo = self._memo_of_objects
        copied = [
            CopiedTensor(live, torch.empty(0, dtype=live.dtype, device="cpu"))
            for live in tensors_in(x)
            if id(live) not in memo and _is_plain(live)
        ]
        for live, _ in copied:
            check_memory(live)
        for run in runs_of(copied, keeps_sharing=True):
            memory = torch.empty(run.nbytes, dtype=torch.uint8, device="cpu")
            copy_elements(run.live(), memory)
            run.set_memory(memory)
        for live, copy in copied:
            memo[id(live)] = _like(live, copy)
            self._keep_alive(live, memo)  # type: ignore[no-untyped-call]
        for live, _ in copied:  # Afterwards, because attributes may be such tensors.
            if attributes := vars(live):
                copies = self.deepcopy_with_tensor_offload(attributes, memo)
                vars(memo[id(live)]).update(copies)

    def _copy_for_object(self, x: torch.Tensor, memo: Any) -> torch.Tensor:
        if isinstance(x, ShardedTensor):
            return self._deferred_shards(x, memo).get()
        if not _is_plain(x):
            y = full_copy(x)
            if not is_traceable_wrapper_subclass(x) and (attributes := vars(x)):
                vars(y).update(self.deepcopy_with_tensor_offload(attributes, memo))
            return y
        check_memory(x)
        # Torch's method preserves attributes, and storage shared by views.
        y = self._offload_tensor(x, memo)  # type: ignore[no-untyped-call]
        attributes = vars(y)
        y = _like(x, y)
        vars(y).update(attributes)
        return y

    def _copy(self, x: torch.Tensor, memo: Any) -> torch.Tensor | _Deferred:
        y = self._copy_values(x, memo)
        if not attributes_of(x):
            return y

        def describe(y: torch.Tensor) -> torch.Tensor:
            copy_attributes(x, y)
            self.described.append(y)
            return y

        return _Deferred(lambda: describe(y.get())) if isinstance(y, _Deferred) else describe(y)

    def _copy_values(self, x: torch.Tensor, memo: Any) -> torch.Tensor | _Deferred:
        if type(x) is DTensor:
            local = self.deepcopy_with_tensor_offload(x._local_tensor, memo)
            # DTensor.__init__ does nothing, but it imports all of torch's compiler.
            make = functools.partial(
                DTensor.__new__, DTensor, spec=x._spec, requires_grad=x.requires_grad
            )
            return _Deferred(lambda: make(local.get())) if type(local) is _Deferred else make(local)
        if type(x) is AsyncCollectiveTensor:
            return self._copy_values(x.wait(), memo)
        if is_traceable_wrapper_subclass(x):
            return self._deferred_wrapper(x, memo)
        if isinstance(x, ShardedTensor):
            return self._deferred_shards(x, memo)
        if x.is_nested or _tensor_view.tensor_kind(x) == _tensor_view.TensorKind.TORCH_ONLY:
            return full_copy(x)
        if x.is_conj() or x.is_neg():
            return to_plain(x)
        y = torch.empty(0, dtype=x.dtype, device="cpu")
        self.tensors.append(CopiedTensor(x, y))
        return y

    def _deferred_wrapper(self, x: Any, memo: Any) -> _Deferred:
        names, context = x.__tensor_flatten__()
        # Detached, because the inner tensor itself may be a value that is excluded from staging.
        # The tensors of shards may themselves be excluded, like those of a DTensor.
        is_shards = type(x) is LocalShards
        inner = {
            name: self.deepcopy_with_tensor_offload(
                getattr(x, name) if is_shards else getattr(x, name).detach(), memo
            )
            for name in names
        }

        def make() -> torch.Tensor:
            copies = {n: y.get() if type(y) is _Deferred else y for n, y in inner.items()}
            return _wrapper_like(x, copies, context)

        return _Deferred(make)

    def _deferred_shards(self, x: ShardedTensor, memo: Any) -> _Deferred:
        # Not detached: staging recognizes excluded tensors by their identity.
        shards = [
            (self.deepcopy_with_tensor_offload(shard.tensor, memo), shard.metadata)
            for shard in x.local_shards()
        ]

        def make() -> torch.Tensor:
            properties = x.metadata().tensor_properties
            y = torch.Tensor._make_wrapper_subclass(
                type(x),
                x.metadata().size,
                dtype=properties.dtype,
                layout=properties.layout,
                requires_grad=properties.requires_grad,
            )
            vars(y).update(vars(x), _init_rrefs=False, _sharded_tensor_id=None)
            copies = ((y.get() if type(y) is _Deferred else y, where) for y, where in shards)
            y._local_shards = [Shard(copy, where) for copy, where in copies]
            return y

        return _Deferred(make)


class CopiedFile(CopiedState):
    """A copy that also retains parameters and attributes, which ``torch.save`` stores.

    DCP stores neither. Attributes of a parameter in training may be large.
    """

    keeps_sharing = True

    def _copy(self, x: torch.Tensor, memo: Any) -> torch.Tensor | _Deferred:
        y = super()._copy(x, memo)
        attributes, is_parameter = vars(x), type(x) is torch.nn.Parameter
        if isinstance(y, _Deferred) or not (is_parameter or attributes):
            return y
        copies = self.deepcopy_with_tensor_offload(attributes, self._memo_of_objects)

        def make() -> torch.Tensor:
            made = _like(x, y)
            vars(made).update(copies)
            return made

        return _Deferred(make)


class _DescribedState(dict[str, Any]):
    """A copied state dict whose tensors retain their attributes when sent to a save process.

    Torch sends the values of a tensor to another process, but not its attributes.
    """

    def __init__(self, state: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        super().__init__(state)
        self._tensors = tensors

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _described, (dict(self), [(x, attributes_of(x)) for x in self._tensors])


def _described(
    state: dict[str, Any], attributes: list[tuple[torch.Tensor, dict[str, Any]]]
) -> dict[str, Any]:
    for tensor, values in attributes:
        vars(tensor).update(values)
    return state


class _Deferred:
    """A tensor to create after its inner tensors have values, which its class may read."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor


def _wrapper_like(x: Any, inner: dict[str, torch.Tensor], context: Any) -> torch.Tensor:
    y: torch.Tensor = type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())
    return y.requires_grad_(x.requires_grad)


def _is_plain(x: torch.Tensor) -> bool:
    """Returns whether the tensor's memory alone contains its values."""
    is_torch_only = _tensor_view.tensor_kind(x) == _tensor_view.TensorKind.TORCH_ONLY
    return not (is_torch_only or x.is_nested or x.is_conj() or x.is_neg())


def _like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns ``y``, as a parameter if ``x`` is one."""
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(y.detach(), x.requires_grad)
    return y.requires_grad_(x.requires_grad)


def tensors_in(x: object) -> list[torch.Tensor]:
    """Returns the tensors in nested containers of Python, and in attributes of objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    ahead: list[Any] = [x]
    while ahead:
        value = ahead.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple) or type(value) in _CONTAINERS:
            ahead += value
        elif type(value) in (dict, OrderedDict):
            ahead += value.values()
        elif _is_its_attributes(type(value)):
            ahead += vars(value).values()
    return found


def _is_its_attributes(kind: type) -> bool:
    """Returns whether copying an object copies exactly all its attributes."""
    return (
        not issubclass(kind, type | FunctionType | ModuleType)  # They are not copied.
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__deepcopy__")
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and kind not in copyreg.dispatch_table
        and kind.__dictoffset__ != 0
    )


def full_copy(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy with its own memory and values, on the CPU."""
    if x.is_meta:
        return _like(x, x.detach())  # Without values. DCP's save refuses it with its FQN.
    if x.dtype not in PICKLED_DTYPES:
        return x.detach()  # Torch cannot copy it. The save refuses it with its FQN.
    check_memory(x)
    if is_traceable_wrapper_subclass(x):  # Many of these classes do not implement clone.
        names, context = x.__tensor_flatten__()
        return _wrapper_like(x, {n: full_copy(getattr(x, n)) for n in names}, context)
    if x.dtype in (torch.quint4x2, torch.quint2x4):  # Torch has no clone of them.
        return deepcopy(x.detach())
    return _like(x, x.detach().clone() if x.device.type == "cpu" else x.detach().cpu())
