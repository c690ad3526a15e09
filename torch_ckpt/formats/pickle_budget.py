"""Bounds the expansion of a pickle: nesting, and bytes that calls copy, hash and allocate.

A few bytes of a pickle can stand for many values: the memo repeats any value, a range counts its
numbers, and a call may copy or hash all values in its arguments. References cost nothing.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch

from torch_ckpt.formats.expansion import HOW_TO_LIFT, RATIO, Expansion, ExpansionError

__all__ = ["Budget"]

_MAX_DEPTH = 100

_COPY = 48
"""Bytes charged for a call, and for each value that it copies. A hashed value is charged 1."""

_CHARACTER = 8
"""Bytes charged for each character of a text, or each byte, in an argument."""

_BYTES_PER_VALUE = 16
"""Bytes of a text or number that take as long to hash as one value."""

_PER_ELEMENT: dict[type, int] = {
    **dict.fromkeys((str, bytes, bytearray), _CHARACTER),
    **dict.fromkeys((list, tuple, dict, set, frozenset, range, torch.Size), _COPY),
    **dict.fromkeys((collections.OrderedDict, collections.Counter, collections.deque), _COPY),
}

_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}
"""Dtype whose elements are smaller than a byte -> elements in each byte."""


class Budget:
    """Depths and costs of the values in a pickle.

    Weights are charged when values are hashed. No value may be heavier than the remaining budget,
    because torch and NumPy hash some arguments, and error messages show them.
    """

    def __init__(self, expansion: Expansion) -> None:
        self._expansion = expansion
        # Id -> depth and weight of a value, and the value itself, so that the id stays in use.
        self._measured: dict[int, tuple[int, int, object]] = {}
        self._copied: set[int] = set()  # Addresses of storages.

    def charge(self, nbytes: int) -> None:
        """Charges bytes. Raises ExpansionError if fewer are left."""
        self._expansion.charge(nbytes)

    def charge_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Charges a call for the lengths of its arguments, and of the elements of its tuples.

        Deeper values are references, which calls do not copy. Raises ExpansionError if the call may
        copy, hash or allocate more than is left, and ValueError if an argument is invalid for the
        function.
        """
        cost = _COPY
        for argument in arguments:
            kind = type(argument)
            cost += _PER_ELEMENT[kind] * len(argument) if kind in _PER_ELEMENT else 0
            if kind is tuple:
                for element in argument:
                    kind = type(element)
                    cost += _PER_ELEMENT[kind] * len(element) if kind in _PER_ELEMENT else 0
        self.charge(cost)
        if name in _COSTS:
            _COSTS[name](self, *arguments)

    def charge_any_call(self, arguments: Iterable[Any]) -> None:
        """Charges a call of a class, such as ``dict``, that may iterate and hash any argument."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                self.charge(_COPY * argument.numel())
            elif isinstance(argument, Sized):
                self.charge(_COPY * len(argument))
            if isinstance(argument, list | tuple | dict | set | frozenset):
                self.charge_hashes(argument)
            for element in argument if isinstance(argument, list | tuple) else ():
                if isinstance(element, range):
                    self.charge(_COPY * len(element))
                elif isinstance(element, list):
                    self.charge_hashes(element[:1])  # A key and its value.

    def charge_hashes(self, keys: Iterable[Any]) -> None:
        """Charges the values that are visited when these keys are hashed."""
        charge, measured = self._expansion.charge, self._measured
        for key in keys:
            known = measured.get(id(key))
            charge(1 if known is None else known[1])

    def charge_views(self, *tensors: torch.Tensor) -> None:
        """Charges the elements of tensors that a call reads, beyond what their storages justify.

        An expanded tensor of a few bytes can have any number of elements.
        """
        nbytes = 0
        for tensor in tensors:
            _require_strided(tensor)
            nbytes += tensor.numel() * tensor.itemsize
            nbytes -= RATIO * tensor.untyped_storage().nbytes()
        self.charge(max(nbytes, 0))

    def charge_copy(self, tensor: torch.Tensor, itemsize: int) -> None:
        """Charges a copy of a tensor. Each storage justifies the bytes of one copy."""
        _require_strided(tensor)
        storage = tensor.untyped_storage()
        nbytes = tensor.numel() * itemsize
        address = storage.data_ptr()  # 0 if the storage has no memory.
        if address not in self._copied:
            nbytes -= storage.nbytes()
            self._copied |= {address} - {0}
        self.charge(max(nbytes, 0))

    def measure(self, value: Any, elements: Iterable[Any], text_nbytes: int = 0) -> None:
        """Records the depth of a value, and its weight: the number of values that its hash visits.

        A value may be measured again after it has received more elements. ``text_nbytes`` is the
        length of a text or number that its hash reads. Raises ExpansionError if the value is too
        deep or heavy.
        """
        measured = self._measured
        depth, weight, _ = measured.get(id(value), (1, 1, None))
        weight += text_nbytes // _BYTES_PER_VALUE
        for element in elements:
            known = measured.get(id(element))
            if known is None:
                weight += 1
            else:
                weight += known[1]
                if known[0] >= depth:
                    depth = known[0] + 1
        if depth > _MAX_DEPTH:
            raise ExpansionError(
                f"its values are nested more than {_MAX_DEPTH} deep. {HOW_TO_LIFT}"
            )
        if weight > self._expansion.left:
            self._expansion.charge(weight)
        if weight > 1:
            measured[id(value)] = depth, weight, value


def _require_strided(tensor: Any) -> None:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        raise ValueError("an argument is not a plain tensor")


def _require_numbers(kind: type | tuple[type, ...], values: Iterable[object]) -> None:
    if not all(isinstance(value, kind) for value in values):
        raise ValueError("an argument is not a number")


# The functions below charge the calls that hash, or that read or copy elements of tensors.


def _sparse_tensor(budget: Budget, layout: torch.layout, data: Any) -> None:
    # The result shares the memory of its parts. Their values are checked.
    budget.charge_views(*data[: 2 if layout is torch.sparse_coo else 3])


def _quantized_tensor(
    budget: Budget, storage: Any, _: Any, sizes: Any, __: Any, parameters: Any, *___: Any
) -> None:
    if type(sizes) not in (tuple, torch.Size) or type(parameters) is not tuple:
        raise ValueError("an argument is not a tuple")
    _require_numbers(int, sizes)
    nbytes = math.prod(sizes) * storage.dtype.itemsize // _PACKED.get(storage.dtype, 1)
    budget.charge(max(nbytes - RATIO * storage.nbytes(), 0))
    for one in parameters[1:3]:  # Scales and zero points.
        if isinstance(one, torch.Tensor):
            budget.charge_copy(one, max(one.itemsize, torch.float64.itemsize))
        else:
            _require_numbers((int, float), one if isinstance(one, list) else [one])


def _nested_tensor(budget: Budget, *tensors: Any) -> None:
    budget.charge_views(*tensors)


def _copied_tensor(budget: Budget, tensor: torch.Tensor, dtype: torch.dtype, *_: Any) -> None:
    budget.charge_copy(tensor, dtype.itemsize)


def _array_tensor(budget: Budget, array: Any, dtype: torch.dtype, *_: Any) -> None:
    budget.charge(array.size * dtype.itemsize)


def _from_type(budget: Budget, function: Any, _: Any, arguments: tuple[Any, ...], __: Any) -> None:
    budget.charge_call(f"{function.__module__}.{function.__qualname__}", arguments)


def _ordered_dict(budget: Budget, items: Sequence[Any] = ()) -> None:
    for item in items:
        if type(item) not in (list, tuple):
            raise ValueError("an item is not a pair")
        budget.charge_hashes(item[:1])


_GENERATOR_NBYTES = 5056

_COSTS: dict[str, Callable[..., None]] = {
    "builtins.set": lambda budget, elements=(): budget.charge_hashes(elements),
    "builtins.frozenset": lambda budget, elements=(): budget.charge_hashes(elements),
    "collections.Counter": lambda budget, counts=None: budget.charge_hashes(counts or ()),
    "collections.OrderedDict": _ordered_dict,
    "torch._C.Generator": lambda budget, _: budget.charge(_GENERATOR_NBYTES),
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _copied_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _array_tensor,
    "torch._utils._rebuild_nested_tensor": _nested_tensor,
    "torch._utils._rebuild_qtensor": _quantized_tensor,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
}
"""Full name of a function -> function that charges more than the lengths of the arguments."""
