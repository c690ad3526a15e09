"""Files of torch.save: what FastReader loads of them is what torch.load loads."""

from __future__ import annotations

import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import (
    DTYPES,
    CuttingLoadPlanner,
    blank,
    differences,
    failure_of,
    layouts,
    load,
    loads,
    random_tensor,
)
from support.flips import flipped
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_ckpt import FastLoadPlanner, FastReader
from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError

PLANNERS = [DefaultLoadPlanner, FastLoadPlanner]


def trained() -> dict[str, Any]:
    """A model and its optimizer after a step, and what a trainer adds to them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 17,
        "betas": (0.9, 0.95),
        "history": [{"loss": 1.5}, {"loss": 1.25, "lr": torch.tensor(0.1)}],
        "notes": ["a", 2, None],
        "rng": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "empty": {},
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Tensors of every dtype and layout, views of one storage, and a trained model."""
    few = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    shared = random_tensor([64, 32], torch.float32)
    return {
        "dtypes": {str(dtype): random_tensor([3, 5], dtype) for dtype in DTYPES},
        "layouts": {str(dtype): layouts(dtype) for dtype in few},
        "shared": [shared, shared[3:7], shared.t(), shared.view(-1)[5::7], shared],
        "parameter": torch.nn.Parameter(random_tensor([4], torch.float16)),
        "conjugate": random_tensor([5], torch.complex64).conj(),
        "negative": random_tensor([5], torch.complex64).conj().imag,
        **trained(),
    }


@pytest.fixture(scope="module")
def file(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.pt"
    torch.save(state, path)
    return path


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_file_loads_as_torch_loads_it(file: Path, planner: Any) -> None:
    expected = torch.load(file, weights_only=True)

    assert loads(file, expected, planner=planner()) == []


def test_random_boxes_of_a_file_load(file: Path, state: dict[str, Any], rng: random.Random) -> None:
    expected = {name: state[name] for name in ("layouts", "shared", "conjugate")}

    assert loads(file, expected, planner=CuttingLoadPlanner(rng)) == []


def test_names_and_paths_are_those_of_dcp(file: Path, state: dict[str, Any]) -> None:
    flat, paths = flatten_state_dict(state)

    metadata = FastReader(file).read_metadata()

    assert dict(metadata.planner_data) == paths
    assert list(metadata.state_dict_metadata) == list(flat)
    for fqn, value in flat.items():
        stored = metadata.state_dict_metadata[fqn]
        if isinstance(value, torch.Tensor):
            assert stored.size == value.size()
            assert stored.properties.dtype == value.dtype
            assert stored.properties.requires_grad == value.requires_grad


def test_a_whole_file_comes_without_a_state_to_load_into(file: Path) -> None:
    expected = torch.load(file, weights_only=True)
    del expected["empty"]  # DCP stores nothing for it. Its paths have strings for numbers.
    expected["optim"]["state"] = {str(k): v for k, v in expected["optim"]["state"].items()}

    assert differences(expected, _load_state_dict_from_keys(storage_reader=FastReader(file))) == []


def test_what_dcp_has_converted_loads_as_the_checkpoint_did(tmp_path: Path) -> None:
    from torch_ckpt import FastWriter

    state = {"model": {"w": random_tensor([5, 3], torch.float32)}, "step": 4}
    dcp.save(state, storage_writer=FastWriter(tmp_path / "dcp"), no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")

    assert loads(tmp_path / "all.pt", state) == []


def test_loaded_objects_are_the_callers_own(tmp_path: Path) -> None:
    torch.save({"notes": ["a"]}, tmp_path / "a.pt")
    reader = FastReader(tmp_path / "a.pt")

    load(first := {"notes": None}, reader)
    first["notes"].append("b")  # type: ignore[attr-defined]

    assert load({"notes": None}, reader)["notes"] == ["a"]


def test_objects_that_hold_tensors_load(tmp_path: Path) -> None:
    state = {"pair": (torch.arange(5), {"x": torch.ones(2)}), "set": {1, 2}}
    torch.save(state, tmp_path / "a.pt")

    loaded = load({"pair": None, "set": None}, FastReader(tmp_path / "a.pt"))
    assert differences(state, loaded) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "quantised", "nested"],
)
def test_tensors_that_only_torch_can_make_do_not_hinder_the_others(
    tmp_path: Path, odd: Callable[[], torch.Tensor]
) -> None:
    state = {"odd": odd(), "plain": random_tensor([300, 100], torch.float32)}
    torch.save(state, tmp_path / "a.pt")

    assert loads(tmp_path / "a.pt", {"plain": state["plain"]}) == []
    loaded = load({"odd": None}, FastReader(tmp_path / "a.pt"))
    assert str(loaded["odd"]) == str(state["odd"])


class Trusted:
    """A class that is in no allow-list."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Trusted

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("planner", PLANNERS)
def test_other_classes_are_refused_unless_the_pickle_is_trusted(
    tmp_path: Path, planner: Any
) -> None:
    path = tmp_path / "a.pt"
    values = {"object": Trusted(), "inside": (1, [{"x": Trusted()}], torch.ones(2))}
    torch.save({**values, "w": torch.ones(3)}, path)

    for name in values:
        target = {name: None, "w": torch.zeros(3)}
        error = failure_of(load, target, FastReader(path), planner=planner())
        assert type(error) is UnsupportedError
        for part in (f"{name!r} of {path}", f"GLOBAL {__name__}.Trusted", "add_safe_globals"):
            assert part in str(error)
    assert loads(path, {"w": torch.ones(3)}) == []

    trusting = FastReader(path, trust_pickle=True)
    loaded = load({"object": None, "w": torch.zeros(3)}, trusting, planner=planner())
    assert differences({"object": Trusted(), "w": torch.ones(3)}, loaded) == []
    with torch.serialization.safe_globals([Trusted]):
        assert load({"object": None}, FastReader(path))["object"] == Trusted()


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_state_dict_is_refused_by_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"

    def refused() -> BaseException:
        return failure_of(load, {"w": torch.ones(3)}, FastReader(path))

    for value, name in [(torch.ones(3), "Tensor"), ([1], "list"), (None, "NoneType")]:
        torch.save(value, path)
        assert type(refused()) is UnsupportedError
        assert f"its value is a {name}" in str(refused())
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert type(refused()) is UnsupportedError
    assert "legacy format of torch.save" in str(refused())
    torch.save({"a.b": 1, "a": {"b": 2}}, path)  # Names that DCP cannot tell apart.
    assert type(refused()) is UnsupportedError
    assert "a.b" in str(refused())
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert type(refused()) is UnsupportedError
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/hello", "world")
    assert type(refused()) is UnsupportedError
    path.write_bytes(b"hello")
    assert type(refused()) is UnsupportedError
    path.write_bytes(b"")
    assert type(refused()) is CorruptionError
    path.unlink()
    assert isinstance(refused(), NotFoundError)


def endless() -> dict[str, Any]:
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    return {"a": cycle}


def exponential() -> dict[str, Any]:
    value: dict[str, Any] = {"x": 1}
    for _ in range(40):
        value = {"l": value, "r": value}
    return value


def long_names() -> dict[str, Any]:
    value: Any = dict.fromkeys(map(str, range(100)), 1)
    for _ in range(250):
        value = OrderedDict({"a" * 100_000: value})
    return dict(value)


@pytest.mark.parametrize("state", [endless, exponential, long_names])
def test_a_pickle_that_unfolds_without_end_is_refused(
    tmp_path: Path, state: Callable[[], dict[str, Any]]
) -> None:
    torch.save(state(), tmp_path / "a.pt")

    error = failure_of(load, {"a": None}, FastReader(tmp_path / "a.pt"))

    # A list in itself is no state of anybody. Shared dicts may be, but not so many.
    assert type(error) in (CorruptionError, UnsupportedError)
    assert "nested without end" in str(error) or "expands to more than its" in str(error)


def test_a_flipped_bit_is_found_where_a_storage_is_read_whole(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "a.pt"
    state = {
        "long": random_tensor([3 << 20], torch.uint8),
        "short": random_tensor([64], torch.int8),
    }
    torch.save(state, path)
    good = path.read_bytes()
    for fqn in state:
        begin = good.index(state[fqn].numpy().tobytes())
        at = begin + rng.randrange(state[fqn].nbytes)
        path.write_bytes(flipped(good, at, rng.randrange(8)))
        for planner in PLANNERS:
            reader = FastReader(path)
            error = failure_of(load, {fqn: blank(state[fqn])}, reader, planner=planner())
            assert type(error) is CorruptionError
            assert fqn in str(error)
        load({fqn: blank(state[fqn])}, FastReader(path, verify=False))


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("a/data/0", lambda data: data[:-4], CorruptionError),
        ("a/data/0", lambda data: None, CorruptionError),
        ("a/byteorder", lambda data: b"big", UnsupportedError),
        ("a/data.pkl", lambda data: pickle.dumps({"w": Evil()}, protocol=2), UnsupportedError),
    ],
    ids=["shorter", "lost", "turned", "run"],
)
def test_records_that_are_not_what_the_pickle_asks_for_are_refused(
    tmp_path: Path, name: str, change: Any, kind: type, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(8), "v": torch.ones(9)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records[name] = change(records[name])
    with zipfile.ZipFile(path, "w") as archive:  # Whose checksums are right.
        for record, data in records.items():
            if data is not None:
                archive.writestr(record, data)

    error = failure_of(load, {"w": torch.zeros(8)}, FastReader(path))

    assert type(error) is kind
    assert "a.pt" in str(error)
    assert capfd.readouterr().out == ""


def test_random_damage_is_refused_or_does_not_matter(
    tmp_path: Path, rng: random.Random, full: bool
) -> None:
    path = tmp_path / "a.pt"
    state = {"w": random_tensor([40], torch.float32), "o": {"x": random_tensor([9], torch.int8)}}
    torch.save(state, path)
    good = path.read_bytes()
    refused = right = 0
    count = 250 if full else 50
    for _ in range(count):
        data = bytearray(good)
        at = rng.randrange(len(data))
        if rng.random() < 0.1:
            del data[at:]
        elif rng.random() < 0.1:
            data[at : at + 30] = bytes(30)
        else:
            data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            loaded = load(blank(state), FastReader(path))
        except dcp.CheckpointException as failed:
            (error, _) = failed.failures[0]
            assert isinstance(error, CorruptionError | UnsupportedError), repr(error)
            refused += 1
            continue
        assert differences(state, loaded) == []
        right += 1
    print(f"{refused} refused, {right} right")
    assert refused > count // 5
