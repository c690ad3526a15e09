"""Aborts of saves that this machine will never complete, for the machines that wait for it."""

from __future__ import annotations

import logging
import threading
import time

from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.errors import CheckpointError

__all__ = ["PendingAborts"]

_log = logging.getLogger("torch_ckpt.agent")

_MAX_PENDING = 16
"""Other machines are never this many saves behind."""

_POLL_S = 0.5


class PendingAborts:
    """Publishes aborts for saves that other machines have begun. Thread-safe.

    An abort is published only once another machine has files for the save, so a save that all
    machines skip leaves no files.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[str, tuple[Manifests, str, float]] = {}  # By tag: reason and deadline.

    def add(self, manifests: Manifests, why: str, *, within_s: float) -> None:
        """Aborts a save, if other machines begin it within so many seconds."""
        with self._lock:
            is_watched = bool(self._saves)
            deadline = time.monotonic() + within_s
            self._saves.setdefault(manifests.tag, (manifests, why, deadline))
            while len(self._saves) > _MAX_PENDING:
                del self._saves[next(iter(self._saves))]
        if not is_watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Waits for the aborts of saves that other machines wait for now, for a second at most."""
        end = time.monotonic() + 2 * _POLL_S
        while self._saves and time.monotonic() < end:
            time.sleep(_POLL_S / 10)

    def _watch(self) -> None:
        while True:
            with self._lock:
                saves = list(self._saves.values())
            for manifests, why, deadline in saves:
                if manifests.has_files():
                    try:
                        manifests.abort(why)
                    except CheckpointError as error:
                        _log.warning("cannot abort a save that other machines wait for: %s", error)
                elif time.monotonic() < deadline:
                    continue
                with self._lock:
                    self._saves.pop(manifests.tag, None)
            with self._lock:
                if not self._saves:
                    return
            time.sleep(_POLL_S)
