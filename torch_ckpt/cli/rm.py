"""``torch-ckpt rm``: removes a step of a run, or the steps that are newer than a step."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torch_ckpt.cli.arguments import no_run, path_of
from torch_ckpt.cli.terminal import FAILED, SOUND, fail, print_json
from torch_ckpt.ladder.removal import (
    discard_after,
    discard_from_memory,
    steps_after,
    steps_in_memory,
)
from torch_ckpt.ladder.step_files import listed_steps, same_run_of_local, what_is_missing
from torch_ckpt.storage.progress import is_terminal
from torch_ckpt.storage.verify import check_whole

__all__ = ["add_to"]

_MOST_LISTED = 10


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "rm",
        help="remove a step of a run, or all steps after a step",
        description="Removes one step of a run, or all steps after a step, on disk and in "
        "the memory of the run's agent on this machine. --after is for a run that goes back to an "
        "older step: until it has saved again, the next restore loads the newest step. One whole "
        "step must remain, and no removed step may be leased. No training of the run may be in "
        "progress. The command lists the steps, and asks before it removes "
        "them. Exit status: 0; 1 if a damaged step would remain, and none that is whole; 3 if "
        "nothing was removed for another reason, or not all of the steps, or if the local "
        "directory of a run names the directory of another run.",
    )
    parser.add_argument("run", type=path_of, help="directory of the run")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--after", type=int, metavar="STEP", help="the newest step to retain")
    which.add_argument("--step", type=int, help="the only step to remove")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON; needs --yes")
    parser.set_defaults(command=_rm)


def _rm(options: argparse.Namespace) -> int:
    run = options.run.resolved()
    if options.json and not options.yes:
        return fail("--json prints no question: pass --yes as well. Nothing was removed")
    if not listed_steps(run):
        raise no_run(run)
    promoted_to = same_run_of_local(run)
    # The local directory last: otherwise its steps would be promoted again.
    directories = [run] if promoted_to is None else [promoted_to.resolved(), run]
    alone = options.step is not None
    step: int = options.step if alone else options.after

    def is_removed(found: int) -> bool:
        return found == step if alone else found > step

    newest, newer = steps_after(directories, step, check_whole, alone=alone)
    doomed = sorted(filter(is_removed, steps_in_memory(directories[0])), reverse=True)
    if not newer and not doomed:
        missing = what_is_missing(run / f"step-{step}") if alone else ""
        found = f"has no step {step}" if alone else f"has no steps after step {step}"
        return fail(f"{missing or f'{run} {found}'}. Nothing was removed")
    if not options.json:
        print(f"the newest step of {run} that remains: {newest}")
        print(f"steps to remove: {_listed(newer) or 'none on disk'}")
        if doomed:
            print(f"steps to remove from memory: {_listed(doomed)}")
    if not options.yes and not _is_confirmed():
        return FAILED
    discarded = discard_from_memory(directories[0], is_removed)
    removed = discard_after(directories, step, alone=alone)
    if options.json:
        facts = {"run": str(run), "newest": newest, "removed": removed}
        print_json({**facts, "removed_from_memory": sorted(discarded, reverse=True)})
        return SOUND
    print(f"removed steps: {len(removed)} on disk, {len(discarded)} in memory")
    return SOUND


def _listed(steps: list[int]) -> str:
    more = f" and {len(steps) - _MOST_LISTED} more" if len(steps) > _MOST_LISTED else ""
    return ", ".join(map(str, steps[:_MOST_LISTED])) + more


def _is_confirmed() -> bool:
    """Asks for confirmation on the terminal."""
    if not is_terminal(sys.stdin):
        fail("there is no terminal to ask on; pass --yes to remove them. Nothing was removed")
        return False
    print("Remove them? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False
