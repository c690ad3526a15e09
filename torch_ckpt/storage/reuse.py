"""Takes unchanged data from an older checkpoint, the base of a save.

Whole files are taken, by a hard link or a copy within the store. A taken file gets a name of the
new save, like every written file. So every checkpoint is self-contained, and no two saves share a
file name. Each rank decides for the boxes that it would write:

- A box is unchanged if the base has the same box with the same digest of all elements.
- A file of the base is taken if more than half of its bytes are unchanged boxes of this rank. So
  less than half of a taken file is dead.
- Unchanged boxes in other files are written to a separate file, apart from changed boxes, so that
  the next save can take it.

This module imports no torch.
"""

from __future__ import annotations

import array
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed

__all__ = ["BaseBox", "Reuse", "TakenFile", "link_file", "take_from_base"]

MAX_FILES = 16
"""Maximum number of files that a rank takes, so that checkpoints do not gather small files."""

BaseBox = tuple[int, int, int, int, int, int, int]
"""Position of an item; number of a file, offset and length of the box in it; digest of its sample,
and both halves of the digest of all elements."""


@dataclass(frozen=True)
class TakenFile:
    """A file of the base in the new checkpoint, and its boxes that are unchanged, by offset."""

    report: _native.ReportedFile
    boxes: Sequence[BaseBox]


@dataclass(frozen=True)
class Reuse:
    """The data that one rank takes from the base, and the items that it must write.

    Attributes:
        files: The files that were taken, under their new names.
        groups: Positions of the remaining items, in groups for different files.
        samples: The digest of the sample of each item; 0 if unknown.
        digested: Positions of the items that get a digest of all elements. Changed items get none,
            because they may change at each save.
    """

    files: Sequence[TakenFile]
    groups: Sequence[Sequence[int]]
    samples: Sequence[int]
    digested: Sequence[int]


def take_from_base(
    base: Location | None,
    directory: Location,
    work: _native.Work,
    samples: bytes,
    full_digests: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
    *,
    boxes: Sequence[tuple[str, Sequence[int]] | None] = (),
    new_name: Callable[[], str],
    finished: list[str],
    max_files: int | None = MAX_FILES,
    sync: bool,
) -> Reuse:
    """Takes files of the base into the directory of a new checkpoint.

    If the base is missing or unusable, everything is written.

    Args:
        base: Directory of the older checkpoint.
        directory: Directory to which the save writes.
        work: The items of this rank.
        samples: The digest of the sample of each item, 8 bytes each.
        full_digests: Returns the digests of all elements of the items at given positions.
        boxes: FQN and offsets of the box of each item, or ``None`` for an item that is not
            compared; empty to use the boxes of the work.
        new_name: Returns the name of the next file of this rank.
        finished: Receives the name of each file as soon as it exists.
        max_files: Maximum number of files to take, the largest ones; all if ``None``. Other
            unchanged boxes are written to one file.
        sync: Whether taken files survive a power cut once the directory is synced.
    """
    found = _Found([], [], [])
    if base is not None:
        try:
            found = _compare(base, work, samples, full_digests, boxes, max_files)
        except NotFoundError:
            pass
        except (CorruptionError, StorageError, UnsupportedError) as error:
            warnings.warn(
                f"everything is written, since the base is of no use: {error}", stacklevel=2
            )
    files = []
    for file in found.files:
        assert base is not None
        name, nbytes, sums, digests, origin = file.report
        own = new_name()
        finished.append(own)
        if link_file(base / name, directory / own, nbytes, sync=sync):
            files.append(TakenFile((own, nbytes, sums, digests, origin), file.boxes))
        else:
            finished.remove(own)
    every = set(range(len(work)))
    others = every.difference(box[0] for file in files for box in file.boxes)
    unchanged = others.intersection(box[0] for box in found.equal)
    groups = [sorted(group) for group in (unchanged, others - unchanged) if group]
    digested = sorted(every.difference(found.changed))
    return Reuse(files, groups, array.array("Q", samples), digested)


@dataclass(frozen=True)
class _Found:
    """Unchanged boxes of the base, positions of items that have changed, and files to take."""

    equal: Sequence[BaseBox]
    changed: Sequence[int]
    files: Sequence[TakenFile]


def _compare(
    base: Location,
    work: _native.Work,
    samples: bytes,
    full_digests: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
    names: Sequence[tuple[str, Sequence[int]] | None],
    max_files: int | None,
) -> _Found:
    """Compares the items of a rank with the base. Raises if the base cannot be read."""
    index = open_committed(base, "")[1]
    if index is None:
        return _Found([], [], [])
    candidates, changed = index.find_in_base(work, samples, names)
    digests = full_digests([box[0] for box in candidates])
    equal: list[BaseBox] = []
    for box, found in zip(candidates, digests, strict=True):
        if box[5:] == found:
            equal.append(box)
        else:  # Its sample does not show that it changes. Its digest is not worth the time.
            changed.append(box[0])
    boxes_of: dict[int, list[BaseBox]] = {}
    for box in equal:
        boxes_of.setdefault(box[1], []).append(box)
    live = {number: sum(box[3] for box in boxes) for number, boxes in boxes_of.items()}
    lengths = index.files
    taken = [number for number in sorted(live) if 2 * live[number] > lengths[number][1]]
    taken.sort(key=lambda number: live[number], reverse=True)
    files = []
    for number in taken[:max_files]:
        boxes = sorted(boxes_of[number], key=lambda box: box[2])
        slices = array.array("Q")  # As ``SliceDigest`` of the engine.
        for _, _, offset, _, *digest in boxes:
            slices.extend((offset, *digest))
        name, nbytes, sums, origin = index.file(number)
        files.append(TakenFile((name, nbytes, sums, slices.tobytes(), origin), boxes))
    return _Found(equal, changed, files)


def link_file(source: Location, target: Location, nbytes: int, *, sync: bool) -> bool:
    """Links a file of this length into another directory; returns whether that was possible."""
    try:
        if source.nbytes() != nbytes:
            return False
        source.link(target, sync=sync)
    except NotFoundError:  # It was removed.
        return False
    except CheckpointError as error:
        # The text for a file system without links is the same for all steps, so it is shown once.
        where, why = target.parent.parent, str(error).rpartition(": ")[2]
        warnings.warn(f"what has not changed is written again to {where}: {why}", stacklevel=2)
        target.discard()
        return False
    return True
