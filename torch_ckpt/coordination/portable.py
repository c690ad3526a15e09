"""Serialized forms of values and errors, which ranks send to each other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from traceback import StackSummary
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.distributed.checkpoint.api import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)

from torch_ckpt._core.unpickling import allow_in_messages, unpickle
from torch_ckpt.errors import (
    CheckpointError,
    UnsupportedError,
    pickles,
    portable_error,
    typed_text_of,
)
from torch_ckpt.records import record as records

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "attempted",
    "drop_frames",
    "first_error",
    "pickled",
    "pickled_values",
    "portable",
    "reference_to",
    "unpicklable",
    "unpickled",
    "unpickled_error",
    "value_of",
    "why",
]

T = TypeVar("T")


def pickled(value: object) -> bytes:
    """Returns the pickle of a value, with its errors made portable."""
    return pickle.dumps(_with_errors(value, lambda error: _ErrorWithText(portable_error(error))))


def pickled_values(values: Sequence[object]) -> list[bytes]:
    """Returns the pickle of each value. An object that occurs several times is pickled once."""
    distinct = {id(value): pickled(value) for value in values}
    return [distinct[id(value)] for value in values]


def unpicklable(rank: int, phase: str, cause: Exception, note: str = "") -> WRAPPED_EXCEPTION:
    """Returns an error to send instead of a value that cannot be pickled."""
    text = f"rank {rank} cannot pickle its result of {phase}: {why(cause)}{note}"
    return _wrap_exception(CheckpointError(text))


def unpickled(message: Buffer, rank: int) -> Any:
    """Returns the value that a rank has pickled, or on failure an error in DCP's form."""
    try:
        return unpickle(message, f"rank {rank}")
    except UnsupportedError as error:
        return _wrap_exception(error)
    except Exception as error:
        text = f"cannot unpickle what rank {rank} sent: {typed_text_of(error)}"
        return _wrap_exception(CheckpointError(text))


def drop_frames(error: BaseException) -> None:
    """Drops the tracebacks of an error and of its causes, which are not sent to other ranks.

    Their frames refer to the frames of the callers, and so to the state.
    """
    chain: BaseException | None = error
    while chain is not None and chain.__traceback__ is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__


def reference_to(error: BaseException) -> Callable[[], BaseException | None]:
    """Returns a weak reference to an error, or a strong one if its class has no weak ones."""
    return weakref.ref(error) if hasattr(error, "__weakref__") else lambda: error


def unpickled_error(message: Buffer, rank: int) -> WRAPPED_EXCEPTION:
    """Returns the error in DCP's form that a rank has pickled."""
    error = unpickled(message, rank)
    if _is_wrapped_exception(error):
        return cast(WRAPPED_EXCEPTION, error)
    return _wrap_exception(CheckpointError(f"rank {rank} failed, but sent no error"))


class _ErrorWithText(Exception):
    """Pickles as an error and its text. The text arrives even if a rank refuses the error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)

    def __reduce__(self) -> tuple[Any, ...]:
        (error,) = self.args
        lines = [typed_text_of(error), *map(str, getattr(error, "__notes__", []))]
        return _received_error, (pickle.dumps(error), "\n".join(lines))


@allow_in_messages
def _received_error(message: bytes, text: str) -> BaseException:
    try:
        error = unpickle(message, "a rank")
    except Exception:
        error = None
    return error if isinstance(error, BaseException) else CheckpointError(text)


def portable(value: T) -> T:
    """Returns the value, with errors that do not pickle replaced by errors that do.

    The value is an error, an error in DCP's form, or any other value, which is returned unchanged.
    """
    return _with_errors(value, portable_error)


def _with_errors(value: T, change: Callable[[BaseException], BaseException]) -> T:
    if isinstance(value, CheckpointException):
        failures = {rank: _with_errors(each, change) for rank, each in value.failures.items()}
        return cast(T, CheckpointException(value.args[0], failures))
    if isinstance(value, BaseException):
        return cast(T, change(value))
    if not _is_wrapped_exception(value):
        return value
    error, trace = cast(tuple[BaseException, StackSummary], value)
    sent = _with_errors(error, change)
    return cast(T, (sent, trace if pickles(trace) else StackSummary()))


def why(error: BaseException) -> str:
    """Returns an error in one line. For a ``CheckpointException``, lists the errors of all ranks.

    Example::

        assert why(ValueError("no")) == "ValueError: no"
    """
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {why(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return typed_text_of(error)


def first_error(where: str) -> AbstractContextManager[None]:
    """Raises the error of the first rank that failed, instead of DCP's error with all of them."""
    return _FirstError(where)


class _FirstError(AbstractContextManager[None]):
    """See :func:`first_error`. No frame or context of the raised error refers to DCP's error.

    DCP's error refers to the raised one, and a cycle would keep all frames alive, and so the state.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __exit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, CheckpointException):
            return
        first, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        cause.add_note(f"raised on rank {first} {self._where}")
        try:
            raise cause from None
        except BaseException:
            cause.__context__ = None
            raise
        finally:
            del cause, error, traceback


def value_of(outcome: Any) -> Any:
    """Returns a result, or raises it if it is the error of a call."""
    try:
        if isinstance(outcome, CheckpointException):
            raise outcome
        return outcome
    finally:
        del outcome  # The traceback of an error refers to this frame, and so to the state.


def attempted(function: Callable[[], Any], phase: str) -> Any:
    """Returns the function's result, or its error in the form in which DCP sends errors.

    An interrupt is raised as it is, since it must not end the other ranks: its call fails instead.
    The record has the function as this phase, if that is not empty.
    """
    try:
        with records.phase(phase):
            return function()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        wrapped = _wrap_exception(error)  # Contains the stack as text.
        drop_frames(error)
        return wrapped
