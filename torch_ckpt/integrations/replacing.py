"""Temporarily replaces attributes of modules or classes."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from types import CellType
from typing import Any

import torch

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.process_state import PROCESS

__all__ = ["Callee", "first_value", "has_only", "replacing"]

# Threads begin and end blocks at the same time. A signal handler may do so within another block.
_LOCK = threading.RLock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def has_only(kind: type, arguments: Collection[str]) -> bool:
    """Returns whether a class of another library has no arguments other than these."""
    return set(inspect.signature(kind).parameters) <= set(arguments)


class Callee:
    """The function that a decorated function calls, as a replaceable attribute.

    The replacement applies wherever a program has stored the decorated function, such as in another
    module, a class or a ``functools.partial``.
    """

    def __init__(self, decorated: Any) -> None:
        cells: Sequence[CellType] = decorated.__closure__ or ()
        inner = getattr(decorated, "__wrapped__", decorated)
        found = [cell for cell in cells if cell.cell_contents is inner]
        if not found:
            raise UnsupportedError(f"cannot replace {decorated} of torch {torch.__version__}")
        self._cell = found[0]

    @property
    def function(self) -> Any:
        """The function that is called."""
        return self._cell.cell_contents

    @function.setter
    def function(self, replacement: Any) -> None:
        self._cell.cell_contents = replacement


def first_value(owner: Any, name: str) -> Any:
    """Returns the original value of an attribute, whether it is replaced or not."""
    return PROCESS.replaced.get((owner, name), [getattr(owner, name)])[0]


@contextlib.contextmanager
def replacing(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute of a module or class within a block, like ``mock.patch.object``.

    Blocks of several threads may overlap: the block that began last, among those that have not
    ended, applies. When all have ended, the attribute has its original value again.
    """
    at, has_begun = (owner, name), False
    try:
        with _LOCK:
            values = PROCESS.replaced.setdefault(at, [getattr(owner, name)])
            values.append(replacement)
            has_begun = True
            setattr(owner, name, replacement)
        yield
    finally:
        if has_begun:
            with _LOCK:
                is_last = getattr(owner, name) is values[-1]
                del values[_last_place(values, replacement)]
                if is_last:  # No other code has replaced it.
                    setattr(owner, name, values[-1])
                if len(values) == 1:
                    PROCESS.replaced.pop(at, None)


def _last_place(values: Sequence[Any], replacement: Any) -> int:
    return max(place for place, value in enumerate(values) if place and value is replacement)
