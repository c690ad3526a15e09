"""Takes what has not changed from an older checkpoint, the base of a save.

The unit is a file, which a hard link or a copy within the store brings into the new checkpoint
under its own name. So every checkpoint is complete by itself. Each rank decides for the boxes that
it would write:

- A box is unchanged if the base has the same box with the same digest of all elements.
- A file of the base is taken if more than half of its bytes are unchanged boxes of this rank. So
  less than half of a taken file is dead, and no other rank takes it.
- Unchanged boxes that lie in another file are written to a file of their own, apart from those that
  have changed. So the next save can take it.

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

__all__ = ["BaseBox", "Reuse", "TakenFile", "reuse"]

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
    """What one rank takes from the base, and what it has to write.

    Attributes:
        files: The files that were taken.
        groups: Positions of the items that remain, in groups that go to different files.
        samples: The digest of the sample of each item; 0 if unknown.
        digested: Positions of the items that get a digest of all elements. Those that change at
            each save do not need one.
    """

    files: Sequence[TakenFile]
    groups: Sequence[Sequence[int]]
    samples: Sequence[int]
    digested: Sequence[int]


def reuse(
    base: Location | None,
    directory: Location,
    work: _native.Work,
    samples: bytes,
    full_digests: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
    *,
    names: Sequence[tuple[str, Sequence[int]] | None] = (),
    sync: bool,
) -> Reuse:
    """Takes files of the base into the directory of a new checkpoint.

    A base that is missing, or of no use, has no other effect than that everything is written.

    Args:
        base: Directory of the older checkpoint.
        directory: Where the save writes its files.
        work: The items of this rank.
        samples: The digest of the sample of each item, 8 bytes each.
        full_digests: Returns the digests of all elements of the items at some positions.
        names: FQN and offsets of each box, or ``None`` for an item that is not compared; empty if
            they are those of the work.
        sync: Whether what is taken survives a power cut, once the directory is synced.
    """
    found = _Found([], [], [])
    if base is not None:
        try:
            found = _compare(base, work, samples, full_digests, names)
        except NotFoundError:
            pass
        except (CorruptionError, StorageError, UnsupportedError) as error:
            warnings.warn(
                f"everything is written, since the base is of no use: {error}", stacklevel=2
            )
    files = []
    for file in found.files:
        name, nbytes, *_ = file.report
        assert base is not None
        if _link(base / name, directory / name, nbytes, sync=sync):
            files.append(file)
    every = set(range(len(work)))
    others = every.difference(box[0] for file in files for box in file.boxes)
    unchanged = others.intersection(box[0] for box in found.equal)
    groups = [sorted(group) for group in (unchanged, others - unchanged) if group]
    digested = sorted(every.difference(found.changed))
    return Reuse(files, groups, array.array("Q", samples), digested)


@dataclass(frozen=True)
class _Found:
    """Unchanged boxes of the base, positions of items whose samples differ, and files to take."""

    equal: Sequence[BaseBox]
    changed: Sequence[int]
    files: Sequence[TakenFile]


def _compare(
    base: Location,
    work: _native.Work,
    samples: bytes,
    full_digests: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
    names: Sequence[tuple[str, Sequence[int]] | None],
) -> _Found:
    """Compares the items of a rank with the base. Raises if the base cannot be read."""
    index = open_committed(base, "")[1]
    if index is None:
        return _Found([], [], [])
    candidates, changed = index.find_in_base(work, samples, names)
    digests = full_digests([box[0] for box in candidates])
    equal = [box for box, found in zip(candidates, digests, strict=True) if box[5:] == found]
    boxes_of: dict[int, list[BaseBox]] = {}
    for box in equal:
        boxes_of.setdefault(box[1], []).append(box)
    files = []
    lengths = index.files
    for number, boxes in sorted(boxes_of.items()):
        if 2 * sum(box[3] for box in boxes) <= lengths[number][1]:
            continue
        boxes.sort(key=lambda box: box[2])
        own = array.array("Q")
        for _, _, offset, _, *digest in boxes:
            own.extend((offset, *digest))
        files.append(TakenFile(index.file(number, own.tobytes()), boxes))
    return _Found(equal, changed, files)


def _link(source: Location, target: Location, nbytes: int, *, sync: bool) -> bool:
    """Brings a file into another directory; returns whether that was possible."""
    try:
        if source.nbytes() != nbytes:
            return False
        source.link(target, sync=sync)
    except UnsupportedError as error:
        # The text is the same for all steps of a run, so it is shown once.
        warnings.warn(
            f"what has not changed is written again at each save to {target.parent.parent}: "
            f"{str(error).rpartition(': ')[2]}",
            stacklevel=2,
        )
        return False
    except CheckpointError:  # It was removed, or the directory has a file of this name.
        return False
    return True
