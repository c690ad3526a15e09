"""Code of the documents that tests and their programs run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "rank-state.md"


def recipe(name: str) -> Any:
    """A class of the page on the state of ranks."""
    [code] = re.findall(rf"^(class {name}\b.*?\n)\n\n(?=\w)", PAGE.read_text(), re.M | re.S)
    namespace: dict[str, Any] = {"torch": torch, "Sampler": torch.utils.data.Sampler}
    exec(code, namespace)
    return namespace[name]
