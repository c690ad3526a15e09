"""A rank's state of its calls, and the errors that end them on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from torch_ckpt.coordination.contributions import ExchangeState
from torch_ckpt.coordination.jobs import Cancellable, Jobs
from torch_ckpt.coordination.loop import settle
from torch_ckpt.errors import RankTimeoutError
from torch_ckpt.records.record import Heard

__all__ = [
    "METHOD_CALLS",
    "PARTS_OF_SERIES",
    "SERIES_CALLS",
    "CallState",
    "Calls",
]

METHOD_CALLS = 1 << 20
"""Numbers of the calls of one method. A wait for promotion makes a call every two seconds."""

SERIES_CALLS = 1 << 48
"""Numbers of one series. A message has 64 bits for the number of a call."""

PARTS_OF_SERIES = 1 << 4
"""Parts of the numbers of a series: one for its calls, the others for series within it."""

_CALLS = 4096  # Maximum number of retained calls, for ranks that are late for a failed call.


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
        """Events that other ranks have recorded, on the coordinator."""

    @property
    def is_uncommitted(self) -> bool:
        """Whether the call has failed before this rank allowed the commit."""
        return self.error is not None and not self.promised

    def take_heard(self) -> list[Heard]:
        """Removes and returns the events that ranks have sent with the call, on the coordinator."""
        heard, self.heard = self.heard, []
        return heard

    def late(self, exchange: int, names: Sequence[int]) -> list[int]:
        """Returns the names of late ranks, given all names. Called on the coordinator."""
        state = self.exchanges.get(exchange)
        arrived = set() if state is None else set(state.contributions)
        return [name for rank, name in enumerate(names) if rank not in arrived]

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
        """Returns the error that all ranks raise.

        After a promise, the message adds that the checkpoint may yet appear. The phase is that of
        this rank, unless another one is given.
        """
        if self.promised:
            message += ". The coordinator had begun to publish the checkpoint, which may yet appear"
        return RankTimeoutError(message, names, phase or self.phase, waited_s, self.promised)

    def error_of_lost(self, lost: RankTimeoutError) -> RankTimeoutError:
        """Returns the error of this call, given the error of a lost rank."""
        message = f"{lost.args[0]}. It had not finished {self.phase}"
        return self.timeout_error(message, list(lost.ranks), lost.seconds)


class Calls:
    """The calls of a rank by number, and the methods that a rank has left.

    Other threads may :meth:`get` a call, or its error. The relay's thread calls all other methods.
    """

    def __init__(self) -> None:
        self._calls: dict[int, CallState] = {}
        # Methods, by number -> the first call that a rank does not make.
        self._left: dict[int, tuple[int, RankTimeoutError]] = {}

    def __iter__(self) -> Iterator[CallState]:
        return iter(list(self._calls.values()))

    def get(self, number: int) -> CallState | None:
        """Returns a call; ``None`` if it has not begun on this rank."""
        return self._calls.get(number)

    def error(self, number: int) -> Exception | None:
        """Returns the error of a call that has failed."""
        call = self._calls.get(number)
        if call is not None:
            return call.error
        first, error = self._left.get(number // METHOD_CALLS, (0, None))
        return error if number >= first else None

    def begun(self, number: int) -> CallState:
        """Returns a call, which begins here if it has not yet."""
        call = self._calls.get(number)
        if call is None:
            error = self.error(number)
            call = self._calls[number] = CallState(number)
            call.error = error
            if len(self._calls) > _CALLS:
                idle = (n for n, c in self._calls.items() if not c.exchanges and c is not call)
                self._calls.pop(next(idle, number), None)
                self._calls[number] = call
        return call

    def leave(self, first: int, error: RankTimeoutError) -> bool:
        """Ends the calls of a method from ``first`` on; returns whether this is new."""
        method = first // METHOD_CALLS
        known, _ = self._left.get(method, (first + 1, error))
        if known <= first:
            return False
        self._left[method] = first, error
        if len(self._left) > _CALLS:
            del self._left[next(iter(self._left))]
        for call in self:
            if call.number >= first and call.number // METHOD_CALLS == method:
                call.end(error)
        return True
