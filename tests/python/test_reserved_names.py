"""Names that a format itself uses: a tensor of such a name is loaded again, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import differences, failure_of
from support.safetensors_files import names_in

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location

NAMES = ["__metadata__", "format", "pt", "DCP_SHARDING_INFO", "DCP_VERSION", "1.0", "total_size"]
NAMES += [
    "weight_map",
    ".metadata",
    "data.pkl",
    "version",
    "a/b",
    "..",
    "\n",
    '"',
    "\\",
    "x" * 70000,
]
NAMES += ["model.safetensors", "\0", "\ud800"]

State = dict[str, torch.Tensor]


def _converted(to: str) -> Callable[[State, Path], object]:
    def write(state: State, path: Path) -> object:
        source = path.with_name("source")
        torch_ckpt.save(state, checkpoint_id=source)
        return convert(Location(source), Location(path), to, ties={n: "emb" for n in [*state][1:]})

    return write


WRITERS: dict[str, Callable[[State, Path], object]] = {
    "safetensors": lambda state, path: torch_ckpt.save(
        state, storage_writer=SafetensorsWriter(path)
    ),
    "dcp": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "safetensors by conversion": _converted("safetensors"),
    "torch by conversion": _converted("torch"),
}
REFUSED = {("__metadata__", "safetensors"), ("\ud800", "safetensors")}


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "alone"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_tensor_of_a_reserved_name_is_loaded_again_or_refused(
    writer: str, is_tied: bool, tmp_path: Path
) -> None:
    weight = torch.randn(8)
    for number, name in enumerate(NAMES):
        path = tmp_path / str(number) / "model"
        state = {"emb": weight, name: weight if is_tied else weight.clone()}
        if (name, writer.partition(" ")[0]) in REFUSED:
            error = _error_of(WRITERS[writer], state, path)
            assert type(error) is UnsupportedError, name
            assert f"cannot store {name!r} as safetensors: the name" in str(error)
            continue
        if (name, writer) == ("\ud800", "torch by conversion"):
            continue  # Only torch reads such a pickle.
        WRITERS[writer](state, path)
        blank = {name: torch.zeros(8) for name in state}
        dcp.load(blank, storage_reader=FastReader(path))
        assert not differences(state, blank), name
        found = FastReader(path).read_metadata().state_dict_metadata
        assert found.keys() == state.keys(), name


def _error_of(write: Callable[[State, Path], object], state: State, path: Path) -> Any:
    try:
        return failure_of(write, state, path)
    except UnsupportedError as error:
        return error


def test_a_reserved_name_is_stored_apart_from_the_tensor_that_it_shares(tmp_path: Path) -> None:
    weight = torch.randn(8)
    names = ["format", "DCP_SHARDING_INFO", "DCP_VERSION"]
    state = dict.fromkeys(["emb", *names, "head"], weight)
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(tmp_path))
    assert names_in(tmp_path) == {"emb", *names}


def test_a_model_of_an_earlier_version_with_a_reserved_tie_is_read(tmp_path: Path) -> None:
    emb = torch.randn(8)
    metadata = {"format": "pt", "DCP_SHARDING_INFO": "emb", "DCP_VERSION": "emb"}
    safetensors.torch.save_file({"emb": emb}, tmp_path / "model.safetensors", metadata)
    blank = {name: torch.zeros(8) for name in ("emb", "DCP_SHARDING_INFO", "DCP_VERSION")}
    dcp.load(blank, storage_reader=FastReader(tmp_path))
    assert not differences(dict.fromkeys(blank, emb), blank)
