"""The small files of a step beside its checkpoint. The process that commits the step writes them.

This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location

__all__ = ["BRANCH", "METRICS", "SMALL_FILES", "STEP_NAME", "write_small_files"]

STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
"""Name of the directory of a step. Without leading zeros, each step has one name."""

METRICS = "metrics.json"

BRANCH = "branch.json"
"""The file that records on which branch of the run a step was saved."""

SMALL_FILES = frozenset({METRICS, BRANCH})


def write_small_files(step: Location, files: Mapping[str, bytes], *, sync: bool) -> None:
    """Writes the ``SMALL_FILES`` of a step (contents by name), and removes old ones.

    The directory of the step exists. With ``sync``, the files and their names survive a power cut.
    """
    changes = [name for name in SMALL_FILES if not _has(step, name, files.get(name))]
    for name in changes:
        if name in files:
            (step / name).replace(files[name], sync=sync)
        else:
            (step / name).discard()
    if changes and sync:
        step.sync()


def _has(step: Location, name: str, contents: bytes | None) -> bool:
    """Returns whether a file has these contents already; with ``None``, whether it is missing.

    Always ``False`` on a store, where a check takes as many requests as writing the file.
    """
    if not step.file_system.has_folders:
        return False
    try:
        return (step / name).read() == contents
    except NotFoundError:
        return contents is None
    except CheckpointError:  # Writing it may work.
        return False
