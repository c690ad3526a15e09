"""Planners that observe whether a save or load may show a progress bar."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as dcp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def on_a_terminal() -> Iterator[Terminal]:
    with mock.patch("sys.stderr", Terminal()) as terminal:
        yield terminal


def has_bar() -> bool:
    """Whether a thread of this process shows a bar, or will after 3 s."""
    return any(thread.name == "torch_ckpt-progress" for thread in threading.enumerate())


class SavePlanner(dcp.DefaultSavePlanner):
    """Observes while an object is saved: tensors are resolved before the writes begin."""

    had_bar: bool | None = None

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.tensor_data is None:
            self.had_bar = has_bar()
        return super().resolve_data(write_item)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Observes while a load is planned, and while an object is loaded."""

    had_bar: bool | None = None
    was_planned_with_bar: bool | None = None

    def create_local_plan(self) -> Any:
        self.was_planned_with_bar = has_bar()
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.had_bar = has_bar()
        super().load_bytes(read_item, value)
