"""A rank's state of a call, and the errors that end the call on all ranks."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future

from torch_ckpt.coordination.contributions import ExchangeState
from torch_ckpt.coordination.jobs import Cancellable, Jobs
from torch_ckpt.coordination.loop import settle
from torch_ckpt.errors import RankTimeoutError
from torch_ckpt.records.record import Heard

__all__ = [
    "COMMITTING",
    "METHOD_CALLS",
    "PARTS_OF_SERIES",
    "SERIES_CALLS",
    "WRITING",
    "CallState",
]

WRITING, COMMITTING = "writing", "committing"
"""The phases in which all ranks write, and in which they wait for the coordinator's commit."""

METHOD_CALLS = 1 << 20
"""Numbers of the calls of one method. A wait for promotion makes a call every two seconds."""

SERIES_CALLS = 1 << 48
"""Numbers of one series. A message has 64 bits for the number of a call."""

PARTS_OF_SERIES = 1 << 4
"""Parts of the numbers of a series: the first one for its own calls, the others for its series."""


class CallState:
    """This rank's state of a call."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.exchanges: dict[int, ExchangeState] = {}
        self.phase = "beginning"
        self.error: Exception | None = None
        self.jobs: Jobs[Cancellable] | None = None
        """The jobs of this rank, which end when the call fails."""
        self.promised = False
        """Whether the coordinator may commit without another message."""
        self.claim: Future[None] | None = None
        self.awaited: set[int] = set()
        """The children that have not promised yet."""
        self.heard: list[Heard] = []
        """What other ranks have recorded, on the coordinator."""

    def cancel_jobs(self) -> None:
        """Cancels the jobs of this rank, now and later."""
        if self.jobs is not None:
            with contextlib.suppress(Exception):  # An error here would end all calls of the group.
                self.jobs.cancel()

    def end(self, error: Exception) -> None:
        """Ends the call on this rank with an error, unless it has one."""
        if self.error is None:
            self.error = error
            for exchange in self.exchanges.values():
                settle(exchange.future, error=error)
            settle(self.claim, error=error)
            self.exchanges, self.claim = {}, None
            self.cancel_jobs()

    def exchange(self, number: int) -> ExchangeState:
        """Returns the state of an exchange, which begins here if it has not yet."""
        return self.exchanges.setdefault(number, ExchangeState(number))

    def timeout_error(
        self, message: str, names: list[int], waited_s: float = 0.0, phase: str = ""
    ) -> RankTimeoutError:
        """Returns the error of all ranks. After a promise, it says that the checkpoint may appear.

        Its phase is that of this rank, unless another one is given.
        """
        if self.promised:
            message += ". The coordinator had begun to publish the checkpoint, which may yet appear"
        return RankTimeoutError(message, names, phase or self.phase, waited_s, self.promised)

    def error_of_lost(self, lost: RankTimeoutError) -> RankTimeoutError:
        """Returns the error of this call, given the error of a lost rank."""
        message = f"{lost.args[0]}. It had not finished {self.phase}"
        return self.timeout_error(message, list(lost.ranks), lost.seconds)
