"""What was saved can be resumed: every state is loaded again, or named when it is saved."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import READERS, WRITERS, failure_of, load, save
from support.resumable_states import (
    ARRAYS,
    OBJECTS,
    REFUSED,
    TENSORS,
    Colour,
    Packed4,
    Scaled8,
    Settings,
    Tagged,
    drawn,
    equal,
    packed,
    scaled8,
)
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.testing._internal.two_tensor import TwoTensor

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter
from torch_ckpt.errors import UnsupportedError

PLANNERS = {
    "stock's planners": (DefaultSavePlanner, DefaultLoadPlanner),
    "our planners": (FastSavePlanner, FastLoadPlanner),
}
HOWS = ["stock, sync", "ours, sync", "ours, async"]  # Who saves. Stock stages no subclass.


@pytest.fixture(autouse=True)
def _allowed_subclasses() -> Iterator[None]:
    """As users must for their own classes; torchao's allow themselves when they are imported."""
    classes = [TwoTensor, Tagged, torch.nn.Parameter, Packed4, Scaled8, scaled8]
    with torch.serialization.safe_globals(classes):
        yield


def save_as(how: str, state: dict[str, Any], path: Path, planner: Any) -> None:
    who, when = how.split(", ")
    if when == "sync":
        save(state, WRITERS[who](path), planner=planner())
        return
    future = dcp.async_save(state, storage_writer=FastWriter(path), planner=planner(), no_dist=True)
    future.result()


@contextlib.contextmanager
def no_warning_of_ours() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [w.message for w in caught if "torch_ckpt" in str(w.message)] == []


@pytest.mark.thin(2)
@pytest.mark.parametrize("planners", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_class_is_resumed(
    name: str, how: str, reader: str, planners: Any, tmp_path: Path
) -> None:
    state, target = TENSORS[name](), TENSORS[name]()
    assert not equal(state, target)

    with no_warning_of_ours():
        save_as(how, state, tmp_path, planners[0])
    load(target, READERS[reader](tmp_path), planner=planners[1]())

    assert equal(target, state)


@pytest.mark.thin(2)
@pytest.mark.parametrize("planners", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", HOWS)
def test_objects_of_plain_data_are_resumed(
    how: str, reader: str, planners: Any, tmp_path: Path
) -> None:
    state = {name: make() for name, make in OBJECTS.items()}
    expected = {name: clone(value) for name, value in state.items()}

    with no_warning_of_ours():
        save_as(how, state, tmp_path, planners[0])
    target = load(dict.fromkeys(state), READERS[reader](tmp_path), planner=planners[1]())

    assert [name for name in state if not equal(target[name], expected[name])] == []


def clone(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_arrays_that_were_loaded_are_the_users_own(tmp_path: Path) -> None:
    save({name: make() for name, make in ARRAYS.items()}, FastWriter(tmp_path))
    loaded = load(dict.fromkeys(ARRAYS), FastReader(tmp_path))
    for value in loaded.values():
        if type(value) is np.ndarray and value.size:
            assert value.flags.owndata
            assert value.flags.writeable


@pytest.mark.thin(1)
@pytest.mark.parametrize("how", HOWS[1:])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_load_would_refuse_is_named_when_it_is_saved(
    name: str, how: str, tmp_path: Path
) -> None:
    make, named = REFUSED[name]
    with pytest.warns(UserWarning, match="torch_ckpt saves 1 values") as caught:
        save_as(how, {"odd": {"one": make()}, "step": 3}, tmp_path, FastSavePlanner)
    (message,) = [str(w.message) for w in caught if "torch_ckpt" in str(w.message)]
    for part in ("'odd.one'", named, "add_safe_globals", "trust_pickle=True"):
        assert part in message

    target = {"odd": {"one": None}}
    error = failure_of(load, target, FastReader(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert named in str(error)
    assert target == {"odd": {"one": None}}
    load(target, FastReader(tmp_path, trust_pickle=True))
    assert type(target["odd"]["one"]) is type(make())


def test_one_warning_names_all_that_a_load_would_refuse(tmp_path: Path) -> None:
    state = {f"settings{i}": Settings(i, []) for i in range(50)} | {"colour": Colour.RED}
    with pytest.warns(UserWarning, match="torch_ckpt saves") as caught:
        save(state, FastWriter(tmp_path))
    (message,) = [str(w.message) for w in caught if "torch_ckpt" in str(w.message)]
    assert "51 values" in message
    assert "support.resumable_states.Colour, support.resumable_states.Settings" in message
    assert "and 31 more" in message


def test_one_error_names_all_classes_that_a_load_refuses(tmp_path: Path) -> None:
    state = {"a": (Settings(1.0, []), Colour.RED), "b": Colour.RED, "t": drawn(3), "c": 5}
    with pytest.warns(UserWarning, match="torch_ckpt saves"):
        save(state, FastWriter(tmp_path))

    error = failure_of(load, {"a": 0, "b": 0, "t": torch.zeros(3), "c": 0}, FastReader(tmp_path))

    assert isinstance(error, UnsupportedError)
    for part in ("2 values", "'a'", "'b'", "resumable_states.Settings", "resumable_states.Colour"):
        assert part in str(error)
    with torch.serialization.safe_globals([Settings, Colour]):
        loaded = load({"a": 0, "b": 0, "t": torch.zeros(3), "c": 0}, FastReader(tmp_path))
    assert equal(loaded, state)


def test_a_class_of_the_users_that_holds_arrays_is_resumed_once_it_is_allowed(
    tmp_path: Path,
) -> None:
    state = {"settings": Settings(np.float32(0.5), [np.arange(3), range(4)])}
    with torch.serialization.safe_globals([Settings]), no_warning_of_ours():
        save(state, FastWriter(tmp_path))
        loaded = load({"settings": None}, FastReader(tmp_path))
    assert equal(vars(loaded["settings"]), vars(state["settings"]))


def test_what_is_refused_is_named_behind_a_stream_transform_too(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    with pytest.warns(UserWarning, match=r"resumable_states\.Colour"):
        save({"c": Colour.RED}, FastWriter(tmp_path / "object", _extensions=[ZStandard()]))
    tagged = {"t": drawn(3).as_subclass(Unlisted)}
    with pytest.warns(UserWarning, match=r"test_resumable_states\.Unlisted"):
        save(tagged, FastWriter(tmp_path / "tensor", _extensions=[ZStandard()]))


class Unlisted(torch.Tensor):
    """A subclass that nobody has allowed."""


def test_a_subclass_that_nobody_has_allowed_is_named_and_trust_loads_it(tmp_path: Path) -> None:
    state = {"t": drawn(3).as_subclass(Unlisted)}
    with pytest.warns(UserWarning, match=r"'t' \(test_resumable_states\.Unlisted\)"):
        save(state, FastWriter(tmp_path))
    error = failure_of(load, {"t": torch.zeros(3)}, FastReader(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert "test_resumable_states.Unlisted" in str(error)
    loaded = load({"t": torch.zeros(3)}, FastReader(tmp_path, trust_pickle=True))
    assert torch.equal(loaded["t"], state["t"].as_subclass(torch.Tensor))


@pytest.mark.thin(1)
@pytest.mark.parametrize("planner", [p[0] for p in PLANNERS.values()])
@pytest.mark.parametrize("how", HOWS[1:])
@pytest.mark.parametrize("dtype", [torch.int4, torch.uint4, torch.int1, torch.uint7])
def test_a_dtype_that_torch_cannot_pickle_is_refused_by_name(
    dtype: torch.dtype, how: str, planner: Any, tmp_path: Path
) -> None:
    state = {"model": {"w": drawn(3), "packed": packed(dtype)}}
    with pytest.raises(CheckpointException) as caught:
        save_as(how, state, tmp_path, planner)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedError)
    assert f"'model.packed': torch.save does not support {dtype}" in str(error)
    assert not list(tmp_path.glob("*"))


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.parametrize("how", HOWS[1:])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_refused_by_name(layout: torch.layout, how: str, tmp_path: Path) -> None:
    state = {"model": {"w": drawn(3), "rows": nested(layout)}}
    with pytest.raises(CheckpointException) as caught:
        save_as(how, state, tmp_path, FastSavePlanner)
    assert isinstance(caught.value.failures[0][0], UnsupportedError)
    assert "cannot save 'model.rows': it is a nested tensor" in str(caught.value)
    assert not list(tmp_path.glob("*"))
    state["model"]["rows"] = list(state["model"]["rows"].unbind())
    save_as(how, state, tmp_path, FastSavePlanner)


@pytest.mark.parametrize("planner", [p[0] for p in PLANNERS.values()])
@pytest.mark.parametrize("how", HOWS[1:])
def test_a_tensor_without_values_is_refused_by_name(how: str, planner: Any, tmp_path: Path) -> None:
    state = {"model": {"w": drawn(3), "empty": torch.empty(3, device="meta")}}
    with pytest.raises(CheckpointException) as caught:
        save_as(how, state, tmp_path, planner)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedError)
    assert str(error) == "cannot save 'model.empty': it is a meta tensor, which has no data"
    assert not list(tmp_path.glob(".metadata"))


def test_a_dtype_that_torch_cannot_pickle_within_a_wrapper_is_refused_by_name(
    tmp_path: Path,
) -> None:
    state = {"w": TwoTensor(packed(torch.int4), packed(torch.int4))}
    error = failure_of(save, state, FastWriter(tmp_path), planner=FastSavePlanner())
    assert isinstance(error, UnsupportedError)
    assert "'w'" in str(error)
    assert "int4" in str(error)


def test_a_class_that_dcp_cannot_describe_is_refused_by_name_in_every_save(tmp_path: Path) -> None:
    class Opaque(Scaled8):
        @classmethod
        def __torch_dispatch__(cls, func: Any, *arguments: Any) -> Any:
            if func is torch.ops.aten.is_pinned.default:
                raise NotImplementedError("no is_pinned")
            return super().__torch_dispatch__(func, *arguments)

    state = {"w": drawn(3), "odd": Opaque(packed(torch.uint8), drawn(1)[0])}
    for how in HOWS[1:]:
        with pytest.raises(CheckpointException) as caught:
            save_as(how, state, tmp_path / how, FastSavePlanner)
        error = caught.value.failures[0][0]
        assert isinstance(error, UnsupportedError)
        assert "cannot save 'odd': DCP cannot describe a" in str(error)
        assert "Opaque (no is_pinned)" in str(error)
        assert not list(tmp_path.glob("*/*.distcp"))


@pytest.mark.parametrize("how", HOWS[1:])
def test_the_first_save_of_a_class_names_the_line_that_allows_it(how: str, tmp_path: Path) -> None:
    state = {"w": Unlisted8(packed(torch.uint8), drawn(1)[0])}
    expected = r"'w' \(test_resumable_states\.unlisted8\).*torch\.serialization\.add_safe_globals"
    with pytest.warns(UserWarning, match=expected):
        save_as(how, state, tmp_path, FastSavePlanner)
    target = {"w": Unlisted8(packed(torch.uint8), drawn(1)[0])}
    error = failure_of(load, target, FastReader(tmp_path))
    assert "add_safe_globals" in str(error)
    with torch.serialization.safe_globals([unlisted8]):
        load(target, FastReader(tmp_path))
    assert equal(target["w"].data8, state["w"].data8)
    assert equal(target["w"].scale, state["w"].scale)


class Unlisted8(Scaled8):
    """A class that nobody has allowed."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unlisted8, (self.data8, self.scale)


def unlisted8(data8: torch.Tensor, scale: torch.Tensor) -> Unlisted8:
    return Unlisted8(data8, scale)


def test_load_and_installed_trust_pickles_if_they_are_told_to(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="torch_ckpt saves"):
        torch_ckpt.save({"c": Colour.RED}, checkpoint_id=tmp_path, no_dist=True)
    target = {"c": None}
    torch_ckpt.load(target, checkpoint_id=tmp_path, no_dist=True, trust_pickle=True)
    assert target == {"c": Colour.RED}
    for trust in (False, True):
        target = {"c": None}
        with torch_ckpt.installed(trust_pickle=trust):
            if trust:
                dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
                assert target == {"c": Colour.RED}
            else:
                failure_of(dcp.load, target, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="pass it to the reader"):
        torch_ckpt.load(target, storage_reader=FastReader(tmp_path), trust_pickle=True)


@pytest.mark.thin(1)
@pytest.mark.parametrize("planners", PLANNERS.values(), ids=PLANNERS)
@pytest.mark.parametrize(
    ("how", "reader"),
    [c for c in itertools.product(HOWS, READERS) if c != ("stock, sync", "stock")],
)
def test_a_name_with_a_lone_surrogate_is_resumed(
    how: str, reader: str, planners: Any, tmp_path: Path
) -> None:
    state = {"t\ud800": drawn(300, 700), "n": {"\udfff": drawn(2), "o\udc00": 3}}
    save_as(how, state, tmp_path, planners[0])
    target = {"t\ud800": torch.zeros(300, 700), "n": {"\udfff": torch.zeros(2), "o\udc00": 0}}
    load(target, READERS[reader](tmp_path), planner=planners[1]())
    assert equal(target, state)


def test_a_scratch_of_a_subclass_is_read_and_committed_one_after_the_other(tmp_path: Path) -> None:
    class Scratches(FastLoadPlanner):
        scratch = TwoTensor(torch.zeros(4), torch.zeros(4))

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return self.scratch

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().resolve_tensor(read_item).copy_(tensor.a)

    state = {f"w{i}": drawn(4) for i in range(5)}
    save(state, FastWriter(tmp_path))
    target = {fqn: torch.zeros(4) for fqn in state}
    load(target, FastReader(tmp_path), planner=Scratches())
    assert equal(target, state)


@pytest.mark.parametrize("source", ["torch.save", "safetensors"])
def test_a_subclass_is_loaded_from_other_formats(source: str, tmp_path: Path) -> None:
    values = {"a": drawn(4, 5), "b": drawn(3)}
    if source == "torch.save":
        path = tmp_path / "model.pt"
        torch.save(values | {"array": np.arange(3)}, path)
    else:
        import safetensors.torch

        path = tmp_path / "model.safetensors"
        safetensors.torch.save_file(values, path)
    target = {"a": TwoTensor(torch.zeros(4, 5), torch.zeros(4, 5)), "b": torch.zeros(3)}
    load(target, FastReader(path))
    assert equal(target["a"].a, values["a"])
    assert equal(target["a"].b, values["a"])
    assert equal(target["b"], values["b"])
    if source == "torch.save":
        assert equal(load({"array": None}, FastReader(path))["array"], np.arange(3))
