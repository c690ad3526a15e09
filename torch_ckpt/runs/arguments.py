"""Checks the arguments of a run: each is valid, and important ones are equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from torch_ckpt.coordination.group import Group
from torch_ckpt.ladder.failures import OnFailure
from torch_ckpt.ladder.step_directories import Verify
from torch_ckpt.ladder.step_files import whole_number
from torch_ckpt.options import OnBusy
from torch_ckpt.runs.step_saves import Reuse

__all__ = ["check_arguments", "check_local"]

_CHOICES = {"on_busy": OnBusy, "verify": Verify, "on_failure": OnFailure, "reuse": Reuse}


def check_arguments(group: Group, timeout_s: float, given: Mapping[str, object]) -> None:
    """Checks arguments of all ranks. All ranks call it.

    Raises ValueError if one of ``_CHOICES`` is unknown, or the ``given`` arguments differ between
    ranks.
    """
    for name, choices in _CHOICES.items():
        if (value := given[name]) not in (known := get_args(choices)):
            raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
    what = "opening the run"
    group.decide(what, lambda: None, lambda _: None, timeout_s=timeout_s, equal=given)


def check_local(keep_local: int, promote_bytes_per_s: int | None) -> None:
    """Raises TypeError for a local number that is not an integer, ValueError if below 1."""
    rate = 1 if promote_bytes_per_s is None else promote_bytes_per_s
    for name, value in {"keep_local": keep_local, "promote_bytes_per_s": rate}.items():
        if whole_number(name, value) < 1:
            raise ValueError(f"{name}={value} is not positive")
