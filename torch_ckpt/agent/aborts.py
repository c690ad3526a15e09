"""Saves that this machine will never have, for those that wait for them elsewhere."""

from __future__ import annotations

import logging
import threading
import time

from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.errors import CheckpointError

__all__ = ["PendingAborts"]

_log = logging.getLogger("torch_ckpt.agent")

_KEPT = 16
"""Others are never so far behind."""

_POLL_S = 0.5


class PendingAborts:
    """Tells other machines that they wait in vain, where they do; all threads may use it.

    Nothing is written where nobody waits: what all machines skip leaves no trace.

    Args:
        timeout_s: Seconds for which others may come.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._saves: dict[str, tuple[Manifests, str, float]] = {}  # Why, and until when.

    def add(self, manifests: Manifests, why: str) -> None:
        """Declines a save."""
        with self._lock:
            is_watched = bool(self._saves)
            until = time.monotonic() + self._timeout_s
            self._saves.setdefault(manifests.tag, (manifests, why, until))
            while len(self._saves) > _KEPT:
                del self._saves[next(iter(self._saves))]
        if not is_watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Returns when those that wait by now were told: nobody will be any more."""
        end = time.monotonic() + 2 * _POLL_S
        while self._saves and time.monotonic() < end:
            time.sleep(_POLL_S / 10)

    def _watch(self) -> None:
        while True:
            with self._lock:
                saves = list(self._saves.values())
            for manifests, why, until in saves:
                if manifests.is_attended():
                    try:
                        manifests.abort(why)
                    except CheckpointError as error:
                        _log.warning("other machines wait in vain: %s", error)
                elif time.monotonic() < until:
                    continue
                with self._lock:
                    self._saves.pop(manifests.tag, None)
            with self._lock:
                if not self._saves:
                    return
            time.sleep(_POLL_S)
