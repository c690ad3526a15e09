"""Opens the local directory of a run: ties it to the run, and promotes its steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Sequence
from typing import Any

from torch_ckpt.agent.identity import (
    begin_id,
    check_owner,
    id_in_directory,
    is_copy,
    new_id,
    own_id,
    write_id,
)
from torch_ckpt.commits.terms import newest_term
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError, is_unreadable
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder.failures import PromotionFailures
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.machine_directories import (
    MachineDirectories,
    Part,
    WholeSave,
    part_in,
    parts_in,
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
    """Returns the directories of a run, first the one for saves, and the places of that one."""
    steps = StepDirectories(run, verify=verify, reader=reader)
    if local is None:
        return [steps], Places()
    path = Location(local).resolved()
    places = Places.find(group, path, run, timeout_s)
    if places.others:
        return [MachineDirectories(path, places, run, reader=reader), steps], places
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
    has_agent: bool,
    timeout_s: float,
) -> Promotion | WithoutPromotion:
    """Returns the promotion of the steps at this rank's place, if the rank is the first there.

    All ranks call it. ``disks`` are the local directory, if any, and the directory of the run.
    Without a local directory, the coordinator removes old steps after each save. Raises
    CheckpointError on all ranks if the local directory has steps of another run.
    """
    local, run = disks[0], disks[-1]
    if len(disks) == 1 and group.is_coordinator:
        return WithoutPromotion(functools.partial(remove_old, run, retention, lineage))
    if len(disks) == 1:
        return WithoutPromotion()
    activity, run_id = "opening the local directory", ""
    opened: set[int] = set()  # The machines have compared their files of these steps alone.
    own: dict[int, Part] = {}

    def claim() -> str:
        nonlocal run_id
        if places.is_first:
            run_id = _claim_local(local.directory, run.directory)
            tie()
        return run_id

    def tie() -> None:
        if id_in_directory(local.directory) != run_id:
            write_id(local.directory, run_id)
        tie_directories(local.directory, run.directory, is_part=places.others > 0)

    def parts() -> dict[int, Part] | None:
        claim()
        if not places.is_first:
            return None
        opened.update(committed_steps(local.directory))
        own.update(parts_in(local.directory))
        return own

    def compare(
        reports: list[dict[int, Part] | None],
    ) -> tuple[dict[int, WholeSave], list[int], dict[int, float]]:
        """Returns the whole local steps, those to spread, and the metrics of the run's steps."""
        values = {} if retention.monitor is None else run.values(retention.monitor)[0]
        if not isinstance(local, MachineDirectories):
            return {}, [], values
        whole = local.whole(reports)
        return whole, local.incomplete(reports, whole), values

    # The coordinator first: it may write the id of the run.
    run_id = group.decide(activity, lambda: None, lambda _: claim(), timeout_s=timeout_s)
    whole, spread, values = group.decide(activity, parts, compare, timeout_s=timeout_s)
    here = {step for step, save in whole.items() if group.rank in save.ranks}
    for step in spread:  # The coordinator chooses from the steps that it has.
        assert isinstance(local, MachineDirectories)
        try:
            local.spread(step, whole[step], own, group, timeout_s)
        except CancelledError:
            raise
        except CheckpointError as error:  # On all ranks.
            _LOG.warning("not all machines have the metadata of step %d: %s", step, error)
        with contextlib.suppress(CheckpointError):
            if places.is_first and part_in(local.path(step)).save_id == whole[step].save_id:
                here.add(step)
    if not places.is_first:
        check = functools.partial(check_owner, local.directory, run_id, may_be_gone=True)
        return WithoutPromotion(check_owner=check)
    in_run, newest = committed_steps(run.directory), newest_term(run.directory)
    ages = run.ages(in_run) if retention.keep_for is not None else {}
    steps = (PromotionSteps if places.others else StepsOfOnePlace)(local, retention)
    # If retention removes steps, those of the run count, too.
    steps.found(in_run, values, ages, _terms_of(run, in_run) if retention.removes else {})
    steps.set_lineage(newest)
    warned: set[int] = set()
    left = set(committed_steps(local.directory))  # By former jobs.

    def examine() -> None:
        with old.changed:
            steps.found_here(committed_steps(local.directory))
            unread = steps.unreadable()
            # A training beside this evaluation promotes the others. With an agent, there is none.
            if not (has_agent or lineage.term.number):
                unread = [step for step in unread if step in left]
        if unread:
            # If files of a later step are missing, the coordinator finds out when it commits it.
            lacking = opened.difference(here) if places.others else None
            found = _examined(local, run, unread, lacking, warned)
            with old.changed:
                steps.examined(*found)

    old = OldSteps(local, run, lineage, retention, steps, keep=keep, run_id=run_id, tie=tie)
    steps.examine = examine
    examine()
    commits, others = group.is_coordinator, places.others
    # It starts when the run is complete.
    return Promotion(local, run, lineage, steps, old, failures, commits=commits, others=others)


def _terms_of(disk: StepDirectories, steps: Sequence[int]) -> dict[int, int]:
    """Returns the terms of steps, except of those that are damaged or cannot be read."""
    found = {}
    for step in steps:
        with contextlib.suppress(CheckpointError):
            found[step] = disk.term_of(step)
    return found


def _examined(
    local: StepDirectories,
    run: StepDirectories,
    here: Sequence[int],
    lacking: Collection[int] | None,
    warned: set[int],
) -> tuple[dict[int, int], set[int]]:
    """Returns the terms of local steps, and which are not promoted, and logs the latter.

    A step is not promoted if it is damaged, not on the lineage of the newest term, or ``lacking``
    files on all machines together; ``None`` if this machine must have all files. Nor is it if the
    directory of the run has another save of it, unless the local one has a known term and that is
    not older: a job saves locally first, so of two saves in one term, the local one is newer. The
    terms lack steps that cannot be read now, and ``warned`` are those of which a warning was
    logged.
    """
    newest, terms = newest_term(run.directory), {}
    other, parts, lost = set(), set(), set()
    unreadable: dict[int, str] = {}
    for step in here:
        source, target = local.path(step), run.path(step)
        try:
            term = local.term_of(step)
            part = part_in(source) if lacking is None else None
        except CheckpointError as error:
            if is_unreadable(error):
                unreadable[step] = str(error)  # Its traceback would refer to this frame.
                continue
            _LOG.warning("step %d of %s is not promoted: %s", step, local.directory, error)
            terms[step] = 0
            parts.add(step)
            continue
        try:
            is_other = is_of_another_save(source, target)
            is_older = is_other and (not term or run.term_of(step) > term)
            is_in_run = has_checkpoint(target)
        except StorageError as error:
            unreadable[step] = str(error)
            continue
        terms[step] = term
        if is_older or not newest.has(step, term):
            other.add(step)
        if part.files != part.present if part is not None else step in (lacking or ()):
            parts.add(step)
            lost.update([] if is_in_run else [step])
    for step in unreadable.keys() - warned:
        _LOG.warning("step %d is not promoted while it cannot be read: %s", step, unreadable[step])
    warned.update(unreadable)
    if other:
        _LOG.warning(
            "steps %s of %s are not on the lineage of %s, and are not promoted",
            *(sorted(other), local.directory, run.directory),
        )
    if lost:
        _LOG.warning(
            "steps %s of %s lack files that no machine of this run has, and are not promoted",
            *(sorted(lost), local.directory),
        )
    return terms, other | parts


def _claim_local(local: Location, run: Location) -> str:
    """Ties a local directory to a run by giving both the same id; returns the id.

    Called on one rank of each machine.

    A path does not identify a run: the directory of a former run may have been removed, and another
    run may begin at its path. Raises CheckpointError if the local directory has steps of another
    run.
    """
    ours, found = own_id(run), id_in_directory(local)
    # If a directory was copied before its first save, no term names the original.
    tied = None
    with contextlib.suppress(CheckpointError):  # It is written again.
        tied, _ = run_of_local(local)
    is_of_copy = tied is not None and found == ours is not None and is_copy(run, str(tied), ours)
    if found is not None and found == ours and not is_of_copy:
        return found
    if steps := committed_steps(local):
        of = "another run" if found is None else f"run {found}"
        now, remedy = f"is of run {ours}", f"Use another directory, or remove {local}"
        if ours is None:
            now = "has no sound run-id: it may be new, or was removed"
            remedy += f". If {run} was removed, copy {local / 'run-id'} there instead"
        if is_of_copy:
            of, now = f"the run in {tied}", "is a copy of that, or its original"
        raise CheckpointError(
            f"cannot use {local} as the local directory of {run}: its {len(steps)} steps are of "
            f"{of}, and {run} {now}. {remedy}"
        )
    # First: an id in the local directory implies one here.
    return begin_id(run, new_id()) if ours is None else ours
