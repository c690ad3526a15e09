"""Terms: which job of a run may commit, and from which steps its training continues.

A job takes a term before its first save, by creating a file in the directory of the run: ``term-7``
for term 7. The newest term counts, so it works as a fencing token. Each step
that the job saves records the number of the term in ``.metadata``. Every commit first checks for a
later term: a job that was believed dead, but still runs, replaces no step of its successor. A local
directory of the run contains the file as well, for jobs of the same machine.

The number of a term is the time when it began, in milliseconds since 1970, and larger than all that
its job has found, even if the clock is wrong. So steps on a machine that was away are older than
those of later jobs, even if the directory of the run was lost.

The file also records the lineage: the former terms, and the newest step of each that this job
builds on. A restore ignores all other steps. A step without a term number, such as one that stock
DCP saved, has term 0.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Mapping
from errno import EEXIST
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.commits.probe import created
from torch_ckpt.commits.small_files import BRANCH, STEP_NAME
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, SupersededError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.stored_json import from_json

__all__ = [
    "Term",
    "check_directory",
    "check_holder",
    "check_term",
    "has_term",
    "job_in",
    "newest_term",
    "other_directory",
    "superseded",
    "take_term",
    "term_at",
    "term_in",
    "term_of",
]

# Not hidden, so `cp run/*` includes it. A longer number would not fit into metadata.
_TERM = re.compile(r"term-([1-9][0-9]{0,17})")

_KEPT = 20
"""Number of former terms whose files remain.

They allow a job to continue from an abandoned branch.
"""

_LAST_S = 253_402_300_799.0
"""The end of the year 9999, in seconds since 1970."""

_MOST_TRIES = 100
"""Give up after other jobs have taken this many terms first."""


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of a run.

    Attributes:
        number: Its number; 0 before the first job.
        lineage: Number of each former term -> the newest of its steps on which this term builds.
        host: Host of its job.
        pid: Process of its job.
        directory: The directory of the run, by the name that its job uses.
        began_s: When it began, in seconds since 1970, by the clock of the host.
        job: An id that no other job has; empty in files of development versions.
    """

    number: int = 0
    lineage: Mapping[int, int] = dataclasses.field(default_factory=dict)
    host: str = ""
    pid: int = 0
    directory: str = ""
    began_s: float = 0.0
    job: str = ""

    def has(self, step: int, term: int) -> bool:
        """Returns whether a step that was saved in a term is on the lineage of this one."""
        if term >= self.number:
            return True
        return step <= self.lineage.get(term, -1)

    def before(self, step: int, term: int) -> dict[int, int]:
        """Returns the lineage of a new term that continues from a step of this lineage."""
        former = {t: min(s, step) for t, s in self.lineage.items() if t < term}
        return {**former, term: step}

    def __str__(self) -> str:
        began_s = min(max(0.0, self.began_s), _LAST_S)  # The clock, or the file, may be wrong.
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(began_s))
        return f"term {self.number}, process {self.pid} on host {self.host} since {began} UTC"


def newest_term(run: Location) -> Term:
    """Returns the newest term of a run.

    Raises StorageError if the directory cannot be read.
    """
    return _newest_among(run, _names(run))


def term_at(run: Location, number: int) -> Term | None:
    """Returns a term of a run by its number; ``None`` if it has no whole file.

    The file is missing if the term ended long ago. It is incomplete while it is being written, or
    if its writer died. Raises StorageError if the file cannot be read.
    """
    with contextlib.suppress(NotFoundError, ValueError):
        contents = (run / f"term-{number}").read()
        return from_json(contents, lambda facts: _term_of(number, facts))
    return None


def take_term(
    run: Location, lineage: Mapping[int, int], local: Location | None = None, job: str = ""
) -> Term:
    """Takes a term of a run that is newer than all others, for this process.

    Writes the file to the ``local`` directory of the steps as well, because a job that was believed
    dead may save there, too. A term of a publisher has no ``lineage``, and each term of a run has
    one.

    Raises:
        CheckpointError: A run and a publisher would share a directory.
        StorageError: A file cannot be written. It may exist nevertheless: then the ``job`` must not
            save in any of its former terms.
    """
    places = [run] if local is None else [run, local]
    with created(run, sync=True):
        for _ in range(_MOST_TRIES):
            names = [_names(place) for place in places]
            for place, found in zip(places, names, strict=True):
                _check_use(place, found, lineage)
            began_s = time.time()
            now_ms = int(1000 * min(max(0.001, began_s), _LAST_S))  # The clock may be wrong.
            taken = itertools.chain(lineage, *map(_numbers_among, names))
            number = max([now_ms, *(1 + former for former in taken)])
            host, pid = socket.gethostname(), os.getpid()
            term = Term(number, lineage, host, pid, str(run), began_s, job)
            if _wrote(term, run, local):
                for place in places:
                    _remove_former(place)
                return term
            time.sleep(secrets.randbelow(20) / 1e3)  # Else jobs may hinder each other for long.
        raise StorageError(f"cannot begin a term in {run}: other jobs begin terms at the same time")


def _wrote(term: Term, run: Location, local: Location | None) -> bool:
    """Writes the files of a new term; returns whether it is the newest."""
    file = run / f"term-{term.number}"
    try:
        file.write(_encoded(term), sync=True)
        run.sync()
        if max(_numbers_among(_names(run)), default=0) > term.number:
            file.discard()
            return False
        if local is not None:
            local.create_directories()
            # It names no directory: a copied local directory is one of the same run.
            here = _encoded(dataclasses.replace(term, directory=""))
            (local / file.name).replace(here, sync=True)
            local.sync()
    except StorageError as error:
        if error.errno == EEXIST:  # Another job has taken it.
            return False
        for place in filter(None, (run, local)):  # No job took this term: it supersedes none.
            (place / file.name).discard()
        raise
    return True


def check_term(
    run: Location,
    number: int,
    step: Location | None = None,
    *,
    names: Collection[str] | None = None,
) -> None:
    """Checks that no later term of a run than this one has begun. Term 0 is not checked.

    A ``step`` may still be committed if the later term builds on it and has not saved it itself.
    Without a step, later terms of the same job do not count: it may have failed to take them.
    ``names`` are those in the directory, if the caller has just listed it.

    Raises:
        SupersededError: A later term has begun.
        StorageError: The directory cannot be read.
    """
    if not number:
        return
    if max(_numbers_among(_names(run) if names is None else names), default=0) <= number:
        return
    newest = newest_term(run)
    if step is None and newest.job and (own := term_at(run, number)) and own.job == newest.job:
        return
    found = None if step is None else STEP_NAME.fullmatch(step.name)
    is_ancestor = found is not None and newest.has(int(found[1]), number)
    if newest.number > number and not (is_ancestor and step and term_of(step) <= number):
        raise superseded(run, newest)


def check_holder(run: Location, number: int, job: str) -> None:
    """Checks that a term is still that of a job. Reads its file only.

    If the directory was removed or moved, another job may have taken the same number there.

    Raises:
        CheckpointError: No term is there.
        SupersededError: Another job has a term there.
    """
    found = term_at(run, number) or newest_term(run)
    if not found.number:
        raise CheckpointError(f"cannot use {run}: it was removed or moved meanwhile")
    if found.job != job:
        raise superseded(run, found)


def has_term(names: Collection[str], number: int | None = None) -> bool:
    """Returns whether a directory with these names has a term: any, or that of a ``number``."""
    numbers = _numbers_among(names)
    return bool(numbers) if number is None else number in numbers


def check_directory(run: Location, number: int, job: str, *, may_be_empty: bool = False) -> None:
    """Checks that a path still leads to the directory in which a job took a term.

    Raises CheckpointError if the directory has terms, and none of the job or after it, or has
    neither terms nor steps, unless it ``may_be_empty``. Raises StorageError if it cannot be read. A
    directory with steps and without terms passes: a program may have removed old files.
    """
    found = term_at(run, number)
    if found is None:
        names = _names(run)
        others = [term_at(run, other) for other in _numbers_among(names)]
        if any(each and number in each.lineage for each in others):
            return  # Later terms of this run have removed it.
        found = next((each for each in others if each and each.job == job), None)
        has_steps = any(map(STEP_NAME.fullmatch, names))
        if found is None and not others and (may_be_empty or has_steps):
            return
    if found is None or found.job != job:
        raise other_directory(run, f"it has {found or f'no term-{number}'}")


def other_directory(run: Location, why: str) -> CheckpointError:
    """Returns the error of a job whose directory is no longer at its path."""
    return CheckpointError(
        f"cannot use {run}: it is not the directory of this run, because {why}"
        ". That may have been moved or unmounted. To continue here, start the job again"
    )


def superseded(run: Location, newest: Term) -> SupersededError:
    """Returns the error of a job that is not the newest of a run."""
    return SupersededError(
        f"cannot save to {run}: a newer job saves there ({newest}), or another Run of its process. "
        "To continue with this job instead, start it again"
    )


def term_of(step: Location) -> int:
    """Returns the term in which a step was saved; 0 if it has none.

    Raises StorageError if that cannot be read: a step of a later term would count as abandoned.
    """
    with contextlib.suppress(NotFoundError):
        metadata = _native.MetadataFile(step.file_system, (step / ".metadata").path)
        return metadata.term or term_in({BRANCH: (step / BRANCH).read()})
    return 0


def term_in(small_files: Mapping[str, bytes] | None) -> int:
    """Returns the term of a step with these small files; 0 if it has none."""
    with contextlib.suppress(ValueError, KeyError):
        number = from_json((small_files or {})[BRANCH], lambda record: record["term"])
        if type(number) is int and 0 < number < 1 << 64:
            return number
    return 0


def job_in(small_files: Mapping[str, bytes] | None) -> str:
    """Returns the id of the job that saved a step with these small files; empty if unknown."""
    with contextlib.suppress(ValueError, KeyError):
        return from_json((small_files or {})[BRANCH], lambda record: str(record["job"]))
    return ""


def _check_use(place: Location, names: Collection[str], lineage: Mapping[int, int]) -> None:
    """Raises CheckpointError if a directory of a publisher would get a run, or the reverse.

    Each would end the term of the other. A directory that has both, as earlier versions allowed it,
    is that of the run.
    """
    step = next(filter(STEP_NAME.fullmatch, names), None)
    if lineage and step:
        return
    newest = _newest_among(place, names)
    if lineage and newest.number and not newest.lineage:
        raise CheckpointError(
            f"cannot save to {place}: a Publisher publishes there (it has {newest}). "
            "Use another directory for the run"
        )
    if not lineage and (step or newest.lineage):
        raise CheckpointError(
            f"cannot publish to {place}: a Run saves there (it has {step or newest}). "
            "Use another directory for the versions"
        )


def _newest_among(run: Location, names: Collection[str]) -> Term:
    numbers = sorted(_numbers_among(names), reverse=True)
    return next(filter(None, (term_at(run, number) for number in numbers)), Term())


def _remove_former(run: Location) -> None:
    """Removes the files of old terms. If that fails, the next term removes them."""
    with contextlib.suppress(CheckpointError):
        numbers = sorted(_numbers_among(_names(run)), reverse=True)
        for former in numbers[1 + _KEPT :]:
            (run / f"term-{former}").discard()


def _names(run: Location) -> list[str]:
    try:
        return run.names()
    except NotFoundError:
        return []


def _numbers_among(names: Collection[str]) -> list[int]:
    return [int(match[1]) for match in map(_TERM.fullmatch, names) if match]


def _encoded(term: Term) -> bytes:
    facts = {
        "lineage": list(term.lineage.items()),
        "host": term.host,
        "pid": term.pid,
        "directory": term.directory,
        "began_s": term.began_s,
        "job": term.job,
    }
    return json.dumps(facts).encode()


def _term_of(number: int, facts: dict[str, Any]) -> Term:
    lineage = {int(term): int(step) for term, step in facts["lineage"]}
    host, directory, job = str(facts["host"]), str(facts["directory"]), str(facts.get("job", ""))
    return Term(number, lineage, host, int(facts["pid"]), directory, float(facts["began_s"]), job)
