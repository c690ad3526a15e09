"""The exceptions of torch_ckpt. Importing this module does not import torch.

Most exceptions correspond to one status code of the native engine. A message names the operation
that failed, its object, and the cause. All exceptions pickle, because DCP gathers them across
ranks. DCP raises a ``CheckpointException`` that maps ranks to their exceptions.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

__all__ = [
    "SITE",
    "AlreadyExistsError",
    "CancelledError",
    "CheckpointError",
    "CorruptionError",
    "MismatchError",
    "NotFoundError",
    "RankTimeoutError",
    "StorageError",
    "SupersededError",
    "UnsupportedError",
    "add_name",
    "naming",
    "naming_cycle",
    "naming_first",
    "pickles",
    "portable_error",
    "portable_errors",
    "text_of",
    "typed_text_of",
    "warn_after_commit",
]

_LOG = logging.getLogger("torch_ckpt")

SITE = "https://torch-ckpt.github.io/torch-ckpt/"
"""Address of the documents, for messages; also in pyproject.toml."""

_MOST_TEXT = 20_000
"""Maximum number of characters of an error text that becomes part of another error."""


class CheckpointError(RuntimeError):
    """A save or load failed. Base class of all exceptions of this package.

    This class itself is raised for failures without a subclass, such as a broken invariant.

    Example::

        from torch.distributed.checkpoint.api import CheckpointException

        try:
            torch_ckpt.load(state, checkpoint_id="run/step-100")
        except CheckpointException as error:
            for rank, (cause, _) in error.failures.items():
                print(rank, isinstance(cause, torch_ckpt.CheckpointError), cause)
    """

    may_be_committed: bool = False
    """Whether the outcome of the save is unknown, so that the checkpoint may still appear."""


class _ErrnoError(CheckpointError, OSError):
    """A :class:`CheckpointError` with an ``errno`` of the operating system."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[_ErrnoError], tuple[str, int | None]]:
        return type(self), (self.args[0], self.errno)


class NotFoundError(_ErrnoError, FileNotFoundError):
    """The directory has no committed checkpoint, or a file of the checkpoint is missing."""

    def __init__(self, message: str, errno: int | None = _errno.ENOENT) -> None:
        super().__init__(message, errno)


class AlreadyExistsError(_ErrnoError, FileExistsError):
    """The directory already has a committed checkpoint, which must not be replaced."""

    def __init__(self, message: str, errno: int | None = _errno.EEXIST) -> None:
        super().__init__(message, errno)


class StorageError(_ErrnoError):
    """The disk or store failed. :attr:`errno` is the error code of the operating system."""

    _RETRIABLE = frozenset({_errno.EAGAIN, _errno.EBUSY, _errno.EINTR, _errno.ETIMEDOUT})

    @property
    def retriable(self) -> bool:
        """Whether the same operation may succeed if it is retried unchanged."""
        return self.errno in self._RETRIABLE


class SupersededError(CheckpointError):
    """A newer job of the run has begun to save, so this job must no longer save."""


class MismatchError(CheckpointError):
    """The checkpoint is valid, but an FQN, shape or dtype differs from the requested one."""


class CorruptionError(CheckpointError):
    """Stored bytes do not match their checksum, or a file is malformed."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """This build, platform or format does not support the operation."""


class CancelledError(CheckpointError):
    """The operation stopped because another task or rank of the same save or load failed."""


class RankTimeoutError(CancelledError, TimeoutError):
    """A rank was late, stuck or dead, so the save or load failed on every rank.

    It is raised directly, not within a ``CheckpointException``.

    Args:
        message: The error message.
        ranks: The ranks that did not arrive, as ``dist.get_rank()`` numbers them. Empty if they
            are unknown.
        phase: The phase that these ranks did not finish, such as ``"planning"``, ``"writing"``,
            ``"committing"`` or ``"reading"``.
        seconds: How long the other ranks waited, in seconds.
        may_be_committed: Whether the checkpoint may still appear, because the coordinator was
            publishing it when the save failed. If ``False``, it never appears.
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


_OF_FILES = frozenset(
    {
        *(_errno.EIO, _errno.ENODATA, _errno.EUCLEAN, _errno.EBADMSG, _errno.EILSEQ),
        *(_errno.EISDIR, _errno.ENOTDIR, _errno.ENXIO, _errno.ELOOP),
    }
)
"""Error codes of a bad sector or a damaged file system, and of what is no file.
``csrc/engine/open_checkpoint.cc`` has the same ones."""


def is_damage(error: BaseException) -> bool:
    """Returns whether stored data are the reason of an error, so that an older step may load.

    Otherwise storage has failed or refused to answer, and the data may be whole. That includes each
    error of storage without an error code.
    """
    if isinstance(error, StorageError):
        return error.errno in _OF_FILES
    return isinstance(error, CorruptionError | NotFoundError)


def is_unreadable(error: BaseException) -> TypeGuard[StorageError]:
    """Returns whether storage failed or refused to answer, so that the data may be whole."""
    return isinstance(error, StorageError) and not is_damage(error)


def listed_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Returns the start of a sentence about ranks: ``"rank 3 is"``, ``"ranks 3, 4 are"``.

    ``ranks`` is not empty. The text lists at most ``most`` of them, and counts the others.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more} are"


@contextlib.contextmanager
def naming(action: str, fqn: str) -> Iterator[None]:
    """Adds the FQN of a value to an error of the block: ``cannot save 'model.w': ...``.

    The error remains the same object, and is unchanged if it already has the name.
    """
    try:
        yield
    except Exception as error:
        add_name(error, action, fqn)
        raise


@contextlib.contextmanager
def naming_first(
    action: str, values: Callable[[], Iterable[tuple[str, Any]]], attempt: Callable[[Any], object]
) -> Iterator[None]:
    """Adds the FQN of the failing value to an error of a block that processes many values at once.

    After an error, calls ``attempt`` for each (FQN, value), until one raises, too. Errors of this
    package are not changed: they already have a name, or concern no value.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # The state dict may not be flattened.
            for fqn, value in values():
                try:
                    attempt(value)
                except Exception:
                    add_name(error, action, fqn)
                    break
        raise


@contextlib.contextmanager
def naming_cycle(action: str, state_dict: Any) -> Iterator[None]:
    """Replaces the RecursionError for a container that contains itself by an error with its FQN."""
    try:
        yield
    except RecursionError:
        found = _first_cycle(state_dict, "", {})
        if found is None:
            raise
        inner, outer = found
        raise ValueError(
            f"cannot {action} {inner!r}: it is {outer}, which contains it, so the state dict would "
            "never end"
        ) from None


def _first_cycle(container: Any, fqn: str, around: dict[int, str]) -> tuple[str, str] | None:
    """Returns both FQNs of a dict or list that contains itself, the inner one first."""
    around = {**around, id(container): repr(fqn) if fqn else "the state dict itself"}
    pairs = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in pairs:
        if isinstance(value, Mapping | list):
            inner = f"{fqn}.{key}" if fqn else str(key)
            if id(value) in around:
                return inner, around[id(value)]
            if (found := _first_cycle(value, inner, around)) is not None:
                return found
    return None


def add_name(error: Exception, action: str, fqn: str) -> None:
    """Adds the FQN of a value to an error, as :func:`naming` does."""
    shown = text_of(error)
    if repr(fqn) in shown and shown != repr(fqn):  # A KeyError may consist of this name alone.
        return
    text, args = f"cannot {action} {fqn!r}", error.args
    if not args or (len(args) == 1 and isinstance(args[0], str)):
        error.args = (f"{text}: {args[0]}" if args else text,)
    if text not in text_of(error):  # The class does not use `args` for its message.
        error.args = args
        error.add_note(text)


@contextlib.contextmanager
def portable_errors() -> Iterator[None]:
    """Replaces an exception that does not survive pickling by a :class:`CheckpointError`.

    DCP gathers the exceptions of ranks by pickling. Some exceptions cannot be unpickled, because
    the arguments of their class differ from ``args``. Such an exception would fail only the
    coordinator. The other ranks would wait for an answer that never arrives.
    """
    try:
        yield
    except Exception as error:
        replacement = portable_error(error)
        if replacement is not error:
            raise replacement from error
        raise


def portable_error(error: BaseException) -> BaseException:
    """Returns the error, or a :class:`CheckpointError` with its message if it does not pickle."""
    return error if pickles(error) else CheckpointError(typed_text_of(error))


def text_of(error: BaseException) -> str:
    """Returns the text of an error of any class, for messages and for other ranks.

    The ``__str__`` of its class may raise, return no string, or return characters that cannot be
    encoded or a very long text.
    """
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # Also SystemExit: an odd class raises it.
        return f"(no text: its __str__ raises {type(broken).__name__})"
    if len(text) > _MOST_TEXT:
        half = _MOST_TEXT // 2  # The last line of a DCP exception is its error.
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def typed_text_of(error: BaseException) -> str:
    """Returns the class and the text of an error of any class; see :func:`text_of`."""
    return f"{type(error).__qualname__}: {text_of(error)}"


def warn_after_commit(message: str, *, stacklevel: int) -> None:
    """Issues a warning after a commit; logs it instead if warnings are errors.

    An error would suggest that the checkpoint was not saved.
    """
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning:
        _LOG.warning(message)


def pickles(value: object) -> bool:
    """Returns whether a value survives pickling and unpickling."""
    try:
        pickle.loads(pickle.dumps(value))
    except (Exception, SystemExit):
        return False
    return True
