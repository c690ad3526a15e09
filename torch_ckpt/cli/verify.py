"""``torch-ckpt verify``: checks every byte of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from torch_ckpt.cli.arguments import (
    add_json,
    add_rules,
    add_trust_pickle,
    checkpoint_at,
    no_run,
    path_of,
    rules_of,
)
from torch_ckpt.cli.terminal import DAMAGED, SOUND, UNKNOWN, colored, print_json, printable
from torch_ckpt.cli.versions import is_root, verify_versions
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps, is_part_of_machine
from torch_ckpt.storage.progress import progress_bar
from torch_ckpt.storage.verify import examine

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint",
        description="Checks every byte of a checkpoint against its index and lists damaged ranges. "
        "Accepts every format that FastReader loads, and a run, whose newest step it checks; "
        "with --all, every step. Of published versions, checks the newest, with those that it is "
        "added to; with --all, every one. A damaged range "
        "lists the first tensors in it, and --json all of them. "
        "Exit status: 0 if all bytes are sound; 1 if some are damaged; 2 if not all bytes can be "
        "verified, because a checkpoint of stock DCP has only the CRCs of its zip archives, and "
        "these match, safetensors have no checksums, or other machines have some of the files; 3 "
        "if there is no checkpoint or it cannot be read.",
    )
    parser.add_argument("path", type=path_of, help="directory or file of the checkpoint, or a run")
    add_rules(parser)
    add_trust_pickle(parser)
    add_json(parser)
    parser.add_argument("--all", action="store_true", help="check all steps of a run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    rules = rules_of(options)
    if is_root(options.path):
        return verify_versions(
            options.path, every=options.all, as_json=options.json, quiet=options.quiet
        )
    if not options.all:
        path = checkpoint_at(options.path)
        facts, status = _verified(path, options, rules)
        if options.json:
            print_json(facts)
            return status
        if str(path) != str(options.path):
            print(f"the newest step is {printable(str(path))}")
        _print(facts)
        return status
    statuses, of_steps = [], []
    for step in committed_steps(options.path):
        path = options.path / f"step-{step}"
        try:
            facts, status = _verified(path, options, rules)
        except NotFoundError:
            continue
        if status == DAMAGED and path.is_missing():  # Training has removed it meanwhile.
            continue
        statuses.append(status)
        of_steps.append(facts)
        if not options.json:
            print(printable(str(path)))
            _print(facts)
    if not statuses:
        raise no_run(options.path)
    if options.json:
        print_json(of_steps)
    return next((each for each in (DAMAGED, UNKNOWN) if each in statuses), SOUND)


def _verified(
    path: Location, options: argparse.Namespace, rules: str | None
) -> tuple[dict[str, Any], int]:
    """Verifies one checkpoint; returns its facts and the exit status."""
    begin = 0.0  # Set when the checkpoint is open, to exclude the import of modules.
    progress = [0, 0]  # Checked bytes, all bytes.

    def watch(done: int, total: int) -> None:
        nonlocal begin
        begin = begin or time.monotonic()
        progress[:] = done, total

    bar = progress_bar("verifying", path, lambda: progress[1], lambda: progress[0])
    with contextlib.nullcontext() if options.quiet else bar:
        report = examine(
            path,
            watch=watch,
            trust_pickle=options.trust_pickle,
            rules=rules,
            is_part=is_part_of_machine(path.absolute().parent),
        )
    seconds = max(time.monotonic() - begin, 1e-9) if begin else 0.0
    status = DAMAGED if report.damage else UNKNOWN if report.doubts else SOUND
    facts = {
        "path": str(path),
        "outcome": {DAMAGED: "damaged", UNKNOWN: "no damage found", SOUND: "sound"}[status],
        "damage": report.damage,
        "fqns": sorted(report.fqns),
        "unverified": report.doubts,
        "nbytes": report.nbytes,
        "seconds": seconds,
    }
    return facts, status


def _print(facts: dict[str, Any]) -> None:
    for line in facts["damage"]:
        print(colored(printable(f"damaged: {line}")))
    if count := len(facts["fqns"]):
        print("1 FQN is damaged" if count == 1 else f"{count} FQNs are damaged")
    if not facts["damage"]:
        for line in facts["unverified"]:
            print(colored(printable(f"cannot verify: {line}")))
    nbytes, seconds = facts["nbytes"], facts["seconds"]
    speed = f", {nbytes / seconds / 1e9:.2f} GB/s" if seconds else ""
    outcome = colored(facts["outcome"])
    print(f"{outcome} ({nbytes} bytes in {seconds:.2f} s{speed})")
