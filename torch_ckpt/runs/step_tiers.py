"""The places where steps of a run are, as one: the newest whole step is loaded from wherever it is.

The coordinator looks, and all ranks load what it has found; so they fall back together, too.
"""

from __future__ import annotations

import errno
import heapq
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.group import Group, why
from torch_ckpt.errors import (
    CancelledError,
    CorruptionError,
    NotFoundError,
    RankTimeoutError,
    StorageError,
)
from torch_ckpt.filesystems.location import Location

__all__ = ["StepTiers", "Tier"]

T = TypeVar("T")

_GRACE_S = 60.0
"""For how long a rank that has failed by itself waits for others, to tell them."""


class Tier(Protocol):
    """A place where steps of a run are."""

    def here(self) -> Any:
        """What this rank has to say on steps. Asked on every rank."""
        ...

    def steps(self, said: Sequence[Any]) -> Iterator[int]:
        """Steps that are whole there, the newest first. Asked on one rank, for all.

        Args:
            said: What each rank has said.
        """
        ...

    def damaged(self) -> list[int]:
        """Steps that were committed there and are not whole any more. Asked on one rank."""
        ...

    def load(
        self,
        step: int,
        state: dict[str, Any],
        *,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_s: float,
    ) -> None:
        """Loads a step in place. Called on all ranks at once; raises what DCP's load does."""
        ...


class StepTiers:
    """Several tiers of one run. All ranks call its methods together.

    Args:
        tiers: Of several that have the same step, the first counts.
        group: The ranks.
        process_group: The same, as DCP takes them.
        timeout_s: Seconds that one rank waits for another.
        directory: That of the run, for messages.

    Example::

        tiers = StepTiers([StepDirectories(path)], group_of(None), None, 600, path)
        start = tiers.restore(state, first=lambda: None)
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        group: Group,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        directory: Location,
    ) -> None:
        self._tiers, self._group, self._process_group = tiers, group, process_group
        self._timeout_s, self._directory = timeout_s, directory

    def latest(self, *, first: Callable[[], None]) -> int | None:
        """The newest whole step on all ranks.

        Args:
            first: What each rank does before.
        """
        found = self._group.decide(
            "looking for the latest step",
            lambda: self._here(first),
            lambda said: self._newest(None, [here for _, here in said]),
            timeout_s=self._timeout_s,
        )
        return None if found is None else found[0]

    def restore(self, state: dict[str, Any], *, first: Callable[[], None]) -> int | None:
        """Loads the newest step that turns out to be sound; ``None`` if none was committed."""
        before: tuple[int, int] | None = None
        failure: CheckpointException | None = None
        while found := self._choose(before, first):
            step, number = before = found
            try:
                self._load(self._tiers[number], step, state)
            except CheckpointException as error:
                if not _is_damage(error):
                    raise
                warnings.warn(f"step {step} is passed over: {why(error)}", stacklevel=3)
                failure = failure or error
            else:
                return step
        if failure is not None:
            failure.add_note("no older step is whole; the state may be loaded in part")
            raise failure
        return None

    def restore_step(self, step: int, state: dict[str, Any], *, first: Callable[[], int]) -> None:
        """Loads this step, from the first tier that has it whole, or else from the last."""

        def choose(said: list[tuple[int, list[Any]]]) -> int:
            the_same([steps for steps, _ in said])
            for number, tier in enumerate(self._tiers[:-1]):
                if step in tier.steps([here[number] for _, here in said]):
                    return number
            return len(self._tiers) - 1

        number = self._group.decide(
            "choosing a step", lambda: self._here(first), choose, timeout_s=self._timeout_s
        )
        while True:
            try:
                self._load(self._tiers[number], step, state)
            except CheckpointException as error:
                number += 1
                if number == len(self._tiers) or not _is_damage(error):
                    raise
            else:
                return

    def _here(self, first: Callable[[], T]) -> tuple[T, list[Any]]:
        """What a rank does first, and what it has to say to each tier."""
        return first(), [tier.here() for tier in self._tiers]

    def _newest(
        self, before: tuple[int, int] | None, said: Sequence[list[Any]]
    ) -> tuple[int, int] | None:
        """The newest whole step, and the number of its tier: the one before may be in the next."""
        tiers = [
            _numbered(tier.steps([here[number] for here in said]), number)
            for number, tier in enumerate(self._tiers)
        ]
        for step, number in heapq.merge(*tiers, key=lambda found: -found[0]):
            if before is None or (-step, number) > (-before[0], before[1]):
                return step, number
        return None

    def _choose(
        self, before: tuple[int, int] | None, first: Callable[[], None]
    ) -> tuple[int, int] | None:
        def choose(said: list[tuple[None, list[Any]]]) -> tuple[int, int] | None:
            found = self._newest(before, [here for _, here in said])
            if found is None and before is None:
                damaged = [step for tier in self._tiers for step in tier.damaged()]
                if damaged:
                    raise CorruptionError(
                        f"no step in {self._directory} is whole, though {len(damaged)} were "
                        f"committed, step {max(damaged)} the last of them: to begin anew, use "
                        "another directory"
                    )
            return found

        return self._group.decide(
            "choosing a step", lambda: self._here(first), choose, timeout_s=self._timeout_s
        )

    def _load(self, tier: Tier, step: int, state: dict[str, Any]) -> None:
        failure: Exception | None = None
        try:
            tier.load(
                step,
                state,
                process_group=self._process_group,
                no_dist=self._group.size == 1,
                timeout_s=self._timeout_s,
            )
        except RankTimeoutError:
            raise
        except Exception as error:  # Of this rank alone, such as of a load_state_dict.
            failure = error

        def own() -> None:
            if failure is not None:
                raise failure

        timeout_s = self._timeout_s
        if failure is not None:
            timeout_s = min(_GRACE_S, timeout_s)
        try:
            self._group.decide("restoring", own, lambda _: None, timeout_s=timeout_s)
        except RankTimeoutError:
            if failure is not None:
                raise failure from None
            raise


def the_same(steps: list[int]) -> int:
    """The step that all ranks are at.

    Raises:
        ValueError: They are at different ones.

    Example::

        assert the_same([7, 7]) == 7
    """
    if len(set(steps)) > 1:
        other = next(rank for rank, step in enumerate(steps) if step != steps[0])
        raise ValueError(
            f"ranks are at different steps: rank 0 of the run at {steps[0]}, rank {other} at "
            f"{steps[other]}"
        )
    return steps[0]


def _numbered(steps: Iterator[int], number: int) -> Iterator[tuple[int, int]]:
    return ((step, number) for step in steps)


def _is_damage(error: CheckpointException) -> bool:
    """Whether a load has failed for what is stored, so that an older step may do."""
    causes = [cause for cause, _ in error.failures.values()]
    damage = [
        cause
        for cause in causes
        if isinstance(cause, CorruptionError | NotFoundError)
        or (isinstance(cause, StorageError) and cause.errno == errno.EIO)
    ]
    cancelled = [cause for cause in causes if isinstance(cause, CancelledError)]
    return bool(damage) and len(damage) + len(cancelled) == len(causes)
