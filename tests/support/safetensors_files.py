"""Models in safetensors files, as other programs read them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

__all__ = ["INDEX", "MODEL", "load_model", "names_in"]


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(path: Path, *, index_first: bool = False) -> dict[str, torch.Tensor]:
    """As Hugging Face's loaders do: the only file, or those that the index names.

    ``index_first`` for those that look for the latter first.
    """
    choices = [path / INDEX, path / MODEL] if index_first else [path / MODEL, path / INDEX]
    found = next(file for file in choices if file.exists())
    if found.name == MODEL:
        return load_file(found)
    index = json.loads(found.read_bytes())
    loaded: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(path / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}  # transformers refuses others.
        loaded |= (shard := load_file(path / name))
        assert shard.keys() == {fqn for fqn, of in index["weight_map"].items() if of == name}
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in loaded.values())}
    return loaded


def names_in(path: Path) -> set[str]:
    """Names of the tensors in the only file of a model."""
    with safe_open(path / MODEL, "pt") as file:
        return set(file.keys())
