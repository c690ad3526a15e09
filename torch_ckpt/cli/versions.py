"""Published versions in the commands ``ls`` and ``verify``."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from torch_ckpt.cli.terminal import (
    DAMAGED,
    SOUND,
    age_text,
    print_json,
    print_table,
    printable,
)
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.version_files import committed_versions, listed_versions, path_of
from torch_ckpt.storage.progress import progress_bar, readable_nbytes

__all__ = ["is_root", "list_versions", "verify_versions"]

_HEADER = ("version", "kind", "size", "share", "age", "leases", "state", "")


def is_root(path: Location) -> bool:
    """Returns whether a directory has published versions."""
    try:
        return bool(listed_versions(path))
    except StorageError:  # Probably a file.
        return False


def list_versions(root: Location, *, as_json: bool) -> int:
    """Prints the versions of a directory, the newest first; returns the exit status."""
    from torch_ckpt.publishing.examination import facts_of  # Imports torch.

    versions = facts_of(root)
    if as_json:
        print_json({"versions": versions, "root": str(root)})
    else:
        rows = [
            [
                str(facts["version"]),
                facts["kind"] or "-",
                readable_nbytes(facts["nbytes"]),
                "-" if facts["share"] is None else f"{100 * facts['share']:.1f} %",
                age_text(facts["age_s"]),
                str(facts["leases"] or ""),
                facts["state"],
                facts["reason"] or "",
            ]
            for facts in versions
        ]
        print_table(rows, header=_HEADER, right=range(6))
    return DAMAGED if any(facts["state"] == "damaged" for facts in versions) else SOUND


def verify_versions(root: Location, *, every: bool, as_json: bool, quiet: bool) -> int:
    """Checks each byte of the newest version, or of every one; returns the exit status."""
    numbers = committed_versions(root)
    if not numbers:
        raise NotFoundError(f"no version is committed in {root}")
    outcomes = []
    for number in numbers if every else numbers[:1]:
        facts = _verify(root, number, quiet=quiet)
        outcomes.append(facts)
        if not as_json:
            for line in facts["damage"]:
                print(printable(f"damaged: {line}"))
            took = f"{facts['nbytes']} bytes in {facts['seconds']:.2f} s"
            print(f"version {number}: {facts['outcome']} ({took})")
    if as_json:
        print_json({"root": str(root), "versions": outcomes})
    return DAMAGED if any(facts["damage"] for facts in outcomes) else SOUND


def _verify(root: Location, number: int, *, quiet: bool) -> dict[str, Any]:
    """Returns the facts of a check of one version, for programs."""
    from torch_ckpt.publishing.examination import damage_of  # Imports torch.

    done, total, begin = 0, 0, time.monotonic()

    def watch(done_nbytes: int, nbytes: int) -> None:
        nonlocal done, total
        done, total = done_nbytes, nbytes

    bar = progress_bar("verifying", path_of(root, number), lambda: total, lambda: done)
    with contextlib.nullcontext() if quiet else bar:
        damage = damage_of(root, number, watch)
    return {
        "version": number,
        "outcome": "damaged" if damage else "sound",
        "damage": damage,
        "seconds": time.monotonic() - begin,
        "nbytes": total,
    }
