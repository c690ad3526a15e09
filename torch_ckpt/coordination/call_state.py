"""A rank's state of a call, and the errors that end the call on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from torch_ckpt.coordination.contributions import ExchangeState
from torch_ckpt.errors import RankTimeoutError

__all__ = ["CallState", "as_seen_in", "timeout_error"]


class CallState:
    """This rank's state of a call."""

    def __init__(self) -> None:
        self.exchanges: dict[int, ExchangeState] = {}
        self.phase = "beginning"
        self.error: Exception | None = None
        self.on_failure: list[Callable[[], None]] = []
        """Functions of this rank to call when the call fails."""
        self.promised = False
        """Whether the coordinator may commit without another message."""
        self.claim: Future[None] | None = None
        self.awaited: set[int] = set()
        """The children that have not promised yet."""


def timeout_error(
    message: str, names: list[int], phase: str, waited_s: float, promised: bool
) -> RankTimeoutError:
    """Returns the error of all ranks. After a promise, it says that the checkpoint may appear."""
    if promised:
        message += ". The coordinator had begun to publish the checkpoint, which may yet appear"
    return RankTimeoutError(message, names, phase, waited_s, promised)


def as_seen_in(call: CallState, error: RankTimeoutError) -> RankTimeoutError:
    """Returns the error of a call, given the error of a lost rank."""
    message = f"{error.args[0]}. It had not finished {call.phase}"
    return timeout_error(message, list(error.ranks), call.phase, error.seconds, call.promised)
