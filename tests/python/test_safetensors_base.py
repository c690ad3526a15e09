"""Models of which files are taken from an older model by hard link."""

from __future__ import annotations

import os
import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import differences, random_tensor
from support.safetensors_files import INDEX, MODEL, load_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

import torch_ckpt
from torch_ckpt import FastSavePlanner, SafetensorsWriter
from torch_ckpt.storage import safetensors_base
from torch_ckpt.storage.reuse import MAX_FILES
from torch_ckpt.storage.stored_values import StoredValues

State = dict[str, torch.Tensor]
SHARD_NBYTES = 40_000


def state_of(layers: int = 12) -> State:
    return {f"layer.{n}.weight": random_tensor([100 + n, 30], torch.float32) for n in range(layers)}


def export(state: State, path: Path, base: Path, most: int = SHARD_NBYTES) -> None:
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(path, max_shard_nbytes=most, base=base))
    assert differences(state, load_model(path)) == []
    assert not [name for name in os.listdir(path) if name.startswith(".")]


def inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.glob("*.safetensors")}


def linked(path: Path, base: Path) -> float:
    """The part of the files of a model that it has in common with another one."""
    own = inodes(path)
    return len(own & inodes(base)) / len(own)


@pytest.mark.parametrize("layers", [1, 12], ids=["one-file", "shards"])
def test_a_model_that_has_not_changed_is_linked(tmp_path: Path, layers: int) -> None:
    state = state_of(layers)
    export(state, tmp_path / "a", tmp_path / "a")
    export(state, tmp_path / "b", tmp_path / "a")
    assert linked(tmp_path / "b", tmp_path / "a") == 1
    before = inodes(tmp_path / "b")
    export(state, tmp_path / "b", tmp_path / "b")
    assert inodes(tmp_path / "b") == before
    assert (tmp_path / "b" / (MODEL if layers == 1 else INDEX)).exists()


def test_what_changes_is_soon_alone_in_its_files(tmp_path: Path) -> None:
    state = state_of()
    export(state, tmp_path / "0", tmp_path / "none", most=10**6)  # All in one file.
    for number in (1, 2, 3):
        for name in ("layer.3.weight", "layer.7.weight"):
            state[name] = state[name] + 1
        base = tmp_path / str(number - 1)
        export(state, tmp_path / str(number), base, most=10**6)
        assert len(inodes(tmp_path / str(number))) == 2  # What changes, and what does not.
        assert linked(tmp_path / str(number), base) == (0 if number == 1 else 0.5)


def test_a_model_with_tied_names_is_linked(tmp_path: Path) -> None:
    state = state_of()
    state["layer.tied"] = state["layer.3.weight"]
    for path in (tmp_path / "a", tmp_path / "b"):
        writer = SafetensorsWriter(path, max_shard_nbytes=SHARD_NBYTES, base=tmp_path / "a")
        torch_ckpt.save(state, storage_writer=writer)
    assert linked(tmp_path / "b", tmp_path / "a") == 1
    state["layer.tied"] = state["layer.tied"].clone()
    export(state, tmp_path / "c", tmp_path / "a")
    assert 0 < linked(tmp_path / "c", tmp_path / "a") < 1


def test_a_model_without_tensors_has_one_file(tmp_path: Path) -> None:
    export({}, tmp_path / "a", tmp_path / "a")
    export({}, tmp_path / "b", tmp_path / "a")
    assert os.listdir(tmp_path / "b") == [MODEL]


def test_small_files_do_not_gather(tmp_path: Path) -> None:
    state = state_of(MAX_FILES + 14)
    export(state, tmp_path / "0", tmp_path / "0", most=10**6)
    for number, name in enumerate(state, 1):
        state[name] = state[name] + 1  # Another one each time, which then has a file of its own.
        base = tmp_path / str(number - 1)
        export(state, tmp_path / str(number), base, most=10**6)
        assert len(inodes(tmp_path / str(number))) <= MAX_FILES + 2


class CopyingPlanner(FastSavePlanner):
    """Creates each value, and counts the bytes of those that exist at a time."""

    nbytes = most_nbytes = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        copy = super().resolve_data(write_item).clone()
        cls, nbytes = CopyingPlanner, copy.nbytes
        cls.nbytes += nbytes
        cls.most_nbytes = max(cls.most_nbytes, cls.nbytes)
        weakref.finalize(copy, lambda: setattr(cls, "nbytes", cls.nbytes - nbytes))
        return copy


def test_values_that_a_planner_creates_are_compared_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_base, "_BATCH_NBYTES", 10_000)
    state = state_of(40)
    export(state, tmp_path / "a", tmp_path / "a", most=10**6)
    writer = SafetensorsWriter(tmp_path / "b", max_shard_nbytes=10**6, base=tmp_path / "a")
    torch_ckpt.save(state, storage_writer=writer, planner=CopyingPlanner())
    assert linked(tmp_path / "b", tmp_path / "a") == 1
    assert CopyingPlanner.most_nbytes < 60_000  # All have 574,000.


def test_a_file_is_read_no_further_than_its_first_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_base, "_BATCH_NBYTES", 20_000)
    state = state_of(30)
    export(state, tmp_path / "a", tmp_path / "a", most=10**6)
    loaded: list[str] = []
    load = StoredValues.load

    def counted(self: StoredValues, boxes: Any) -> Any:
        loaded.extend(fqn for fqn, _ in boxes)
        return load(self, boxes)

    for tensor in state.values():
        tensor[-1] += 1  # No sample shows it.
    monkeypatch.setattr(StoredValues, "load", counted)
    torch_ckpt.save(
        state,
        storage_writer=SafetensorsWriter(
            tmp_path / "b", max_shard_nbytes=10**6, base=tmp_path / "a"
        ),
    )
    assert len(loaded) < len(state) + 5


def test_a_save_that_fails_leaves_the_base_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    export(state, tmp_path / "a", tmp_path / "a")
    before = load_model(tmp_path / "a")
    state["layer.5.weight"] = state["layer.5.weight"] + 1

    def fail(self: object, *arguments: object) -> None:
        assert any(name.endswith(".tmp") for name in os.listdir(path))
        raise OSError("the disk is full")

    for path in (tmp_path / "a", tmp_path / "b"):
        for method in ("_write", "finish"):
            with monkeypatch.context() as patch:
                patch.setattr(SafetensorsWriter, method, fail)
                with pytest.raises(CheckpointException):
                    export(state, path, tmp_path / "a")
            assert differences(before, load_model(tmp_path / "a")) == []
    export(state, tmp_path / "a", tmp_path / "a")


CHANGES = {
    "first-bit": lambda t: t.view(torch.uint8).flatten()[:1].bitwise_xor_(1),
    "last-bit": lambda t: t.view(torch.uint8).flatten()[-1:].bitwise_xor_(128),
    "middle": lambda t: t.view(torch.uint8).flatten()[len(t) * 60 :][:1].bitwise_xor_(4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_bit_is_written(tmp_path: Path, change: str) -> None:
    state = state_of()
    export(state, tmp_path / "a", tmp_path / "a")
    CHANGES[change](state["layer.5.weight"])
    export(state, tmp_path / "b", tmp_path / "a")
    assert 0 < linked(tmp_path / "b", tmp_path / "a") < 1


def test_names_dtypes_sizes_and_ties_count(tmp_path: Path) -> None:
    state = state_of()
    base = tmp_path / "0"
    export(state, base, base)
    changed: list[State] = [
        {**state, "layer.3.weight": state["layer.3.weight"].view(torch.int32)},
        {**state, "layer.3.weight": state["layer.3.weight"].T.contiguous()},
        {name.replace(".3.", ".x."): tensor for name, tensor in state.items()},
        {name: tensor for name, tensor in state.items() if ".3." not in name},
        {**state, "new": torch.ones(3)},
    ]
    for number, each in enumerate(changed, 1):
        export(each, tmp_path / str(number), base)
        assert 0 < linked(tmp_path / str(number), base) < 1, number
    tied = {**state, "layer.tied": state["layer.3.weight"]}
    writer = SafetensorsWriter(tmp_path / "tied", max_shard_nbytes=SHARD_NBYTES, base=base)
    torch_ckpt.save(tied, storage_writer=writer)
    assert 0 < linked(tmp_path / "tied", base) < 1  # The header of one file names the tie.


def test_random_histories(tmp_path: Path, rng: random.Random, full: bool) -> None:
    for history in range(30 if full else 3):
        state = state_of(rng.randint(1, 8))
        for _ in range(6):
            for name in rng.sample(sorted(state), rng.randint(0, min(2, len(state)))):
                numbers = state[name].view(torch.uint8).flatten()
                numbers[rng.randrange(len(numbers))] ^= 1 << rng.randrange(8)
            path = tmp_path / f"{history}-{rng.randrange(3)}"
            base = tmp_path / f"{history}-{rng.randrange(3)}"
            export(state, path, base, most=rng.choice([15_000, SHARD_NBYTES, 10**6]))


def test_a_base_of_another_disk_is_no_base(tmp_path: Path, small_disk: Path) -> None:
    state = state_of()
    export(state, small_disk / "a", small_disk / "a")
    with pytest.warns(UserWarning, match="what has not changed is written again"):
        export(state, tmp_path / "b", small_disk / "a")
    assert linked(tmp_path / "b", small_disk / "a") == 0


def test_a_base_that_is_damaged_or_no_model_is_no_base(tmp_path: Path) -> None:
    state = state_of(1)
    export(state, tmp_path / "a", tmp_path / "a")
    (tmp_path / "a" / MODEL).write_bytes(b"\xff" * 100)
    with pytest.warns(UserWarning, match="the base is of no use"):
        export(state, tmp_path / "b", tmp_path / "a")
    (tmp_path / "folder").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(state, tmp_path / "c", tmp_path / "folder")


def test_a_file_that_is_replaced_while_it_is_compared_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = state_of(), state_of()
    export(state, tmp_path / "a", tmp_path / "a")
    compare = safetensors_base._compare

    def replaced_after(*arguments: object) -> object:
        found = compare(*arguments)  # type: ignore[arg-type]
        export(other, tmp_path / "new", tmp_path / "new")
        for file in (tmp_path / "new").glob("*.safetensors"):
            file.replace(tmp_path / "a" / file.name)
        return found

    monkeypatch.setattr(safetensors_base, "_compare", replaced_after)
    export(state, tmp_path / "b", tmp_path / "a")


def test_a_background_save_takes_files(tmp_path: Path) -> None:
    state = state_of()
    export(state, tmp_path / "a", tmp_path / "a")
    writer = SafetensorsWriter(tmp_path / "b", max_shard_nbytes=SHARD_NBYTES, base=tmp_path / "a")
    torch_ckpt.async_save(state, storage_writer=writer).result()
    assert differences(state, load_model(tmp_path / "b")) == []
    assert linked(tmp_path / "b", tmp_path / "a") == 1
