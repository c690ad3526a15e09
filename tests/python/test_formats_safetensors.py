"""Safetensors: what FastReader loads of them is what the library and stock DCP's reader load."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
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
    load,
    loads,
    random_tensor,
    save,
)
from safetensors.torch import load_file, save_file
from support.tensors import PACKED
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torch_ckpt import FastLoadPlanner, FastReader
from torch_ckpt.errors import CorruptionError, MismatchError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.opening import open_safetensors

UNKNOWN_TO_THE_LIBRARY = {torch.complex32, torch.complex128}
PLANNERS = [DefaultLoadPlanner, FastLoadPlanner]


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Tensors of every dtype, short and long."""
    dtypes = [dtype for dtype in [*DTYPES, *PACKED] if dtype not in UNKNOWN_TO_THE_LIBRARY]
    state = {f"layers.0.{dtype}": random_tensor([3, 5], dtype) for dtype in dtypes}
    state["large"] = random_tensor([1031, 701], torch.bfloat16)
    state["scalar"] = random_tensor([], torch.float32)
    state["empty"] = random_tensor([0, 7], torch.float32)
    return state


@pytest.fixture(scope="module")
def file(state: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def shards(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """A directory as Hugging Face's libraries write it."""
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    weight_map = {fqn: names[number % 3] for number, fqn in enumerate(state)}
    for name in names:
        part = {fqn: state[fqn] for fqn, where in weight_map.items() if where == name}
        save_file(part, tmp_path / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("planner", PLANNERS)
def test_files_and_directories_load_as_the_library_loads_them(
    file: Path, shards: Path, state: dict[str, torch.Tensor], planner: Any
) -> None:
    assert loads(file, load_file(file), planner=planner()) == []
    assert loads(shards, state, planner=planner()) == []


def test_random_boxes_of_a_file_load(
    file: Path, state: dict[str, torch.Tensor], rng: random.Random
) -> None:
    assert loads(file, state, planner=CuttingLoadPlanner(rng)) == []


def test_a_nested_state_finds_its_fqns(file: Path, state: dict[str, torch.Tensor]) -> None:
    large = state["layers.0.torch.bfloat16"]
    nested = {"layers": {"0": {"torch": {"bfloat16": blank(large)}}}}

    load(nested, FastReader(file), planner=FastLoadPlanner())

    assert differences(large, nested["layers"]["0"]["torch"]["bfloat16"]) == []


def test_other_dtypes_and_strides_are_loaded_by_way_of_a_temporary(
    file: Path, state: dict[str, torch.Tensor]
) -> None:
    large = state["large"]
    targets = {"large": torch.zeros(701, 1031, dtype=torch.float64).t()}

    load(targets, FastReader(file))

    assert differences(large.double(), targets["large"]) == []


def test_a_whole_file_comes_without_a_state_to_load_into(
    file: Path, state: dict[str, torch.Tensor]
) -> None:
    loaded = _load_state_dict_from_keys(storage_reader=FastReader(file))

    assert differences(state, loaded) == []


def test_the_index_decides_between_files_that_hold_the_same(
    shards: Path, state: dict[str, torch.Tensor]
) -> None:
    save_file({"large": torch.zeros(1)}, shards / "other.safetensors")

    assert loads(shards, state) == []

    (shards / "model.safetensors.index.json").unlink()
    (shards / "other.safetensors").unlink()
    assert loads(shards, state) == []  # Files without an index are read together.
    save_file({"scalar": torch.zeros([])}, shards / "other.safetensors")
    assert type(failure_of(loads, shards, state)) is MismatchError


@pytest.mark.parametrize("consolidated", [False, True])
def test_what_dcps_own_writer_has_written_loads(
    tmp_path: Path, state: dict[str, torch.Tensor], consolidated: bool
) -> None:
    # Its consolidation takes whole tensors of few dtypes.
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    state = {fqn: tensor for fqn, tensor in state.items() if tensor.dtype in dtypes}
    state = {fqn: tensor for fqn, tensor in state.items() if tensor.dim() and tensor.numel()}
    writer = HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=consolidated
    )
    save(state, writer)

    assert loads(tmp_path, state) == []
    if consolidated:
        assert loads(tmp_path / "sharded", state) == []


def test_a_checkpoint_of_dcp_comes_before_safetensors_beside_it(tmp_path: Path) -> None:
    from torch_ckpt import FastWriter

    save({"a": torch.ones(3)}, FastWriter(tmp_path))
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")

    assert loads(tmp_path, {"a": torch.ones(3)}) == []


def test_a_missing_fqn_and_another_shape_are_errors_of_the_planner(file: Path) -> None:
    for planner in PLANNERS:
        missing = failure_of(load, {"no": torch.ones(1)}, FastReader(file), planner=planner())
        assert "no" in str(missing)
        shape = failure_of(load, {"large": torch.ones(2)}, FastReader(file), planner=planner())
        assert "large" in str(shape)


def test_a_payload_at_an_odd_offset_loads(tmp_path: Path) -> None:
    # The library pads headers; others need not.
    tensor = random_tensor([3, 70001], torch.float64)
    for pad in (1, 3, 4):
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(
            encoded({"a": entry("F64", [3, 70001], 0, tensor.nbytes)}, tensor.numpy(), pad=pad)
        )
        assert loads(path, {"a": tensor}) == []
        part = {"a": torch.zeros(3, 70001, dtype=torch.float64)}
        load(part, FastReader(path), planner=CuttingLoadPlanner(random.Random(pad)))
        assert differences(tensor, part["a"]) == []


# Damaged and hostile files.


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def encoded(header: Any, data: Any = b"", *, pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * ((pad - len(text)) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


FOUR = entry("F32", [1], 0, 4)
BAD: dict[str, bytes] = {
    "no header": b"1234567",
    "only a length": struct.pack("<Q", 2),
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a header of 2 ** 63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header of more than 100 MB": struct.pack("<Q", 100_000_001) + b"{}" + bytes(100),
    "no JSON": encoded(b"{'a'}"),
    "no UTF-8": encoded(b'{"\xff": 1}'),
    "a list": encoded([]),
    "a tensor twice": encoded(b'{"a": %s, "a": %s}' % ((json.dumps(FOUR).encode(),) * 2), b"1234"),
    "nested too deep": encoded(b'{"a": ' + b"[" * 100_000),
    "an entry that is a number": encoded({"a": 1}),
    "no dtype": encoded({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "another key": encoded({"a": {**FOUR, "stride": [1]}}, b"1234"),
    "a dtype that is a list": encoded({"a": entry(["F32"], [1], 0, 4)}, b"1234"),
    "a negative size": encoded({"a": entry("F32", [-1, -1], 0, 4)}, b"1234"),
    "a size that is a float": encoded({"a": entry("F32", [1.0], 0, 4)}, b"1234"),
    "a size that is a bool": encoded({"a": entry("F32", [True], 0, 4)}, b"1234"),
    "a size of many digits": encoded(
        b'{"a": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 4]}}' % (b"0" * 5000), b"1234"
    ),
    "sizes that overflow": encoded({"a": entry("F32", [1 << 32, 1 << 32], 0, 0)}),
    "sizes that overflow beside a 0": encoded({"a": entry("F32", [0, 1 << 62, 1 << 62], 0, 0)}),
    "65 dimensions": encoded({"a": entry("F32", [1] * 65, 0, 4)}, b"1234"),
    "three offsets": encoded({"a": {**FOUR, "data_offsets": [0, 4, 8]}}, b"1234"),
    "offsets in reverse": encoded({"a": entry("F32", [1], 4, 0)}, b"1234"),
    "offsets beyond the end": encoded({"a": entry("F32", [2], 0, 8)}, b"1234"),
    "offsets beyond 2 ** 63": encoded({"a": entry("F32", [1], 1 << 63, (1 << 63) + 4)}, b"1234"),
    "a length that is not the shape's": encoded({"a": entry("F32", [2], 0, 4)}, b"1234"),
    "an overlap": encoded({"a": FOUR, "b": entry("F32", [1], 2, 6)}, b"123456"),
    "two tensors in one place": encoded({"a": FOUR, "b": FOUR}, b"1234"),
    "a gap": encoded({"a": FOUR, "b": entry("F32", [1], 8, 12)}, b"123456781234"),
    "bytes behind the tensors": encoded({"a": FOUR}, b"12345"),
    "bytes in front of the tensors": encoded({"a": entry("F32", [1], 4, 8)}, b"12345678"),
    "metadata that are a list": encoded({"__metadata__": [], "a": FOUR}, b"1234"),
    "a name that is no text": encoded(b'{"\\ud800": %s}' % json.dumps(FOUR).encode(), b"1234"),
    "a name of 2 MiB": encoded({"a" * (2 << 20): FOUR}, b"1234"),
    **{
        f"offsets of boxes: {offsets}": encoded(
            {"__metadata__": {"DCP_SHARDING_INFO": offsets}, "a": FOUR}, b"1234"
        )
        for offsets in (
            "[]",
            "{",
            "{}",
            '{"a": {"saved_offsets": 1}}',
            '{"a": {"saved_offsets": [-1]}}',
            '{"a": {"saved_offsets": [0, 0]}}',
            '{"a": {"saved_offsets": [9223372036854775807]}}',
        )
    },
}


@pytest.mark.parametrize("what", BAD)
def test_a_header_that_cannot_be_is_refused_with_the_name_of_the_file(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[what])

    with pytest.raises(CorruptionError, match=r"bad\.safetensors"):
        open_safetensors(Location(path))
    assert type(failure_of(load, {"a": torch.zeros(1)}, FastReader(path))) is CorruptionError


def test_an_error_of_a_tensor_names_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(encoded({"model.w": entry("F32", [2], 0, 4)}, b"1234"))

    with pytest.raises(CorruptionError, match=r"'model\.w' of .*bad\.safetensors"):
        FastReader(path).read_metadata()


def test_dtypes_that_torch_has_not_are_an_error_of_their_tensor_alone(tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    others = {"packed": entry("F6_E2M3", [2, 4], 4, 10), "future": entry("F5", [3], 10, 12)}
    others |= {"odd": entry("F4", [2, 3], 12, 15)}
    path.write_bytes(encoded({"a": FOUR, **others}, b"123456789012345"))

    loaded = load({"a": torch.zeros(1)}, FastReader(path))
    assert bytes(loaded["a"].numpy()) == b"1234"
    packs = "packs several numbers into a byte"
    reasons = {"packed": f"F6_E2M3 {packs}", "odd": f"F4 {packs}", "future": "unknown dtype 'F5'"}
    for name, why in reasons.items():
        error = failure_of(load, {name: torch.zeros(2, 4)}, FastReader(path))
        assert type(error) is UnsupportedError
        assert f"{name!r} of {path}" in str(error)
        assert why in str(error)


def test_boxes_that_do_not_cover_a_tensor_are_an_error_of_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "boxes.safetensors"
    offsets = '{"a": {"saved_offsets": [1]}, "b": {"saved_offsets": [0]}}'
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": offsets},
        "a": FOUR,
        "b": entry("F32", [1], 4, 8),
    }
    path.write_bytes(encoded(header, b"12345678"))

    assert bytes(load({"b": torch.zeros(1)}, FastReader(path))["b"].numpy()) == b"5678"
    error = failure_of(load, {"a": torch.zeros(2)}, FastReader(path))
    assert type(error) is CorruptionError
    assert "'a'" in str(error)
    assert "exactly once" in str(error)


def test_a_file_that_is_cut_off_after_it_was_opened_is_an_error(
    file: Path, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(file.read_bytes())
    reader = FastReader(path)
    metadata = reader.read_metadata()
    path.write_bytes(file.read_bytes()[:-5])
    planner = FastLoadPlanner()
    planner.set_up_planner(blank(state), metadata)
    reader.set_up_storage_reader(metadata, True)

    with pytest.raises(CorruptionError, match="bytes long"):
        reader.read_data(planner.create_local_plan(), planner).wait()


def refused(shards: Path, text: str, wanted: Any = None) -> BaseException:
    """How a load fails with such an index."""
    (shards / "model.safetensors.index.json").write_text(text)
    return failure_of(load, wanted or {}, FastReader(shards))


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/hostname", "a/b", "..", "", 3, None])
def test_an_index_that_names_a_file_elsewhere_is_refused(shards: Path, name: Any) -> None:
    save_file({"large": torch.zeros(1)}, shards.parent / "out.safetensors")

    text = json.dumps({"weight_map": {"large": name}})
    error = refused(shards, text, {"large": torch.zeros(1)})

    assert type(error) is CorruptionError
    assert "is not a file name" in str(error)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "b"}}']
)
def test_an_index_that_is_none_is_refused(shards: Path, text: str) -> None:
    assert type(refused(shards, text)) is CorruptionError


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_the_tensors_of_a_file_of_the_index_that_cannot_be_read_are_an_error(
    shards: Path, state: dict[str, torch.Tensor], damage: str
) -> None:
    text = (shards / "model.safetensors.index.json").read_text()
    file = shards / "model-00002-of-00003.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:20])
    for name, of_file in json.loads(text)["weight_map"].items():
        if of_file != file.name:
            assert loads(shards, {name: state[name]}) == []
            continue
        error = refused(shards, text, {name: torch.zeros(1)})
        assert type(error) is (NotFoundError if damage == "missing" else CorruptionError)
        assert file.name in str(error)


def test_a_name_of_the_index_that_its_file_lacks_is_an_error(shards: Path) -> None:
    text = json.dumps({"weight_map": {"no": "model-00001-of-00003.safetensors"}})
    error = refused(shards, text, {"no": torch.zeros(1)})
    assert type(error) is CorruptionError
    assert "'no'" in str(error)


def test_an_index_whose_files_are_all_missing_is_an_error(shards: Path) -> None:
    for file in shards.glob("model-*"):
        file.unlink()
    with pytest.raises(NotFoundError, match=r"assigns it to model-0000\d-of-00003"):
        FastReader(shards).read_metadata()


def mutations(good: bytes, rng: random.Random, count: int) -> Iterator[bytes]:
    """Headers in which something is other than it was."""
    header_nbytes = struct.unpack("<Q", good[:8])[0]
    words = [b"0", b"-1", b"9" * 19, b"[", b"}", b'"', b",", b'"F16"', b"null", b"1e3", b"\\u0000"]
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(8 + header_nbytes)
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    word = rng.choice(words)
                    data[at : at + len(word)] = word
                case 3:
                    begin = rng.randrange(8, 8 + header_nbytes)
                    nbytes = min(rng.randint(1, 30), len(data) - at, len(data) - begin)
                    data[at : at + nbytes] = data[begin : begin + nbytes]
        yield bytes(data[: rng.randrange(len(data))]) if rng.random() < 0.1 else bytes(data)


def test_random_headers_are_refused_or_mean_what_the_library_reads(
    tmp_path: Path, rng: random.Random, full: bool
) -> None:
    names = ["model.layers.0.self_attention.weight", "model.layers.0.self_attention.bias"]
    good = {
        names[0]: random_tensor([2, 3], torch.float32),
        names[1]: random_tensor([4], torch.int16),
    }
    path = tmp_path / "mutated.safetensors"
    save_file(good, path)
    refused = read = 0
    count = 700 if full else 100
    for data in mutations(path.read_bytes(), rng, count):
        path.write_bytes(data)
        try:
            opened = open_safetensors(Location(path))
        except (CorruptionError, UnsupportedError):
            refused += 1
            continue
        fqns = list(opened.metadata.state_dict_metadata)
        expected = load_file(path)  # Which refuses at least as much.
        assert sorted(fqns) == sorted(expected)
        assert loads(path, expected) == []
        read += 1
    print(f"{refused} refused, {read} read")
    assert refused > count // 3
    assert read > count // 30


def test_a_process_group_is_not_needed(file: Path, state: dict[str, torch.Tensor]) -> None:
    targets = blank(state)
    dcp.load(targets, storage_reader=FastReader(str(file)))
    assert differences(state, targets) == []
