"""Damage to the files of a checkpoint: every region of every file, in every way disks fail."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import files
from support.commit_files import index_file
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

BLOCK = 64 << 10  # What the index has a checksum of.
SECTOR, PAGE = 512, 4096
TRAILER = 64  # At the end of metadata.


@dataclass(frozen=True)
class Damage:
    """Files in another state than they were saved in; ``None`` for one that is gone.

    Attributes:
        what: For messages.
        changed: Name of each file, and what is in it now.
        in_structure: Those of them of which a load can tell before it reads any data: the trailer
            of metadata, the index, and data files of another length.
    """

    what: str
    changed: dict[str, bytes | None]
    in_structure: set[str]

    @classmethod
    def of(cls, what: str, changed: dict[str, bytes | None], before: dict[str, bytes]) -> Damage:
        """A damage to the files that were ``before``."""
        in_structure = {
            name
            for name, after in changed.items()
            if after is None
            or len(after) != len(before[name])
            or (is_structure(name) and not is_outside(name, before[name], after))
        }
        return cls(what, changed, in_structure)

    def apply(self, path: Path) -> None:
        """Damages the checkpoint in a directory."""
        for name, content in self.changed.items():
            (path / name).unlink(missing_ok=True)
            if content is not None:
                (path / name).write_bytes(content)


@dataclass(frozen=True)
class Slice:
    """Where an item lies."""

    fqn: str
    file: str
    begin: int
    end: int


def slices_of(path: Path) -> list[Slice]:
    """Where every item of a checkpoint lies."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return [
        Slice(index.fqn, info.relative_path, info.offset, info.offset + info.length)
        for index, info in metadata.storage_data.items()
    ]


def changed_blocks(before: bytes, after: bytes) -> list[tuple[int, int]]:
    """The blocks in which two files of one length differ."""
    ranges = [(at, min(at + BLOCK, len(before))) for at in range(0, len(before), BLOCK)]
    return [(a, b) for a, b in ranges if before[a:b] != after[a:b]]


Points = list[tuple[str, int]]  # Name of a region, an offset in it.


def points_of_data(name: str, data: bytes, slices: Iterable[Slice]) -> Points:
    """Offsets in every region of a data file."""
    points: Points = []
    mine = sorted((s for s in slices if s.file == name), key=lambda s: s.begin)
    end_of_last = 0
    for item in mine:
        if item.begin > end_of_last:
            points.append((f"gap before {item.fqn}", end_of_last))
            points.append((f"gap before {item.fqn}", item.begin - 1))
        end_of_last = item.end
        points += [
            (f"{region} of {item.fqn}", item.begin + at)
            for region, at in _points_of_archive(data[item.begin : item.end])
        ]
    return points


def _points_of_archive(data: bytes) -> Points:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        directory = archive.start_dir
        payload = max(archive.infolist(), key=lambda record: record.header_offset)
        payload = next((r for r in archive.infolist() if r.filename.endswith("/data/0")), payload)
    name_nbytes, extra_nbytes = struct.unpack_from("<2H", data, payload.header_offset + 26)
    begin = payload.header_offset + 30 + name_nbytes + extra_nbytes
    end = begin + payload.file_size
    points = [
        ("first byte of the head", 0),
        ("pickle", 64),
        ("local header", payload.header_offset + 26),
        ("end of the head", begin - 1),
        ("descriptor", end),
        ("directory", directory),
        ("middle of the directory", (directory + len(data)) // 2),
        ("last byte", len(data) - 1),
    ]
    if end > begin:
        points += [
            ("first byte of the payload", begin),
            ("middle of the payload", (begin + end) // 2),
            ("last byte of the payload", end - 1),
        ]
    return points


_INDEX_FIELDS = {
    "magic": 0,
    "version": 8,
    "block length": 12,
    "save id": 16,
    "length of the metadata": 32,
    "sum of the metadata": 40,
    "flags": 48,
    "Metadata.version": 56,
    "sum of the top": 256,
    "zeros": 264,
    "sum of the header": 312,
}
_INDEX_SECTIONS = [
    *("files", "names of files", "entries", "names of entries", "boxes"),
    *("dims", "paths", "keys", "text", "sums", "top", "table"),
]


def points_of_index(data: bytes) -> Points:
    """Offsets in every field of the header of an index and in every section."""
    points = list(_INDEX_FIELDS.items())
    for number, section in enumerate(_INDEX_SECTIONS):
        where = 64 + 16 * number
        offset, nbytes = struct.unpack_from("<2Q", data, where)
        points += [(f"place of section {section}", where), (f"size of {section}", where + 8)]
        assert nbytes > 0, f"the checkpoint should have something in section {section}"
        points += [
            (f"first byte of {section}", offset),
            (f"middle of {section}", offset + nbytes // 2),
            (f"last byte of {section}", offset + nbytes - 1),
        ]
    return points


def points_of_metadata(data: bytes, count: int) -> Points:
    """Offsets all over a pickle, and in every field of its trailer."""
    end = len(data) - TRAILER
    points = [("pickle", number * (end - 1) // (count - 1)) for number in range(count)]
    return points + [("trailer", end + at) for at in (0, 8, 12, 16, 31, 32, 40, 48, 56, 63)]


def damages_at(
    name: str, data: bytes, region: str, at: int, rng: random.Random
) -> Iterator[tuple[str, bytes]]:
    """A file damaged at an offset in every way that keeps its length, and cut off there."""
    edits = {"a flipped bit": (at, bytes([data[at] ^ 1 << rng.randrange(8)]))}
    for what, nbytes in (
        ("a zeroed byte", 1),
        ("a zeroed sector", SECTOR),
        ("a zeroed page", PAGE),
    ):
        begin = at // nbytes * nbytes
        edits[what] = begin, bytes(min(nbytes, len(data) - begin))
    page, pages = at // PAGE, len(data) // PAGE
    if pages > 1:
        other = (page + rng.randrange(1, pages)) % pages
        there = data[page * PAGE : (page + 1) * PAGE]
        edits["another page in its place"] = page * PAGE, data[other * PAGE :][: len(there)]
    for what, (begin, new) in edits.items():
        if data[begin : begin + len(new)] != new:
            damaged = data[:begin] + new + data[begin + len(new) :]
            yield f"{what} at {at} of {name} ({region})", damaged
    yield f"{name} cut off at {at} ({region})", data[:at]


def damages_of_file(name: str, data: bytes, other: bytes) -> Iterator[tuple[str, bytes | None]]:
    """A whole file damaged; ``other`` is the same file of another save."""
    yield f"{name} missing", None
    yield f"{name} empty", b""
    yield f"{name} one byte longer", data + b"\0"
    yield f"{name} a block longer", data + data[-BLOCK:].ljust(BLOCK, b"\0")
    yield f"{name} of another save", other


def is_outside(name: str, before: bytes, after: bytes) -> bool:
    """Whether only the pickle of metadata differs, of which a load uses no byte."""
    return name == ".metadata" and before[-TRAILER:] == after[-TRAILER:]


def is_structure(name: str) -> bool:
    """Whether a file is no data file."""
    return not name.endswith(".distcp")


def damages_of_checkpoint(path: Path, other: Path, rng: random.Random) -> Iterator[Damage]:
    """Every kind of damage to every region of every file.

    ``other`` is a save of other values whose data files have the same names and lengths.
    """
    before, foreign = files(path), files(other)
    for name, data in before.items():
        for what, after in damages_of_file(name, data, foreign[name]):
            yield Damage.of(what, {name: after}, before)
        if name.startswith(".index"):
            points = points_of_index(data)
        elif name == ".metadata":
            points = points_of_metadata(data, 40)
        else:
            points = points_of_data(name, data, slices_of(path))
        seen = {data}
        for region, at in points:
            for what, after in damages_at(name, data, region, at, rng):
                if after not in seen:
                    seen.add(after)
                    yield Damage.of(what, {name: after}, before)
    names = sorted(before)
    for number, one in enumerate(names):
        for two in names[:number]:
            swapped: dict[str, bytes | None] = {one: before[two], two: before[one]}
            yield Damage.of(f"{one} and {two} swapped", swapped, before)
    data_names = [name for name in names if not is_structure(name)]
    (index,) = (name for name in names if name.startswith(".index"))
    for structure in (index, ".metadata"):
        mixed: dict[str, bytes | None] = {n: foreign[n] for n in [structure, *data_names]}
        yield Damage.of(f"data files and {structure} of another save", mixed, before)
    both: dict[str, bytes | None] = {name: foreign[name] for name in (index, ".metadata")}
    yield Damage.of("metadata and index of another save", both, before)


def random_damage(before: dict[str, bytes], rng: random.Random) -> Damage:
    """One to three files with one to three edits each, mostly anywhere and mostly of some bytes."""
    changed: dict[str, bytes | None] = {}
    said: list[str] = []
    for name in rng.sample(sorted(before), min(rng.choice([1, 1, 1, 2, 3]), len(before))):
        after = bytearray(before[name])
        for _ in range(rng.choice([1, 1, 2, 3])):
            at, nbytes = (
                rng.randrange(len(before[name])),
                rng.choice([1, 1, 8, SECTOR, PAGE, BLOCK]),
            )
            end = min(at + nbytes, len(after))
            kind = rng.choice(["noise", "noise", "zeros", "ones", "gone", "doubled"])
            said.append(f"{kind} in [{at}, {end}) of {name}")
            new = {
                "noise": rng.randbytes(max(end - at, 0)),
                "zeros": bytes(max(end - at, 0)),
                "ones": b"\xff" * max(end - at, 0),
                "gone": b"",
                "doubled": bytes(after[at:end]) * 2,
            }[kind]
            after[at:end] = new
        if after != before[name]:
            changed[name] = bytes(after)
    return Damage.of(", ".join(said), changed, before)


class BoxesPlanner(DefaultLoadPlanner):
    """Reads one box of the only chunk of each of some tensors."""

    def __init__(self, boxes: dict[str, list[int]], targets: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.boxes = boxes
        self.targets = targets

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(fqn),
                    dest_offsets=torch.Size([0] * len(offsets)),
                    storage_index=MetadataIndex(fqn, torch.Size([0] * len(offsets))),
                    storage_offsets=torch.Size(offsets),
                    lengths=self.targets[fqn].size(),
                )
                for fqn, offsets in self.boxes.items()
            ]
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass


def rename_data_files_as_in(path: Path, other: Path) -> None:
    """Gives the data files and the index of ``other`` the names that those of ``path`` have."""
    mine, theirs = (sorted(folder.glob("*.distcp")) for folder in (path, other))
    for one, two in zip(mine, theirs, strict=True):
        assert one.stat().st_size == two.stat().st_size
        os.replace(two, other / one.name)
    os.replace(index_file(other), other / index_file(path).name)
