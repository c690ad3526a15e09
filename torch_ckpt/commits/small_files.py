"""The small files of a step beside its checkpoint: whoever commits the step writes them.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_ckpt.filesystems.location import Location

__all__ = ["BRANCH", "METRICS", "SMALL_FILES", "write_small_files"]

METRICS = "metrics.json"

BRANCH = "branch.json"
"""The file that records on which branch of the run a step was saved."""

SMALL_FILES = frozenset({METRICS, BRANCH})


def write_small_files(step: Location, files: Mapping[str, bytes]) -> None:
    """Writes the ``SMALL_FILES`` of a step (contents by name), and removes old ones.

    The directory of the step exists.
    """
    for name in SMALL_FILES.difference(files):
        (step / name).discard()
    for name, contents in files.items():
        (step / name).replace(contents, sync=False)
