"""The files of a run beside its checkpoints: names of steps, and small files of steps.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import SupportsIndex, TypeVar, cast

from torch_ckpt.agent.identity import RUN_ID, id_in_directory
from torch_ckpt.commits.leases import leases_of
from torch_ckpt.commits.small_files import BRANCH, METRICS, SMALL_FILES, STEP_NAME
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
)
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.formats.committed import has_checkpoint, index_name, prefixes_among
from torch_ckpt.stored_json import from_json

__all__ = [
    "agreed",
    "branch_of",
    "check_same_run",
    "committed_steps",
    "is_part_of_machine",
    "leased_steps",
    "linked_steps",
    "listed_steps",
    "metrics_file",
    "metrics_of",
    "readable_metrics_of",
    "refusal",
    "renew_files",
    "run_of_local",
    "same_run_of_local",
    "step_number",
    "tie_directories",
    "what_is_missing",
    "whole_number",
]

T = TypeVar("T")

_LOCAL_OF = "local-of"
"""The file that names the directory to which local steps are promoted."""

_PART = "files of one machine\n"

_MOST_LINKS = 40
"""Maximum number of links that the system follows in a path."""

_MODEL = "model.safetensors.index.json"
_DATA_OF_COORDINATOR = re.compile(r"__0_\d+_([0-9a-f]{16})\.distcp")  # With the index's id.
# Stock DCP's pending metadata has no id.
_REMAINS = re.compile(r"(__\d+)?\.metadata(\.[0-9a-f]{16})?\.tmp|\.agents-.*")


def listed_steps(directory: Location) -> list[int]:
    """Returns all directories with the name of a step, whole or not, the newest first.

    Links to directories count. Files and broken links do not.
    """
    try:
        names = directory.directory_names()
    except NotFoundError:
        return []
    found = (STEP_NAME.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def committed_steps(directory: Location) -> list[int]:
    """Returns the steps with a committed checkpoint, whole or damaged, the newest first.

    A step whose directory cannot be read counts, because it may have one.
    """

    def is_committed(step: int) -> bool:
        try:
            return has_checkpoint(directory / f"step-{step}")
        except StorageError:
            return True

    def scan() -> tuple[list[int], list[int]]:
        steps = listed_steps(directory)
        return list(filter(is_committed, steps)), steps

    return agreed(scan, lambda found: found[0] == found[1] != [])[0]


def linked_steps(directory: Location, steps: Iterable[int]) -> set[int]:
    """Returns the steps of a directory that are targets of links among its steps."""
    found = set()
    for step in steps:
        path = directory / f"step-{step}"
        for _ in range(_MOST_LINKS):
            target = path.link_target()
            if target is None:
                break
            match = STEP_NAME.fullmatch(target.name)
            if match is not None and target.parent.is_same_as(directory):
                found.add(int(match[1]))
            path = target
    return found


def leased_steps(directory: Location) -> set[int]:
    """Returns the steps that a lease protects, including the targets of leased links."""
    leased = set(leases_of(directory))
    return leased | linked_steps(directory, leased)


def agreed(scan: Callable[[], T], is_certain: Callable[[T], bool]) -> T:
    """Scans the steps of a run until the result is certain, or two scans in a row agree.

    During a scan, another process may commit a step that the scan has passed or did not list, and
    remove the next step. So a scan that finds no step, or an uncommitted one, is uncertain.
    """
    found = scan()
    while not is_certain(found):
        before, found = found, scan()
        if found == before:
            break
    return found


def what_is_missing(step: Location) -> str:
    """Returns what the directory of a step lacks, if no save can have left it in this state.

    A save that did not commit leaves a pending file, and agents leave their files. If neither these
    nor metadata exist, a user may have copied the data files alone. On a store, the step may be a
    file instead. The text is empty for a checkpoint, whole or damaged, for the remains of a save,
    and if the directory cannot be read.
    """
    try:
        names = step.names()  # Once: a save may commit meanwhile.
    except CheckpointError:
        return ""
    if prefixes_among(names) or any(_REMAINS.fullmatch(name) for name in names):
        return ""
    if _MODEL in names:  # Trainings may export the last step.
        return f"{step} has a model of Hugging Face, and no checkpoint"
    others = [name for name in names if name not in SMALL_FILES and not name.startswith(PENDING)]
    if not others:  # A listing of a store does not distinguish objects from folders.
        return "" if names or not step.is_file() else f"{step} is a file"
    ids = {match[1] for match in map(_DATA_OF_COORDINATOR.fullmatch, others) if match}
    lacks = " and ".join([".metadata", *(index_name(save_id) for save_id in sorted(ids))])
    return (
        f"{step} has {', '.join(others[:2])}{' and others' if len(others) > 2 else ''}, but lacks "
        f"{lacks}. Its save did not finish, or it was copied by "
        f"`cp {step.name}/*`, which leaves out the files whose names begin with a dot: copy these "
        "as well"
    )


# ---- A local directory of a run ----


def tie_directories(local: Location, run: Location, *, is_part: bool) -> None:
    """Records, for users and commands, the run to which a local directory belongs.

    ``is_part``: whether other machines have the other files of its steps.
    """
    name = str(run)
    if not name.isprintable():  # For example with a line feed, or not UTF-8.
        name = json.dumps(name)
    contents = f"{name}\n{_PART if is_part else ''}".encode()
    with contextlib.suppress(NotFoundError):
        if (local / _LOCAL_OF).read() == contents:
            return
    (local / _LOCAL_OF).replace(contents, sync=True)


def run_of_local(local: Location) -> tuple[Location | None, bool]:
    """Returns the directory to which the steps of a local directory are promoted, if any.

    The second value is whether other machines have the other files of these steps. The directory
    may belong to another run by now; :func:`check_same_run` checks that. Raises CheckpointError if
    the file that names it cannot be read, or this process cannot reach the directory.
    """
    file = local / _LOCAL_OF
    try:
        run, _, part = file.read().decode().partition("\n")
        if run.startswith('"'):  # A path is absolute, and a URL begins with its scheme.
            run = from_json(run, str)
        os.fsencode(run)
        return Location(run), part == _PART
    except NotFoundError:
        return None, False
    except ValueError as error:
        raise CorruptionError(f"{file} does not name the directory of a run: {error}") from None


def is_part_of_machine(local: Location) -> bool:
    """Returns whether other machines have the other files of the steps of a local directory."""
    with contextlib.suppress(CheckpointError):
        return run_of_local(local)[1]
    return False


def same_run_of_local(local: Location) -> Location | None:
    """Returns the directory of the run as :func:`run_of_local`, and checks it."""
    run, _ = run_of_local(local)
    if run is not None:
        check_same_run(local, run)
    return run


def check_same_run(local: Location, run: Location) -> None:
    """Checks that a local directory belongs to the run in the directory that it names.

    Raises CheckpointError if that directory belongs to another run or was removed, and StorageError
    if it cannot be read.
    """
    own, found = id_in_directory(local), id_in_directory(run)
    if own is None or own != found:
        raise CheckpointError(
            f"{run}, which {local / _LOCAL_OF} names, is not the run of the steps in {local}: its "
            f"run-id is {found or 'missing'}, and theirs is {own or 'missing'}. To treat the local "
            f"directory as a run, remove {local / _LOCAL_OF}"
        )


def renew_files(run: Location, term: int) -> None:
    """Dates the files of a run that a job writes once to the present, as far as possible.

    A program that purges old files by their age would otherwise remove them. ``term`` is that of
    this job: on a store, a file that another job removes meanwhile may return.
    """
    with contextlib.suppress(CheckpointError):
        for name in (RUN_ID, _LOCAL_OF, f"term-{term}"):
            (run / name).renew()


# ---- Small files of a step ----


def metrics_file(step: int, metrics: Mapping[str, float], monitor: str | None) -> dict[str, bytes]:
    """Returns the file with the metrics of a step, by name.

    Raises ValueError if a value is not a number, or ``monitor`` is missing.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"step {step} was not saved: metrics has no number as {name!r}: {error}"
            ) from error
    if monitor is not None and monitor not in numbers:
        raise ValueError(f"step {step} was not saved: metrics has no {monitor!r}")
    return {METRICS: json.dumps(numbers, indent=1).encode()}


def branch_of(step: Location) -> dict[str, int | None] | None:
    """Returns the record of the branch on which a step was saved; ``None`` without one.

    The record has one entry, ``continued_from``: the step at which the branch begins, or ``None``
    if it begins with a new training.
    """
    try:
        root = from_json((step / BRANCH).read(), operator.itemgetter("continued_from"))
    except (CheckpointError, ValueError):
        return None
    is_step = isinstance(root, int) and not isinstance(root, bool)
    return {"continued_from": root} if root is None or is_step else None


def metrics_of(step: Location) -> dict[str, float]:
    """Returns the metrics of a step; empty if it has none, or they cannot be read."""
    with contextlib.suppress(CheckpointError):
        return readable_metrics_of(step)
    return {}


def readable_metrics_of(step: Location) -> dict[str, float]:
    """Returns the metrics of a step; empty if it has none.

    Raises StorageError if they cannot be read, and CorruptionError if they are damaged: the step
    may be the best.
    """
    try:
        return from_json((step / METRICS).read(), _numbers_of)
    except NotFoundError:
        return {}
    except ValueError as error:
        raise CorruptionError(f"{step / METRICS} is damaged: {error}") from None


def _numbers_of(stored: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in stored.items() if isinstance(value, int | float)}


# ---- Arguments ----


def whole_number(name: str, value: object) -> int:
    """Returns a number passed by a caller: an integer of Python, NumPy or a tensor.

    Raises TypeError, with the name of the argument, for any other value. Raises ValueError for more
    than 63 bits, which neither the memory of an agent nor the core can store.
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise TypeError(f"{name}={value!r} is not an integer")
    try:
        number = operator.index(cast(SupportsIndex, value))
    except (TypeError, ValueError, RuntimeError):  # Such as a tensor of several values.
        raise TypeError(f"{name}={value!r} is not an integer") from None
    if number.bit_length() > 63:
        bits = number.bit_length()
        raise ValueError(f"{name} is too large: it has {bits} bits, and the largest is 2**63 - 1")
    return number


def step_number(step: object) -> int:
    """Returns a step passed by a caller.

    Raises TypeError if it is not an integer: a directory ``step-1.0`` would never be found.
    """
    return whole_number("step", step)


def refusal(step: object, *, is_kept: bool) -> Exception | None:
    """Returns the error for an unusable step. ``is_kept``: it goes to disk or to an agent."""
    try:
        number = step_number(step)
    except (TypeError, ValueError) as error:
        return error
    if number < 0:
        return ValueError(f"{step=} is negative")
    if not is_kept:
        return ValueError("persist=False: only an agent can retain a step in memory alone")
    return None
