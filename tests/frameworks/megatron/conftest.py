"""The tests of Megatron-Core, which is imported without a compiler.

``torch.compile`` imports one for what is decorated with it, in each process that collects tests.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch


def as_it_is(function: Any = None, **_: Any) -> Any:
    """Stands for ``torch.compile``."""
    return as_it_is if function is None else function


with mock.patch.object(torch, "compile", as_it_is), contextlib.suppress(ImportError):
    import megatron.core  # noqa: F401
