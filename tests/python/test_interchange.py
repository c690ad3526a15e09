"""What one engine writes the other reads: every dtype, memory layout and kind of value."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    DTYPES,
    PAIRS,
    READERS,
    ROOT,
    WRITERS,
    bits,
    blank,
    differences,
    layouts,
    load,
    loads,
    random_tensor,
    save,
)
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import MismatchError

pairs = pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=lambda who: who)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).partition(".")[2])


@pytest.mark.thin(1)
@pairs
@dtypes
def test_every_dtype_in_every_layout_comes_back_bit_for_bit(
    dtype: torch.dtype, writer: str, reader: str, tmp_path: Path, rng: random.Random
) -> None:
    state = layouts(dtype)
    save(state, WRITERS[writer](tmp_path))

    assert loads(tmp_path, state, READERS[reader]) == []


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].clone().expand_as(tensor)


# Destinations of a tensor of shape [6, 3, 5, 4]; each holds other values.
DESTINATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "reversed strides": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "channels_last": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "view": lambda t: torch.cat([t, t, t], dim=2)[:, :, 5:10],
    "misaligned view": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "strided step": lambda t: torch.cat([t, t], dim=3)[:, :, :, ::2],
    "parameter": lambda t: nn.Parameter(t, requires_grad=t.is_floating_point()),
    "expanded": _expanded,
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (40, 15, 4, 1)),
    "conj view": lambda t: t.conj(),
    "neg view": lambda t: torch._neg_view(t),
    "imaginary parts": lambda t: t.conj().imag if t.is_complex() else t,
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("stored", ["contiguous", "reversed strides", "channels_last", "view"])
@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.complex64, torch.complex64),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float64),
        (torch.float64, torch.int32),
        (torch.int64, torch.bool),
        (torch.uint8, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
    ],
    ids=lambda dtype: str(dtype).partition(".")[2],
)
@pytest.mark.parametrize("copies", [1, 40], ids=["small", "large"])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_every_destination_ends_as_with_the_stock_reader(
    copies: int,
    from_dtype: torch.dtype,
    to_dtype: torch.dtype,
    stored: str,
    tmp_path: Path,
    rng: random.Random,
) -> None:
    values = torch.randint(0, 100, [6, 3, 5, 4 * copies * copies]).to(from_dtype)
    if from_dtype.is_complex:
        values += 1j * torch.randint(0, 100, values.shape)
    save({"t": DESTINATIONS[stored](values)}, FastWriter(tmp_path, sync_files=False))

    def outcome(destination: str, reader: Any) -> tuple[object, bytes]:
        target = DESTINATIONS[destination](torch.full(values.shape, 7).to(to_dtype))
        around = torch.tensor([], dtype=torch.uint8).set_(target.untyped_storage())
        try:
            state = load({"t": target}, reader)
        except CheckpointException as error:
            return type(error.failures[0][0]), around.numpy().tobytes()
        assert state["t"] is target
        return "loaded", around.numpy().tobytes()

    for destination in DESTINATIONS:
        ours = outcome(destination, READERS["ours"](tmp_path))
        expected = outcome(destination, READERS["stock"](tmp_path))
        # Stock's errors have no names. Of overlapping elements, some are wrong in silence.
        if destination in ("expanded", "overlapping"):
            expected = (ValueError, expected[1])
        elif expected[0] != "loaded":
            expected = (MismatchError, expected[1])
        assert ours == expected, destination


class Subclass(torch.Tensor):
    """A tensor subclass that nobody has registered with the weights-only unpickler."""


def _special_values() -> dict[str, torch.Tensor]:
    floats = torch.randn(6, 4)
    whole = torch.complex(torch.randn(5, 3), torch.randn(5, 3))
    weights = torch.randn(4, 3, 2)
    tagged = torch.randn(3)
    tagged.note = "kept by nobody"  # type: ignore[attr-defined]
    big = torch.complex(torch.randn(300, 301), torch.randn(300, 301))
    scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    zeros = torch.tensor([0, 1, 2, 3])
    return {
        "quantised per tensor": torch.quantize_per_tensor(floats, 0.05, 3, torch.qint8),
        "quantised unsigned": torch.quantize_per_tensor(floats, 0.05, 3, torch.quint8),
        "quantised wide": torch.quantize_per_tensor(floats, 0.05, 0, torch.qint32),
        "quantised per channel": torch.quantize_per_channel(weights, scales, zeros, 0, torch.qint8),
        "conj view": whole.conj(),
        "neg view": torch._neg_view(floats),
        "conj and neg": torch._neg_view(whole.conj()),
        "imaginary part of conj": whole.conj().imag,
        "large conj view": big.conj().t(),
        "large neg view": torch._neg_view(big.real),
        "parameter": nn.Parameter(torch.randn(3, 3)),
        "buffer": nn.Buffer(torch.randn(3)),
        "subclass": torch.randn(3, 3).as_subclass(Subclass),
        "large subclass": torch.randn(300, 300).as_subclass(Subclass),
        "attributes": tagged,
        "requires grad": torch.randn(2, 2, requires_grad=True),
        "not a leaf": torch.randn(2, 2, requires_grad=True) * 2,
        "inference": torch.inference_mode()(torch.randn)(3, 3),
        "copy on write": torch._lazy_clone(floats),
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        "mkldnn": torch.randn(3, 3).to_mkldnn(),
    }


with warnings.catch_warnings(action="ignore"):
    SPECIAL = list(_special_values())


def _target_like(value: torch.Tensor) -> torch.Tensor:
    if value.is_quantized and value.qscheme() == torch.per_channel_affine:
        zeros = torch.zeros(value.shape)
        scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        axis = value.q_per_channel_axis()
        return torch.quantize_per_channel(zeros, scales, points, axis, value.dtype)
    if value.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(value.shape), 1.0, 0, value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CheckpointException as error:
        return type(error.failures[0][0])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors_save_and_load_or_fail_as_stock_does(
    kind: str, tmp_path: Path, rng: random.Random
) -> None:
    value = _special_values()[kind]
    results = {}
    for writer in ("stock", "ours"):
        path = tmp_path / writer
        saved = _attempt(lambda path=path, w=WRITERS[writer]: save({"t": value}, w(path)))
        if isinstance(saved, type):
            results[writer] = saved
            continue
        for reader in ("stock", "ours"):

            def read(path: Path = path, reader: str = reader) -> Any:
                loaded = load({"t": _target_like(value)}, READERS[reader](path))["t"]
                assert loaded.requires_grad is False
                if loaded.is_quantized:
                    return bits(loaded.int_repr()), loaded.qscheme(), bits(loaded.dequantize())
                return bits(loaded)

            results[writer, reader] = _attempt(read)
    if "stock" in results:
        assert "ours" in results
        return
    expected = results["stock", "stock"]
    for pair in PAIRS:
        result = results[pair]
        if isinstance(expected, bytes | tuple):
            assert result == expected, pair
        else:
            assert isinstance(result, type), pair


class Thing:
    """An object that only torch's unrestricted unpickler reads."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


class Counter:
    """A Stateful."""

    def __init__(self, count: int, weight: torch.Tensor) -> None:
        self.count = count
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight, "thing": Thing([self.count])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["thing"] == Thing([state["count"]])
        self.count = state["count"]
        self.weight = state["weight"]


@pairs
def test_nested_containers_and_objects_come_back(
    writer: str, reader: str, tmp_path: Path, rng: random.Random
) -> None:
    state = {
        "model": {"layers": {"0": {"weight": torch.randn(3, 2)}, "1": {"bias": torch.randn(2)}}},
        "list": [torch.randn(2), 1, "two", None, [torch.randn(1), {"deep": torch.randn(3)}]],
        "tuple": (torch.randn(2), 5),
        "dots.in.names": {"a.b": torch.randn(2), "": torch.randn(1), "c": {"d/e": 4}},
        "step": 7,
        "float": float("inf"),
        "bytes": b"\0" * 100,
        "unicode ü ≈ 𝄞": "ü",
        "large object": list(range(50_000, 80_000)),  # About 120 kB.
        "thing": Thing({"x": 1}),
        "none": None,
        "bool": True,
        "storage sharing": (lambda t: [t[:5], t[3:]])(torch.randn(10)),
    }
    save(state, WRITERS[writer](tmp_path))

    with torch.serialization.safe_globals([Thing]):
        loaded = load(blank(state), READERS[reader](tmp_path))
    assert differences(state, loaded) == []


@pairs
def test_stateful_objects_are_saved_and_loaded_in_place(
    writer: str, reader: str, tmp_path: Path, rng: random.Random
) -> None:
    saved = Counter(3, torch.randn(4))
    save({"counter": saved, "module": nn.Linear(3, 2)}, WRITERS[writer](tmp_path))

    loaded = Counter(0, torch.zeros(4))
    module = nn.Linear(3, 2)
    with torch.serialization.safe_globals([Thing]):
        load({"counter": loaded, "module": module}, READERS[reader](tmp_path))

    assert loaded.count == 3
    assert bits(loaded.weight) == bits(saved.weight)


@pairs
@pytest.mark.parametrize(
    "state",
    [
        {},
        {"empty": {}},
        {"step": 1},
        {"t": torch.empty(0)},
        {"a": torch.empty(0, 5), "b": torch.empty(3, 0), "c": torch.tensor(1.5)},
    ],
    ids=["nothing", "an empty dict", "no tensors", "an empty tensor", "empty tensors"],
)
def test_checkpoints_of_next_to_nothing_come_back(
    state: dict[str, Any], writer: str, reader: str, tmp_path: Path
) -> None:
    save(state, WRITERS[writer](tmp_path))

    assert loads(tmp_path, state, READERS[reader]) == []


def test_the_same_reader_loads_again_and_elsewhere(tmp_path: Path, rng: random.Random) -> None:
    first, second = {"t": random_tensor([9], torch.float32)}, {"t": random_tensor([7], torch.int8)}
    save(first, FastWriter(tmp_path / "1"))
    save(second, FastWriter(tmp_path / "2"))

    reader = FastReader(tmp_path / "1")

    assert differences(first, load(blank(first), reader)) == []
    assert differences(second, load(blank(second), reader, checkpoint_id=tmp_path / "2")) == []
    assert differences(second, load(blank(second), reader)) == []
    assert differences(first, load(blank(first), reader, checkpoint_id=tmp_path / "1")) == []


def test_saving_leaves_the_tensors_as_they_were(tmp_path: Path, rng: random.Random) -> None:
    state = layouts(torch.float16)
    before = {name: (bits(t), t.stride(), t.data_ptr()) for name, t in state.items()}

    save(state, FastWriter(tmp_path))

    assert before == {name: (bits(t), t.stride(), t.data_ptr()) for name, t in state.items()}


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_checkpoint_of_torch_2_15_loads(trust_pickle: bool) -> None:
    """Its metadata has strides, which earlier versions do not know."""
    state = {"w": torch.zeros(3, 4), "t": torch.zeros(3, 2, dtype=torch.int64), "n": {"step": 0}}
    path = ROOT / "tests" / "golden" / "torch-2.15"
    if trust_pickle and "strides" not in TensorProperties.__dataclass_fields__:
        pytest.skip("this torch itself does not read them")
    load(state, FastReader(path, trust_pickle=trust_pickle))
    assert torch.equal(state["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(state["t"], torch.arange(6).reshape(2, 3).t())
    assert state["n"] == {"step": 7}
