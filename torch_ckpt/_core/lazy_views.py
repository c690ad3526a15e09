"""Mappings that are filled when they are looked at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

__all__ = ["LazyMapping"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class LazyMapping(Mapping[_K, _V], Generic[_K, _V]):
    """A read-only mapping that stands for a dict, which it equals, and as which it is pickled."""

    @abstractmethod
    def __getitem__(self, key: _K) -> _V: ...

    def pairs(self) -> Iterator[tuple[_K, _V]]:
        """What ``items`` iterates over."""
        return ((key, self[key]) for key in self)

    def items(self) -> ItemsView[_K, _V]:
        """As a dict's."""
        return _Items(self)

    def values(self) -> ValuesView[_V]:
        """As a dict's."""
        return _Values(self)

    def copy(self) -> dict[_K, _V]:
        """A dict of its own."""
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
