"""Groups of ranks that save, load or decide together, within a deadline.

A call consists of exchanges. In an exchange, each rank sends a contribution to the coordinator,
which is the group's first rank, and receives an answer. Messages use a tree of connections
(``connect``, ``relay``) and not the collectives of training. So a late or lost rank never leaves
another rank in a collective.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import (
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)
from torch.distributed.distributed_c10d import _get_default_group

from torch_ckpt.coordination.arguments import comparing
from torch_ckpt.coordination.call_state import (
    METHOD_CALLS,
    PARTS_OF_SERIES,
    SERIES_CALLS,
    CallState,
)
from torch_ckpt.coordination.connections import Connections
from torch_ckpt.coordination.contributions import Contribution, RaisedError, Values
from torch_ckpt.coordination.current_call import CURRENT, claim_commit, current_call, setting
from torch_ckpt.coordination.jobs import Cancellable, Jobs
from torch_ckpt.coordination.lateness import COMMITTING, WRITING
from torch_ckpt.coordination.loop import OwnNumbers
from torch_ckpt.coordination.methods import calls_of_method, method
from torch_ckpt.coordination.portable import (
    attempted,
    first_error,
    pickled,
    pickled_values,
    portable,
    reference_to,
    unpicklable,
    unpickled,
    unpickled_error,
    value_of,
    why,
)
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.coordination.waiting import GRACE_S, duration, result_of
from torch_ckpt.errors import CancelledError, CheckpointError, RankTimeoutError
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records import record as records
from torch_ckpt.records.figures import nbytes_text

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Call",
    "Cancellable",
    "Group",
    "claim_commit",
    "group_of",
    "time_limit_s",
]

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_TIMEOUT_S = 1800.0
"""Default deadline in seconds, the same as that of gloo process groups."""

_PHASES = {"plan": "planning", "write": WRITING, "read": "reading"}
_STEPS = {phase: step for step, phase in _PHASES.items()}

_DECIDED_IN = {"plan": "plan", "write": "commit", "read": "", "commit": "commit"}
"""Step that the record has as a phase -> the phase in which the coordinator decides."""

_ALONE = Connections(None, 0, [0])  # For a process without other ranks.


class Group:
    """Ranks that make the same calls in the same order.

    A group does not use the connections of its process group: its first call opens separate ones.
    Each message contains the number of its call. So a background save can run at the same time as
    training and other calls. All groups of one process group share connections (:meth:`series`).

    The process group is ``None`` for a single process. ``rank`` is the rank within the group; 0 is
    the coordinator. ``names`` are the numbers of the ranks in messages: by default, their global
    ranks in the training processes. Raises CheckpointError if this process was forked from a rank
    of the process group, and ValueError if it is not a rank of it.

    Example::

        group = group_of(None)
        slowest = group.decide("measuring", lambda: seconds, max, timeout_s=600)
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, names: list[int] | None = None
    ) -> None:
        self.rank, self.size, self.names = 0, 1, names or [0]
        self.connections = _ALONE
        if process_group is not None:
            self.names = names or dist.get_process_group_ranks(process_group)
            self.rank, self.size = dist.get_rank(process_group), len(self.names)
            self.connections = Connections(process_group, self.rank, self.names)
        self._first, self._methods = 0, itertools.count(0, METHOD_CALLS)
        self._span = SERIES_CALLS
        self._series = itertools.count(self._span, self._span)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.rank == 0

    def call(self, timeout_s: float) -> Call:
        """Begins a call. All ranks must begin the same calls in the same order.

        Raises CheckpointError if this process is a forked child of the rank, RankTimeoutError on
        all ranks if the system has no more threads, and ValueError unless ``timeout_s`` is a
        positive number. The call then fails on the other ranks.
        """
        try:
            limit_s = duration("timeout_s", timeout_s)
        except ValueError as error:
            self._next_call(DEFAULT_TIMEOUT_S).fail(error)
            raise
        return self._next_call(limit_s)

    def _next_call(self, limit_s: float) -> Call:
        numbers = calls_of_method(self.connections) or self._methods
        try:
            self.connect()  # First: a call that this rank refuses must not consume a number.
        except RankTimeoutError:
            next(numbers)  # The call of all ranks has failed.
            raise
        return Call(self, next(numbers), limit_s)

    def method(self, activity: str, timeout_s: float) -> AbstractContextManager[None]:
        """If the block raises on one rank, fails it on all ranks; see ``methods``."""
        if self.size == 1:
            return contextlib.nullcontext()
        limit_s = DEFAULT_TIMEOUT_S
        with contextlib.suppress(ValueError):
            limit_s = duration("timeout_s", timeout_s)
        return method(self.connections, self._methods, activity, limit_s)

    def connect(self) -> None:
        """Begins to connect to the other ranks without waiting. Raises as :meth:`call`.

        So the end of another process is detected even before this rank waits for it.
        """
        if self.size > 1:
            self.connections.started("beginning")

    def decide(
        self,
        activity: str,
        own: Callable[[], T],
        decide: Callable[[list[T]], R],
        *,
        timeout_s: float,
        recorded: str = "",
        equal: Mapping[str, object] | None = None,
    ) -> R:
        """Computes a value on the coordinator from the values of all ranks, and returns it on each.

        ``activity``, such as ``"measuring"``, is for messages. ``recorded`` is the phase for the
        record, if any. Every rank calls ``own`` for its value, and the coordinator calls ``decide``
        with the list of all values. An error of either is raised on every rank, and so is
        RankTimeoutError if a rank did not arrive within ``timeout_s``. ``equal`` contains
        arguments, by name, that must be equal on all ranks: otherwise, every rank raises
        ValueError.
        """
        if self.size == 1:
            with records.phase(recorded):
                return decide([own()])

        compared = comparing(own, decide, equal or {}, names=self.names, activity=activity)
        with self.call(timeout_s) as call, first_error(f"of the group, while {activity}"):
            return call.all_reduce(activity, *compared, recorded)

    def series(self) -> Group:
        """Returns a group of the same ranks that numbers its calls separately. All ranks call it.

        If only some ranks make a call of this series, other series remain usable. A series within a
        series uses a part of its numbers: even if only some ranks create it, the next series of the
        whole group is the same on all ranks.
        """
        series = copy.copy(self)
        series._first, series._span = next(self._series), self._span // PARTS_OF_SERIES
        series._methods = itertools.count(series._first, METHOD_CALLS)
        series._series = itertools.count(series._first + series._span, series._span)
        series.connect()
        return series

    def numbered(self, number: int, timeout_s: float) -> Call:
        """Returns a call that only some ranks may make. If one of them raises, it fails on all."""
        return Call(self, self._first + number, timeout_s)


class Call:
    """One save, load or decision of a group, on one rank.

    As a context manager, it fails the call on all ranks if the block raises on this rank. If a rank
    is lost or misses the deadline, every exchange raises the same
    :class:`~torch_ckpt.errors.RankTimeoutError` on all ranks. ``number`` is the number of the call
    within the group. In each exchange, this rank waits ``timeout_s`` for others.

    The block must contain all code that may raise on a single rank, such as a ``state_dict()`` of
    the program. If such code follows the last exchange, call :meth:`begin_last` before it.
    """

    def __init__(self, group: Group, number: int, timeout_s: float) -> None:
        self.group, self.timeout_s, self.number = group, timeout_s, number
        self._exchanges = OwnNumbers()
        self._is_deciding = False
        # The error that every rank raises, or its equal. The frames of its traceback refer to this.
        self._shared_error: Callable[[], BaseException | None] = lambda: None
        self._jobs = Jobs[Cancellable]()  # Those of the present step on this rank.
        # On the coordinator: the exchange in which it waits, and the ranks that were too late.
        self._awaited: tuple[int, str, float] | None = None
        self._late: tuple[str, list[int], float] | None = None
        self.phase = "beginning"
        """What this rank does, for messages."""
        self.written_nbytes: Callable[[], tuple[int, int]] | None = None
        """Returns the bytes that this rank has written, and the total, while it writes."""
        self._last_phase = ""
        self.record = records.current_record()
        """The record of the save or load to which this call belongs, if any."""
        if self.record is not None:
            self.record.joined(self)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self._shared_error():
            self.fail(error)
        if error is None and self._last_phase:
            phase, self._last_phase = self._last_phase, ""
            try:
                self.barrier(phase)
            except BaseException as ended:
                if ended is not self._shared_error():
                    self.fail(ended)
                raise

    def begin_last(self, phase: str) -> None:
        """Begins the last phase, without an exchange: the end of the block exchanges messages.

        So a rank that raises in this phase fails the call on all ranks.
        """
        self._last_phase = phase
        relay = self.group.connections.current
        if relay is not None:
            relay.post(relay.enter, self.number, phase, self._jobs)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes :func:`current_call` return this call within the block, which must not fork."""
        recording = contextlib.nullcontext() if self.record is None else self.record.current()
        with self._exchanges.one_process(), setting(CURRENT, self), recording:
            yield

    def progress(self) -> str:
        """Returns the progress of this rank, for the log of a long wait."""
        rank, written = self.group.names[self.group.rank], self.written_nbytes
        done, total = (0, 0) if written is None else written()
        nbytes = f", {nbytes_text(done)} of {nbytes_text(total)} written" if total else ""
        return f"rank {rank} is {self.phase}{nbytes}"

    @property
    def _state(self) -> CallState | None:
        relay = self.group.connections.current
        return None if relay is None else relay.calls.get(self.number)

    # ---- The record ----

    def heard(self) -> list[records.Heard]:
        """Returns the events that other ranks have sent since the previous call."""
        state = self._state
        return [] if state is None else state.take_heard()

    def late(self) -> tuple[str, list[int], float] | None:
        """Returns the phase that other ranks have not finished, these ranks, and when it began."""
        awaited, late, names = self._awaited, self._late, self.group.names
        if awaited is not None:
            (exchange, recorded, begin), state = awaited, self._state
            late = recorded, names if state is None else state.late(exchange, names), begin
        return late if late is not None and late[0] else None

    # ---- DCP's collectives ----

    def reduce_scatter(
        self, step: str, own: Callable[[], T], reduce: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """Calls ``own`` on every rank, and ``reduce`` with all results on the coordinator.

        Returns this rank's element of the result of ``reduce``. Raises a CheckpointException, whose
        ``failures`` maps ranks to their errors, if ``own`` or ``reduce`` raised.
        """
        return cast(R, value_of(self._reduced(step, own, reduce, "", scatters=True)))

    def all_reduce(
        self, step: str, own: Callable[[], T], reduce: Callable[[list[T]], R], recorded: str = ""
    ) -> R:
        """Like :meth:`reduce_scatter`, but returns the whole result of ``reduce`` on every rank.

        ``recorded`` is the phase for the record, if the step is not one of DCP's.
        """
        return cast(R, value_of(self._reduced(step, own, reduce, recorded, scatters=False)))

    def barrier(self, phase: str) -> None:
        """Waits until all ranks have called it."""
        self._exchange(phase, b"", lambda _: b"")

    # ---- Decisions ----

    def any_rank(self, answer: bool, phase: str) -> bool:
        """Returns whether ``answer`` is true on any rank."""
        return self.decide(bytes([answer]), lambda answers: b"\1" in answers, phase)

    def decide(self, answer: bytes, decide: Callable[[Sequence[bytes]], bool], phase: str) -> bool:
        """Returns the coordinator's result of ``decide`` on every rank.

        ``decide`` receives the answers of all ranks, and must not raise. ``phase`` is for messages.
        """

        def decided(answers: Sequence[Any]) -> bytes:
            return bytes([decide([bytes(answer) for answer in answers])])

        return bool(self._exchange(phase, answer, decided)[0])

    def claim_commit(self) -> None:
        """Acquires the right to publish the checkpoint. Called by the coordinator.

        From then on, a rank that fails the call reports that the checkpoint may be committed.
        Raises RankTimeoutError if a rank has failed the call, is lost or does not answer. The
        checkpoint must then not be published.
        """
        if not self._is_deciding or self.group.size == 1:
            return  # A rank that saves alone needs no permission to commit.
        relay = self.group.connections.relay(COMMITTING, self.timeout_s)
        claim = relay.submit(relay.claim, self.number)
        try:
            # After the deadline, the communication thread names the ranks that are late.
            limit_s = self.timeout_s + GRACE_S
            result_of(claim, lambda: "the promises of all ranks", timeout_s=limit_s, is_named=False)
        except Exception as error:
            failed = error if isinstance(error, RankTimeoutError) else self.fail(error)
            raise self._as_shared(failed) from None

    def raise_if_failed(self) -> None:
        """Raises the error of the call if a rank has failed it, or has ended.

        For code that waits for other ranks without an exchange of this call. The error is a
        CheckpointException if a rank has raised, and a RankTimeoutError if one was late, stuck or
        dead.
        """
        relay = self.group.connections.current
        error = None if relay is None else relay.error(self.number)
        if error is not None:
            raise self._as_shared(error)

    @property
    def is_uncommitted(self) -> bool:
        """Whether the call has failed, and the coordinator can no longer commit."""
        return (state := self._state) is not None and state.is_uncommitted

    def cancel_on_failure(self, job: Cancellable) -> None:
        """Cancels a job of the present step when the call fails on any rank.

        Any thread may call it, while a function of :meth:`reduce_scatter` or :meth:`all_reduce`
        runs.
        """
        self._jobs.add(job)

    def fail(self, cause: BaseException) -> RankTimeoutError:
        """Ends the jobs of this rank, fails the call on the others, and returns their error."""
        self._jobs.cancel()
        if self.group.size == 1:
            return RankTimeoutError(why(cause))
        # Some ranks may never connect, so this rank waits for a short time only.
        relay = self.group.connections.started("beginning")
        relay.deadline.begin(self.timeout_s, "beginning")
        failed: futures.Future[RankTimeoutError]
        failed = relay.submit(relay.fail_here, self.number, why(cause))
        futures.wait([failed], min(self.timeout_s, GRACE_S))
        with contextlib.suppress(Exception):
            return failed.result(0)
        rank = self.group.names[self.group.rank]
        return RankTimeoutError(f"rank {rank} failed: {why(cause)}", [rank])

    # ---- Exchanges ----

    def _exchange(
        self,
        phase: str,
        contribution: bytes,
        decide: Callable[[Sequence[Any]], Values],
        *,
        is_error: bool = False,
        recorded: str = "",
    ) -> Any:
        """Sends a contribution to the coordinator, which calls ``decide`` with all contributions.

        Returns this rank's answer. With ``is_error``, the contribution is an error, which fails the
        call on all ranks.
        """
        group, number, self.phase = self.group, next(self._exchanges), phase
        if group.size == 1:
            answer = decide([contribution])
            return answer if isinstance(answer, bytes) else answer[0]
        with self._sharing_errors():
            relay = group.connections.relay(phase, self.timeout_s)
        events = b""
        if self.record is not None and not group.is_coordinator:
            events = self.record.recorder.take()  # Other ranks would not know of its error.
        with self._sharing_errors():
            begin = time.monotonic()
            own = Contribution(self.timeout_s, begin, contribution, is_error, events)
            if group.is_coordinator:
                self._awaited = number, recorded, begin
            future = relay.submit(relay.begin, self.number, number, phase, own)
            others = f"the other ranks, while {phase}"  # The communication threads name them.
            try:
                received = result_of(future, lambda: others, is_named=False)
            except RankTimeoutError as error:
                self._late = (recorded, list(error.ranks), begin) if group.is_coordinator else None
                raise
            except TimeoutError as error:  # A signal ends this process before the deadline.
                raise self.fail(relay.naming_late(error, self.number, number)) from None
            finally:
                self._awaited = None
        if not group.is_coordinator:
            return received
        values = decide(received)
        with self._sharing_errors():
            relay.submit(relay.answer, self.number, number, values).result()
        return values if isinstance(values, bytes) else values[0]

    @contextlib.contextmanager
    def _sharing_errors(self) -> Iterator[None]:
        """Records an error of the connections, which the other ranks raise as well.

        A signal handler may raise any other one, which the others do not know.
        """
        try:
            yield
        except (RankTimeoutError, RaisedError) as error:
            raise self._as_shared(error) from None

    def _as_shared(self, error: Exception) -> BaseException:
        """Records the error that every rank raises, and returns it as this rank raises it."""
        # The connections retain their error. Its traceback would keep the frames of this call
        # alive.
        error.__traceback__ = None
        shared: BaseException = copy.copy(error) if isinstance(error, RankTimeoutError) else error
        if isinstance(error, RaisedError):
            names, raised = self.group.names, error.failures.items()
            failures = {rank: unpickled_error(data, names[rank]) for rank, data in raised}
            shared = CheckpointException(_STEPS.get(error.phase, error.phase), failures)
        self._shared_error = reference_to(shared)
        return shared

    @contextlib.contextmanager
    def _working(self, phase: str) -> Iterator[None]:
        """Lets a failure of the call end the jobs of this rank within the block."""
        relay = self.group.connections.current
        if relay is not None:
            relay.post(relay.enter, self.number, phase, self._jobs)
        try:
            yield
        finally:
            self._jobs.clear()

    def _reduced(
        self,
        step: str,
        own: Callable[[], Any],
        reduce: Callable[[list[Any]], Any],
        recorded: str,
        *,
        scatters: bool,
    ) -> Any:
        """Returns this rank's result, or the CheckpointException that all ranks raise."""
        phase = _PHASES.get(step, step)
        mine = step if step in _DECIDED_IN else recorded
        deciding = _DECIDED_IN.get(step, recorded)
        self.phase = phase
        with self._working(phase):
            own_value: Any = attempted(own, mine)
        if self.group.size == 1:
            outcome = self._outcome(step, [own_value], reduce, deciding, scatters)
            is_error = isinstance(outcome, CheckpointException)
            return outcome[0] if scatters and not is_error else outcome
        retained: list[Any] = []  # The coordinator uses a shared outcome without pickling.

        def decide(contributions: Sequence[Any]) -> Values:
            values = list(map(unpickled, contributions, self.group.names))
            outcome = self._outcome(step, values, reduce, deciding, scatters)
            each = scatters and not isinstance(outcome, CheckpointException)
            retained[:] = [] if each else [portable(outcome)]
            try:
                return pickled_values(outcome) if each else pickled(outcome)
            except Exception as error:
                note = "; the checkpoint is committed" if phase == WRITING else ""
                failures = {0: unpicklable(self.group.names[0], phase, error, note)}
                retained[:] = [CheckpointException(step, failures)]
                return pickled(retained[0])

        try:
            contribution = pickled(own_value)
        except Exception as error:
            own_value = unpicklable(self.group.names[self.group.rank], phase, error)
            contribution = pickled(own_value)
        cause = own_value[0] if _is_wrapped_exception(own_value) else None
        # A cancelled rank waits for the error that is the cause.
        is_error = cause is not None and not isinstance(cause, CancelledError)
        try:
            answer = self._exchange(phase, contribution, decide, is_error=is_error, recorded=mine)
        except RankTimeoutError as error:
            if cause is not None and is_error:
                error.add_note(f"this rank had failed before, while {phase}: {why(cause)}")
            raise
        received = retained[0] if retained else unpickled(answer, self.group.names[0])
        if _is_wrapped_exception(received):  # Unreadable: the coordinator sends none.
            return CheckpointException(step, {0: received})
        if isinstance(received, CheckpointException):
            self._shared_error = reference_to(received)
        return received

    def _outcome(
        self,
        step: str,
        values: list[Any],
        reduce: Callable[[list[Any]], Any],
        deciding: str,
        scatters: bool,
    ) -> Any:
        """Returns the result of ``reduce`` on the coordinator, or the error for all ranks."""
        failures = {r: value for r, value in enumerate(values) if _is_wrapped_exception(value)}
        if not failures:
            self._is_deciding = True
            with self.current():
                result = attempted(lambda: reduce(values), deciding)
            self._is_deciding = False
            if not _is_wrapped_exception(result):
                if not scatters or len(result) == self.group.size:
                    return result
                result = _wrap_exception(
                    CheckpointError(f"{len(result)} results of {step} for {self.group.size} ranks")
                )
            elif result[0] is self._shared_error():
                raise cast(BaseException, result[0])
            failures = {0: result}
        return CheckpointException(step, cast(Any, failures))


def time_limit_s() -> float:
    """Returns the deadline, in seconds, of exchanges in the call that runs in this thread."""
    call = current_call()
    return DEFAULT_TIMEOUT_S if call is None else call.timeout_s


def group_of(
    process_group: dist.ProcessGroup | None,
    *,
    no_dist: bool = False,
    names: list[int] | None = None,
) -> Group:
    """Returns the group of a process group. The same process group always has the same group.

    ``None`` stands for the default process group. With ``no_dist``, or without
    ``torch.distributed``, the group consists of this process alone. Raises ValueError if this
    process is not a rank of the process group.
    """
    watch_storage()  # Every save and load begins here.
    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return Group(None)
    key = process_group or _get_default_group()
    if cast(object, key) is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group")
    group: Group | None = PROCESS.groups.get(key)
    if group is None:
        group = PROCESS.groups[key] = Group(key, names)
    return group
