"""``torch-ckpt follow``: a directory of safetensors that always is the newest version."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from torch_ckpt.cli.arguments import path_of, seconds
from torch_ckpt.cli.terminal import SOUND
from torch_ckpt.errors import CheckpointError, NotFoundError, text_of
from torch_ckpt.filesystems.location import Location

__all__ = ["FOLLOWED", "add_to"]

FOLLOWED = "published_version.json"
"""The file that names the version, once the model of the version is there."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "follow",
        help="keep a directory of safetensors at the newest published version",
        description="Waits for new versions that a Publisher publishes, reads what has changed, "
        "and replaces the model in a directory: model.safetensors, or several files and their "
        f"index, atomically. Then {FOLLOWED} names the version. Other files in the directory, such "
        "as config.json, are not touched. Keeps one copy of the tensors in memory. If a version "
        "cannot be read, says why and tries the next one. Exit status: 0; 3 if there is no version "
        "and --once is given, or the last version could not be read.",
    )
    parser.add_argument("url", type=path_of, help="directory of the versions")
    parser.add_argument("directory", type=path_of, help="directory of the model")
    parser.add_argument("--once", action="store_true", help="end when it is the newest version")
    parser.add_argument("--until-version", type=int, metavar="VERSION", help="end at this version")
    parser.add_argument(
        "--interval",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between two searches for a new version (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each version")
    parser.set_defaults(command=_follow)


def _follow(options: argparse.Namespace) -> int:
    from torch_ckpt.publishing.subscriber import Subscriber  # Imports torch.

    subscriber = Subscriber(options.url.checkpoint_id)
    tensors: dict[str, Any] = {}
    written: int | None = None
    has_warned = False
    while True:
        try:
            newest = subscriber.latest()
            if newest is None:
                raise NotFoundError(f"no version is published in {options.url}")
            if newest != written:
                tensors = _fitting(options.url, newest, tensors)
                # Not the newest one by now, which may have other tensors.
                _write(options.directory, tensors, subscriber.update(tensors, newest))
                written = newest
                facts = json.dumps({"version": written, "directory": str(options.directory)})
                print(facts if options.json else f"version {written}", flush=True)
            has_warned = False
        except CheckpointError as error:
            if options.once:
                raise
            if not has_warned:  # Not each second.
                print(f"torch-ckpt: {text_of(error)}", file=sys.stderr, flush=True)
            has_warned = True
        is_last = written is not None and options.until_version is not None
        if options.once or (is_last and written >= options.until_version):
            return SOUND
        time.sleep(options.interval)


def _fitting(url: Location, number: int, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors of the names, dtypes and sizes of a version; the same ones if they fit."""
    import torch

    from torch_ckpt.publishing.version_files import read_version

    version = read_version(url, number)
    wanted = {
        name: (getattr(torch, dtype), sizes) for name, (dtype, sizes) in version.tensors.items()
    }
    own = {name: (value.dtype, tuple(value.size())) for name, value in tensors.items()}
    made = tensors
    if own != {**wanted, **{alias: wanted[name] for alias, name in version.ties.items()}}:
        made = {
            name: torch.empty(sizes, dtype=dtype, device="cpu")
            for name, (dtype, sizes) in wanted.items()
        }
        made |= {alias: made[name] for alias, name in version.ties.items()}
    return made


def _write(directory: Location, tensors: dict[str, Any], version: int) -> None:
    from torch_ckpt.api import save
    from torch_ckpt.coordination.portable import first_error
    from torch_ckpt.storage.safetensors_writer import SafetensorsWriter

    with first_error("of the command"):
        writer = SafetensorsWriter(directory.checkpoint_id)
        save(tensors, storage_writer=writer, no_dist=True)
    (directory / FOLLOWED).replace(json.dumps({"version": version}).encode(), sync=True)
