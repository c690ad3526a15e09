"""Distributed models of transformers under `installed`, bit for bit as without."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from torch.distributed.tensor import DTensor

import torch_ckpt
from torch_ckpt.errors import RankTimeoutError

pytestmark = [
    pytest.mark.framework("transformers"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

TIMEOUT_S = 240  # transformers takes long to import, on each rank.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {"tie_word_embeddings": False}),
    "tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "experts": ("Qwen3MoeConfig", EXPERTS),  # Merged from one tensor for each expert.
}


def write(path: Path, model: str) -> None:
    import transformers

    name, options = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES, **options)
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    net.save_pretrained(path, max_shard_size="100KB")


def pretrained(path: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    os.environ.update(
        RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(world)
    )
    config = DistributedConfig(tp_size=2, fsdp_size=world // 2)
    return AutoModelForCausalLM.from_pretrained(
        path, distributed_config=config, dtype=torch.bfloat16
    )


def parts_of(net: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    return {
        name: (tensor.placements, tensor.to_local())
        if isinstance(tensor, DTensor)
        else (None, tensor)
        for name, tensor in net.state_dict().items()
    }


def assert_equal(net: Any, other: Any) -> None:
    found, expected = parts_of(net), parts_of(other)
    assert found.keys() == expected.keys()
    for name, (placements, tensor) in expected.items():
        assert found[name][0] == placements, name
        assert torch.equal(found[name][1], tensor), name


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def count(self: Any, *arguments: Any) -> Any:
        calls.append("read")
        return function(self, *arguments)

    return count


def load_and_save(path: Path, model: str) -> int:
    """Loads, saves and loads again, with stock beside; returns how often our reader read."""
    source = path / "source"
    if dist.get_rank() == 0:
        write(source, model)
    dist.barrier()
    reads: list[str] = []
    read_data, nets = torch_ckpt.FastReader.read_data, {}
    torch_ckpt.FastReader.read_data = counted(read_data, reads)  # type: ignore[method-assign]
    try:
        for name in ("stock", "ours"):
            with torch_ckpt.installed() if name == "ours" else contextlib.nullcontext():
                nets[name] = pretrained(source)
                nets[name].save_pretrained(path / name, distributed_checkpoint=True)
            dist.barrier()
        assert_equal(nets["ours"], nets["stock"])
        for saved in ("stock", "ours"):
            for name in ("stock", "ours"):
                with torch_ckpt.installed() if name == "ours" else contextlib.nullcontext():
                    assert_equal(pretrained(path / saved), nets["stock"])
    finally:
        torch_ckpt.FastReader.read_data = read_data  # type: ignore[method-assign]
    return len(reads)


@pytest.mark.parametrize(("model", "world"), [("dense", 8), ("tied", 4), ("experts", 4)])
def test_distributed_models_load_and_save_as_without(
    worlds: Worlds, tmp_path: Path, model: str, world: int
) -> None:
    assert worlds.agree(world, load_and_save, tmp_path, model, timeout_s=TIMEOUT_S) == 3
    names = {file.name for file in (tmp_path / "ours").glob("*.safetensors")}
    assert names == {"shard-00001-model-00001-of-00001.safetensors"}
    assert len(list((tmp_path / "stock").glob("shard-*"))) == world


def fail_on_one_rank(path: Path, moment: str) -> float:
    """Loads where the last rank fails; returns how long the others took to raise."""
    from torch_ckpt.frameworks.transformers import loading as ours

    if dist.get_rank() == 0:
        write(path, "dense")
    dist.barrier()
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def fail(*_: Any) -> Any:
        raise TypeError("this rank cannot")

    failing = mock.patch.object(ours, "_box_of", fail) if is_last else contextlib.nullcontext()
    if moment == "opening" and is_last:
        failing = mock.patch.object(ours._Replaced, "_boxes_of", return_value=None)
    began = time.monotonic()
    raises = pytest.raises((TypeError, RankTimeoutError), match="this rank cannot")
    with torch_ckpt.installed(), failing, raises if moment == "boxes" else contextlib.nullcontext():
        pretrained(path)
    return time.monotonic() - began


@pytest.mark.parametrize("moment", ["opening", "boxes"])
def test_a_rank_that_fails_or_reads_alone_lets_no_other_wait(
    worlds: Worlds, tmp_path: Path, moment: str
) -> None:
    took_s = worlds.run(2, fail_on_one_rank, tmp_path, moment, timeout_s=TIMEOUT_S)
    assert max(took_s) < TIMEOUT_S / 2


def load_by_changed_functions(path: Path) -> tuple[bool, int]:
    """Loads where a function has another argument; returns whether ours was used, and warnings."""
    import logging

    from transformers import core_model_loading as loading

    from torch_ckpt.process_state import PROCESS

    if dist.get_rank() == 0:
        write(path, "dense")
    dist.barrier()
    messages: list[str] = []

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, stock = Messages(logging.WARNING), loading.spawn_materialize
    logging.getLogger("torch_ckpt").addHandler(handler)
    PROCESS.unreplaced.clear()

    def spawn_materialize(*arguments: Any, priority: int = 0, **options: Any) -> Any:
        return stock(*arguments, **options)

    loading.spawn_materialize = spawn_materialize
    reads: list[str] = []
    read_data = torch_ckpt.FastReader.read_data
    torch_ckpt.FastReader.read_data = counted(read_data, reads)  # type: ignore[method-assign]
    try:
        for _ in range(2):
            with torch_ckpt.installed():
                pretrained(path)
    finally:
        loading.spawn_materialize = stock
        torch_ckpt.FastReader.read_data = read_data  # type: ignore[method-assign]
        logging.getLogger("torch_ckpt").removeHandler(handler)
    return bool(reads), sum("reads by itself" in message for message in messages)


def test_functions_that_have_changed_are_left_alone_with_one_warning(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = worlds.run(2, load_by_changed_functions, tmp_path, timeout_s=TIMEOUT_S)
    assert found == [(False, 1)] * 2
