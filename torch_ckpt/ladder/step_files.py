"""The files of a run beside its checkpoints: names of steps, small files of steps, and leases.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import SupportsIndex, TypeVar, cast

from torch_ckpt.agent.identity import id_in_directory
from torch_ckpt.commits.small_files import BRANCH, METRICS, SMALL_FILES, STEP_NAME
from torch_ckpt.coordination.exclusive import has_ended
from torch_ckpt.coordination.owner import is_dead, this_process
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.formats.committed import has_checkpoint, index_name, prefixes_among
from torch_ckpt.process_state import PROCESS
from torch_ckpt.stored_json import from_json

__all__ = [
    "LEASE_S",
    "agreed",
    "announced_removal",
    "branch_of",
    "check_same_run",
    "committed_steps",
    "lease",
    "leased_steps",
    "linked_steps",
    "listed_steps",
    "metrics_file",
    "metrics_of",
    "refusal",
    "remove_expired_leases",
    "run_of_local",
    "same_run_of_local",
    "step_number",
    "tie_directories",
    "what_is_missing",
    "whole_number",
]

T = TypeVar("T")

LEASE_S = 300.0
"""Seconds for which a lease protects a step after it was renewed."""

_LOCAL_OF = "local-of"
"""The file that names the directory to which local steps are promoted."""

_PART = "files of one machine\n"

_MOST_LINKS = 40
"""Most links that the system follows in a path."""

_RENEW_S = 60.0

_REMOVAL = f"{PENDING}removal-"
"""Prefix of the files that announce removals. Retention deletes old pending files."""

_REMOVAL_S = 30.0
"""Longest wait of a lease for announced removals, whose steps are renamed within moments."""

_POLL_S = 0.02

_MODEL = "model.safetensors.index.json"
_LEASE = re.compile(r"\.lease-(0|[1-9][0-9]*)-[0-9a-f]+")
_DATA_OF_COORDINATOR = re.compile(r"__0_\d+_([0-9a-f]{16})\.distcp")  # Its id is the index's.
# Stock DCP's pending metadata has no id.
_REMAINS = re.compile(r"(__\d+)?\.metadata(\.[0-9a-f]{16})?\.tmp|\.agents-.*")


def listed_steps(directory: Location) -> list[int]:
    """Returns all directories with the name of a step, whole or not, the newest first.

    A link to a directory is one. A file is none, and neither is a link that leads nowhere.
    """
    try:
        names = directory.directory_names()
    except NotFoundError:
        return []
    found = (STEP_NAME.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def committed_steps(directory: Location) -> list[int]:
    """Returns the steps with a committed checkpoint, whole or damaged, the newest first."""

    def scan() -> tuple[list[int], list[int]]:
        steps = listed_steps(directory)
        return [step for step in steps if has_checkpoint(directory / f"step-{step}")], steps

    return agreed(scan, lambda found: found[0] == found[1] != [])[0]


def linked_steps(directory: Location, steps: Iterable[int]) -> set[int]:
    """Returns the steps of a directory to which some of its steps lead, which are links."""
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


def agreed(scan: Callable[[], T], is_certain: Callable[[T], bool]) -> T:
    """Scans the steps of a run until the result is certain, or two scans in a row agree.

    During a scan, another process may commit a step that the scan has passed or did not list, and
    remove the step that comes next. So a scan without a step, or with one that is not committed, is
    not certain.
    """
    found = scan()
    while not is_certain(found):
        before, found = found, scan()
        if found == before:
            break
    return found


def what_is_missing(step: Location) -> str:
    """Returns what the directory of a step lacks, if it has files but cannot have been left so.

    A save leaves a pending file, and agents leave files of their own, where it did not commit. If
    there are neither these nor metadata, somebody may have copied the data files alone. On a store,
    there may be a file of this name instead. The text is empty for a checkpoint, whole or damaged,
    for the remains of a save, and if the directory cannot be read.
    """
    try:
        names = step.names()  # Once: a save may commit meanwhile.
    except CheckpointError:
        return ""
    if prefixes_among(names) or any(_REMAINS.fullmatch(name) for name in names):
        return ""
    if _MODEL in names:  # A training may export its last step.
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
    """Records, for people and commands, to which run a local directory belongs.

    ``is_part`` says that other machines have the other files of its steps.
    """
    name = str(run)
    if not name.isprintable():  # Such as one with a line feed, or that is not UTF-8.
        name = json.dumps(name)
    contents = f"{name}\n{_PART if is_part else ''}".encode()
    with contextlib.suppress(NotFoundError):
        if (local / _LOCAL_OF).read() == contents:
            return
    (local / _LOCAL_OF).replace(contents, sync=True)


def run_of_local(local: Location) -> tuple[Location | None, bool]:
    """Returns the directory to which the steps of a local directory are promoted, if any.

    The second value says that other machines have the other files of these steps. Whether that
    directory is still of the same run, :func:`check_same_run` finds out. Raises CheckpointError if
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


def same_run_of_local(local: Location) -> Location | None:
    """Returns as :func:`run_of_local` the directory of the run, which has been checked."""
    run, _ = run_of_local(local)
    if run is not None:
        check_same_run(local, run)
    return run


def check_same_run(local: Location, run: Location) -> None:
    """Checks that a local directory belongs to the run in a directory that it names.

    Raises CheckpointError if that directory is of another run or was removed, and StorageError if
    it cannot be read.
    """
    own, found = id_in_directory(local), id_in_directory(run)
    if own is None or own != found:
        raise CheckpointError(
            f"{run}, which {local / _LOCAL_OF} names, is not the run of the steps in {local}: its "
            f"run-id is {found or 'missing'}, and theirs is {own or 'missing'}. To treat the local "
            f"directory as a run, remove {local / _LOCAL_OF}"
        )


# ---- Small files of a step ----


def metrics_file(step: int, metrics: Mapping[str, float], monitor: str | None) -> dict[str, bytes]:
    """Returns the file with the metrics of a step, by name.

    Raises ValueError if a value is no number, or ``monitor`` is missing.
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
    """Returns the metrics of a step; empty if there are none."""
    try:
        return from_json((step / METRICS).read(), _numbers_of)
    except (CheckpointError, ValueError):
        return {}


def _numbers_of(stored: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in stored.items() if isinstance(value, int | float)}


# ---- Leases ----


@contextlib.contextmanager
def lease(directory: Location, step: int) -> Iterator[Location]:
    """Protects a step of a run from removal within the block, which gets its directory.

    The lease is a file in the directory of the run. A thread renews it. After the death of the
    process, it protects the step for another 300 s at most. A forked child that leaves the block
    does not end it. Raises NotFoundError if the step is not committed, or is being removed.
    """
    path = directory / f"step-{step}"
    if not has_checkpoint(path):
        raise _no_step(directory, step)
    file, owner = directory / f".lease-{step}-{secrets.token_hex(8)}", os.getpid()
    _renew(file)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_RENEW_S):
            with contextlib.suppress(CheckpointError):  # The next renewal may succeed.
                _renew(file)

    thread = threading.Thread(target=renew, name="torch_ckpt-lease", daemon=True)
    try:
        # A removal that is announced later finds the lease.
        _wait_for_removals(directory, path.name, file)
        if not has_checkpoint(path):
            raise _no_step(directory, step)
        thread.start()
        yield path
    finally:
        if os.getpid() == owner:
            ended.set()
            if thread.is_alive():
                thread.join()
            file.discard()


def announced_removal(
    directory: Location, names: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Lets new leases of some steps wait until the block ends, if a file for it can be written.

    If the process dies, no lease of its machine waits, and those of other machines do not wait for
    longer than ``_REMOVAL_S``. A later retention deletes the file. If an interrupt leaves the file,
    the next removal of this process deletes it. The block must not ``yield``.
    """
    return _announced(directory, names, sys._getframe(1))


@contextlib.contextmanager
def _announced(directory: Location, names: Sequence[str], by: FrameType) -> Iterator[None]:
    for left in [each for each in list(PROCESS.removals) if has_ended(each[1])]:
        left[0].discard()
        with contextlib.suppress(ValueError):  # Another thread has removed it.
            PROCESS.removals.remove(left)
    file = directory / f"{_REMOVAL}{secrets.token_hex(8)}.{this_process()}"
    removal = file, by
    try:
        PROCESS.removals.append(removal)
        with contextlib.suppress(CheckpointError):  # Whole at once: an empty one blocks all leases.
            file.replace(json.dumps(list(names)).encode(), sync=False)
        yield
    finally:
        file.discard()
        with contextlib.suppress(ValueError):  # It was not announced yet.
            PROCESS.removals.remove(removal)


def _wait_for_removals(directory: Location, name: str, lease: Location) -> None:
    """Waits until no removal of a step is announced, or its process has probably died."""
    now_s = lease.modified_s()  # By the clock of the file system; the lease was just written.
    waiting = LongWait(lambda: f"the removal of {directory / name} to end")
    for pause_s in waiting.rounds(_REMOVAL_S, _POLL_S):
        files = [directory / each for each in directory.names() if each.startswith(_REMOVAL)]
        if not any(_announces(file, name) and not _has_died(file, now_s) for file in files):
            return
        time.sleep(pause_s)


def _announces(file: Location, name: str) -> bool:
    try:
        return from_json(file.read(), lambda names: name in names)
    except NotFoundError:
        return False
    except ValueError:  # It is being written.
        return True


def _has_died(removal: Location, now_s: float | None) -> bool:
    """Returns whether the process of an announced removal has died, as far as that is known.

    On other machines, and for files of earlier versions, the age of the file is the evidence.
    """
    if any(file == removal and has_ended(by) for file, by in list(PROCESS.removals)):
        return True
    if (found := is_dead(_owner_of(removal))) is not None:
        return found
    written_s = removal.modified_s()
    return now_s is not None and written_s is not None and now_s - written_s > _REMOVAL_S


def _owner_of(pending: Location) -> str:
    """Returns the process of a pending file; empty if its name has none."""
    return pending.name.removeprefix(PENDING).partition(".")[2]


def leased_steps(directory: Location) -> set[int]:
    """Returns the steps that a lease protects, also those to which a leased link leads."""
    leased = {step for step, _, is_valid in _leases(directory) if is_valid}
    return leased | linked_steps(directory, leased)


def remove_expired_leases(directory: Location) -> None:
    """Deletes the leases of processes that have died, and what they have left unfinished."""
    for _, file, is_valid in _leases(directory):
        if not is_valid:
            file.discard()
    others = []  # Perhaps of another machine, or of a process that lives.
    for file in (directory / name for name in directory.names() if name.startswith(PENDING)):
        if is_dead(_owner_of(file)):
            file.discard()
        else:
            others.append(file)
    now = _now_s(directory) if others else None
    for file in others:
        written = file.modified_s()
        if now is not None and written is not None and now - written > LEASE_S:
            file.discard()


def _leases(directory: Location) -> Iterator[tuple[int, Location, bool]]:
    try:
        leases = list(filter(None, map(_LEASE.fullmatch, directory.names())))
    except NotFoundError:
        return
    now = _now_s(directory) if leases else None
    for match in leases:
        file = directory / match[0]
        by, written = now, file.modified_s()
        if written is None:  # The file system dates no files.
            by, written = time.time(), _renewed_s(file)
        is_valid = by is None or written is None or abs(by - written) < LEASE_S
        # A clock may have been set meanwhile, or the lease was not renewed on a full disk.
        yield int(match[1]), file, is_valid or _lives(file)


def _now_s(directory: Location) -> float | None:
    """Returns the time by the clock of the file system, by which files are dated.

    A server and this machine may have different clocks. ``None`` if no file can be written.
    """
    file = directory / f"{PENDING}{secrets.token_hex(8)}.{this_process()}"
    written = None
    with contextlib.suppress(CheckpointError):
        file.write(b"", sync=False)
        written = file.modified_s()
    file.discard()
    return written


def _renew(file: Location) -> None:
    """Writes the lease again, with its owner; ``host`` and ``pid`` are for people.

    The time of the write counts, or that in the file if the file system dates no files.
    """
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "process": this_process()}
    file.replace(json.dumps(owner | {"renewed_s": time.time()}).encode(), sync=False)


def _lives(lease: Location) -> bool:
    """Returns whether the process of a lease certainly lives: it is one of this machine."""
    with contextlib.suppress(CheckpointError, ValueError):
        return from_json(lease.read(), lambda owner: is_dead(owner["process"])) is False
    return False


def _renewed_s(file: Location) -> float | None:
    """Returns when a lease was written by the clock of its process; ``None`` if it is unknown."""
    with contextlib.suppress(CheckpointError, ValueError):
        return from_json(file.read(), lambda owner: float(owner["renewed_s"]))
    return None


def _no_step(directory: Location, step: int) -> NotFoundError:
    return NotFoundError(f"cannot lease step {step} of {directory}: it is not a committed step")


# ---- Arguments ----


def whole_number(name: str, value: object) -> int:
    """Returns a number that a caller has given: an integer of Python, NumPy or a tensor.

    Raises TypeError for any other value, with the name of the argument, and ValueError if it has
    more than 63 bits: neither the memory of an agent nor the core can store it.
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
    """Returns a step that a caller has given.

    Raises TypeError if it is no integer: a directory ``step-1.0`` would never be found again.
    """
    return whole_number("step", step)


def refusal(step: object, *, is_kept: bool) -> Exception | None:
    """Returns the error of a step that cannot be saved. ``is_kept``: on disk or by an agent."""
    try:
        number = step_number(step)
    except (TypeError, ValueError) as error:
        return error
    if number < 0:
        return ValueError(f"{step=} is negative")
    if not is_kept:
        return ValueError("persist=False: only an agent can retain a step in memory alone")
    return None
