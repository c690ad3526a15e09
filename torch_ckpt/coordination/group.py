"""The ranks that save, load or decide together: every one has the outcome, in time.

Ranks meet in exchanges: each sends a part to the coordinator, which is the group's first rank, and
gets an answer. All of them go along a tree of connections (``connect``, ``node``), beside the
collectives of training: a rank that is late or gone does not leave others in one of these.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextvars import ContextVar
from traceback import StackSummary
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_group,
    _get_process_group_store,
)

from torch_ckpt.coordination.node import COMMITTING, WRITING, Node, Values
from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.process_state import PROCESS

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Call",
    "Group",
    "claim_commit",
    "current_call",
    "group_of",
    "portable",
    "time_limit_s",
    "why",
]

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_TIMEOUT_S = 1800.0
"""As long as torch's own process groups wait by default."""

_PHASES = {"plan": "planning", "write": WRITING, "read": "reading"}
_GRACE_S = 5.0  # For the thread to say what is wrong, rather than that it says nothing.


class Group:
    """Ranks that make calls together, each call on all of them and in the same order.

    Its connections are its own, and calls are told apart by their numbers. So a save in the
    background goes on beside training, and beside other calls. The first call connects.

    Args:
        process_group: The ranks; ``None`` for a process that is alone.

    Attributes:
        rank: This one, as the group numbers it. Rank 0 is the coordinator.
        size: How many there are.

    Raises:
        ValueError: This process is none of the ranks.

    Example::

        group = group_of(None)
        slowest = group.decide("measuring", lambda: seconds, max, timeout_s=600)
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self.names = 0, 1, [0]
        if process_group is not None:
            self.names = dist.get_process_group_ranks(process_group)
            self.rank, self.size = dist.get_rank(process_group), len(self.names)
            if self.rank < 0:
                raise ValueError(f"rank {dist.get_rank()} is not in the process group")
            store = _store_of(process_group)
            self._connections = _Connections(store, self.rank, self.names)
        self._calls = itertools.count()

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == 0

    def call(self, timeout_s: float) -> Call:
        """Begins a call: all ranks begin the same ones in the same order.

        Raises:
            ValueError: ``timeout_s`` is no positive number of seconds.
        """
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"{timeout_s=} is no positive number of seconds")
        return Call(self, next(self._calls), timeout_s)

    def decide(
        self,
        what: str,
        own: Callable[[], T],
        decide: Callable[[list[T]], R],
        *,
        timeout_s: float,
    ) -> R:
        """Returns on every rank what the coordinator has decided.

        Args:
            what: What the ranks do here, for messages.
            own: Called on every rank.
            decide: Called on the coordinator, with what all ranks have returned.
            timeout_s: Seconds that this rank waits for the others.

        Raises:
            RankTimeoutError: A rank did not come.
            BaseException: What ``own`` or ``decide`` has raised, on every rank.
        """
        if self.size == 1:
            return decide([own()])
        with self.call(timeout_s) as call:
            try:
                return call.all_reduce(what, own, decide)
            except CheckpointException as error:
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
                cause.add_note(f"raised on rank {rank} of the group, when {what}")
                raise cause from None

    def series(self) -> Group:
        """The same ranks, for calls that are counted apart; all ranks call it.

        A call that only some of them make puts nothing out of step but this series.
        """
        series = copy.copy(self)
        series._calls = itertools.count((next(self._calls) + 1) << 32)
        return series

    def node(self, phase: str, timeout_s: float) -> Node:
        """The connections of this rank; the first call makes them, in this phase and time.

        Raises:
            RankTimeoutError: A rank has not come, or the store does not answer.
        """
        return self._connections.node(phase, timeout_s)

    def started(self, phase: str, timeout_s: float) -> Node:
        """The connections of this rank, which may not be made yet."""
        return self._connections.started(phase, timeout_s)

    @property
    def connected(self) -> Node | None:
        """The connections of this rank if they were begun."""
        return None if self.size == 1 else self._connections.made


class _Connections:
    """The connections of a rank, once they are needed.

    Args:
        store: Where the ranks find each other.
        rank: This one, as the group numbers it.
        names: The ranks as the whole job numbers them.
    """

    def __init__(self, store: Callable[[], Store], rank: int, names: list[int]) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._attempts = itertools.count()
        self._lock = threading.Lock()
        self.made: Node | None = None

    def started(self, phase: str, timeout_s: float) -> Node:
        with self._lock:
            if self.made is None:
                attempt = next(self._attempts)
                store = self._store
                self.made = Node(
                    lambda: PrefixStore(f"{attempt}", store()),
                    self._rank,
                    self._names,
                    phase,
                    timeout_s,
                )
            return self.made

    def node(self, phase: str, timeout_s: float) -> Node:
        node = self.started(phase, timeout_s)
        try:
            node.connected.result(timeout_s + _GRACE_S)
        except Exception as error:
            with self._lock:
                if self.made is node:
                    self.made = None  # The next call tries again.
                    node.abort()
            if isinstance(error, RankTimeoutError):
                raise
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            raise RankTimeoutError(
                f"rank {self._names[self._rank]} cannot use the store of its process group to find "
                f"the other ranks: {reason}",
                phase=phase,
            ) from error
        return node


class Call:
    """One save, load or decision of a group, on one rank.

    As a context it fails on all ranks if it raises on this one.

    Args:
        group: The ranks.
        number: Which call of the group it is.
        timeout_s: Seconds that this rank waits for others in each exchange.

    Every exchange raises :class:`~torch_ckpt.errors.RankTimeoutError`, the same on all ranks, if a
    rank is gone or later than ``timeout_s``.
    """

    def __init__(self, group: Group, number: int, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self.number = number
        self._exchanges = itertools.count()
        self._is_deciding = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (CheckpointException, RankTimeoutError)):
            self.fail(error)  # The others do not know of it.

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within the block, :func:`current_call` is this."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    # ---- As DCP has them ----

    def reduce_scatter(
        self, step: str, own: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """``own`` on every rank, ``reduce`` of all on the coordinator; to each rank its own part.

        Raises:
            CheckpointException: ``own`` or ``reduce`` has raised; maps ranks to their errors.
        """
        return cast(R, self._reduced(step, own, reduce, scatters=True))

    def all_reduce(self, step: str, own: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        """As :meth:`reduce_scatter`; what ``reduce`` returns goes to all ranks."""
        return cast(R, self._reduced(step, own, reduce, scatters=False))

    def barrier(self, phase: str) -> None:
        """Returns when all ranks are here."""
        self._exchange(phase, b"", lambda _: b"")

    # ---- What ranks agree on ----

    def any_rank(self, answer: bool, phase: str) -> bool:
        """Whether any rank says so."""
        return bool(
            self._exchange(phase, bytes([answer]), lambda parts: bytes([any(p[0] for p in parts)]))[
                0
            ]
        )

    def all_equal(self, answer: bytes, phase: str) -> bool:
        """Whether all ranks say the same."""

        def decide(parts: Sequence[Any]) -> bytes:
            return bytes([len({bytes(part) for part in parts}) == 1])

        return bool(self._exchange(phase, answer, decide)[0])

    def claim_commit(self) -> None:
        """Called by the coordinator before it publishes: from now on nobody gives up for good.

        Raises:
            RankTimeoutError: A rank has given the call up, is gone or does not answer. The
                checkpoint must not be published.
        """
        if not self._is_deciding or self.group.size == 1:
            return  # What a rank commits by itself is nobody else's.
        node = self.group.node(COMMITTING, self.timeout_s)
        claim = node.claim(self.number)
        try:
            claim.result(self.timeout_s)
        except TimeoutError as error:
            if isinstance(error, RankTimeoutError):
                raise
            raise self.fail(error) from None

    def fail(self, cause: BaseException) -> RankTimeoutError:
        """Fails the call on the other ranks; returns their error."""
        if self.group.size == 1:
            return RankTimeoutError(str(cause))
        rank = self.group.names[self.group.rank]
        node = self.group.connected
        phase, promised = ("beginning", False) if node is None else node.phase(self.number)
        error = RankTimeoutError(
            f"rank {rank} has left while {phase}: {type(cause).__qualname__}: {cause}",
            [rank],
            phase,
            may_be_committed=promised,
        )
        # Others may not have come yet, or never come: this rank does not wait for them.
        node = self.group.started(phase, self.timeout_s)
        node.fail(self.number, error)
        futures.wait([node.connected], min(self.timeout_s, _GRACE_S))
        return error

    # ---- Exchanges ----

    def _exchange(self, phase: str, part: bytes, decide: Callable[[Sequence[Any]], Values]) -> Any:
        """Sends a part to the coordinator, which decides; returns this rank's answer."""
        group, number = self.group, next(self._exchanges)
        if group.size == 1:
            answer = decide([part])
            return answer if isinstance(answer, bytes) else answer[0]
        try:
            node = group.node(phase, self.timeout_s)
            received = node.exchange(self.number, number, phase, part, self.timeout_s).result()
            if not group.is_coordinator:
                return received
            values = decide(received)
            node.answer(self.number, number, values).result()
        except Exception:
            raise
        except BaseException as error:  # An interrupt.
            self.fail(error)
            raise
        return values if isinstance(values, bytes) else values[0]

    def _reduced(
        self,
        step: str,
        own: Callable[[], Any],
        reduce: Callable[[list[Any]], Any],
        *,
        scatters: bool,
    ) -> Any:
        phase = _PHASES.get(step, step)
        if self.group.connected is not None:
            self.group.connected.enter(self.number, phase)
        sent: Any = _attempted(own)
        if self.group.size == 1:
            found = self._outcome(step, [sent], reduce)
            if isinstance(found, CheckpointException):
                raise found
            return found[0] if scatters else found
        kept: list[Any] = []  # What goes to all is not sent to the coordinator itself.

        def decide(parts: Sequence[Any]) -> Values:
            found = self._outcome(step, [pickle.loads(part) for part in parts], reduce)
            each = scatters and not isinstance(found, CheckpointException)
            kept[:] = [] if each else [_portable(found)]
            try:
                return _pickled_parts(found) if each else _pickled(found)
            except Exception as error:
                note = "; what was to be committed is" if phase == WRITING else ""
                failures = {0: self._unpicklable(phase, error, note)}
                kept[:] = [CheckpointException(step, failures)]
                return _pickled(kept[0])

        try:
            part = _pickled(sent)
        except Exception as error:
            part = _pickled(self._unpicklable(phase, error))
        answer = self._exchange(phase, part, decide)
        received = kept[0] if kept else pickle.loads(answer)
        if isinstance(received, CheckpointException):
            raise received
        return received

    def _outcome(self, step: str, values: list[Any], reduce: Callable[[list[Any]], Any]) -> Any:
        """What the coordinator makes of what all ranks have found, or the error of all."""
        failures = {r: value for r, value in enumerate(values) if _is_wrapped_exception(value)}
        if not failures:
            self._is_deciding = True
            with self.current():
                found = _attempted(lambda: reduce(values))
            self._is_deciding = False
            if not _is_wrapped_exception(found):
                return found
            if isinstance(found[0], RankTimeoutError):
                raise found[0]  # Known to all.
            failures = {0: found}
        return CheckpointException(step, cast(Any, failures))

    def _unpicklable(self, phase: str, cause: Exception, note: str = "") -> WRAPPED_EXCEPTION:
        """Takes the place of a value that does not pickle."""
        error = CheckpointError(
            f"rank {self.group.names[self.group.rank]} cannot pickle what it sends to the others "
            f"after {phase}: {type(cause).__qualname__}: {cause}{note}"
        )
        return _wrap_exception(error)


_current: ContextVar[Call | None] = ContextVar("torch_ckpt_call", default=None)


def current_call() -> Call | None:
    """The call that this thread is in; ``None`` within DCP's own functions."""
    return _current.get()


def time_limit_s() -> float:
    """Seconds that one rank waits for another in the call that this thread is in."""
    call = _current.get()
    return DEFAULT_TIMEOUT_S if call is None else call.timeout_s


def claim_commit() -> None:
    """Called by a writer at the last moment before it publishes a checkpoint.

    Raises:
        RankTimeoutError: The other ranks have given this save up, and must not see it succeed.

    Example::

        claim_commit()
        temporary.rename(final)
    """
    call = _current.get()
    if call is not None:
        call.claim_commit()


def group_of(process_group: dist.ProcessGroup | None, *, no_dist: bool = False) -> Group:
    """The group of a process group: one, as long as that is.

    Args:
        process_group: The ranks; all if ``None``.
        no_dist: Whether this process is alone all the same, as it is without ``torch.distributed``.

    Raises:
        ValueError: This process is none of the ranks.
    """
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return Group(None)
    key = process_group or _get_default_group()
    group: Group | None = PROCESS.groups.get(key)
    if group is None:
        group = PROCESS.groups[key] = Group(key)
    return group


def _store_of(group: dist.ProcessGroup) -> Callable[[], Store]:
    """Connects to the group's store anew: another thread may wait on the connection it has."""
    served: Any = _get_process_group_store(group)
    # A launcher may keep one store over all of its attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return lambda: PrefixStore(f"torch_ckpt/{attempt}", served.clone())


def _attempted(function: Callable[[], Any]) -> Any:
    """What it returns, or its error as DCP sends it."""
    try:
        return function()
    except BaseException as error:
        return _wrap_exception(error)


def _pickled(value: object) -> bytes:
    return pickle.dumps(_portable(value))


def _pickled_parts(values: Sequence[object]) -> list[bytes]:
    """One object for several ranks is pickled once."""
    distinct = {id(value): _pickled(value) for value in values}
    return [distinct[id(value)] for value in values]


def _portable(value: T) -> T:
    """The value, with an exception that cannot travel between ranks replaced by one that can."""
    if isinstance(value, CheckpointException):
        failures = {rank: _portable(failure) for rank, failure in value.failures.items()}
        return cast(T, CheckpointException(value.args[0], failures))
    if not _is_wrapped_exception(value):
        return value
    error, trace = cast(tuple[BaseException, StackSummary], value)
    return cast(T, (portable(error), trace if _travels(trace) else StackSummary()))


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it does not pickle."""
    if isinstance(error, CheckpointException):
        return _portable(error)
    return error if _travels(error) else CheckpointError(f"{type(error).__qualname__}: {error}")


def _travels(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def why(error: BaseException) -> str:
    """An error in one line, with those of all ranks if it is DCP's.

    Example::

        assert why(ValueError("no")) == "ValueError: no"
    """
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {why(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return f"{type(error).__qualname__}: {error}"
