"""The steps of a run on disk: which there are, which of them are whole, and how one is removed.

A step is a directory ``step-<n>``. Its name alone says what it is, so that no file beside it can be
torn, or name a step that is not there; whether it is a checkpoint, its own metadata say.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch.distributed as dist

from torch_ckpt.api import load
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.verify import check_sound, check_whole

__all__ = ["StepDirectories", "Verify", "remove_directory"]

Verify = Literal["quick", "full"]

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_REMOVED = ".removed-"


class StepDirectories:
    """The tier of a run that is on disk.

    Every method but :meth:`load` concerns one process: ranks agree on what one of them has found.

    Args:
        directory: That of the run.
        verify: How :meth:`steps` looks whether a step is whole.
        reader: Arguments for each :class:`FastReader`.

    Example::

        newest = next(StepDirectories(Location("run")).steps(), None)
    """

    def __init__(
        self, directory: Location, *, verify: Verify = "quick", reader: dict[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self._check: Callable[[Location], None] = check_sound if verify == "full" else check_whole
        self._reader = dict(reader or {})

    def path(self, step: int) -> Location:
        """Where a step is."""
        return self.directory / f"step-{step}"

    def listed(self) -> list[int]:
        """All that is named as a step, whole or not, the newest first.

        Raises:
            StorageError: The directory of the run cannot be read.
        """
        try:
            names = self.directory.names()
        except NotFoundError:
            return []
        found = (_STEP.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def here(self) -> None:
        """Nothing: all ranks reach the same disk."""

    def steps(self, said: Sequence[None] = ()) -> Iterator[int]:
        """Steps that are whole, the newest first; each is looked at when it is asked for.

        Warns of those that were committed and are not whole any more.
        """
        for step in self.listed():
            try:
                self._check(self.path(step))
            except NotFoundError:
                continue  # Never committed, or removed just now.
            except CheckpointError as error:
                warnings.warn(f"step {step} is passed over: {error}", stacklevel=2)
            else:
                yield step

    def damaged(self) -> list[int]:
        """Steps that were committed and are not whole any more, the newest first."""
        found = []
        for step in self.listed():
            try:
                self._check(self.path(step))
            except NotFoundError:
                continue
            except CheckpointError:
                found.append(step)
        return found

    def load(
        self,
        step: int,
        state: dict[str, Any],
        *,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_s: float,
    ) -> None:
        """Loads a step on all ranks of the group, as :func:`torch_ckpt.load` does."""
        load(
            state,
            storage_reader=FastReader(self.path(step).checkpoint_id, **self._reader),
            process_group=process_group,
            no_dist=no_dist,
            timeout_s=timeout_s,
        )

    def retain(self, saved: int, *, last: int, every: int | None) -> None:
        """Removes what is neither among the newest steps nor one of every so many.

        What is kept whatever the arguments are: the step that was saved just now and the newest
        whole one; and of what is newer than the oldest of the last ones, all that was committed,
        also where it is damaged.

        Args:
            saved: The step that was saved just now.
            last: How many of the newest whole steps to keep.
            every: Steps that are multiples of it are kept, where they were committed.

        Raises:
            StorageError: The directory of the run cannot be read, or a step not be removed.
        """
        newest: list[int] = []
        for step in self.listed():
            if len(newest) < max(last, 1):
                try:
                    check_whole(self.path(step))
                    newest.append(step)
                    continue
                except NotFoundError:
                    committed = False
                except CheckpointError:
                    continue
            else:
                committed = (self.path(step) / ".metadata").exists()
            if step == saved or (committed and every is not None and step % every == 0):
                continue
            if newest:  # What is newer than all that is whole may be a save that goes on.
                remove_directory(self.path(step))

    def sweep(self) -> None:
        """Deletes what removals that were killed have left.

        Raises:
            StorageError: Something cannot be deleted.
        """
        with contextlib.suppress(NotFoundError):
            for name in self.directory.names():
                if name.startswith(_REMOVED):
                    (self.directory / name).remove_all()


def remove_directory(path: Location) -> None:
    """Removes a checkpoint, so that nobody ever finds half of it under its name.

    A reader that has opened the checkpoint finishes, or gets a
    :class:`~torch_ckpt.errors.NotFoundError`.

    Args:
        path: Directory of the checkpoint.

    Raises:
        NotFoundError: There is none.
        StorageError: It cannot be renamed, and is as it was. Or something in it cannot be deleted;
            :meth:`StepDirectories.sweep` tries again.

    Example::

        remove_directory(Location("run/step-100"))
    """
    doomed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    path.rename(doomed)
    path.parent.sync()
    doomed.remove_all()
