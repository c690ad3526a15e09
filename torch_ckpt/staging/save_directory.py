"""SaveDirectory: the directory of a writer's saves. Links are resolved once for each save."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.filesystems.location import Location

__all__ = ["SaveDirectory"]


class SaveDirectory:
    """The directory of a writer's saves: as ``given``, and ``absolute`` with unresolved links.

    Links in its path may change while a save is in progress, and the process may change its working
    directory. A save must nevertheless write to a single directory. So a relative path is resolved
    against the working directory when it is passed. Links are resolved once for each save, when it
    begins.

    A save in the background begins in the call that requests it (:meth:`begin`), and enters the
    directory in another thread or process (:meth:`enter`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        watch_storage()  # The writer may resolve other paths before a save begins.
        self.given = Location(path)
        self.absolute = self.given.absolute()
        self._begun: _Begun | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for the process that carries out the save.
        begun = None if self._begun is None else self._begun._replace(thread=None)
        return {**self.__dict__, "_begun": begun}

    def change(self, checkpoint_id: str | os.PathLike[str]) -> None:
        """Sets the directory of the next save.

        If a background save to the same ``checkpoint_id`` has begun, its directory does not change.
        """
        begun = self._begun_elsewhere()
        given = Location(checkpoint_id)
        if begun is not None and begun.given == given:
            self.given, self.absolute = begun.given, begun.absolute
            return
        self.given, self.absolute, self._begun = given, given.absolute(), None

    def begin(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Resolves the directory of a background save: ``checkpoint_id``, if its thread sets it."""
        watch_storage()  # This process may be a child of the one that created the writer.
        given = self.given if checkpoint_id is None else Location(checkpoint_id)
        absolute = self.absolute if checkpoint_id is None else given.absolute()
        self._begun = _Begun(given, absolute, absolute.resolved(), threading.current_thread())

    def enter(self) -> Location:
        """Returns the directory of the save that starts in the current thread."""
        begun, self._begun = self._begun_elsewhere(), None
        return self.absolute.resolved() if begun is None else begun.resolved

    def _begun_elsewhere(self) -> _Begun | None:
        """Returns the save that another thread has begun.

        A save begun by the current thread itself was never carried out, or has ended.
        """
        begun = self._begun
        return None if begun is None or begun.thread is threading.current_thread() else begun


class _Begun(NamedTuple):
    """A background save that has begun."""

    given: Location
    absolute: Location
    resolved: Location
    thread: threading.Thread | None  # The thread that requested it; None in another process.
