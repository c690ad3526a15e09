"""Waits for files that another rank has created, and that a network file system may show late.

A client of NFS or Lustre may cache for a while that a name is missing, and may return stale
listings of directories.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.filesystems.location import Location

if TYPE_CHECKING:
    from torch_ckpt.coordination.group import Group

__all__ = ["APPEARS_S", "still_missing", "wait_on_all"]

APPEARS_S = 30.0
"""Seconds within which every rank must find files that another rank has created."""

_POLL_S = 0.1


def _is_found(name: Location) -> bool:
    return not name.is_missing()


def still_missing(
    names: Sequence[Location], creator: str, is_found: Callable[[Location], bool] = _is_found
) -> list[Location]:
    """Waits for files or directories that ``creator`` has created; returns those still missing.

    Ends after :data:`APPEARS_S`. If the present call fails meanwhile, raises its error: the rank
    that has created the files may have removed them.
    """
    missing = [name for name in names if not is_found(name)]

    def awaited() -> str:
        others = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
        return f"{missing[0]}{others}, which {creator} has created, to appear on this machine"

    waiting, call = LongWait(awaited), current_call()
    for pause_s in waiting.rounds(APPEARS_S, _POLL_S):
        if not missing:
            break
        if call is not None:
            call.raise_if_failed()
        time.sleep(pause_s)
        missing = [name for name in missing if not is_found(name)]
    return missing


def wait_on_all(group: Group, name: Location, creator: str, *, timeout_s: float) -> None:
    """Waits until all ranks find a file that ``creator`` has created, or no rank does.

    Ends after :data:`APPEARS_S` in any case. All ranks call it, outside a call. If the file is
    removed meanwhile, it soon disappears on all ranks, and the wait ends. ``timeout_s`` is the
    deadline of each exchange.
    """
    awaited = f"{name}, which {creator} has created, to appear on this machine"
    waiting = LongWait(lambda: "" if _is_found(name) else awaited)

    def must_wait(found: list[bool]) -> bool:
        return any(found) and not all(found) and waiting.waited_s < APPEARS_S

    while group.decide("opening", lambda: _is_found(name), must_wait, timeout_s=timeout_s):
        waiting.log()
        time.sleep(_POLL_S)
