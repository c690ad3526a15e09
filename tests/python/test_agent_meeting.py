"""What agents of several machines put down for each other, and what one machine's memory lacks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from torch_ckpt import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.agent.meeting import Meeting, Word, decode, encode
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.snapshot import holes
from torch_ckpt.storage.gc import stale_files


def meeting_in(path: Path, node: int = 0) -> Meeting:
    return Meeting(b"r" * 16, b"s" * 16, 7, node, 2, Location(path))


def test_no_byte_of_a_file_can_be_changed_or_cut_off_unnoticed(rng: random.Random) -> None:
    whole = encode({"a": [1, "b"]}, [b"xy", b"", b"z"])
    assert decode(whole) == ({"a": [1, "b"]}, [b"xy", b"", b"z"])
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        for bad in (bytes(changed), whole[:at]):
            with pytest.raises(CorruptionError):
                decode(bad)


def test_a_word_that_is_damaged_or_none_is_no_word(tmp_path: Path) -> None:
    meeting = meeting_in(tmp_path)
    word = Word("failed", meeting.visit, "ab", {1: "cd"}, ("NotFoundError", "full", 28))
    meeting.say(word)
    assert meeting_in(tmp_path, 1).word_of(0) == word
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert meeting.word_of(0) is None
    for facts in ({}, {**word.facts(), "visits": []}, {**word.facts(), "failure": ["x"]}):
        meeting.put(0, "word", facts)
        assert meeting.word_of(0) is None
    assert meeting.word_of(1) is None


def test_what_a_save_recognises_as_left_over_is_every_file_of_a_meeting(tmp_path: Path) -> None:
    meeting = meeting_in(tmp_path)
    for what in ("word", "lists", "part", "report"):
        meeting.put(1, what, {})  # type: ignore[arg-type]
    names = {path.name for path in tmp_path.iterdir()}
    names |= {f"{name}.tmp" for name in names}
    assert len(names) == 8
    assert set(stale_files([*names, ".agents", "agents-1"], [], None)) == names


def test_a_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    meeting = meeting_in(tmp_path / "none")
    with pytest.raises(NotFoundError, match="No such file"):
        meeting.say(Word("here", meeting.visit))
    assert not meeting.is_attended()
    with pytest.raises(CheckpointError):
        meeting.decline("of no room")


def test_holes_are_exactly_what_no_box_covers(rng: random.Random) -> None:
    for _ in range(300):
        whole = [rng.randrange(1, 6) for _ in range(rng.randrange(4))]
        expected = torch.ones(whole)
        boxes = []
        for _ in range(rng.randrange(4)):
            offsets = [rng.randrange(size) for size in whole]
            sizes = [rng.randrange(size - at + 1) for at, size in zip(offsets, whole, strict=True)]
            boxes.append((offsets, sizes))
            expected[region(offsets, sizes)] = 0
        found = torch.zeros(whole)
        for offsets, sizes in holes(whole, boxes):
            assert all(sizes)
            found[region(offsets, sizes)] += 1  # Once: they do not overlap.
        assert torch.equal(found, expected), (whole, boxes)


def region(offsets: object, sizes: object) -> tuple[slice, ...]:
    pairs = zip(offsets, sizes, strict=True)  # type: ignore[call-overload]
    return tuple(slice(at, at + size) for at, size in pairs)
