"""``torch-ckpt watch``: runs a command on each new step of a run, or shows what the run does."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch_ckpt.cli.arguments import command, no_run, path_of, seconds
from torch_ckpt.cli.terminal import FAILED, SOUND, printable
from torch_ckpt.commits.leases import lease
from torch_ckpt.commits.terms import Term, newest_term, term_of
from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps, is_part_of_machine, listed_steps
from torch_ckpt.records.calls import in_flight
from torch_ckpt.records.diagnosis import first_sentence
from torch_ckpt.records.reading import recent_events
from torch_ckpt.storage.verify import check_here, check_whole

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="run a command on each new step of a run, such as an evaluation, or show the steps",
        description="Waits for new steps of a run and runs a command on each. Without a command, "
        "prints each new step, and the saves and loads that are in progress, as far as the record "
        "of the run has them. In the words of the command, "
        "{path} is the directory of the step and {step} its number. The environment has "
        "both as TORCH_CKPT_PATH and TORCH_CKPT_STEP. A lease protects the step from removal "
        "meanwhile. If several steps appear during a command, only the newest of them is next. "
        "Exit status: 0 if all commands succeeded, else 3.",
    )
    parser.add_argument("run", type=path_of, help="directory of the run")
    parser.add_argument(
        "--exec",
        dest="words",
        type=command,
        metavar="COMMAND",
        help="command, split into words as by a shell; no shell runs it",
    )
    parser.add_argument("--all", action="store_true", help="first all existing steps, in order")
    parser.add_argument("--once", action="store_true", help="end when there is no new step")
    parser.add_argument("--until-step", type=int, metavar="STEP", help="end after this step")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="time between two searches for new steps (default: %(default)g)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON for each step, and for each change of what is in progress",
    )
    parser.set_defaults(command=_watch)


def _watch(options: argparse.Namespace) -> int:
    with _interrupts() as interrupted:
        return _run_commands(options, interrupted)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Records Ctrl-C: Python drops the exception for it if a destructor runs at that moment.

    After each command, the destructor of ``Popen`` does.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _run_commands(options: argparse.Namespace, interrupted: threading.Event) -> int:
    status = SOUND
    for step in _new_steps(options, interrupted):
        facts: dict[str, Any] = {"step": step, "path": str(options.run / f"step-{step}")}
        if options.words is not None:
            try:
                with lease(options.run, step) as path:
                    facts["succeeded"] = _succeeds(options.words, step, str(path))
            except NotFoundError:
                print(f"torch-ckpt: step {step} was removed before its command", file=sys.stderr)
                facts["removed"] = True
        if not facts.get("succeeded", True):
            status = FAILED
        if options.json:
            print(json.dumps(facts), flush=True)
        elif options.words is None:
            print(f"step {step}: {printable(str(facts['path']))}", flush=True)
        if options.until_step is not None and step >= options.until_step:
            break
    return status


def _new_steps(options: argparse.Namespace, interrupted: threading.Event) -> Iterator[int]:
    """Yields the existing steps if ``--all``, else the newest, then the new ones of each search.

    With a command, only the newest of the new ones.

    A run that goes back to an earlier step saves the same numbers again, in a later term. These
    steps are new, and those that the run has left are not among them.
    """
    if options.once and not listed_steps(options.run):
        raise no_run(options.run)
    if not listed_steps(options.run):
        found = "does not exist" if _is_missing(options.run) else "has no step"
        print(f"torch-ckpt: {options.run} {found} yet; waiting for its first step", file=sys.stderr)
    known: dict[int, int] = {}
    shown: list[tuple[str, ...]] = []
    is_first = not options.all
    if options.all:
        known = _terms_of_whole_steps(options.run, known)
        yield from sorted(known)
    while True:
        if interrupted.is_set():
            raise KeyboardInterrupt
        former, known = known, _terms_of_whole_steps(options.run, known)
        new = [step for step, term in known.items() if former.get(step) != term]
        if new:
            only_newest = is_first or options.words is not None
            yield from [max(new)] if only_newest else sorted(new)
        elif options.once:
            return
        else:
            if options.json or options.words is None:
                shown = _show_in_flight(options, shown)
            time.sleep(options.interval)
        is_first = False


def _terms_of_whole_steps(run: Location, known: Mapping[int, int]) -> dict[int, int]:
    """Returns the whole steps that the run has not left, and the terms of their saves.

    Steps that are ``known`` are not checked again, unless the newest term begins at the step or
    before it: then it may be saved again.
    """
    steps = committed_steps(run)
    check = check_here if is_part_of_machine(run) else check_whole
    lineage = newest_term(run) if steps else Term()
    found = {}
    for step in steps:
        term = known.get(step)
        # It is not whole, or was removed meanwhile.
        with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
            if term is None or (term < lineage.number and step >= lineage.lineage.get(term, -1)):
                term = term_of(run / f"step-{step}")
                if lineage.has(step, term):
                    check(run / f"step-{step}")
            if lineage.has(step, term):
                found[step] = term
    return found


def _show_in_flight(
    options: argparse.Namespace, shown: list[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Prints the calls in progress if they, or their phases, are not the ``shown`` ones."""
    calls = in_flight(recent_events(options.run), time.time())
    found = [(call.name, *call.open_phases) for call in calls]
    if found == shown:
        return shown
    if options.json:
        facts = [
            {"kind": call.kind, "step": call.step, "phases": call.open_phases, "start": call.start}
            for call in calls
        ]
        print(json.dumps({"in_flight": facts}), flush=True)
    for call in () if options.json else calls:
        step = "" if call.step is None else f" of step {call.step}"
        print(printable(f"{call.kind}{step}: {first_sentence(call)}"), flush=True)
    return found


def _is_missing(run: Location) -> bool:
    try:
        run.names()
    except NotFoundError:
        return True
    return False


def _succeeds(words: list[str], step: int, path: str) -> bool:
    names = {"{path}": path, "{step}": str(step)}
    command = [_filled(word, names) for word in words]
    environment = {**os.environ, "TORCH_CKPT_PATH": path, "TORCH_CKPT_STEP": str(step)}
    try:
        status = subprocess.run(command, env=environment).returncode
    except OSError as error:
        print(f"torch-ckpt: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return False
    if status:
        print(f"torch-ckpt: step {step}: {command[0]} ended with {status}", file=sys.stderr)
    return not status


def _filled(word: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word
