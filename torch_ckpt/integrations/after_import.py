"""Calls a function after a module is imported, if the program ever imports it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["after_import"]


@contextlib.contextmanager
def after_import(name: str, function: Callable[[], None]) -> Iterator[None]:
    """Calls a function after a module is imported: immediately, or later within the context."""
    if name in sys.modules:
        function()
        yield
        return
    finder = _Finder(name, function)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module like Python, and calls a function once after the module has executed."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function
        self._is_searching = False

    def remove(self) -> None:
        """Removes the finder from ``sys.meta_path``."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Finds the module by the other finders."""
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:  # The context has not ended.
                self.remove()
                self._function()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
