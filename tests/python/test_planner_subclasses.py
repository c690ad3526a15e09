"""What a subclass of our planners overrides is called, as it is in a subclass of stock's."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of, flattened_metadata, load, outcome, save, stored_slice
from support.planner_mixins import BalancesByCount, MakesNewPlans, StoresPlans
from support.states import blanked, same
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)

from torch_ckpt import CheckpointError, FastLoadPlanner, FastReader, FastSavePlanner, FastWriter
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed

pytestmark = pytest.mark.filterwarnings("ignore")


def some_state() -> dict[str, Any]:
    return {
        "model": {f"w{i}": torch.full((5, i), float(i + 1)) for i in range(6)},
        "ema": torch.arange(12.0).reshape(3, 4),
        "step": 7,
        "note": "text",
    }


def zeros() -> dict[str, Any]:
    return blanked(some_state())


class LooksUp:
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return found + 1 if isinstance(found, torch.Tensor) else found


class Transforms:
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object.bfloat16()
        return super().transform_object(write_item, object)


class TransformsObjects:
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, int):
            object += 1
        return super().transform_object(write_item, object)


class Resolves:
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


class ResolvesByAttribute:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.lookup_object
        self.lookup_object = lambda index: -plain(index) if index.fqn == "ema" else plain(index)


class LeavesOut:
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[i for i in plan.items if i.index.fqn != "ema"])


class TellsOfItself:
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, planner_data={**plan.planner_data, "extra": ("extra", 1)})


class RenamesAll:
    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        renamed = {f"my.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, *args, **kwargs)


class AddsPlannerData:
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        paths = {**metadata.planner_data, "extra": ("extra",)}
        return plans, dataclasses.replace(metadata, planner_data=paths)


class PutsPlannerData:
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"run": object, "config": [1, 2]}
        return plans, metadata


MCORE_DATA = {"w": {"nd_reformulated": (1, 2)}}


class AddsAttribute:
    """As Megatron's planner does."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.mcore_data = MCORE_DATA
        return plans, metadata


class TravelsWithMore:
    """As Megatron's plans do."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return PlanWithMore(**vars(plan), more="of this rank")

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        assert [plan.more for plan in all_plans] == ["of this rank"]
        return super().create_global_plan(all_plans)


@dataclasses.dataclass(frozen=True)
class PlanWithMore(SavePlan):
    more: str = ""


class Rewrites:
    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        stored = dict(metadata.state_dict_metadata)
        stored["ema"] = dataclasses.replace(stored["ema"])
        return plans, dataclasses.replace(metadata, state_dict_metadata=stored)


class Reorders:
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.plan = dataclasses.replace(plan, items=list(plan.items)[::-1])
        return self.plan


class HalvesPrecision:
    """``FP16Planner`` of torch's documentation."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        item = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


class RemovesAnItem:
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        plan.items.remove(next(item for item in plan.items if item.index.fqn == "ema"))
        return plan


SAVERS: list[type] = [
    HalvesPrecision,
    RemovesAnItem,
    BalancesByCount,
    LooksUp,
    Transforms,
    TransformsObjects,
    Resolves,
    ResolvesByAttribute,
    LeavesOut,
    TellsOfItself,
    RenamesAll,
    AddsPlannerData,
    PutsPlannerData,
    AddsAttribute,
    TravelsWithMore,
    Rewrites,
    Reorders,
]


def everything(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What stock finds in a checkpoint: metadata, and the values."""
    metadata = FileSystemReader(path).read_metadata()
    said = {
        **flattened_metadata(metadata),
        "more": vars(metadata).keys() - Metadata.__dataclass_fields__.keys(),
        "mcore": getattr(metadata, "mcore_data", None),
        "stored": dict(metadata.state_dict_metadata),
    }
    state = {
        fqn: torch.zeros(stored.size) if hasattr(stored, "size") else None
        for fqn, stored in metadata.state_dict_metadata.items()
    }
    return said, load(state, FileSystemReader(path))


@pytest.mark.parametrize("mixin", SAVERS)
def test_a_subclass_saves_what_it_saves_as_one_of_stocks(mixin: type, tmp_path: Path) -> None:
    theirs = type("Theirs", (mixin, DefaultSavePlanner), {})
    ours = type("Ours", (mixin, FastSavePlanner), {})
    save(some_state(), FileSystemWriter(tmp_path / "stock"), planner=theirs())
    said, values = everything(tmp_path / "stock")
    for name, writer in {"mixed": FileSystemWriter, "ours": FastWriter}.items():
        save(some_state(), writer(tmp_path / name), planner=ours())
        found, loaded = everything(tmp_path / name)
        if mixin is AddsAttribute and writer is FastWriter:
            # Stock's writer drops the attribute in torch 2.11.
            said |= {"more": {"mcore_data"}, "mcore": MCORE_DATA}
        assert found == said
        assert same(loaded, values)
        by_ours = {
            key: torch.zeros_like(v) if hasattr(v, "size") else None for key, v in values.items()
        }
        reader = FastReader(tmp_path / name, trust_pickle=True)
        assert same(load(by_ours, reader, planner=FastLoadPlanner()), values)


class FlipsACopy:
    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        return super().transform_tensor(read_item, tensor).flip(0)


class Scratches:
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(tuple(read_item.lengths))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor + 1)


class KeepsBetween:
    """Has state from the resolve of a tensor to its commit, as Megatron's planner has."""

    pending: Any = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.pending is None, "the tensor before was not committed"
        target = super().resolve_tensor(read_item)
        if read_item.dest_index.fqn != "ema":
            scratch = torch.zeros_like(target)
            self.pending = read_item, target, scratch
            return scratch
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if self.pending is not None:
            item, target, scratch = self.pending
            assert item is read_item
            target.copy_(scratch)
            self.pending = None


class RecordsCalls:
    """Records which tensors are resolved and committed, in this order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, MetadataIndex]] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.calls.append(("resolve", read_item.dest_index))
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls.append(("commit", read_item.dest_index))
        super().commit_tensor(read_item, tensor)


class Commits:
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        tensor.mul_(3)


class CommitsByAttribute:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commit_tensor = lambda read_item, tensor: tensor.mul_(3)


class LooksUpElsewhere:
    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = super().lookup_tensor(index)
        if index.fqn == "ema":
            found = self.original_state_dict["other"] = torch.zeros_like(found)
        return found


class LoadsBytes:
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = len(value.getvalue())


class RenamesByPrefix:
    """``RenamePlanner`` of torch's documentation."""

    def set_up_planner(self, state_dict: Any, metadata: Any, is_coordinator: bool) -> None:
        self.original_state_dict = state_dict
        renamed = {fqn.removeprefix("my."): value for fqn, value in state_dict.items()}
        if self.flatten_sharded_tensors:
            renamed = _flatten_sharded_tensors(renamed)
        if self.flatten_state_dict:
            renamed, self.mappings = flatten_state_dict(renamed)
        self.state_dict = renamed
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


class Materializes:
    """``MetaModelMaterialize`` of torch's documentation."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn] = tensor
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], tensor)


class EditsReads:
    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        plan.items.remove(next(item for item in plan.items if item.dest_index.fqn == "ema"))
        return plan


def without_threes(plan: LoadPlan) -> LoadPlan:
    items = [item for item in plan.items if not item.dest_index.fqn.endswith("3")]
    return dataclasses.replace(plan, items=items)


class Filters:
    def create_local_plan(self) -> LoadPlan:
        return without_threes(super().create_local_plan())


class FiltersAtTheEnd:
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return without_threes(super().finish_plan(new_plan))


class Renames:
    """Loads what was stored under other names."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        self.state_dict = {fqn.replace("old", "model"): v for fqn, v in self.state_dict.items()}
        self.mappings = {fqn.replace("old", "model"): v for fqn, v in self.mappings.items()}


LOADERS: list[type] = [
    RenamesByPrefix,
    Materializes,
    MakesNewPlans,
    EditsReads,
    FlipsACopy,
    Scratches,
    KeepsBetween,
    Commits,
    CommitsByAttribute,
    LooksUpElsewhere,
    LoadsBytes,
    Filters,
    FiltersAtTheEnd,
    Renames,
]


def index_of(path: Path) -> Any:
    return open_committed(Location(path), "")[1]


def test_what_a_subclass_stores_is_what_the_metadata_say(tmp_path: Path) -> None:
    ours = type("Ours", (HalvesPrecision, FastSavePlanner), {})
    save(some_state(), FastWriter(tmp_path), planner=ours())
    stored = FastReader(tmp_path).read_metadata().state_dict_metadata
    assert stored["ema"].properties.dtype == torch.float16
    frame = stored_slice(tmp_path, FileSystemReader(tmp_path).read_metadata(), "ema")
    assert torch.load(io.BytesIO(frame)).dtype == torch.float16
    assert {facts[0] for _, facts, _ in index_of(tmp_path) if facts is not None} == {"float16"}


@pytest.mark.parametrize("base", [DefaultSavePlanner, FastSavePlanner])
def test_plans_that_a_planner_stores_are_stocks(base: type, tmp_path: Path) -> None:
    planner = type("Stores", (StoresPlans, base), {})
    dcp.save(some_state(), storage_writer=FastWriter(tmp_path), planner=planner())
    for reader in (FastReader, FileSystemReader):
        metadata = reader(tmp_path).read_metadata()
        assert [len(plan.items) for plan in metadata.all_local_plans] == [9]
        assert {type(plan.storage_data) for plan in metadata.all_local_plans} <= {
            type(None),
            _StoragePrefix,
        }
        assert same(load(zeros(), reader(tmp_path)), some_state())


def test_what_a_subclass_adds_to_the_metadata_leaves_them_an_index(tmp_path: Path) -> None:
    ours = type("Ours", (TellsOfItself, FastSavePlanner), {})
    save(some_state(), FastWriter(tmp_path / "more"), planner=ours())
    save(some_state(), FastWriter(tmp_path / "plain"), planner=FastSavePlanner())
    more, plain = (
        [(f, t, [b[:2] + b[5:] for b in boxes]) for f, t, boxes in index_of(tmp_path / name)]
        for name in ("more", "plain")
    )
    assert more == plain
    assert all(boxes[0][2] for _, tensor, boxes in plain if tensor is not None)


def test_metadata_to_which_a_subclass_adds_what_nobody_writes_are_not_committed(
    tmp_path: Path,
) -> None:
    class Adds(FastSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            stored = {**metadata.state_dict_metadata, "new": BytesStorageMetadata()}
            return plans, dataclasses.replace(metadata, state_dict_metadata=stored)

    error = failure_of(save, some_state(), FastWriter(tmp_path), planner=Adds())
    assert isinstance(error, CheckpointError)
    assert "no rank has written 'new'" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", [FileSystemWriter, FastWriter])
def test_a_subclass_need_not_call_our_finish_plan(writer: Any, tmp_path: Path) -> None:
    class Hides(FastSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return pickle.loads(pickle.dumps(new_plan))  # As it has come to a rank.

    save(some_state(), writer(tmp_path), planner=Hides())
    assert same(load(zeros(), FastReader(tmp_path)), some_state())


@pytest.mark.thin(1)
@pytest.mark.parametrize("mixin", LOADERS)
@pytest.mark.parametrize("writer", [FileSystemWriter, FastWriter])
def test_a_subclass_loads_what_it_loads_as_one_of_stocks(
    mixin: type, writer: Any, tmp_path: Path
) -> None:
    theirs = type("Theirs", (mixin, DefaultLoadPlanner), {})
    ours = type("Ours", (mixin, FastLoadPlanner), {})
    save(some_state(), writer(tmp_path))

    def target() -> dict[str, Any]:
        state = zeros()
        if mixin is Renames:
            state["old"] = state.pop("model")
        if mixin is RenamesByPrefix:
            state = {f"my.{key}": value for key, value in state.items()}
        return state

    expected = load(target(), FileSystemReader(tmp_path), planner=theirs())
    for reader in (FileSystemReader, FastReader):
        assert same(load(target(), reader(tmp_path), planner=ours()), expected)


def twice(path: Path) -> FileSystemWriter:
    """A writer of two files for one rank."""
    return FileSystemWriter(path, thread_count=2)


@pytest.mark.parametrize("base", [DefaultLoadPlanner, FastLoadPlanner])
@pytest.mark.parametrize("writer", [FileSystemWriter, twice, FastWriter])
def test_tensors_are_resolved_and_committed_in_the_order_of_stock(
    base: type, writer: Any, tmp_path: Path
) -> None:
    kind = type("Records", (RecordsCalls, base), {})
    save(some_state(), writer(tmp_path))
    found = []
    for reader in (FileSystemReader, FastReader):
        planner = kind()
        assert same(load(zeros(), reader(tmp_path), planner=planner), some_state())
        found.append(planner.calls)
    assert found[0] == found[1]
    assert len(found[0]) == 12  # Six tensors: an empty one has no item.


def wanted() -> dict[str, Callable[[], dict[str, Any]]]:
    """What nobody can load, and what may look so."""
    return {
        "missing tensor": lambda: {**zeros(), "new": torch.zeros(2)},
        "missing object": lambda: {**zeros(), "new": 1},
        "missing in a list": lambda: {"ema": torch.zeros(3, 4), "l": [torch.zeros(1), 5]},
        "other sizes": lambda: {"ema": torch.zeros(4, 3)},
        "more dimensions": lambda: {"ema": torch.zeros(3, 4, 1)},
        "fewer dimensions": lambda: {"ema": torch.zeros(12)},
        "a number for a tensor": lambda: {"ema": 1},
        "none for a tensor": lambda: {"ema": None},
        "a tensor for an object": lambda: {"step": torch.zeros(3)},
        "another dtype": lambda: {"ema": torch.zeros(3, 4, dtype=torch.int16)},
        "expanded": lambda: {"ema": torch.zeros(1, 4).expand(3, 4)},
        "shared": lambda: dict.fromkeys(["ema", "ema2"], torch.zeros(3, 4)),
        "transposed": lambda: {"ema": torch.zeros(4, 3).t()},
        "a subset": lambda: {"step": 0, "model": {"w3": torch.zeros(5, 3)}},
        "nothing": lambda: {},
        "meta": lambda: {"ema": torch.zeros(3, 4, device="meta")},
        "sparse": lambda: {"ema": torch.zeros(3, 4).to_sparse()},
        "complex": lambda: {"ema": torch.zeros(3, 4, dtype=torch.complex64)},
        "a parameter": lambda: {"ema": torch.nn.Parameter(torch.zeros(3, 4))},
        "clashing": lambda: {"model": {"w1": torch.zeros(5, 1)}, "model.w1": torch.zeros(5, 1)},
    }


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    "options", [{}, {"allow_partial_load": True}, {"flatten_state_dict": False}], ids=str
)
@pytest.mark.parametrize("name", wanted())
@pytest.mark.parametrize("saver", [DefaultSavePlanner, FastSavePlanner])
def test_what_cannot_be_loaded_is_the_error_that_stock_raises(
    name: str, options: dict[str, Any], saver: Any, tmp_path: Path
) -> None:
    flat = {k: v for k, v in options.items() if k == "flatten_state_dict"}
    save(some_state(), FastWriter(tmp_path), planner=saver(**flat))

    def loaded(reader: Any, planner: Any) -> Any:
        return outcome(load, wanted()[name](), reader(tmp_path), planner=planner(**options))

    def agrees(ours: Any, expected: Any) -> bool:
        if name == "shared":  # The planner loads the second name through the first.
            return isinstance(ours, dict)
        if name == "expanded" and isinstance(ours, tuple):  # Its name, and what to pass.
            return ours[0] is ValueError and ours[1].startswith("cannot load 'ema': ")
        if name == "meta" and isinstance(ours, dict):  # Stock needs a process group.
            return torch.equal(ours["ema"], some_state()["ema"])
        if isinstance(ours, tuple) and isinstance(expected, tuple):  # Class, message.
            return ours[0] is expected[0] and ours[1].startswith(expected[1])
        return bool(same(ours, expected))

    expected = loaded(FileSystemReader, DefaultLoadPlanner)
    by_reader = loaded(FastReader, DefaultLoadPlanner)
    if name in ("a tensor for an object", "a subset") and flat and isinstance(expected, dict):
        expected = by_reader  # Stock's reader drops objects there.
        assert by_reader["step"] == 7
    assert agrees(loaded(FileSystemReader, FastLoadPlanner), expected)
    if isinstance(expected, tuple) and name not in ("sparse", "expanded"):
        assert by_reader == expected
    assert agrees(loaded(FastReader, FastLoadPlanner), by_reader)
