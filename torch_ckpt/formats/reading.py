"""Reports what a reader of a format cannot use, as damage of the file that it reads.

A file may have any value in any place. A reader uses values of the types that its format has, so a
value of another type may raise any exception. Readers check what leads to a better message, and
:func:`reading` reports the rest.
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
"""The place that :func:`now_reading` stated last within each :func:`reading`."""


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns the exceptions of a reader into errors that name the file and the place in it.

    The error is a StorageError for an ``OSError``, an UnsupportedError for an ``ImportError``, and
    otherwise a CorruptionError. A CheckpointError or ForbiddenPickleError remains as it is. The
    original exception is the cause of the error, since it may also be a fault of this package. The
    message has its class, unless it is a ``ValueError`` that explains itself.
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
    """States the place that the reader uses from now on, for the message of :func:`reading`.

    The key is a place in the file: the keys of a value, or an FQN.
    """
    place = _places.get()
    if place is not None:
        place[:] = [(file, key)]
