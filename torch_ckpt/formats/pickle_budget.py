"""Bounds what a pickle expands to: nesting, values that a walk visits, and bytes.

A few bytes of a pickle can stand for many values: the memo repeats any value, a range counts its
numbers, and a call may copy, hash or convert all values in its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["Budget", "text_weight"]

_MAX_DEPTH = 100
_PER_BYTE = 64
_MIN = 1 << 16
_COPY = 16
"""What a copied value counts. A visited one counts 1."""

_TEXT_PER_VALUE = 16
"""Characters of a text, or bytes, that count as much as a value."""


class Budget:
    """What a pickle may still expand to.

    It is linear in the length of the pickle: 64 for each byte. Bytes of arrays, values in walks and
    values that calls copy count towards it.

    Args:
        nbytes: Length of the pickle.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = _MIN + _PER_BYTE * nbytes
        # Id -> depth and weight of a value, and the value itself, so that the id stays in use.
        self._measured: dict[int, tuple[int, int, object]] = {}
        self._copied: set[int] = set()  # Addresses of storages.

    def charge(self, cost: int) -> None:
        """Charges a number of bytes or values.

        Raises:
            ForbiddenPickleError: The budget is exhausted.
        """
        self._left -= cost
        if self._left < 0:
            raise ForbiddenPickleError("values far larger than the pickle")

    def charge_walk(self, elements: Iterable[Any]) -> None:
        """Charges a walk of values that do not grow, such as the hashes of keys."""
        for element in elements:
            measured = self._measured.get(id(element))
            self.charge(1 if measured is None else measured[1])

    def charge_call(self, arguments: Collection[Any]) -> None:
        """Charges all values that a call may copy, hash or convert, at any depth.

        Lists and dicts are walked, since they may have grown after they were put into a tuple.
        """
        pending: list[Collection[Any]] = [arguments]
        self.charge(_COPY * text_weight(arguments))
        while pending:
            values = pending.pop()
            self.charge(_COPY * len(values))
            for value in values:
                kind = type(value)
                if kind is tuple or kind is list:
                    pending.append(value)
                elif kind is dict:
                    pending += value.keys(), value.values()
                elif kind is range:
                    self.charge(_COPY * (abs(value.stop - value.start) // abs(value.step)))
                elif id(value) in self._measured:
                    self.charge(self._measured[id(value)][1])

    def charge_copy(self, storage: torch.UntypedStorage) -> None:
        """Charges a copy of a storage. A storage may be copied once.

        Raises:
            ForbiddenPickleError: It was copied before.
        """
        address = storage.data_ptr()  # 0 if the storage has no memory.
        if address in self._copied:
            raise ForbiddenPickleError("two tensors that are copies of one storage")
        self._copied |= {address} - {0}

    def measure(self, value: Any, elements: Iterable[Any], weight: int = 0) -> None:
        """Records the depth of a value, and its weight: the number of values that a walk visits.

        Args:
            value: The value. It may have been measured before, and have got more elements.
            elements: What it may reference.
            weight: Its weight in addition to that of its elements.

        Raises:
            ForbiddenPickleError: The value is too deep or too heavy.
        """
        depth, known, _ = self._measured.get(id(value), (1, 1, None))
        weight += known
        for element in elements:
            measured = self._measured.get(id(element))
            if measured is not None:
                depth = max(depth, measured[0] + 1)
                weight += measured[1]
            else:
                weight += 1
        if depth > _MAX_DEPTH:
            raise ForbiddenPickleError("values nested too deeply")
        if weight > _MIN + self._left:
            raise ForbiddenPickleError("values far larger than the pickle")
        if isinstance(value, bytes | bytearray):
            self.charge(len(value))
        elif not isinstance(value, torch.Tensor):
            self.charge(int(getattr(value, "nbytes", 0)))  # Arrays have this attribute.
        if depth > 1 or weight > 1:
            self._measured[id(value)] = depth, weight, value

    def measure_number(self, value: int) -> None:
        """Records the weight of a long number, whose hash reads all of it."""
        self._measured[id(value)] = 1, 1 + value.bit_length() // (8 * _TEXT_PER_VALUE), value


def text_weight(values: Iterable[Any]) -> int:
    """Returns the weight of all texts and bytes among values."""
    return sum(
        len(value) // _TEXT_PER_VALUE
        for value in values
        if isinstance(value, str | bytes | bytearray)
    )
