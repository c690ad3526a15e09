"""Where tensors lie in safetensors files, held against what the library itself writes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.safetensors.layout import DTYPES, PACKED, ModelLayout, TensorFacts

GB = 1_000_000_000


def random_facts(rng: random.Random, count: int) -> list[TensorFacts]:
    names = [f"{rng.choice('abcé')}.{n}.{rng.choice(['weight', 'bias'])}" for n in range(count)]
    facts = []
    for name in names:
        dtype = rng.choice(list(DTYPES))
        sizes = [rng.choice([0, 1, 2, 5, 17]) for _ in range(rng.randrange(dtype in PACKED, 4))]
        facts.append(TensorFacts(rng.choice(["", "Z.", "model."]) + name, dtype, tuple(sizes)))
    return facts


def header_of(file: bytes) -> tuple[bytes, int]:
    """Its text without the spaces behind it, and where tensors begin."""
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end].rstrip(b" "), end


def test_a_file_is_laid_out_as_the_library_lays_it_out(rng: random.Random, tmp_path: Path) -> None:
    for _ in range(20):
        facts = random_facts(rng, rng.randrange(1, 30))
        tensors = {f.fqn: torch.empty(f.sizes, dtype=getattr(torch, f.dtype)) for f in facts}
        save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
        theirs = (tmp_path / "library").read_bytes()

        (ours,) = ModelLayout.of(facts, max_shard_nbytes=GB).files

        (header, begin), (expected, library_begin) = header_of(ours.header), header_of(theirs)
        assert header == expected
        assert begin == len(ours.header)
        assert begin % 4096 == 0
        assert ours.nbytes - begin == len(theirs) - library_begin


def test_places_agree_with_the_headers(rng: random.Random) -> None:
    layout = ModelLayout.of(random_facts(rng, 200), max_shard_nbytes=20_000)
    assert len(layout.files) > 1
    seen = set()
    for number, file in enumerate(layout.files):
        header = json.loads(header_of(file.header)[0])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert tuple(header) == file.fqns
        end = len(file.header)
        for fqn, entry in header.items():
            place = layout.places[fqn]
            assert (place.file, place.offset) == (number, end), fqn
            assert entry["data_offsets"][0] + len(file.header) == place.offset
            assert place.offset % DTYPES[place.facts.dtype][1] == 0, "not aligned to its items"
            end += place.facts.nbytes
            seen.add(fqn)
        assert file.nbytes == end
    assert seen == layout.places.keys()


def test_a_file_is_no_longer_than_asked_for_unless_it_is_one_tensor(rng: random.Random) -> None:
    for most in (1, 5_000, 12_000, 50_000):
        facts = [*random_facts(rng, 300), TensorFacts("large", "float32", (40_000,))]
        rng.shuffle(facts)
        layout = ModelLayout.of(facts, max_shard_nbytes=most)
        first_of = {layout.places[f.fqn].file: f for f in reversed(facts)}
        for number, file in enumerate(layout.files):
            assert file.nbytes <= most or len(file.fqns) == 1
            assert file.fqns, "an empty file"
            if number + 1 < len(layout.files) and most > 1:
                more = first_of[number + 1].nbytes + 2 * 4096 + 40 * len(file.fqns)
                assert file.nbytes + more > most, "the next tensor would have had room"
        order = [layout.places[f.fqn].file for f in facts]
        assert order == sorted(order), "neighbours in the model are not neighbours in its files"


def test_a_layout_that_travels_is_the_same(rng: random.Random) -> None:
    for count in (0, 1, 100):
        layout = ModelLayout.of(random_facts(rng, count), max_shard_nbytes=10_000)
        assert ModelLayout.decode(layout.encode()) == layout


def test_a_layout_of_many_tensors_travels_in_few_bytes() -> None:
    layers = [f"model.layers.{n}.mlp.{m}.weight" for n in range(2500) for m in ("up", "down")]
    facts = [TensorFacts(fqn, "bfloat16", (4096, 11008)) for fqn in layers]
    assert len(ModelLayout.of(facts, max_shard_nbytes=5 * GB).encode()) < 20 * len(facts)


def test_the_dtypes_are_those_that_the_library_stores_and_loads_again(tmp_path: Path) -> None:
    """Fails if another version of the library has more or fewer of them."""
    stored: dict[str, tuple[str, int]] = {}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or str(dtype) != f"torch.{name}":
            continue  # Some dtypes have a second name.
        try:
            tensor = torch.arange(48, dtype=torch.uint8).view(3, 16).view(dtype)
            save_file({"x": tensor}, tmp_path / name)
        except (KeyError, RuntimeError):
            continue
        header = json.loads(header_of((tmp_path / name).read_bytes())[0])
        stored[name] = header["x"]["dtype"], dtype.itemsize
        assert header["x"]["shape"] == [3, 16 // dtype.itemsize * PACKED.get(name, 1)]
        loaded = load_file(tmp_path / name)["x"]
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
    assert stored == DTYPES


def test_half_of_a_byte_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'a\.b' as safetensors: a scalar of float4"):
        ModelLayout.of([TensorFacts("a.b", "float4_e2m1fn_x2", ())], max_shard_nbytes=GB)


@pytest.mark.parametrize(
    ("fqn", "dtype"), [("a.b", "complex128"), ("a.b", "qint8"), ("__metadata__", "float32")]
)
def test_what_has_no_form_is_refused_by_name(fqn: str, dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{fqn}'"):
        ModelLayout.of([TensorFacts(fqn, dtype, (2,))], max_shard_nbytes=GB)
