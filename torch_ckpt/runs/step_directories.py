"""StepDirectories: the steps of a run on disk: listing, verification, retention and removal.

A step is a directory ``step-<n>``. Only its name identifies the step, so no separate file can be
torn or name a missing step. Only its own metadata determines whether it is a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner

from torch_ckpt.api import load
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.runs.step_files import (
    leased_steps,
    listed_steps,
    metrics_of,
    remove_expired_leases,
)
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.verify import check_sound, check_whole

__all__ = ["Mode", "StepDirectories", "Verify", "remove_directory"]

Verify = Literal["quick", "full"]
Mode = Literal["min", "max"]

_REMOVED = ".removed-"


class StepDirectories:
    """The steps of a run on disk, as a storage tier.

    :meth:`load` is called on all ranks, every other method on one rank, whose result the ranks
    share.

    Args:
        directory: Directory of the run.
        verify: How :meth:`steps` verifies a step: ``"quick"`` opens the step and checks the lengths
            of its files; ``"full"`` also checks all bytes.
        reader: Arguments for each :class:`FastReader`.

    Example::

        newest = next(StepDirectories(Location("run")).steps(), None)
    """

    def __init__(
        self, directory: Location, *, verify: Verify = "quick", reader: dict[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self._reader = dict(reader or {})
        trust_pickle = self._reader.get("trust_pickle", False)
        self._check_whole = functools.partial(check_whole, trust_pickle=trust_pickle)
        self._check: Callable[[Location], None] = self._check_whole
        if verify == "full":
            self._check = functools.partial(check_sound, trust_pickle=trust_pickle)

    def path(self, step: int) -> Location:
        """Returns the directory of a step."""
        return self.directory / f"step-{step}"

    def report(self) -> None:
        """Returns ``None``: all ranks have the same disk."""

    def steps(self, reports: Sequence[None] = ()) -> Iterator[int]:
        """Yields the whole steps, the newest first; verifies each step as it is requested.

        Warns of steps that were committed and are damaged.
        """
        for step in listed_steps(self.directory):
            try:
                self._check(self.path(step))
            except NotFoundError:
                continue  # Never committed, or removed meanwhile.
            except CheckpointError as error:
                warnings.warn(f"step {step} is passed over: {error}", stacklevel=2)
            else:
                yield step

    def damaged(self) -> list[int]:
        """Returns the steps that were committed and are damaged, the newest first."""
        found = []
        for step in listed_steps(self.directory):
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
        planner: LoadPlanner,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_s: float,
    ) -> None:
        """Loads a step on all ranks of the group, as :func:`torch_ckpt.load` does."""
        load(
            state,
            storage_reader=FastReader(self.path(step).checkpoint_id, **self._reader),
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            timeout_s=timeout_s,
        )

    def best(self, monitor: str, mode: Mode, count: int) -> list[int]:
        """Returns the committed steps with the best values of a metric, the best one first.

        Of equal values, that of the earlier step is better. A step without the metric, or with a
        NaN, is never among the best.

        Args:
            monitor: Name of the metric.
            mode: Whether the smallest or the largest value is the best.
            count: Number of steps.
        """
        sign = 1 if mode == "min" else -1
        found = []
        for step in listed_steps(self.directory):
            value = metrics_of(self.path(step)).get(monitor, math.nan)
            if not math.isnan(value) and has_checkpoint(self.path(step)):
                found.append((sign * value, step))
        return [step for _, step in sorted(found)[:count]]

    def retain(self, saved: int, *, last: int, every: int | None, best: Sequence[int] = ()) -> None:
        """Removes steps except the newest ``last``, the multiples of ``every`` and the best ones.

        The step that was just saved and the newest whole step always remain. So do damaged steps
        that are newer than the oldest of the newest ``last``, and leased steps.

        Args:
            saved: The step that was just saved.
            last: Number of newest whole steps to retain.
            every: Committed steps that are multiples of this number remain.
            best: Steps that remain for their metrics.

        Raises:
            StorageError: The directory of the run cannot be read, or a step cannot be removed.
        """
        newest: list[int] = []
        protected = {saved, *best, *leased_steps(self.directory)}
        for step in listed_steps(self.directory):
            if len(newest) < max(last, 1):
                try:
                    self._check_whole(self.path(step))
                    newest.append(step)
                    continue
                except NotFoundError:
                    committed = False
                except CheckpointError:
                    continue
            else:
                committed = has_checkpoint(self.path(step))
            if step in protected or (committed and every is not None and step % every == 0):
                continue
            if newest:  # A step newer than all whole steps may be a save in progress.
                remove_directory(self.path(step), unless=functools.partial(self._is_leased, step))

    def _is_leased(self, step: int) -> bool:
        return step in leased_steps(self.directory)

    def sweep(self) -> None:
        """Deletes the remains of interrupted removals, and expired leases.

        Raises:
            StorageError: A file cannot be deleted.
        """
        with contextlib.suppress(NotFoundError):
            for name in self.directory.names():
                if name.startswith(_REMOVED):
                    (self.directory / name).remove_all()
            remove_expired_leases(self.directory)


def remove_directory(path: Location, *, unless: Callable[[], bool] = lambda: False) -> None:
    """Removes a checkpoint, so that no reader ever finds a partly deleted one under its name.

    A reader that has already opened the checkpoint either finishes or raises
    :class:`~torch_ckpt.errors.NotFoundError`.

    Args:
        path: Directory of the checkpoint.
        unless: Called after the directory was renamed. If it returns ``True``, the directory gets
            its name back, and remains.

    Raises:
        NotFoundError: The checkpoint does not exist.
        StorageError: The directory cannot be renamed, and is unchanged. Or a file in the renamed
            directory cannot be deleted; :meth:`StepDirectories.sweep` retries that.

    Example::

        remove_directory(Location("run/step-100"))
    """
    doomed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    path.rename(doomed)
    if unless():
        doomed.rename(path)
        return
    path.parent.sync()
    doomed.remove_all()
