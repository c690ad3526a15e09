"""Saves that this machine will never have, for those that wait for them elsewhere."""

from __future__ import annotations

import logging
import threading
import time

from torch_ckpt.agent.meeting import Meeting
from torch_ckpt.errors import CheckpointError

__all__ = ["Declined"]

_log = logging.getLogger("torch_ckpt.agent")

_KEPT = 16
"""Others are never so far behind."""

_LOOK_S = 0.5


class Declined:
    """Tells other machines that they wait in vain, where they do; all threads may use it.

    Nothing is written where nobody waits: what all machines skip leaves no trace.

    Args:
        timeout_s: Seconds for which others may come.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._saves: dict[str, tuple[Meeting, str, float]] = {}  # Why, and until when.

    def add(self, meeting: Meeting, why: str) -> None:
        """Declines a save."""
        with self._lock:
            is_watched = bool(self._saves)
            until = time.monotonic() + self._timeout_s
            self._saves.setdefault(meeting.tag, (meeting, why, until))
            while len(self._saves) > _KEPT:
                del self._saves[next(iter(self._saves))]
        if not is_watched:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Returns when those that wait by now were told: nobody will be any more."""
        end = time.monotonic() + 2 * _LOOK_S
        while self._saves and time.monotonic() < end:
            time.sleep(_LOOK_S / 10)

    def _watch(self) -> None:
        while True:
            with self._lock:
                saves = list(self._saves.values())
            for meeting, why, until in saves:
                if meeting.is_attended():
                    try:
                        meeting.decline(why)
                    except CheckpointError as error:
                        _log.warning("other machines wait in vain: %s", error)
                elif time.monotonic() < until:
                    continue
                with self._lock:
                    self._saves.pop(meeting.tag, None)
            with self._lock:
                if not self._saves:
                    return
            time.sleep(_LOOK_S)
