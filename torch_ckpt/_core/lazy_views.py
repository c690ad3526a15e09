"""Read-only mappings that create their values on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

__all__ = ["LazyMapping"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class LazyMapping(Mapping[_K, _V], Generic[_K, _V]):
    """A read-only mapping that creates its values on access.

    It compares equal to a dict of the same items, and pickles as one.
    """

    @abstractmethod
    def __getitem__(self, key: _K) -> _V: ...

    def pairs(self) -> Iterator[tuple[_K, _V]]:
        """Yields the pairs of ``items``."""
        return ((key, self[key]) for key in self)

    def items(self) -> ItemsView[_K, _V]:
        return _Items(self)

    def values(self) -> ValuesView[_V]:
        return _Values(self)

    def copy(self) -> dict[_K, _V]:
        """Returns a dict with all items."""
        return dict(self.pairs())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, self.pairs()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} items>"


class _Items(ItemsView[_K, _V]):
    _mapping: LazyMapping[_K, _V]

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        return self._mapping.pairs()


class _Values(ValuesView[_V]):
    _mapping: LazyMapping[Any, _V]

    def __iter__(self) -> Iterator[_V]:
        return (value for _, value in self._mapping.pairs())
