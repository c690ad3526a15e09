"""Promises: every rank allows the commit before the coordinator publishes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch_ckpt.coordination.call_state import CallState
from torch_ckpt.coordination.lateness import COMMITTING
from torch_ckpt.coordination.loop import settle
from torch_ckpt.coordination.peer import Kind, Peer

__all__ = ["Promises"]


class Promises:
    """Collects the promises of the ranks below this one. Used by the relay's thread.

    ``send`` sends a message of a kind for a call.
    """

    def __init__(
        self,
        send: Callable[[Peer, int, int], None],
        parent: Peer | None,
        children: dict[int, Peer],
    ) -> None:
        self._send, self._parent, self._children = send, parent, children

    def claim(self, call: CallState, future: Future[None]) -> None:
        """Begins to collect the promises of all ranks, on the coordinator.

        The future completes when every rank has promised. From then on, a rank that fails the call
        reports that the checkpoint may be committed.
        """
        call.claim = future
        self.give(call)

    def give(self, call: CallState) -> None:
        """Promises to allow the commit. A later error then reports that it may have happened."""
        if call.error is not None:
            return  # The coordinator receives the error, and no promise.
        call.promised, call.phase = self._parent is not None, COMMITTING
        call.awaited = set(self._children)
        for child in self._children.values():
            self._send(child, Kind.PROMISE, call.number)
        self.record(call, None)

    def record(self, call: CallState, child: int | None) -> None:
        """Records the promise of a child, or of this rank."""
        call.awaited.discard(-1 if child is None else child)
        if call.awaited or call.error is not None:
            return
        if self._parent is not None:
            self._send(self._parent, Kind.PROMISED, call.number)
        else:
            call.promised = True
            settle(call.claim, None)
            call.claim = None
