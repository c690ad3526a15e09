"""The exceptions of torch_ckpt. Importing this module does not import torch.

Each stands for one status code of the native engine. A message says what failed, on what, and why.
All of them pickle, since DCP gathers exceptions across ranks; DCP raises them wrapped in a
``CheckpointException`` that maps ranks to the exceptions here.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import pickle
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "CheckpointError",
    "CorruptionError",
    "MismatchError",
    "NotFoundError",
    "RankTimeoutError",
    "StorageError",
    "UnsupportedError",
    "portable_errors",
]


class CheckpointError(RuntimeError):
    """A save or load failed. The base of all the others; by itself, a bug in torch_ckpt."""


class _ErrnoError(CheckpointError, OSError):
    """A :class:`CheckpointError` with the ``errno`` of the operating system."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[_ErrnoError], tuple[str, int | None]]:
        return type(self), (self.args[0], self.errno)


class NotFoundError(_ErrnoError, FileNotFoundError):
    """There is no committed checkpoint, or no such file of one."""

    def __init__(self, message: str, errno: int | None = _errno.ENOENT) -> None:
        super().__init__(message, errno)


class AlreadyExistsError(_ErrnoError, FileExistsError):
    """A checkpoint is committed there already, and may not be replaced."""

    def __init__(self, message: str, errno: int | None = _errno.EEXIST) -> None:
        super().__init__(message, errno)


class StorageError(_ErrnoError):
    """The disk or store failed; :attr:`errno` says how."""

    _RETRIABLE = frozenset({_errno.EAGAIN, _errno.EBUSY, _errno.EINTR, _errno.ETIMEDOUT})

    @property
    def retriable(self) -> bool:
        """Whether the same save may succeed if it is simply tried again."""
        return self.errno in self._RETRIABLE


class MismatchError(CheckpointError):
    """The checkpoint is sound, but an FQN, shape or dtype is not what was asked for."""


class CorruptionError(CheckpointError):
    """Bytes of the checkpoint cannot be what was written."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """This build, platform or format cannot do what was asked."""


class CancelledError(CheckpointError):
    """Stopped because another part of the save or load failed."""


class RankTimeoutError(CancelledError, TimeoutError):
    """Given up on every rank, because one was late, stuck or gone. Raised as it is, not wrapped.

    Args:
        message: What happened.
        ranks: The ranks that the others waited for, as ``dist.get_rank()`` numbers them; none if
            nobody knows.
        phase: What they had still to finish, such as ``"planning"``, ``"writing"``,
            ``"committing"`` or ``"reading"``.
        seconds: How long the others waited, in seconds.
        may_be_committed: Whether the checkpoint may appear all the same: the coordinator was
            publishing it when the others gave up. In all other cases it never will.
    """

    def __init__(
        self,
        message: str,
        ranks: Iterable[int] = (),
        phase: str = "",
        seconds: float = 0.0,
        may_be_committed: bool = False,
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.phase = phase
        self.seconds = seconds
        self.may_be_committed = may_be_committed

    def __reduce__(
        self,
    ) -> tuple[type[RankTimeoutError], tuple[str, tuple[int, ...], str, float, bool]]:
        arguments = self.args[0], self.ranks, self.phase, self.seconds, self.may_be_committed
        return type(self), arguments


def listed_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """The beginning of a sentence about some ranks: ``"rank 3 is"``, ``"ranks 3, 4 are"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more} are"


@contextlib.contextmanager
def portable_errors() -> Iterator[None]:
    """Lets an exception out only if it survives pickling, else a :class:`CheckpointError` for it.

    DCP gathers a rank's exception by pickling; one that cannot be unpickled (of a class whose
    arguments are not its ``args``) would fail the coordinator alone and leave the other ranks
    waiting.
    """
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise CheckpointError(f"{type(error).__qualname__}: {error}") from error
        raise
