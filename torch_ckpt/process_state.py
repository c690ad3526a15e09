"""The single object with process-wide state.

All packages import this module, so it names none of their types. Each attribute has one owner: the
module that writes the attribute. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

__all__ = ["PROCESS", "Descriptor", "gc_paused"]

C = TypeVar("C", bound="_Closable")


class _Closable(Protocol):
    """An object with descriptors: a socket, a pipe, a selector, a lock, a pidfd."""

    def close(self) -> Any:
        """Closes the descriptors of this process."""


class _Forkable(Protocol):
    """An object with threads or connections that a forked child lacks or must not use."""

    def after_fork(self) -> None:
        """Drops the threads and connections of the parent. Called in the child."""


class _Process:
    """The process-wide state.

    Attributes:
        file_systems: File systems by URL scheme; ``None`` if the parent process has registered one
            that this process lacks. Owner: ``filesystems/location``.
        registered: The schemes of registered file systems. Owner: ``filesystems/location``.
        groups: Groups of ranks, by process group. Owner: ``coordination/group``.
        save_processes: The process that writes asynchronous saves of type ``PROCESS``, by the
            connections of a group. Owner: ``coordination/background``.
        plan_cache: Cached plans of earlier saves. Owner: ``planning/plan_cache``.
        stager: The default stager of writers. Owner: ``staging/stager``.
        background_futures: Futures of background saves and loads. Failures that were not read are
            reported when the process exits. Owner: ``coordination/background``.
        installed: The contexts of :func:`torch_ckpt.install`, one per call. Owner:
            ``integrations/installation``.
        unreplaced: Classes of writers and readers that were not replaced, and warned of. Owner:
            ``integrations/installation``.
        replaced: The original value of an attribute of torch or Megatron, and its replacements.
            Owner: ``integrations/replacing``.
        warned_replicas: Sets of FQNs whose replicas had different values, of which this process
            has warned. Owner: ``planning/replica_check``.
        warned_placeholders: Sets of FQNs of empty tensors that this process has warned of. Owner:
            ``planning/placeholders``.
        temporaries: Temporary files and directories that this process uses, by name. Owner:
            ``commits/temporary``.
        removals: The files that announce removals of steps, and the frames of the functions that
            remove them. Owner: ``commits/leases``.
        storage_watch: The thread that logs long calls of storage, if it runs. Owner:
            ``coordination/storage_watch``.
        probed: Pairs of a device and a file system call that it supports. Owner: ``commits/probe``.
        preemption: The ``Preemption`` that catches signals now, or ``None``. Its ``ends_at`` is
            the time at which this process is killed. Owner: ``runs/preemption``.
        forkable: Loops of ``coordination/loop``, futures of ``coordination/waiting``, and all
            stagers.
        unshared: Objects with descriptors, which a forked child closes; see :meth:`own`.
        inherited: Process groups of the parent of this forked process. Owner:
            ``coordination/connections``.
    """

    plan_cache: Any
    stager: Any

    def __init__(self) -> None:
        self.file_systems: dict[str, Any] = {}
        self.registered: set[str] = set()
        self.groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.save_processes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.background_futures: weakref.WeakSet[Any] = weakref.WeakSet()
        self.installed: list[Any] = []
        self.unreplaced: weakref.WeakSet[type] = weakref.WeakSet()
        self.replaced: dict[tuple[Any, str], list[Any]] = {}
        self.warned_replicas: set[frozenset[str]] = set()
        self.warned_placeholders: set[frozenset[str]] = set()
        self.temporaries: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.removals: list[tuple[Any, Any]] = []
        self.storage_watch: dict[str, Any] = {}
        self.probed: set[tuple[int | str, str]] = set()
        self.preemption: Any = None
        self.forkable: weakref.WeakSet[_Forkable] = weakref.WeakSet()
        self.unshared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.inherited: weakref.WeakSet[Any] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._after_fork)

    def own(self, opened: C) -> C:
        """Makes forked children close an object with descriptors, and returns the object.

        An open copy in a child would hide the end of this process, or retain its lock.
        """
        self.unshared.add(opened)
        return opened

    def _after_fork(self) -> None:
        """Drops background work, which remains with the parent."""
        for opened in list(self.unshared):
            with contextlib.suppress(OSError):  # The program may have closed all descriptors.
                opened.close()
        for forkable in list(self.forkable):
            forkable.after_fork()
        self.save_processes.clear()
        self.background_futures.clear()
        self.temporaries.clear()
        self.removals.clear()
        self.storage_watch.clear()
        self.preemption = None  # The parent's signals.


PROCESS = _Process()


class Descriptor:
    """A number of an open descriptor, which :meth:`close` or the end of the object closes.

    Forked children close their copies.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        PROCESS.own(self)

    def close(self) -> None:
        """Closes the descriptor, once."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the garbage collector, which would scan many new objects repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
