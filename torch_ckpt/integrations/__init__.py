"""Replacements for functions and classes of torch. Framework modules also load by former names."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_ckpt.known_frameworks import FRAMEWORKS

_FORMER = {
    f"{__name__}.{former}": row.module(module)
    for row in FRAMEWORKS
    for former, module in row.former
}


class _FormerNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module of a framework by its former name in this package."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in _FORMER else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_FORMER[module.__name__])


sys.meta_path.append(_FormerNames())
