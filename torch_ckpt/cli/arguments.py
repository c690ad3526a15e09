"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import shlex

from torch_ckpt.commits.terms import Term, newest_term, term_of
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.known_frameworks import FRAMEWORKS
from torch_ckpt.ladder.step_files import committed_steps, listed_steps
from torch_ckpt.ladder.times import time_s

__all__ = [
    "add_json",
    "add_rules",
    "add_trust_pickle",
    "checkpoint_at",
    "command",
    "no_run",
    "path_of",
    "point_in_time",
    "positive",
    "rules_of",
    "seconds",
    "tolerance",
]


_WITH_RULES = " or ".join(row.title for row in FRAMEWORKS if row.rules)


def path_of(text: str) -> Location:
    """Returns the location of an argument: absolute, like the paths in errors."""
    return Location(text).absolute()


def no_run(path: Location) -> NotFoundError:
    """Returns the error for a path without a run. It names what exists there instead."""
    # Every command imports this module, and the agent too.
    from torch_ckpt.formats.absent import no_checkpoint
    from torch_ckpt.publishing.version_files import listed_versions

    with contextlib.suppress(CheckpointError):
        if listed_versions(path):
            return NotFoundError(f"{path} is not a run: it has the versions of a publisher")
        if metadata_prefixes(path):
            return NotFoundError(f"{path} is not a run: it is a checkpoint")
        if path.names() and not listed_steps(path):
            return NotFoundError(f"{path} is not a run: it has no directory step-<n>")
    return no_checkpoint(path)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_trust_pickle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="unpickle objects of any class, which can run arbitrary code",
    )


def add_rules(parser: argparse.ArgumentParser, of: str = "a checkpoint") -> None:
    """Adds ``--rules``, for one of the checkpoints of the command."""
    parser.add_argument(
        "--rules",
        type=path_of,
        help="file with rules: how the shards of model-parallel ranks make parameters, if "
        f"{of} is of {_WITH_RULES}",
    )


def rules_of(options: argparse.Namespace) -> str | None:
    """Returns the text of the file of ``--rules``."""
    return None if options.rules is None else options.rules.read().decode(errors="replace")


def positive(text: str) -> int:
    """Returns a positive integer; argparse reports a ``ValueError`` as a usage error."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def seconds(text: str) -> float:
    """Returns a positive number of seconds; argparse reports a ``ValueError`` as a usage error."""
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def point_in_time(text: str) -> float:
    """Returns a point in time, in seconds since 1970."""
    try:
        return time_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tolerance(text: str) -> float:
    """Returns a number that is not negative."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return value


def command(text: str) -> list[str]:
    """Returns the words of a command."""
    words = shlex.split(text)
    if not words:
        raise ValueError(text)
    return words


def checkpoint_at(path: Location) -> Location:
    """Returns the path itself, or for a run the directory of its newest committed step."""
    if path.is_file() or metadata_prefixes(path):
        return path
    steps = [path / f"step-{number}" for number in committed_steps(path)]
    lineage = newest_term(path) if steps else Term()
    live = (step for step in steps if lineage.has(int(step.name[5:]), term_of(step)))
    return next(live, (steps or [path])[0])
