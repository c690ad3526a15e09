"""Damage to files of every format: typed errors that name the file, in bounded time and memory."""

from __future__ import annotations

import collections
import json
import random
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT, files, save
from damage import random_damage
from deepspeed_checkpoints import write, write_shards
from odd_values import changed_file
from rank_state_files import write_both
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch_checkpointing_files import boxes
from torch_checkpointing_files import write as write_torch_checkpointing

import torch_ckpt
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.stored_entries import described, open_checkpoints
from torch_ckpt.storage.stored_values import StoredValues, pieces_of
from torch_ckpt.storage.verify import examine

STATE = {
    "layer": {"weight": torch.arange(60.0).view(6, 10), "bias": torch.ones(10).bfloat16()},
    "list": [torch.arange(5), {"a": 1}],
    "object": collections.deque(
        [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), torch.eye(3).to_sparse()]
    ),
    "view": torch.arange(12.0).view(3, 4).t(),
    "step": 7,
    "rng": torch.get_rng_state(),
}


def stock(path: Path) -> Path:
    save(STATE, FileSystemWriter(path))
    return path


def compressed(path: Path) -> Path:
    save(STATE, FileSystemWriter(path, _extensions=[ZStandard()]))
    return path


def torch_save(path: Path) -> Path:
    path.mkdir()
    torch.save(STATE, path / "file.pt")
    return path / "file.pt"


def safetensors(path: Path) -> Path:
    path.mkdir()
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3).half()}, path / "a.safetensors"
    )
    return path / "a.safetensors"


def hugging_face(path: Path) -> Path:
    path.mkdir()
    tensors = {f"t{i}": torch.arange(4.0) + i for i in range(4)}
    parts = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for part in set(parts.values()):
        save_file({name: tensors[name] for name in tensors if parts[name] == part}, path / part)
    index = {"metadata": {"total_size": 64}, "weight_map": parts}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def zero(stage: int) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        write(path, stage)
        return path

    return make


def parallel(path: Path) -> Path:
    """Two tensor-parallel ranks."""
    whole = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(6.0)}
    shards = [{"a": whole["a"][2 * r : 2 * r + 2], "b": whole["b"]} for r in range(2)]
    info = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": ["b"],
        "parameter_with_row_parallelism_patterns": [],
    }
    write_shards(path, shards, info=info)
    return path


def universal(path: Path) -> Path:
    write(path / "zero" / "tag", 1)
    convert(Location(path / "zero" / "tag"), Location(path / "universal" / "tag"), "universal")
    return path / "universal" / "tag"


def torch_checkpointing(path: Path) -> Path:
    sharding = boxes(((0, 0),), ((3, 4),)), boxes(((3, 0),), ((3, 4),))
    write_torch_checkpointing(path, *sharding)
    for rank in range(2):
        torch.save({"lr": 0.1, "rank": rank, "m": torch.ones(2)}, path / f"optimizer_{rank}.pt")
        (path / f"facts_{rank}.json").write_text(json.dumps({"epoch": 3}))
    return path


def rank_states(path: Path) -> Path:
    write_both(path)
    return path


def megatron(path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests" / "golden" / "megatron-0.15", path))


FORMATS = {
    "stock DCP": stock,
    "DCP with ZStandard": compressed,
    "torch.save": torch_save,
    "safetensors": safetensors,
    "Hugging Face": hugging_face,
    "ZeRO-1": zero(1),
    "ZeRO-3": zero(3),
    "ZeRO-1 with tensor parallelism": parallel,
    "universal": universal,
    "torch_checkpointing": torch_checkpointing,
    "state dicts of ranks": rank_states,
    "Megatron, flattened": megatron,
}

MAX_S = 10
MAX_GROWTH_KIB = 400_000


def read_everything(path: Path, target: dict[str, Any]) -> list[BaseException]:
    """Reads a checkpoint as commands and loads do, and returns the errors."""
    errors: list[BaseException] = []

    def attempt(read: Callable[[], Any]) -> Any:
        begin = time.process_time()
        try:
            return read()
        except CheckpointError as error:
            errors.append(error)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                # DCP's own report of a target that the checkpoint does not have, or has otherwise.
                is_dcps = re.match("Missing key|Invalid checkpoint metadata", str(failure))
                if not isinstance(failure, CheckpointError) and not is_dcps:
                    raise failure from None
                errors.append(failure)
        finally:
            assert time.process_time() - begin < MAX_S, "it is slow"
        return None

    location = Location(path)
    attempt(lambda: [described(one) for one in open_checkpoints(location)])
    attempt(lambda: examine(location))
    attempt(lambda: torch_ckpt.load(dict(target), checkpoint_id=path, no_dist=True))
    values = attempt(lambda: StoredValues(location))
    for name in values.names if values is not None else ():
        entry = values.entry(name)
        if not isinstance(entry, TensorStorageMetadata):
            attempt(lambda name=name: values.objects([name]))
        elif name not in values.why_oversized:
            pieces = pieces_of(entry.size, entry.properties.dtype.itemsize, 4 << 20)
            for box in list(zip(range(4), pieces, strict=False)):
                attempt(lambda name=name, box=box[1]: values.load([(name, box)]))
    return errors


def targets(path: Path) -> dict[str, Any]:
    """What a sound checkpoint loads into."""
    values = StoredValues(Location(path))
    target: dict[str, Any] = {}
    for name in values.names:
        entry = values.entry(name)
        is_tensor = isinstance(entry, TensorStorageMetadata)
        target[name] = torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    return target


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("kind", ["bytes", "values"])
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_a_typed_error_in_bounded_time_and_memory(
    name: str, kind: str, tmp_path: Path, rng: random.Random, full: bool
) -> None:
    if name == "Megatron, flattened" and kind == "values":
        pytest.importorskip("megatron.core")  # Whose classes the pickle to change contains.
    path = FORMATS[name](tmp_path / "sound")
    assert read_everything(path, targets(path)) == []
    target = targets(path)
    root = path.parent if path.is_file() else path
    before = files(root)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    noticed = 0
    rounds = 200 if full else 6
    for _ in range(rounds):
        if kind == "bytes":
            damage = random_damage(before, rng)
            what, changed = damage.what, damage.changed
        else:
            file = rng.choice(
                [file for file in before if not file.endswith((".distcp", "/latest"))]
            )
            new, what = changed_file(file, before[file], rng) or (b"", "emptied")
            what, changed = f"{file}: {what}", {file: new}
        for file, content in changed.items():
            (root / file).write_bytes(content or b"")
        try:
            errors = read_everything(path, target)
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        noticed += bool(errors)
        for error in errors:
            assert len(str(error)) < 5000, what
        for file in changed:
            (root / file).write_bytes(before[file])
    assert noticed > rounds // 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MAX_GROWTH_KIB
