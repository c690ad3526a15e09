"""A campaign: no damage to any file of a checkpoint makes a load return other values."""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import blank, data_files, differences, files, load, narrow, random_tensor, save
from damage import (
    BoxesPlanner,
    Damage,
    Slice,
    changed_blocks,
    damages_of_checkpoint,
    is_structure,
    random_damage,
    rename_data_files_as_in,
    slices_of,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from torch_ckpt import FastReader, FastWriter, IoOptions
from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


def random_state(rng: random.Random) -> dict[str, Any]:
    """Tensors and objects of all kinds; of another seed, others of the same stored lengths."""
    return {
        "model": {
            "wide": random_tensor([300, 1000], torch.float32),  # Begins at a page; many blocks.
            "medium": random_tensor([200, 300], torch.bfloat16),  # Some blocks, shared at the ends.
            "small": random_tensor([10], torch.float32),
            "mask": random_tensor([70, 11], torch.bool),
            "scalar": torch.tensor(rng.random()),
            "none": torch.zeros(0, 3),
        },
        "quantised": quantised_like(torch.randn(30, 40)),
        "step": rng.randrange(1 << 24, 1 << 30),
        "object": rng.randbytes(50_000).hex(),
    }


def quantised_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that only torch can pickle."""
    return torch.quantize_per_tensor(tensor, 0.05, 3, torch.quint8)


def blank_targets(state: dict[str, Any]) -> dict[str, Any]:
    """What to load such a state into."""
    quantised = quantised_like(torch.zeros(state["quantised"].size()))
    return {**blank({**state, "quantised": None}), "quantised": quantised}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The same in values that can be compared bit for bit."""
    if "quantised" not in state:
        return state
    return {**state, "quantised": state["quantised"].int_repr()}


PARTS = {  # Offsets and sizes of what is read of some tensors.
    "rows": {"model.wide": ([100, 0], [40, 1000]), "model.medium": ([199, 0], [1, 300])},
    "columns": {"model.wide": ([0, 990], [300, 10]), "model.medium": ([3, 7], [150, 2])},
}


def tensor_at(state: dict[str, Any], fqn: str) -> torch.Tensor:
    for key in fqn.split("."):
        state = state[key]
    return state


Reader = Callable[[Path], Any]


@dataclass
class Loaded:
    """What became of a load."""

    expected: dict[str, Any]
    before: dict[str, Any]  # The targets, before the load.
    after: dict[str, Any]
    error: BaseException | None = None


def load_all(path: Path, state: dict[str, Any], reader: Reader = FastReader) -> Loaded:
    """Loads everything."""
    targets = blank_targets(state)
    error = error_of(load, targets, reader(path))
    return Loaded(plain(state), plain(blank_targets(state)), plain(targets), error)


def load_part(path: Path, state: dict[str, Any], part: str, reader: Reader = FastReader) -> Loaded:
    """Loads boxes of some tensors."""
    boxes = PARTS[part]
    expected = {fqn: narrow(tensor_at(state, fqn), *box).clone() for fqn, box in boxes.items()}
    targets = blank(expected)
    planner = BoxesPlanner({fqn: offsets for fqn, (offsets, _) in boxes.items()}, targets)
    error = error_of(load, {}, reader(path), planner=planner)
    return Loaded(expected, blank(expected), targets, error)


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException | None:
    try:
        call(*args, **kwargs)
    except CheckpointException as caught:
        return caught.failures[0][0]
    return None


@dataclass
class Checkpoint:
    """A sound checkpoint, and what it holds."""

    path: Path
    other: Path
    state: dict[str, Any]
    before: dict[str, bytes]
    slices: list[Slice]

    def restore(self, damage: Damage) -> None:
        for name in damage.changed:
            (self.path / name).write_bytes(self.before[name])


@pytest.fixture
def checkpoint(tmp_path: Path, rng: random.Random) -> Iterator[Checkpoint]:
    """One of three data files; ``other`` is a save of other values in files of the same lengths."""
    logging.disable()  # DCP logs every failed load, at length.
    state, other = random_state(rng), random_state(rng)
    save(state, FastWriter(tmp_path / "saved", thread_count=3))
    save(other, FastWriter(tmp_path / "other", thread_count=3))
    rename_data_files_as_in(tmp_path / "saved", tmp_path / "other")
    path = tmp_path / "saved"
    assert len(data_files(path)) == 3
    yield Checkpoint(path, tmp_path / "other", state, files(path), slices_of(path))
    logging.disable(logging.NOTSET)


CHECKED = re.compile(r"cannot load (.*): the (\d+) bytes at (\d+) of (.*) do not have the checksum")


def complaints(
    damage: Damage, error: BaseException, read: set[str], checkpoint: Checkpoint
) -> list[str]:
    """What an error should have said of a damage and did not."""
    text = str(error)
    asks_for_code = isinstance(error, UnsupportedError) and "trust_pickle" in text
    if asks_for_code and ".metadata" in damage.changed:
        return []  # Nothing is left that tells these metadata from some that ask for code.
    if not isinstance(error, CorruptionError | NotFoundError):
        return [f"raised {error!r}"]
    if read & damage.in_structure:
        # An index is called that of its metadata, and either may be the one that is damaged.
        names = {".metadata" if ".index" in name else name for name in damage.changed}
        if any(name in text for name in [*names, ".index"]):
            return []
        # The metadata and the index of another save name data files that are not here.
        return [] if "cannot read" in text and ".distcp" in text else [f"names no file: {text}"]
    found = CHECKED.search(text)
    if found is None:
        return [f"names no range: {text}"]
    fqns, file = re.findall(r"'([^']*)'", found[1]), os.path.basename(found[4])
    begin, end = int(found[3]), int(found[3]) + int(found[2])
    after = damage.changed.get(file)
    if after is None or (begin, end) not in changed_blocks(checkpoint.before[file], after):
        return [f"names [{begin}, {end}) of {file}, which is sound"]
    there = {s.fqn for s in checkpoint.slices if s.file == file and s.begin < end and s.end > begin}
    return [] if fqns and set(fqns) <= there else [f"names {fqns} where {sorted(there)} are"]


def files_read(fqns: Iterable[str] | None, checkpoint: Checkpoint) -> set[str]:
    wanted = [s.file for s in checkpoint.slices if fqns is None or s.fqn in fqns]
    structure = {name for name in checkpoint.before if not name.endswith(".distcp")}
    return structure.union(wanted)


def judge(
    damage: Damage, checkpoint: Checkpoint, part: str | None, reader: Reader
) -> tuple[str, list[str]]:
    """Loads a damaged checkpoint: the outcome, and what is wrong with it."""
    path, state = checkpoint.path, checkpoint.state
    loaded = load_all(path, state, reader) if part is None else load_part(path, state, part, reader)
    read = files_read(None if part is None else PARTS[part], checkpoint)
    can_tell_at_once = bool(read & damage.in_structure)
    if loaded.error is None:
        wrong = differences(loaded.expected, loaded.after)
        return "outside what was read", wrong + ["loaded without an error"] * can_tell_at_once
    wrong = complaints(damage, loaded.error, read, checkpoint)
    if can_tell_at_once and differences(loaded.before, loaded.after):
        wrong.append("altered a target")
    return "refused", wrong


def run_campaign(
    damages: Iterable[Damage], checkpoint: Checkpoint, reader: Reader = FastReader
) -> Counter[str]:
    """Loads all and a part under each damage; returns how often each outcome came."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for number, damage in enumerate(damages):
        damage.apply(checkpoint.path)
        for part in (None, list(PARTS)[number % len(PARTS)]):
            outcome, wrong = judge(damage, checkpoint, part, reader)
            outcomes[outcome] += 1
            failures += [f"{damage.what}, {part or 'all'} loaded: {what}" for what in wrong]
        checkpoint.restore(damage)
    print(
        f"{outcomes.total()} loads of damaged files: {outcomes['refused']} refused, "
        f"{outcomes['outside what was read']} outside what was read, {len(failures)} wrong"
    )
    assert failures == []
    return outcomes


def is_sound(loaded: Loaded) -> bool:
    return loaded.error is None and differences(loaded.expected, loaded.after) == []


def test_sound_files_load(checkpoint: Checkpoint) -> None:
    path, state = checkpoint.path, checkpoint.state
    for loaded in [load_all(path, state), *(load_part(path, state, part) for part in PARTS)]:
        assert loaded.error is None
        assert differences(loaded.expected, loaded.after) == []
        assert differences(loaded.before, loaded.after) != []


def test_no_damage_to_any_region_of_any_file_loads_other_values(
    checkpoint: Checkpoint, rng: random.Random, full: bool
) -> None:
    damages = damages_of_checkpoint(checkpoint.path, checkpoint.other, rng)
    every = 1 if full else 5  # No divisor of the number of kinds of damage to a region.

    outcomes = run_campaign(itertools.islice(damages, 0, None, every), checkpoint)

    assert outcomes["refused"] > 1000 // every
    # Else damage elsewhere would be in the way.
    assert outcomes["outside what was read"] > 50 // every
    assert is_sound(load_all(checkpoint.path, checkpoint.state))


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("buffer_nbytes", [512 << 10, 64 << 20])
def test_no_random_damage_loads_other_values(
    buffer_nbytes: int, direct: bool, checkpoint: Checkpoint, rng: random.Random
) -> None:
    io = IoOptions(buffer_nbytes=buffer_nbytes, direct=direct)

    outcomes = run_campaign(
        (random_damage(checkpoint.before, rng) for _ in range(2000)),
        checkpoint,
        lambda path: FastReader(path, io=io),
    )

    assert outcomes["refused"] > 2000


@pytest.mark.slow
def test_stock_dcp_loads_some_of_the_same_damages_without_a_word(
    checkpoint: Checkpoint, rng: random.Random
) -> None:
    damages = [
        damage
        for damage in damages_of_checkpoint(checkpoint.path, checkpoint.other, rng)
        if not any(map(is_structure, damage.changed))
    ]
    flips = [d for d in damages if "flipped" in d.what and "payload of model.wide" in d.what]
    outcomes: Counter[str] = Counter()
    for damage in [*flips, *rng.sample(damages, 80)]:
        damage.apply(checkpoint.path)
        loaded = load_all(checkpoint.path, checkpoint.state, FileSystemReader)
        checkpoint.restore(damage)
        silent = loaded.error is None and not is_sound(loaded)
        outcomes["silently wrong" if silent else "refused" if loaded.error else "right"] += 1
        if damage in flips:
            assert silent, damage.what
    print(f"stock DCP, {outcomes.total()} of the damages to data files: {dict(outcomes)}")
    assert len(flips) == 3
