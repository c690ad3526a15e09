"""Values and errors in the form in which ranks send them to each other."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from traceback import StackSummary
from typing import TypeVar, cast

from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception

from torch_ckpt.errors import pickles, portable_error

__all__ = ["pickled", "pickled_values", "portable", "why"]

T = TypeVar("T")


def pickled(value: object) -> bytes:
    """Returns the pickle of a value, with its errors made portable."""
    return pickle.dumps(portable(value))


def pickled_values(values: Sequence[object]) -> list[bytes]:
    """Returns the pickle of each value. An object that occurs several times is pickled once."""
    distinct = {id(value): pickled(value) for value in values}
    return [distinct[id(value)] for value in values]


def portable(value: T) -> T:
    """Returns the value, with errors that do not pickle replaced by errors that do.

    Args:
        value: An error, an error in DCP's form, or anything else, which is returned as it is.
    """
    if isinstance(value, CheckpointException):
        failures = {rank: portable(failure) for rank, failure in value.failures.items()}
        return cast(T, CheckpointException(value.args[0], failures))
    if isinstance(value, BaseException):
        return cast(T, portable_error(value))
    if not _is_wrapped_exception(value):
        return value
    error, trace = cast(tuple[BaseException, StackSummary], value)
    return cast(T, (portable(error), trace if pickles(trace) else StackSummary()))


def why(error: BaseException) -> str:
    """Returns an error in one line. For a ``CheckpointException``, lists the errors of all ranks.

    Example::

        assert why(ValueError("no")) == "ValueError: no"
    """
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {why(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return f"{type(error).__qualname__}: {error}"
