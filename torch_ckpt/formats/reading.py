"""Reports data that the reader of a format cannot use, as damage of the file.

A file may contain any value anywhere. A reader expects values of the types in its format, so a
value of another type may raise any exception. Readers only check for errors that deserve a better
message; :func:`reading` reports all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    StorageError,
    UnsupportedError,
    text_of,
)
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["now_reading", "reading"]

_Place = tuple[object, object]

_places: ContextVar[list[_Place] | None] = ContextVar("_places", default=None)
"""The place last stated by :func:`now_reading` within each :func:`reading`."""


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Converts the exceptions of a reader into errors that name the file and the place in it.

    The error is a StorageError for an ``OSError``, an UnsupportedError for an ``ImportError``, and
    otherwise a CorruptionError. A CheckpointError or ForbiddenPickleError is not changed. The
    original exception is the cause of the error, because it may also be a bug of this package. The
    message names its class, unless it is a ``ValueError``, whose text suffices.
    """
    outer = _places.get()
    place: list[_Place] = []
    token = _places.set(place)
    try:
        yield
    except (CheckpointError, ForbiddenPickleError):
        raise
    except Exception as error:
        where = "".join(f", at {key!r} of {file}" for file, key in place)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        message = f"cannot read {what}{where}: {kind}{text_of(error)}"
        if isinstance(error, OSError):
            raise StorageError(message, error.errno) from error
        if isinstance(error, ImportError):
            raise UnsupportedError(message) from error
        raise CorruptionError(message) from error
    finally:
        _places.reset(token)
        if outer is not None and place:
            outer[:] = place


def now_reading(file: object, key: object) -> None:
    """States the place that the reader reads next, for the message of :func:`reading`.

    ``key`` is a place in the file: the keys of a value, or an FQN.
    """
    place = _places.get()
    if place is not None:
        place[:] = [(file, key)]
