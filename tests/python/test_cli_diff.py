"""`torch-ckpt diff` compares checkpoints of any formats, value by value, in bounded memory."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import memory_growth_kib, save
from crafted import StoredBytes, archive
from safetensors.torch import save_file
from support.flips import flip, flip_value
from torch.distributed.checkpoint import FileSystemWriter

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.cli.main import main
from torch_ckpt.storage import compare as comparing

WEIGHTS = {
    "a": torch.arange(600.0).reshape(20, 30),
    "b": torch.randn(7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.tensor([1 + 2j, 3 - 1j]),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3, dtype=torch.int64),
}
OBJECTS = {"step": 7, "note": {"lr": [0.1, math.nan], "t": torch.ones(2)}}


def save_torch(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)


def save_shards(state: dict[str, Any], path: Path) -> None:
    path.mkdir()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, path / f"{number}.safetensors")


SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "stock": lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)),
    "torch.save": save_torch,
    "safetensors": save_shards,
}


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = main(["diff", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("a", SAVES)
@pytest.mark.parametrize("b", SAVES)
def test_equal_checkpoints_of_any_two_formats_are_equal(
    a: str, b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {name: value for name, value in WEIGHTS.items() if name != "c"}
    state = weights if "safetensors" in (a, b) else {**WEIGHTS, **OBJECTS}
    SAVES[a](state, tmp_path / "a")
    SAVES[b](state, tmp_path / "b")
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (status, found["differences"], found["not_compared"]) == (0, [], [])
    assert found["equal"] >= len(state)


def test_each_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SAVES["ours"]({**WEIGHTS, **OBJECTS, "gone": torch.ones(1)}, tmp_path / "a")
    other = {name: value.clone() for name, value in WEIGHTS.items()}
    other["a"][3, 4] += 0.5
    other["a"][19, 29] -= 2
    other["b"] = other["b"].float()
    other["scalar"] = torch.tensor([3])
    other["c"][1] += 3j
    SAVES["stock"]({**other, **OBJECTS, "step": 8, "new": 1}, tmp_path / "b")
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert {entry["fqn"]: entry["difference"] for entry in found["differences"]} == {
        "a": "2 of 600 elements differ, by 2 at most",
        "b": "torch.bfloat16 [7] in A, torch.float32 [7] in B",
        "c": "1 of 2 elements differ, by 3 at most",
        "scalar": "torch.int64 [] in A, torch.int64 [1] in B",
        "step": "7 in A, 8 in B",
        "gone": "only in A",
        "new": "only in B",
    }
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr().out
    assert re.search(r"^  only in A +gone$", printed, re.M)
    assert printed.endswith("7 differ, 0 cannot be compared\n")


def test_tolerances_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = torch.tensor([1.0, 0.0, math.nan, math.inf])
    b = torch.tensor([1.001, -0.0, math.nan, math.inf])
    SAVES["ours"]({"w": a}, tmp_path / "a")
    SAVES["ours"]({"w": b}, tmp_path / "b")
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1  # -0.0 has other bits than 0.0.
    assert found["differences"][0]["difference"].startswith("2 of 4 elements differ, by 0.001")
    assert diff(capsys, tmp_path / "a", tmp_path / "b", "--atol", "0.01")[0] == 0
    assert diff(capsys, tmp_path / "a", tmp_path / "b", "--rtol", "0.01")[0] == 0
    assert diff(capsys, tmp_path / "a", tmp_path / "b", "--rtol", "1e-6")[0] == 1


def test_names_are_compared_without_a_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(2)}
    SAVES["ours"]({"model": weights, "step": 3}, tmp_path / "a")
    save_file(weights, tmp_path / "b.safetensors")
    assert diff(capsys, tmp_path / "a", tmp_path / "b.safetensors")[0] == 1
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b.safetensors", "--prefix", "model.")
    assert (status, found["equal"]) == (0, 2)
    misspelt = main(["diff", "--prefix", "modle.", str(tmp_path / "a"), str(tmp_path / "a")])
    assert misspelt == 3
    assert "has a name that begins with 'modle.'" in capsys.readouterr().err


class Own:
    """A class that no pickle may request."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)


def test_an_object_of_a_forbidden_class_leaves_the_other_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step in (("a", 7), ("b", 8)):
        SAVES["ours"]({**WEIGHTS, "own": Own(), "step": step, "note": "x"}, tmp_path / name)
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert found["equal"] == len(WEIGHTS) + 1
    assert [entry["fqn"] for entry in found["differences"]] == ["step"]
    assert [entry["fqn"] for entry in found["not_compared"]] == ["own"]
    assert "Own" in found["not_compared"][0]["reason"]
    status, found = diff(capsys, tmp_path / "a", tmp_path / "b", "--trust-pickle")
    assert found["not_compared"] == []


OTHERS: dict[str, tuple[Any, Any]] = {
    "shape": (np.ones(1), np.ones(3)),
    "dtype": (np.ones(2, np.float32), np.ones(2)),
    "integer": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_values_that_are_nearly_equal_differ(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip("ab", OTHERS[kind], strict=True):
        SAVES["ours"]({"x": value}, tmp_path / name)
    options = ("--trust-pickle", "--atol", "0.5")
    assert diff(capsys, tmp_path / "a", tmp_path / "b", *options)[0] == 1
    assert diff(capsys, tmp_path / "a", tmp_path / "a", *options)[0] == 0


def test_a_checkpoint_equals_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SAVES["ours"]({"nan": np.array([math.nan]), "none": None, "plain": Plain()}, tmp_path / "a")
    status, found = diff(capsys, tmp_path / "a", tmp_path / "a", "--trust-pickle")
    assert (status, found["equal"]) == (2, 2)
    assert "their class has no comparison" in found["not_compared"][0]["reason"]


class Plain:
    """A class without a comparison."""


def test_a_damaged_checkpoint_is_a_failure_and_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        SAVES["ours"](WEIGHTS, tmp_path / name)
    (data,) = (tmp_path / "b").glob("*.distcp")
    flip_value(data, WEIGHTS["a"])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert data.name in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_metadata_that_fail_their_checksum_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    for name in ("a", "b"):
        SAVES["ours"](WEIGHTS, tmp_path / name)
    flip(tmp_path / damaged / ".metadata", 60)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert f"{damaged}/.metadata: " in capsys.readouterr().err


def test_large_tensors_are_compared_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparing, "_PIECE_NBYTES", 64)
    state = {"w": torch.arange(5 * 7 * 11.0).reshape(5, 7, 11), "v": torch.arange(100)}
    SAVES["ours"](state, tmp_path / "a")
    state["w"][4, 6, 10] = -1
    state["w"][0, 0, 0] = 1
    SAVES["stock"](state, tmp_path / "b")
    _, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    (entry,) = found["differences"]
    assert entry == {"fqn": "w", "difference": "2 of 385 elements differ, by 385 at most"}


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    large = torch.zeros(1 << 30, dtype=torch.uint8)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        SAVES["ours"]({"w": large}, path)
    growth_kib = memory_growth_kib("torch_ckpt.storage.compare", "diff", *paths)
    assert 0 < growth_kib < 700 << 10  # One tensor has 1024 << 10.


def test_what_cannot_be_read_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SAVES["ours"]({"w": torch.ones(1)}, tmp_path / "a")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "absent")]) == 3
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("long number", "a value of int"), ("deep list", "[[[")],
)
def test_a_value_that_python_cannot_show_is_a_difference(
    kind: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {
        "long number": pickle.dumps(10**5000, 2),
        "deep list": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    }[kind]
    for name, pickled in (("a", odd), ("b", pickle.dumps(1, 2))):
        state = {"odd": archive(pickled).getvalue(), "step": 7}
        save(state, FastWriter(tmp_path / name), planner=StoredBytes())

    status, found = diff(capsys, tmp_path / "a", tmp_path / "b")

    assert status == 1
    assert found["equal"] == 1
    (difference,) = found["differences"]
    assert difference["fqn"] == "odd"
    assert difference["difference"].startswith(shown)
    assert difference["difference"].endswith("in A, 1 in B")


def test_objects_are_shown_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        state = {"rates": (*range(50), (1, {"lr": rate})), "text": "x" * 90 + name, "kind": name}
        SAVES["ours"]({**state, "length": [0] * (3 if name == "a" else 4)}, tmp_path / name)
    found = diff(capsys, tmp_path / "a", tmp_path / "b")[1]["differences"]
    assert {entry["fqn"]: entry["difference"] for entry in found} == {
        "kind": "'a' in A, 'b' in B",
        "length": "[0, 0, 0] in A, [0, 0, 0, 0] in B",
        "rates": "at [50][1]['lr']: 0.1 in A, 0.2 in B",
        "text": "'...xxxxxxxxxxa' in A, '...xxxxxxxxxxb' in B",
    }
