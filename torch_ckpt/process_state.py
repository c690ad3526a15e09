"""What a process has once, whoever asks: the one object with process-wide state.

It is below all packages, so it names none of their types: each attribute has one owner, the module
that writes it. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["PROCESS"]


class _Forkable(Protocol):
    """What has threads or connections, which a forked child does not have, or must not use."""

    def after_fork(self) -> None:
        """Called in the child."""


class _Process:
    """State that is no other object's.

    Attributes:
        file_systems: By scheme. Owner: ``filesystems/location``.
        groups: By process group, ranks that have called something together. Owner:
            ``coordination/group``.
        save_process: Saves in the background where DCP was told to use a process. Owner:
            ``coordination/background``.
        plan_cache: Plans of former saves. Owner: ``planning/plan_cache``.
        stager: That of all writers which are given none. Owner: ``staging/stager``.
        unsettled: Saves of runs of which nobody has asked yet how they ended; those that have
            failed are printed when the process ends. Owner: ``runs/background_save``.
        forkable: Loops of ``coordination/loop`` and all stagers.
    """

    plan_cache: Any
    stager: Any

    def __init__(self) -> None:
        self.file_systems: dict[str, Any] = {}
        self.groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.save_process: Any = None
        self.unsettled: set[Any] = set()
        self.forkable: weakref.WeakSet[_Forkable] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """In a forked child, what goes on is its parent's."""
        for one in list(self.forkable):
            one.after_fork()
        self.save_process = None
        self.unsettled.clear()


PROCESS = _Process()
