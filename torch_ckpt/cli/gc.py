"""``torch-ckpt gc``: removes the leftovers of killed processes from a run."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch_ckpt.cli.arguments import add_json, no_run, path_of
from torch_ckpt.cli.terminal import FAILED, SOUND, print_json, printable
from torch_ckpt.commits.terms import Term, newest_term
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.ladder.step_files import listed_steps, same_run_of_local

if TYPE_CHECKING:
    from torch_ckpt.ladder.step_directories import StepDirectories

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "gc",
        help="remove the leftovers of killed processes from a run",
        description="Removes what killed processes have left in the directory of a run: "
        "interrupted removals, unfinished saves that are older than the newest step, hidden "
        "directories, and expired leases. Steps with a checkpoint remain, whole or damaged, and so "
        "do the hidden directories of live processes. No training of the run may be in progress, "
        "and no agent may still promote its steps: the next save with keep_last removes the same. "
        "Exit status: 0; 3 if something cannot be removed.",
    )
    parser.add_argument("run", type=path_of, help="directory of the run")
    add_json(parser)
    parser.set_defaults(command=_gc)


def _gc(options: argparse.Namespace) -> int:
    from torch_ckpt.ladder.step_directories import StepDirectories  # Imports torch.

    run = options.run.resolved()
    # A killed first save has left no step. A term without a lineage is that of a publisher.
    if not listed_steps(run) and not newest_term(run).lineage:
        raise no_run(run)
    disk, before = StepDirectories(run), set(run.names())
    promoted_to = same_run_of_local(run)
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        disk.sweep()
        disk.remove(_unfinished(disk, newest_term(promoted_to or run)))
    removed = sorted(before.difference(run.names()))
    status = FAILED if problems else SOUND
    if options.json:
        messages = [str(problem.message) for problem in problems]
        print_json({"run": str(run), "removed": removed, "problems": messages})
        return status
    for name in removed:
        print(printable(f"removed {run / name}"))
    if not removed and not problems:
        print("nothing to remove")
    for problem in problems:
        print(printable(f"torch-ckpt: {problem.message}"), file=sys.stderr)
    return status


def _unfinished(disk: StepDirectories, lineage: Term) -> list[int]:
    """Returns the steps without a checkpoint that are older than the newest whole step.

    Steps that the run has left do not count: after going back, new saves have lower numbers.
    """
    newest, unfinished = None, []
    for step in listed_steps(disk.directory):
        path = disk.path(step)
        with contextlib.suppress(CheckpointError):  # It may be whole, and not readable now.
            if newest is None:
                disk.check_whole(path)
                newest = step if lineage.has(step, disk.term_of(step)) else None
            elif not metadata_prefixes(path):
                unfinished.append(step)
    return unfinished
