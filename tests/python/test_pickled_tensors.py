"""Tensors in objects: what is stored around them, what they share, and storages that were freed."""

from __future__ import annotations

import dataclasses
import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.tensors import Tagged, bits
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._extension import ZStandard
from torch.testing._internal.two_tensor import TwoTensor

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, RankState, Run, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.filesystems.location import Location
from torch_ckpt.staging.pickling import pickle_object

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]


@dataclasses.dataclass
class Holder:
    """An object of a class that is no container."""

    tensor: torch.Tensor


@pytest.fixture(autouse=True)
def allowed() -> Any:
    with torch.serialization.safe_globals([Holder, Tagged, TwoTensor]):
        yield


def by_agent(state: Any, path: Path) -> None:
    with Run(path, asynchronous=True, agent=True) as run:
        run.save(1, state)
        run.wait()


def converted(state: Any, path: Path) -> None:
    with_storages = path / "a.pt"
    path.mkdir()
    torch.save(state, with_storages)
    convert(Location(with_storages), Location(path / "dcp"), "dcp")


ZSTD: Any = {"_extensions": [ZStandard()]}
WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda s, p: torch_ckpt.save(s, storage_writer=FastWriter(p)),
    "stock planner": lambda s, p: dcp.save(s, storage_writer=FastWriter(p)),
    "transformed": lambda s, p: dcp.save(
        s, storage_writer=FastWriter(p, _extensions=[ZStandard()])
    ),
    "async_save": lambda s, p: torch_ckpt.async_save(s, storage_writer=FastWriter(p)).result(),
    "agent": by_agent,
}


def loaded(path: Path, target: Any = None) -> Any:
    """The value of ``x``, and how many bytes the data files have."""
    directory = next(path.rglob(".metadata")).parent
    state = {"x": target}
    torch_ckpt.load(state, storage_reader=FastReader(directory))
    return state["x"], sum(file.stat().st_size for file in directory.glob("*.distcp"))


def whole(numel: int = 1 << 16) -> torch.Tensor:
    return torch.arange(float(numel))


@pytest.mark.parametrize("way", [*WAYS, "converted"])
def test_slices_in_an_object_take_the_bytes_of_their_elements_and_stay_shared(
    way: str, tmp_path: Path
) -> None:
    base, other = whole(), whole()
    value = (base[10:20], [base[15:30], base[40_000:40_002]], other[::4096], {"p": other[3:3]})
    (WAYS | {"converted": converted})[way]({"x": value}, tmp_path / "c")
    (first, [second, third], fourth, fifth), nbytes = loaded(tmp_path / "c")
    assert nbytes < 8000
    assert bits(first) == bits(base[10:20])
    assert bits(third) == bits(base[40_000:40_002])
    assert bits(fourth) == bits(other[::4096])
    assert fifth["p"].numel() == 0
    first[5:].fill_(-1.0)
    assert second[:6].tolist() == [-1.0] * 5 + [20.0]


KINDS: dict[str, Callable[[], Any]] = {
    "parameter": lambda: (torch.nn.Parameter(whole()[2:9]),),
    "subclass": lambda: (whole()[2:9].as_subclass(Tagged),),
    "of a class": lambda: Holder(whole()[2:9]),
    "attribute": lambda: (_with_note(torch.ones(2), whole()[2:9]),),
    "conj": lambda: (torch.view_as_complex(whole().view(-1, 2))[2:5].conj(),),
    "quantized": lambda: (torch.quantize_per_tensor(whole(), 0.1, 3, torch.qint8)[2:9],),
    "sparse": lambda: (torch.sparse_coo_tensor(torch.arange(5)[None], whole()[1:6], (9,)),),
    "newer dtype": lambda: (whole().to(torch.uint16)[2:9], whole().to(torch.float8_e5m2)[2:9]),
    "without elements": lambda: (whole()[:0], whole().view(-1, 1)[:, 1:]),
    "columns": lambda: (whole().view(-1, 256)[:, 1], whole().view(-1, 256)[:, 2]),
}


def _with_note(tensor: torch.Tensor, note: Any) -> torch.Tensor:
    tensor.note = note
    return tensor


@pytest.mark.parametrize("way", ["save", "async_save", "agent"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_any_kind_is_stored_without_the_rest_of_its_storage(
    kind: str, way: str, tmp_path: Path
) -> None:
    WAYS[way]({"x": KINDS[kind]()}, tmp_path / "c")
    found, nbytes = loaded(tmp_path / "c")
    assert nbytes < 8000
    stock = io.BytesIO()
    torch.save(KINDS[kind](), stock)
    stock.seek(0)
    expected = torch.load(stock, weights_only=False)
    if kind == "of a class":
        found, expected = (found.tensor,), (expected.tensor,)
    for one, two in zip(found, expected, strict=True):
        assert type(one) is type(two)
        assert bits(one) == bits(two)
        assert bits(getattr(one, "note", one)) == bits(getattr(two, "note", two))


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_the_inner_tensors_of_a_wrapper_are_stored_without_the_rest_of_their_storages(
    way: str, tmp_path: Path
) -> None:
    WAYS[way]({"x": TwoTensor(whole()[2:9], (-whole())[2:9])}, tmp_path / "c")
    found, nbytes = loaded(tmp_path / "c", TwoTensor(torch.zeros(7), torch.zeros(7)))
    assert (bits(found.a), bits(found.b)) == (bits(whole()[2:9]), bits(-whole()[2:9]))
    assert nbytes < 8000


@pytest.mark.parametrize("way", WAYS)
def test_containers_and_attributes_share_elements_and_store_no_others(
    way: str, tmp_path: Path
) -> None:
    base = whole()
    WAYS[way]({"x": (base[:10], Holder(base[5:8]), [Holder], whole)}, tmp_path)
    with torch.serialization.safe_globals([whole]):
        (first, holder, _, _), nbytes = loaded(tmp_path)
    first[5] = -1
    assert holder.tensor.tolist() == [-1, 6, 7]
    assert nbytes < 1 << 13


def test_a_storage_that_an_object_refers_to_itself_stays_whole_and_shared() -> None:
    base = torch.arange(1 << 12, dtype=torch.uint8)
    pickled = pickle_object((base[:3], base.untyped_storage(), whole()[:2]), "x")
    pickled.seek(0)
    part, storage, other = torch.load(pickled, weights_only=False)
    assert part.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == 1 << 12
    assert other.untyped_storage().nbytes() == 8


class Making:
    """An object that makes a part of a larger tensor for its pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return {"number": self.number, "tensor": torch.full((64,), float(self.number))[3:9]}


def test_tensors_that_objects_make_for_the_pickle_keep_their_values() -> None:
    stream = pickle_object([Making(number) for number in range(50)], "x")
    stream.seek(0)
    made: Any = torch.load(stream, weights_only=False)
    assert all(bool((one.tensor == one.number).all()) for one in made)


class Counting:
    """An object that counts how often it is pickled."""

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> Any:
        self.count += 1
        return int, (self.count,)


@pytest.mark.parametrize("save", [torch_ckpt.save, dcp.save])
def test_an_object_is_pickled_once(save: Any, tmp_path: Path) -> None:
    counting = Counting()
    save({"x": (counting, torch.ones(3))}, storage_writer=FastWriter(tmp_path))
    assert counting.count == 1


class Proxy:
    """An object that has no attribute yet, as proxies of a request or a device."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} yet")


def test_objects_of_the_main_script_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "proxy", Proxy(), raising=False)
    stream = pickle_object({"x": (1,)}, "x")
    stream.seek(0)
    assert torch.load(stream) == {"x": (1,)}


def test_a_planner_that_pickles_objects_itself_still_does(tmp_path: Path) -> None:
    class Own(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, ["own", object])

    torch_ckpt.save({"x": (1,)}, storage_writer=FastWriter(tmp_path), planner=Own())
    assert loaded(tmp_path)[0] == ["own", (1,)]


# ---- Storages that were freed --------------------------------------------------------------------


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _freed_conj() -> torch.Tensor:
    tensor = torch.ones(9, dtype=torch.complex64)
    conj = tensor.conj()
    freed(tensor)
    return conj


def _freed_sparse() -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(torch.arange(9)[None], torch.ones(9), (9,))
    freed(tensor._values())
    return tensor


FREED: dict[str, Callable[[], Any]] = {
    "tensor": lambda: freed(torch.ones(9)),
    "parameter": lambda: torch.nn.Parameter(freed(torch.ones(9))),
    "subclass": lambda: freed(torch.ones(9).as_subclass(Tagged)),
    "wrapper": lambda: TwoTensor(torch.ones(9), freed(torch.ones(9))),
    "quantized": lambda: freed(torch.quantize_per_tensor(torch.ones(9), 0.1, 3, torch.qint8)),
    "conj": _freed_conj,
    "sparse": _freed_sparse,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FREED)
def test_a_freed_tensor_in_an_object_is_refused_with_its_fqn_and_path(
    kind: str, way: str, tmp_path: Path
) -> None:
    state = {"a": {"x": (1, {"cache": Holder(FREED[kind]())})}}
    match = r"cannot save 'a\.x': in its element \[1\]\['cache'\]\.tensor, the storage of a"
    with pytest.raises((ValueError, dcp.CheckpointException), match=match):
        WAYS[way](state, tmp_path / "c")
    assert not list(tmp_path.rglob(".metadata"))


class Endless:
    """An iterable without an end, as data loaders."""

    def __iter__(self) -> Any:
        return itertools.repeat(self)


class Raising:
    """An object whose property hides an attribute, and raises."""

    def __init__(self) -> None:
        vars(self).update(device=1, tensor=freed(torch.ones(9)))

    @property
    def device(self) -> Any:
        raise RuntimeError("no device")


class Slotted:
    __slots__ = "tensor"

    def __init__(self) -> None:
        self.tensor = freed(torch.ones(9))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: (Endless(), freed(torch.ones(9))), r"its element \[1\]"),
        (Raising, "tensor"),
        (lambda: (Slotted(),), r"its element \[0\]\.tensor"),
    ],
    ids=["endless", "raising", "slots"],
)
@pytest.mark.timeout(20)
def test_no_code_of_an_object_runs_to_name_a_freed_tensor(
    value: Any, path: str, tmp_path: Path
) -> None:
    with pytest.raises(dcp.CheckpointException, match=rf"cannot save 'x': in {path}, the storage"):
        torch_ckpt.save({"x": value()}, storage_writer=FastWriter(tmp_path))


# Stock's planner itself reads a conjugated tensor, which torch does not survive.
@pytest.mark.parametrize("way", ["save", "transformed", "async_save", "agent"])
@pytest.mark.parametrize("kind", [kind for kind in FREED if kind not in ("tensor", "parameter")])
def test_a_freed_tensor_that_torch_copies_or_pickles_is_refused_with_its_fqn(
    kind: str, way: str, tmp_path: Path
) -> None:
    if (kind, way) == ("conj", "transformed"):
        pytest.skip("stock's planner reads it")
    match = "the storage of a" if kind == "wrapper" else "cannot save 'x': the storage of a"
    with pytest.raises((ValueError, dcp.CheckpointException), match=f"{match}|cannot stage"):
        WAYS[way]({"x": FREED[kind]()}, tmp_path / "c")
    assert not list(tmp_path.rglob(".metadata"))


def test_a_freed_tensor_that_torch_copies_is_refused_for_safetensors(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="cannot store 'x': the storage of a"):
        torch_ckpt.save({"x": _freed_conj()}, storage_writer=SafetensorsWriter(tmp_path))


@pytest.mark.parametrize("way", WAYS)
def test_a_freed_tensor_in_a_rank_state_is_refused_with_its_fqn_and_path(
    way: str, tmp_path: Path
) -> None:
    state = {"data": RankState(lambda: {"seen": [freed(torch.ones(9))]}, print)}
    match = r"'data\.rank_00000_of_00001': in its element \[0\]\['seen'\]\[0\]"
    with pytest.raises((ValueError, dcp.CheckpointException), match=match):
        WAYS[way](state, tmp_path / "c")
    assert not list(tmp_path.rglob(".metadata"))


def test_a_freed_tensor_is_refused_though_the_planner_pickles_objects_itself(
    tmp_path: Path,
) -> None:
    class Own(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)

    with pytest.raises(dcp.CheckpointException, match=r"'x': in its element \[0\]"):
        torch_ckpt.save(
            {"x": (freed(torch.ones(9)),)}, storage_writer=FastWriter(tmp_path), planner=Own()
        )
