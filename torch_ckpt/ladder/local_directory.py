"""How a run opens its local directory: it belongs to this run, and its steps are promoted."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch_ckpt.agent.identity import id_in_directory, is_copy, new_id, own_id, write_id
from torch_ckpt.commits.terms import Term, newest_term
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.failures import PromotionFailures
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.machine_directories import (
    MachineDirectories,
    Part,
    parts_in,
    whole_steps,
)
from torch_ckpt.ladder.places import Places
from torch_ckpt.ladder.promotion import OldSteps, Promotion
from torch_ckpt.ladder.promotion_steps import PromotionSteps, StepsOfOnePlace
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories, Verify
from torch_ckpt.ladder.step_files import (
    committed_steps,
    run_of_local,
    tie_directories,
)
from torch_ckpt.ladder.without_promotion import WithoutPromotion, remove_old
from torch_ckpt.storage.copying import is_of_another_save

__all__ = ["directories_of", "promotion_for"]

_LOG = logging.getLogger("torch_ckpt")


def directories_of(
    group: Group,
    run: Location,
    local: str | os.PathLike[str] | None,
    *,
    verify: Verify,
    reader: dict[str, Any] | None,
    timeout_s: float,
) -> tuple[list[StepDirectories], Places]:
    """Returns the directories of a run, that to which it saves first, and the places of that."""
    steps = StepDirectories(run, verify=verify, reader=reader)
    if local is None:
        return [steps], Places()
    path = Location(local).resolved()
    places = Places.find(group, path, run, timeout_s)
    if places.others:
        return [MachineDirectories(path, places, reader=reader), steps], places
    return [StepDirectories(path, verify=verify, reader=reader), steps], places


def promotion_for(
    group: Group,
    places: Places,
    disks: Sequence[StepDirectories],
    lineage: Lineage,
    retention: Retention,
    failures: PromotionFailures,
    *,
    keep: int,
    timeout_s: float,
) -> Promotion | WithoutPromotion:
    """Returns the promotion of the steps at the place of this rank, if it is the first there.

    All ranks call it. ``disks`` are the local directory, if there is one, and that of the run.
    Without a local directory, the coordinator removes old steps after each save. Raises
    CheckpointError on all ranks if the local directory has steps of another run.
    """
    local, run = disks[0], disks[-1]
    if len(disks) == 1 and group.is_coordinator:
        return WithoutPromotion(functools.partial(remove_old, run, retention, lineage))
    if len(disks) == 1:
        return WithoutPromotion()
    activity, run_id = "opening the local directory", ""

    def claim() -> None:
        nonlocal run_id
        if places.is_first:
            run_id = _claim_local(local.directory, run.directory)
            tie()

    def tie() -> None:
        if id_in_directory(local.directory) != run_id:
            write_id(local.directory, run_id)
        tie_directories(local.directory, run.directory, is_part=places.others > 0)

    def parts() -> dict[int, Part] | None:
        claim()
        return parts_in(local.directory) if places.is_first else None

    # The coordinator first: it may write the id of the run.
    group.decide(activity, lambda: None, lambda _: claim(), timeout_s=timeout_s)
    whole = group.decide(activity, parts, whole_steps, timeout_s=timeout_s)
    if not places.is_first:
        return WithoutPromotion()
    in_run, newest = committed_steps(run.directory), newest_term(run.directory)
    terms = _terms_of(local, committed_steps(local.directory))
    passed_over = _passed_over(local, run, terms, in_run, whole, newest)
    if retention.removes:  # The steps of the run count then, too.
        terms = _terms_of(run, in_run) | terms
    has_metrics = group.is_coordinator and retention.monitor is not None
    values = run.values(retention.monitor or "") if has_metrics else {}
    steps = (PromotionSteps if places.others else StepsOfOnePlace)(local, retention)
    steps.found(in_run, values, terms)
    steps.pass_over(passed_over)
    steps.set_lineage(newest)
    old = OldSteps(local, run, lineage, retention, steps, keep=keep, run_id=run_id, tie=tie)
    commits, others = group.is_coordinator, places.others
    # It starts when the run is complete.
    return Promotion(local, run, lineage, steps, old, failures, commits=commits, others=others)


def _terms_of(disk: StepDirectories, steps: Sequence[int]) -> dict[int, int]:
    return {step: disk.term_of(step) for step in steps}


def _passed_over(
    local: StepDirectories,
    run: StepDirectories,
    terms: Mapping[int, int],
    in_run: Collection[int],
    whole: Collection[int],
    newest: Term,
) -> set[int]:
    """Returns which local steps are not promoted, and logs them.

    ``terms`` are those of the local steps. A step is returned if it is not on the lineage of the
    ``newest`` term, or not ``whole`` on all machines together. Or the directory of the run has
    another save of the same step, which is of a later term, or the terms are unknown. A job saves
    locally first: of two saves of one term, the local one is the newer.
    """
    here = set(terms)

    def is_older(step: int) -> bool:
        if not is_of_another_save(local.path(step), run.path(step)):
            return False
        return not terms[step] or run.term_of(step) > terms[step]

    other = {s for s in here if not newest.has(s, terms[s]) or (s in in_run and is_older(s))}
    if other:
        _LOG.warning(
            "steps %s of %s are not of the saves from which %s goes on, and are not promoted",
            *(sorted(other), local.directory, run.directory),
        )
    parts = here.difference(whole)
    if lost := parts.difference(in_run):
        _LOG.warning(
            "steps %s of %s lack files that no machine of this run has, and are not promoted",
            *(sorted(lost), local.directory),
        )
    return other | parts


def _claim_local(local: Location, run: Location) -> str:
    """Ties a local directory to a run: both get the same id, which is returned.

    Called on one rank of each machine.

    A path has no identity: the directory of a former run may have been removed, and another run
    begins under its path. Raises CheckpointError if the local directory has steps of another run.
    """
    ours, found = own_id(run), id_in_directory(local)
    # A directory that was copied before its first save has no term that names the original.
    tied = None
    with contextlib.suppress(CheckpointError):  # It is written again.
        tied, _ = run_of_local(local)
    is_of_copy = tied is not None and found == ours is not None and is_copy(run, str(tied), ours)
    if found is not None and found == ours and not is_of_copy:
        return found
    if steps := committed_steps(local):
        of = "another run" if found is None else f"run {found}"
        now = "has no id: it is new, or was removed" if ours is None else f"is of run {ours}"
        if is_of_copy:
            of, now = f"the run in {tied}", "is a copy of that, or its original"
        raise CheckpointError(
            f"cannot use {local} as the local directory of {run}: its {len(steps)} steps are of "
            f"{of}, and {run} {now}. Use another directory, or remove {local}"
        )
    if ours is None:
        ours = new_id()
        write_id(run, ours)  # First: the id of the local directory says that this one has it.
    return ours
