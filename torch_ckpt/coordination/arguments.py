"""Arguments that must be equal on all ranks. An exchange of the call compares them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["comparing"]

T = TypeVar("T")
R = TypeVar("R")


def comparing(
    own: Callable[[], T],
    decide: Callable[[list[T]], R],
    equal: Mapping[str, object],
    *,
    names: Sequence[int],
    activity: str,
) -> tuple[Callable[[], Any], Callable[[list[Any]], R]]:
    """Returns wrappers of both functions that also compare the arguments ``equal`` of all ranks.

    ``own`` is called on each rank, and ``decide`` with all values on the coordinator. ``decide``
    raises ValueError if the arguments differ. ``names`` are the ranks.
    """

    def own_and_given() -> tuple[T, dict[str, str]]:
        return own(), {name: _as_text(value) for name, value in equal.items()}

    def decide_if_equal(answers: list[tuple[T, dict[str, str]]]) -> R:
        _check_equal([given for _, given in answers], names, activity)
        return decide([value for value, _ in answers])

    return own_and_given, decide_if_equal


def _as_text(value: Any) -> str:
    """Returns the text by which ranks compare an argument.

    Integers of NumPy, and tensors of one integer, get the same text as Python's integers.
    """
    if not isinstance(value, bool):
        try:
            return str(operator.index(value))
        except (TypeError, ValueError, RuntimeError):  # Such as a tensor of several values.
            pass
    return repr(value)


def _check_equal(given: Sequence[Mapping[str, str]], names: Sequence[int], activity: str) -> None:
    """Raises ValueError if ranks passed different arguments.

    ``given`` are the texts of the arguments of each rank, and ``names`` the ranks.
    """
    first = given[0]
    for rank, other in enumerate(given):
        for name in {**first, **other}:
            here, there = (each.get(name, "absent") for each in (first, other))
            if here != there:
                raise ValueError(
                    f"ranks have different arguments, while {activity}: {name}={here} on rank "
                    f"{names[0]}, and {name}={there} on rank {names[rank]}"
                )
