"""Models written as safetensors by one process, read back by the library itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import (
    DTYPES,
    CuttingSavePlanner,
    bits,
    differences,
    failure_of,
    files,
    layouts,
    load,
    random_tensor,
    save,
)
from power_cuts import rebuild, trees_of_a_save
from safetensors.torch import save_file
from support.safetensors_files import INDEX, MODEL, load_model
from support.tensors import PACKED, laid_out
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, IoOptions, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import AlreadyExistsError, MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.layout import DTYPES as STORED

State = dict[str, torch.Tensor]


def state_of(number: int) -> State:
    torch.manual_seed(number)
    return {f"t{n}": random_tensor([n + 3, 40], torch.bfloat16) for n in range(6)}


def same_payload(path: Path, library: Path) -> bool:
    """Whether two files have the same header, but for spaces, and the same bytes behind it."""
    parts = []
    for file in (path, library):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])  # The library writes its metadata in any order.
        parts.append((list(header.items()), content[end:]))
    return parts[0] == parts[1]


PLANNERS = {"stock": DefaultSavePlanner, "fast": FastSavePlanner}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_every_dtype_and_layout_is_stored_as_the_library_stores_it(
    tmp_path: Path, direct: bool, planner: str
) -> None:
    state = {}
    for dtype in [*DTYPES, *PACKED]:
        if str(dtype).removeprefix("torch.") in STORED:
            made = layouts(dtype)
            if dtype in PACKED:
                del made["0-dim"]  # It has half of a byte.
            large = dtype in (torch.bfloat16, torch.uint8)
            state |= {f"{dtype} {n}": t for n, t in made.items() if large or "large" not in n}
    state["conj"] = random_tensor([3, 4], torch.complex64).conj()
    state["tied"] = state["torch.bfloat16 large"]
    writer = SafetensorsWriter(tmp_path / "model", io=IoOptions(direct=direct), thread_count=2)

    save(state, writer, planner=PLANNERS[planner]())

    assert files(tmp_path / "model").keys() == {MODEL}
    metadata = {"format": "pt"}
    if planner == "fast":
        del state["tied"]
        metadata["tied"] = "torch.bfloat16 large"
    expected = {name: tensor.resolve_conj().contiguous().clone() for name, tensor in state.items()}
    save_file(expected, tmp_path / "library", metadata=metadata)
    assert same_payload(tmp_path / "model" / MODEL, tmp_path / "library")
    assert differences(expected, load_model(tmp_path / "model")) == []


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "stepped", "expanded"])
def test_packed_numbers_are_stored_and_loaded_bit_for_bit(
    tmp_path: Path, layout: str, planner: str
) -> None:
    state = {
        f"{dtype} {sizes}": laid_out(layout, sizes, torch.uint8, 7).view(dtype)
        for dtype in (*PACKED, torch.float8_e8m0fnu)
        for sizes in ((5,), (3, 5), (1, 1), (2, 3, 4), (131, 1031))
    }
    state["empty"] = torch.empty(3, 0, dtype=PACKED[0])
    for path in (tmp_path / "model", tmp_path / "next"):
        writer = SafetensorsWriter(path, base=tmp_path / "model")
        save(state, writer, planner=PLANNERS[planner]())
    assert same_bits(load_model(tmp_path / "model"), state)
    torch_ckpt.save(state, checkpoint_id=tmp_path / "dcp")
    arguments = Location(tmp_path / "dcp"), Location(tmp_path / "converted"), "safetensors"
    convert(*arguments)
    for name in ("model", "next", "dcp", "converted"):
        loaded = {name: torch.empty_like(value) for name, value in state.items()}
        load(loaded, FastReader(tmp_path / name), planner=DefaultLoadPlanner())
        assert same_bits(loaded, state)
    loaded = {name: torch.empty_like(value) for name, value in state.items()}
    load(loaded, FileSystemReader(tmp_path / "dcp"))
    assert same_bits(loaded, state)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and bits(found[name]) == bits(value)
        for name, value in expected.items()
    )


def test_any_boxes_make_up_the_tensors(rng: random.Random, tmp_path: Path) -> None:
    state = layouts(torch.float32) | {"long rows": random_tensor([3, 1 << 20], torch.uint8)}
    for threads in (1, 3):
        writer = SafetensorsWriter(tmp_path, thread_count=threads, max_shard_nbytes=2 << 20)
        save(state, writer, planner=CuttingSavePlanner(rng))
        assert differences(state, load_model(tmp_path)) == []


def test_large_models_have_shards_and_an_index(tmp_path: Path) -> None:
    state = {f"layer.{n}.weight": random_tensor([100 + n, 30], torch.float32) for n in range(20)}
    metadata = save({"model": state}, SafetensorsWriter(tmp_path, max_shard_nbytes=40_000))

    found = files(tmp_path)
    count = len(found) - 1
    assert count > 5
    names = {f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)}
    assert found.keys() == {INDEX} | names
    assert all(len(found[name]) <= 40_000 for name in names)
    loaded = load_model(tmp_path)
    assert differences({f"model.{name}": tensor for name, tensor in state.items()}, loaded) == []
    for fqn, tensor in loaded.items():  # What DCP returns says where everything is.
        info = metadata.storage_data[MetadataIndex(fqn, torch.Size([0, 0]))]
        stored = found[info.relative_path][info.offset : info.offset + info.length]
        assert stored == bits(tensor), fqn
        assert metadata.state_dict_metadata[fqn].size == tensor.size()
    assert metadata.planner_data["model.layer.0.weight"] == ("model", "layer.0.weight")


def test_a_model_without_tensors_is_a_model_and_a_file_of_no_bytes_is_refused(
    tmp_path: Path,
) -> None:
    save({}, SafetensorsWriter(tmp_path))
    assert load_model(tmp_path) == {}
    with pytest.raises(ValueError, match="max_shard_nbytes=0 is not positive"):
        SafetensorsWriter(tmp_path, max_shard_nbytes=0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"step": 7, "config": {"name": "net"}}, ["'step'", "'config.name'"]),
        ({"odd": torch.zeros(2, dtype=torch.complex128)}, ["'odd'", "complex128"]),
        (
            {"odd": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)},
            ["'odd'", "qint8"],
        ),
        ({"odd": torch.eye(2).to_sparse()}, ["'odd'", "sparse"]),
        ({"odd": torch.zeros(2, device="meta")}, ["'odd'", "meta tensor, which has no data"]),
    ],
    ids=["objects", "complex128", "qint8", "sparse", "meta"],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_what_has_no_form_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, values: dict[str, Any], named: list[str], planner: str
) -> None:
    state = {"model": state_of(1), **values}
    error = failure_of(save, state, SafetensorsWriter(tmp_path), planner=PLANNERS[planner]())
    assert isinstance(error, UnsupportedError)
    assert all(name in str(error) for name in named)
    assert files(tmp_path) == {}


class CastingPlanner(DefaultSavePlanner):
    """Resolves tensors to others than it has planned."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index).float()


def test_a_tensor_that_is_not_as_planned_fails_the_save_and_keeps_the_old_model(
    tmp_path: Path,
) -> None:
    save(state_of(1), SafetensorsWriter(tmp_path))
    error = failure_of(save, state_of(2), SafetensorsWriter(tmp_path), planner=CastingPlanner())
    assert isinstance(error, MismatchError)
    assert "float32" in str(error)
    assert files(tmp_path).keys() == {MODEL}
    assert differences(state_of(1), load_model(tmp_path)) == []


class CastsPlanned(CastingPlanner):
    """Plans what it resolves to: temporaries, which are let go in batches."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        self.kept = self.state_dict
        self.state_dict = {name: tensor.float() for name, tensor in self.kept.items()}

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.state_dict = self.kept
        return plan


def test_tensors_that_a_planner_makes_are_stored(tmp_path: Path) -> None:
    state = {f"t{n}": random_tensor([300, 1000], torch.bfloat16).nan_to_num() for n in range(9)}
    io = IoOptions(buffer_nbytes=1 << 20)
    save(state, SafetensorsWriter(tmp_path, io=io), planner=CastsPlanned())
    expected = {name: tensor.float() for name, tensor in state.items()}
    assert differences(expected, load_model(tmp_path)) == []


def test_a_model_replaces_another_of_any_number_of_files_and_nothing_else(tmp_path: Path) -> None:
    others = {"config.json": b"{}", "tokenizer.model": b"t", "model-card.md": b"m", "a.distcp": b""}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    for number, most in enumerate([4096, 1_000_000, 4096, 4096, 6000, 4096, 1_000_000, 1_000_000]):
        save(state_of(number), SafetensorsWriter(tmp_path, max_shard_nbytes=most))
        assert differences(state_of(number), load_model(tmp_path)) == []
        assert differences(state_of(number), load_model(tmp_path, index_first=True)) == []
        left = files(tmp_path)
        assert others.items() <= left.items()
        shards = [name for name in left.keys() - others.keys() if name not in (MODEL, INDEX)]
        assert ((MODEL in left), (INDEX in left)) == ((most > 6000), (most <= 6000))
        assert len(shards) == (0 if most > 6000 else len(load_index(tmp_path)))


def load_index(path: Path) -> set[str]:
    return set(json.loads((path / INDEX).read_bytes())["weight_map"].values())


@pytest.mark.parametrize("most", [4096, 1_000_000])
def test_a_model_that_must_not_be_replaced_is_not(tmp_path: Path, most: int) -> None:
    save(state_of(1), SafetensorsWriter(tmp_path, max_shard_nbytes=most))
    before = files(tmp_path)
    error = failure_of(save, state_of(2), SafetensorsWriter(tmp_path, overwrite=False))
    assert isinstance(error, AlreadyExistsError)
    assert files(tmp_path) == before


def test_leftovers_of_a_save_that_died_are_removed_by_the_next(tmp_path: Path) -> None:
    for name in (f".{MODEL}.{'0' * 16}.tmp", f".model-00001-of-00002.safetensors.{'f' * 16}.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".{INDEX}.{'a' * 16}.tmp").write_bytes(b"{")
    (tmp_path / "model-00002-of-00009.safetensors").write_bytes(b"renamed, and no index")
    save(state_of(1), SafetensorsWriter(tmp_path))
    assert files(tmp_path).keys() == {MODEL}


def test_a_plan_is_used_again_by_the_fast_planner(tmp_path: Path) -> None:
    hits = FastSavePlanner().plan_cache.hits
    for number in range(3):
        save(state_of(number), SafetensorsWriter(tmp_path), planner=FastSavePlanner())
        assert differences(state_of(number), load_model(tmp_path)) == []
    assert FastSavePlanner().plan_cache.hits == hits + 2


def test_plans_that_stock_keeps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(SavePlanner, f"_cached_{kept}", {})
    save(
        state_of(1),
        SafetensorsWriter(tmp_path),
        planner=DefaultSavePlanner(enable_plan_caching=True),
    )
    planner = DefaultSavePlanner(enable_plan_caching=True)
    error = failure_of(save, state_of(2), SafetensorsWriter(tmp_path), planner=planner)
    assert isinstance(error, UnsupportedError)
    assert "FastSavePlanner" in str(error)
    assert differences(state_of(1), load_model(tmp_path)) == []


@pytest.mark.usefixtures("world_of_one")
def test_a_background_save_writes_what_was_staged(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path)
    for number in range(2):
        state = state_of(number)
        saving = dcp.async_save(state, storage_writer=writer)
        saving.result()
        assert differences(state_of(number), load_model(tmp_path)) == []


ONE, MANY = 1_000_000, 4500  # Bytes of a file: the states have some 1000 bytes in all.


def small_state(number: int) -> State:
    torch.manual_seed(number)
    return {f"t{n}": random_tensor([20 + n, 10], torch.uint8) for n in range(3)}


@pytest.mark.parametrize(
    ("old", "new"), [(None, ONE), (None, MANY), (ONE, ONE), (ONE, MANY), (MANY, ONE), (MANY, MANY)]
)
def test_power_cut_or_kill_at_any_instant_leaves_the_old_model_or_the_new(
    recorder: Any, tmp_path: Path, old: int | None, new: int
) -> None:
    path, rebuilt = tmp_path / "saved", tmp_path / "rebuilt"
    versions: dict[str, State | None] = {"new": small_state(2), "nothing": None}
    before = "nothing"
    if old is not None:
        save(small_state(1), SafetensorsWriter(path, max_shard_nbytes=old))
        before, versions["old"] = "old", small_state(1)

    found: dict[Any, set[str]] = {}
    writer = SafetensorsWriter(path, max_shard_nbytes=new)
    for tree, done, where in trees_of_a_save(recorder, path, writer, small_state(2)):
        visible = {n: c for n, c in tree.items() if not Path(n).name.startswith(".")}
        key = tuple(sorted(visible.items()))
        if key not in found:
            rebuild(visible, rebuilt)
            found[key] = {
                version_found(rebuilt, versions, index_first=first) for first in (False, True)
            }
        assert found[key] <= ({"new"} if done else {before, "new"}), where
    assert set.union(*found.values()) == {before, "new"}


def version_found(path: Path, versions: dict[str, State | None], *, index_first: bool) -> str:
    try:
        loaded = load_model(path, index_first=index_first)
    except StopIteration:  # Neither a file of all tensors nor an index.
        return "nothing"
    except Exception as error:
        return f"error: {error}"
    matching = [n for n, state in versions.items() if state and not differences(state, loaded)]
    return matching[0] if matching else "a mix"
