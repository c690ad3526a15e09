"""Bounds how long a rank waits for another in DCP, and says which one it was.

DCP's ranks meet in collectives, where a rank waits for as long as the process group allows, for
nobody knows whom; and a group of which some ranks are in a collective and others are not is lost to
training. So each collective of a bounded call begins with a roll call: a rank enters when all are
there. When one is not in time, all raise the same error, and so does that one when it comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from traceback import StackSummary
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint import (
    _async_process_executor,
    _async_thread_executor,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.distributed_c10d import _get_default_group

from torch_ckpt.coordination.replan import PlanUnknownError, replanning
from torch_ckpt.coordination.roll_call import COMMITTING, RollCalls, claimable
from torch_ckpt.coordination.tree_exchange import TreeExchange
from torch_ckpt.errors import CheckpointError, RankTimeoutError

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "BoundedExchange",
    "bounded_call",
    "bounded_everywhere",
    "take_part_in_dcp",
    "time_limit_s",
]

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_TIMEOUT_S = 1800.0
"""As long as torch's own process groups wait by default: what succeeds without does so with it."""

_WRITING = "writing"
_PHASES = {"plan": "planning", "write": _WRITING, "read": "reading"}


def _checked(timeout_s: float) -> float:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"{timeout_s=} is no positive number of seconds")
    return timeout_s


@dataclasses.dataclass
class _Call:
    """A bounded save or load of this thread, or of a background thread that it has begun."""

    timeout_s: float
    roll_calls: RollCalls | None = None
    name: str | None = None
    """That of the roll calls, where they are not known yet."""
    taken: bool = False
    """Whether an exchange has taken the roll calls or the name for its own."""


_call: ContextVar[_Call | None] = ContextVar("torch_ckpt_call", default=None)
_process_timeouts_s: list[float] = []


@contextlib.contextmanager
def bounded_call(
    timeout_s: float | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Iterator[RollCalls | None]:
    """Bounds one save or load of this thread, or a background save that it begins.

    An error of this rank alone, wherever in the call, is told to the others at once. Yields the
    roll calls of the call, if there is anybody to wait for.

    Args:
        timeout_s: Seconds that one rank waits for another; ``None`` for those of the call around
            this, or of :func:`bounded_everywhere`.
        group: The ranks of the call; all if ``None``.
        no_dist: Whether the call is this rank's alone.

    Raises:
        ValueError: ``timeout_s`` is no positive number of seconds.

    Example::

        with bounded_call(600):
            dcp.save(state, storage_writer=FastWriter("run/step-100"))
    """
    take_part_in_dcp()
    outer = _call.get()
    if timeout_s is None and (outer is not None or not _process_timeouts_s):
        yield None
        return
    limit_s = _process_timeouts_s[-1] if timeout_s is None else _checked(timeout_s)
    call = _Call(limit_s)
    if not no_dist and dist.is_available() and dist.is_initialized():
        call.roll_calls = _roll_calls(group, limit_s)
    token = _call.set(call)
    try:
        with _telling_others(call):
            yield call.roll_calls
    finally:
        _call.reset(token)


def time_limit_s() -> float:
    """Seconds that one rank waits for another in the call of DCP that this thread is in."""
    call = _call.get()
    if call is not None:
        return call.timeout_s
    return _process_timeouts_s[-1] if _process_timeouts_s else DEFAULT_TIMEOUT_S


@contextlib.contextmanager
def bounded_everywhere(timeout_s: float) -> Iterator[None]:
    """Bounds what any thread calls of DCP meanwhile; the innermost of several counts.

    Args:
        timeout_s: Seconds that one rank waits for another.

    Raises:
        ValueError: ``timeout_s`` is no positive number of seconds.

    Example::

        with bounded_everywhere(600):
            dcp.load(state, storage_reader=FastReader("run/step-100"))
    """
    take_part_in_dcp()
    _process_timeouts_s.append(_checked(timeout_s))
    try:
        yield
    finally:
        _process_timeouts_s.remove(timeout_s)


@contextlib.contextmanager
def _telling_others(call: _Call | None) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, RankTimeoutError):
        raise  # Known to all.
    except BaseException as error:
        if call is not None and call.roll_calls is not None:
            call.roll_calls.call_off(error)
        raise


def _roll_calls(
    group: dist.ProcessGroup | None, timeout_s: float, name: str | None = None
) -> RollCalls | None:
    """Those of a call of the group; ``None`` where there is nobody to wait for."""
    if dist.get_rank(group) < 0 or dist.get_world_size(group) == 1:
        return None
    return RollCalls(_get_default_group() if group is None else group, timeout_s, name)


def _roll_calls_of_exchange(group: dist.ProcessGroup | None) -> RollCalls | None:
    """What an exchange begun here and now takes for its own; ``None`` if it is not bounded."""
    call = _call.get()
    if call is None:
        return _roll_calls(group, _process_timeouts_s[-1]) if _process_timeouts_s else None
    if call.taken or (
        call.roll_calls is not None and call.roll_calls.group is not (group or _get_default_group())
    ):
        return _roll_calls(group, call.timeout_s)
    call.taken = True
    if call.roll_calls is None:
        call.roll_calls = _roll_calls(group, call.timeout_s, call.name)
    return call.roll_calls


class BoundedExchange(_DistWrapper):
    """DCP's exchanges between ranks.

    Where the current call is bounded, each is held along a tree, after a roll call.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int
    ) -> None:
        super().__init__(group, use_dist, coordinator_rank)
        self._calls = _roll_calls_of_exchange(group) if use_dist else None
        self._tree: TreeExchange | None = None
        if self._calls is not None:
            self._tree = TreeExchange(self._calls, root=coordinator_rank)
        self._step = self._phase = "finishing"

    def gather_object(self, object: T) -> list[T] | None:
        """Waits for all ranks, then gathers."""
        if not self.use_dist:
            return super().gather_object(object)
        sent = self._own_part(object)
        with self._all_here(self._phase):
            if self._tree is None:
                return super().gather_object(cast(T, sent))
            parts = self._tree.gather(sent.pickled)
            return None if parts is None else [pickle.loads(part) for part in parts]

    def all_gather_object(self, object: T) -> list[T]:
        """Waits for all ranks, then gathers on each of them."""
        if not self.use_dist:
            return super().all_gather_object(object)
        sent = self._own_part(object)
        with self._all_here(self._phase):
            if self._tree is None:
                return super().all_gather_object(cast(T, sent))
            return [pickle.loads(part) for part in self._tree.all_gather(sent.pickled)]

    def scatter_object(self, object_list: list[T] | None) -> T:
        """Waits for all ranks, then scatters."""
        if not self.use_dist:
            return super().scatter_object(object_list)
        sent = None if object_list is None else self._parts_of_all(object_list)
        with self._all_here(self._phase):
            if self._tree is None:
                return super().scatter_object(cast(list[T] | None, sent))
            parts = None if sent is None else [part.pickled for part in sent]
            return cast(T, pickle.loads(self._tree.scatter(parts)))

    def broadcast_object(self, object: T | None) -> T:
        """Waits for all ranks, then broadcasts."""
        if not self.use_dist:
            return super().broadcast_object(object)
        sent: _Pickled | None = None
        if self.is_coordinator:
            object = _portable(object)
            try:
                sent = _Pickled(object)
            except Exception as error:
                note = "; what was to be committed is" if self._phase == _WRITING else ""
                object = cast(T, self._failure_of_all(error, note))
                sent = _Pickled(object)
        with self._all_here(COMMITTING if self._phase == _WRITING else self._phase):
            if self._tree is None:
                received = super().broadcast_object(cast(T, sent))
            else:
                received = pickle.loads(
                    self._tree.broadcast(None if sent is None else sent.pickled)
                )
        # Its own value is not sent to the coordinator.
        return cast(T, object) if self.is_coordinator else received

    def barrier(self) -> None:
        """Waits for all ranks, then for all of them to have done so."""
        with self._all_here("finishing"):
            super().barrier()

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """As DCP's, once more where ranks have referred to plans that the coordinator lacks."""
        self._begin(step)
        try:
            return super().reduce_scatter(step, map_fun, reduce_fun)
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            if not reasons or not all(isinstance(r, PlanUnknownError) for r in reasons):
                raise
        with replanning():
            return super().reduce_scatter(step, map_fun, reduce_fun)

    def all_reduce(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]
    ) -> R:
        """As DCP's; what ``reduce_fun`` commits can be claimed."""
        self._begin(step)

        def reduce(results: list[T]) -> R:
            with claimable(self._calls):
                return reduce_fun(results)

        return super().all_reduce(step, map_fun, reduce)

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """As DCP's."""
        self._begin(step)
        return super().all_gather(step, map_fun)

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """As DCP's."""
        self._begin(step)
        return super().broadcast(step, map_fun)

    def _begin(self, step: str) -> None:
        self._step, self._phase = step, _PHASES.get(step, step)

    def _own_part(self, value: object) -> _Pickled:
        """The value as it is sent to be gathered; an error for all ranks if it does not pickle."""
        try:
            return _Pickled(value)
        except Exception as error:
            return _Pickled(self._failure(error))

    def _parts_of_all(self, values: list[T]) -> list[_Pickled]:
        """What is sent to each rank; one object for several, such as an error, is pickled once."""
        try:
            distinct = {id(value): value for value in values}
            sent = {key: _Pickled(value) for key, value in distinct.items()}
            return [sent[id(value)] for value in values]
        except Exception as error:
            return [_Pickled(self._failure_of_all(error))] * len(values)

    def _failure_of_all(self, cause: Exception, note: str = "") -> CheckpointException:
        return CheckpointException(self._step, {self.rank: self._failure(cause, note)})

    def _failure(self, cause: Exception, note: str = "") -> WRAPPED_EXCEPTION:
        """Takes the place of a value that does not pickle."""
        error = CheckpointError(
            f"rank {dist.get_rank()} cannot pickle what it sends to the others after "
            f"{self._phase}: {type(cause).__qualname__}: {cause}{note}"
        )
        return _wrap_exception(error)

    @contextlib.contextmanager
    def _all_here(self, phase: str) -> Iterator[None]:
        """Has the body run on all ranks or on none."""
        if self._calls is None:
            yield
            return
        self._calls.wait_for_all(phase)
        try:
            yield
        except RankTimeoutError:
            raise  # Known to all.
        except Exception as error:
            raise self._calls.call_off(error) from error
        except BaseException as error:  # An interrupt.
            self._calls.call_off(error)
            raise


class _Pickled:
    """A value that is unpickled where it arrives.

    Pickling it as torch sends it, in a collective in which the other ranks wait, is a copy and does
    not raise: what does not pickle does so here, before.
    """

    def __init__(self, value: object) -> None:
        self.pickled = pickle.dumps(_portable(value))

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.pickled,)


def _portable(value: T) -> T:
    """The value, with an exception that cannot travel between ranks replaced by one that can."""
    if isinstance(value, CheckpointException):
        failures = {rank: _portable(failure) for rank, failure in value.failures.items()}
        return cast(T, CheckpointException(value.args[0], failures))
    if not _is_wrapped_exception(value):
        return value
    error, trace = cast(tuple[BaseException, StackSummary], value)
    if not _travels(error):
        error = CheckpointError(f"{type(error).__qualname__}: {error}")
    return cast(T, (error, trace if _travels(trace) else StackSummary()))


def _travels(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


class _ContextThreadPool(ThreadPoolExecutor):
    """Runs what is submitted as a part of the bounded call that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        def run() -> T:
            with _telling_others(_call.get()):
                return fn(*args, **kwargs)

        return super().submit(copy_context().run, run)


class _BoundedRequest(_async_process_executor._AsyncCheckpointRequest):
    """An order to save that takes its time limit along to the process that saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        call = _call.get()
        self.timeout_s = None if call is None else call.timeout_s
        # All ranks give this order under the same name, even if some have given fewer of them.
        calls = None if call is None else call.roll_calls
        self.name = None if calls is None else f"order {calls.name}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        take_part_in_dcp()
        _call.set(None if self.timeout_s is None else _Call(self.timeout_s, name=self.name))


@functools.cache
def take_part_in_dcp() -> None:
    """Puts this module's classes in the place of those that they extend, in this process.

    Once and for good: with no deadline they do what DCP's own do, and saves that go on in the
    background would miss what is put back.
    """
    for module in (state_dict_saver, state_dict_loader, _async_process_executor):
        vars(module)["_DistWrapper"] = BoundedExchange
    for module in (_async_thread_executor, _async_process_executor):
        vars(module)["ThreadPoolExecutor"] = _ContextThreadPool
    vars(_async_process_executor)["_AsyncCheckpointRequest"] = _BoundedRequest
