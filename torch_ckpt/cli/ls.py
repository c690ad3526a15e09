"""``torch-ckpt ls``: lists the steps of a run."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch_ckpt.agent.slot_reports import unread_steps
from torch_ckpt.cli.arguments import add_json, no_run, path_of, point_in_time
from torch_ckpt.cli.terminal import (
    DAMAGED,
    SOUND,
    age_text,
    print_json,
    print_table,
    printable,
)
from torch_ckpt.cli.versions import is_root, list_versions
from torch_ckpt.commits.leases import leases_of
from torch_ckpt.commits.terms import Term, newest_term, term_of
from torch_ckpt.errors import CheckpointError, NotFoundError, is_damage
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.ladder.step_files import (
    agreed,
    branch_of,
    check_same_run,
    listed_steps,
    metrics_of,
    run_of_local,
    what_is_missing,
)
from torch_ckpt.records.reading import missing_replicas, newest_first
from torch_ckpt.storage.progress import readable_nbytes
from torch_ckpt.storage.verify import check_here, check_whole

__all__ = ["add_to"]


_PRESENT = "files present"
"""State of a step that opens and whose files have the right lengths: ``ls`` does not read them."""

_HEADER = ("step", "size", "new", "age", "leases", "state", "metrics", "")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the steps of a run, or published versions",
        description="Lists the steps of a run, the newest first: size, age, metrics, and whether "
        "its files are present: the step opens, and they have the right lengths; "
        "torch-ckpt verify reads all bytes. In a local directory, from which steps are promoted, "
        "the list has the steps of the run as well, and where the files of each are, unless the "
        "directory of the run is of another run now; 'part' means "
        "that other machines have the other files. Newer steps of the run in the memory of this "
        "machine are named before the list. 'New' are the bytes that no older step has, if "
        "a save has reused some. "
        "A step that was saved after the run had gone back to "
        "step 300 is marked 'from step 300'. 'Leases' counts the readers that protect a step from "
        "removal. Exit status: 0; 1 if a committed step is damaged; "
        "3 if there is no run. In a directory of published versions, lists these: kind, size, size "
        "as a part of all tensors, age, and how many subscribers read each.",
    )
    parser.add_argument("run", type=path_of, help="directory of the run, or of versions")
    parser.add_argument(
        "--at",
        type=point_in_time,
        metavar="TIME",
        help="list only the step that the run had at a time, such as '2026-11-28 14:30': the "
        "newest sound one of that time; exit status 3 if there is none",
    )
    add_json(parser)
    parser.set_defaults(command=_ls)


def _ls(options: argparse.Namespace) -> int:
    run = options.run
    if is_root(run):
        return list_versions(run, as_json=options.json)
    promoted_to, is_part = None, False
    # A run has the steps of both directories. A step counts where it is whole.
    directories = {"": run}
    only_local: list[str] = []
    try:
        promoted_to, is_part = run_of_local(run)
        if promoted_to is not None:
            directories = {"local": run}
            check_same_run(run, promoted_to)
            directories["run"] = promoted_to
    except CheckpointError as error:
        only_local.append(f"only the local steps are listed: {error}")
        promoted_to = None
    steps: list[dict[str, Any]] = []
    unlisted: list[str] = []

    def scan() -> list[tuple[int, str]]:
        unlisted.clear()
        steps[:] = _steps_of(directories, unlisted, is_part=is_part)
        return [(step["step"], step["state"]) for step in steps]

    # Training may save and remove steps meanwhile.
    agreed(scan, lambda found: found != [] and all(state != "unfinished" for _, state in found))
    for problem in [*(only_local if steps else ()), *unlisted]:
        print(printable(problem), file=sys.stderr)
    if not options.run.file_system.has_folders:  # Some servers list empty folders.
        steps[:] = [step for step in steps if step["state"] != "unfinished" or step["nbytes"]]
    lineage = Term()
    with contextlib.suppress(CheckpointError):  # `unlisted` says so.
        lineage = newest_term(promoted_to or run)
    for step in steps:
        term = step.pop("term")
        step["left"] = term is not None and not lineage.has(step["step"], term)
    live = [step for step in steps if step["state"] == _PRESENT and not step["left"]]
    newest = live[0]["step"] if live else None
    in_memory: list[int] = []
    with contextlib.suppress(CheckpointError):  # A later version wrote it, or mapping is refused.
        in_memory = unread_steps((promoted_to or run).resolved(), newest)
    if not steps and not in_memory:
        raise no_run(run)
    if options.at is not None:
        from torch_ckpt.ladder.step_directories import StepDirectories, step_at  # Imports torch.

        chosen = step_at([StepDirectories(each) for each in directories.values()], options.at)
        steps = [step for step in steps if step["step"] == chosen]
    unreplicated = ""
    with contextlib.suppress(CheckpointError):  # The record is unreadable.
        unreplicated = missing_replicas(newest_first(promoted_to or run))
    if options.json:
        for step in steps:  # JSON has neither NaN nor infinity.
            metrics = step["metrics"].items()
            step["metrics"] = {k: v if math.isfinite(v) else str(v) for k, v in metrics}
        facts = {"run": str(options.run), "newest": newest, "unreplicated": unreplicated or None}
        facts["in_memory"] = in_memory
        print_json({**facts, "steps": steps})
    else:
        if unreplicated:
            print(printable(f"warning: {unreplicated}"), file=sys.stderr)
        if in_memory:
            which = "steps" if newest is None else "newer steps"
            numbers = ", ".join(map(str, in_memory))
            print(f"{which} in the memory of this machine: {numbers}", file=sys.stderr)
        print_table([_row(step, newest) for step in steps], header=_HEADER, right=range(5))
    return DAMAGED if any(step["state"] == "damaged" for step in steps) else SOUND


def _steps_of(
    directories: Mapping[str, Location], unlisted: list[str], *, is_part: bool
) -> list[dict[str, Any]]:
    """Returns the facts of each step in the directories of a run, by tier; the newest first.

    Appends to ``unlisted`` why the directory of the run cannot be listed.
    """
    where: dict[int, list[str]] = {}
    leases: Counter[int] = Counter()
    for tier, directory in directories.items():
        try:
            numbers = listed_steps(directory)
        except CheckpointError as error:
            if tier != "run":
                raise
            unlisted.append(f"the steps of {directory} are not listed: {error}")
            continue
        leases.update(leases_of(directory))
        for number in numbers:
            where.setdefault(number, []).append(tier)
    found = []
    for number in sorted(where, reverse=True):
        paths = {tier: directories[tier] / f"step-{number}" for tier in where[number]}
        found.append(_facts_of(paths, number, is_part=is_part) | {"leases": leases[number]})
    return found


def _facts_of(paths: Mapping[str, Location], number: int, *, is_part: bool) -> dict[str, Any]:
    """Returns the facts of a step in the nearest tier in which it is whole, and all such tiers.

    ``is_part``: whether the local directory contains the files of only one of several machines.
    """
    facts = {
        tier: _facts(path, number, is_part=is_part and tier == "local")
        for tier, path in paths.items()
    }
    sound = [tier for tier, found in facts.items() if found["state"] in (_PRESENT, "part")]
    whole = [tier for tier in sound if facts[tier]["state"] == _PRESENT]
    return facts[(whole or sound or list(facts))[0]] | {"tiers": [tier for tier in sound if tier]}


def _facts(path: Location, number: int, *, is_part: bool) -> dict[str, Any]:
    state, reason = _PRESENT, None
    try:
        if is_part:
            state = "part"
            check_here(path)
        else:
            check_whole(path)
    except NotFoundError:
        reason = what_is_missing(path) or None
        state = "unfinished" if reason is None else "incomplete"
    except CheckpointError as error:
        state, reason = "damaged" if is_damage(error) else "unknown", str(error)
    modified, term = (path / ".metadata").modified_s(), None
    with contextlib.suppress(CheckpointError):  # It cannot be read now.
        term = None if modified is None else term_of(path)
    nbytes, linked_nbytes = _nbytes(path)
    return {
        "step": number,
        "nbytes": nbytes,
        "linked_nbytes": linked_nbytes,
        "saved_s": modified,
        "age_s": None if modified is None else max(time.time() - modified, 0.0),
        "state": state,
        "reason": reason,
        "metrics": metrics_of(path),
        "branch": branch_of(path),
        "term": term,
    }


def _nbytes(path: Location) -> tuple[int, int]:
    """Returns the total length of the files of a step, and of those that an older save wrote."""
    lengths: dict[str, int] = {}
    linked = 0
    with contextlib.suppress(CheckpointError):  # Removed meanwhile.
        for name in path.names():
            with contextlib.suppress(CheckpointError):  # A directory.
                lengths[name] = (path / name).nbytes()
        index = open_committed(path, "")[1]
        if index is not None:
            linked = sum(
                lengths.get(f, 0) for i, (f, _) in enumerate(index.files) if index.origin(i)
            )
    return sum(lengths.values()), linked


def _row(step: dict[str, Any], newest: int | None) -> list[str]:
    is_newest = step["step"] == newest
    tiers = " and ".join(step["tiers"])
    marks = [
        f"{step['state']} ({tiers})" if tiers else step["state"],
        "newest" if is_newest else "",
        "left by the run" if step["left"] else "",
        _branch(step["branch"]),
    ]
    return [
        str(step["step"]),
        readable_nbytes(step["nbytes"]),
        readable_nbytes(step["nbytes"] - linked) if (linked := step["linked_nbytes"]) else "",
        age_text(step["age_s"]),
        str(step["leases"] or ""),
        ", ".join(filter(None, marks)),
        " ".join(f"{name}={value:g}" for name, value in step["metrics"].items()),
        step["reason"] or "",
    ]


def _branch(record: dict[str, Any] | None) -> str:
    """Returns the step at which the branch of a step begins, if the run went back before."""
    if record is None:
        return ""
    root = record["continued_from"]
    return "from the start" if root is None else f"from step {root}"
