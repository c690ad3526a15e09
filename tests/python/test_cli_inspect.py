"""``torch-ckpt inspect``, compared with DCP's own metadata."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CuttingSavePlanner, data_files, random_tensor, save
from command import DAMAGED, MODULE, SOUND, run_command
from support.flips import flip
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_ckpt import FastWriter


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return {
        "model": {
            "wide": random_tensor([300, 50], torch.float32),
            "medium": random_tensor([20, 30], torch.bfloat16),
            "none": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5),
        },
        "ümläut\n": random_tensor([5], torch.bool),
        "step": 7,
        "object": "x" * 1000,
    }


def inspected(path: Path) -> Any:
    status, printed = run_command("inspect", "--json", path)
    assert status == SOUND
    return json.loads(printed)


def extent(metadata: Metadata, index: MetadataIndex) -> dict[str, Any]:
    info = metadata.storage_data[index]
    return {"file": info.relative_path, "offset": info.offset, "nbytes": info.length}


@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
def test_json_says_what_dcps_metadata_say(
    writer: Any, state: dict[str, Any], rng: random.Random, tmp_path: Path
) -> None:
    save(state, writer(tmp_path, thread_count=2), planner=CuttingSavePlanner(rng))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())

    said = inspected(tmp_path)

    tensors = [
        {
            "fqn": fqn,
            "dtype": str(stored.properties.dtype).removeprefix("torch."),
            "shape": list(stored.size),
            "nbytes": stored.size.numel() * stored.properties.dtype.itemsize,
            "boxes": [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **extent(metadata, MetadataIndex(fqn, chunk.offsets)),
                }
                for chunk in stored.chunks
            ],
        }
        for fqn, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    ]
    objects = [
        {"fqn": fqn, **extent(metadata, MetadataIndex(fqn))}
        for fqn, stored in metadata.state_dict_metadata.items()
        if not isinstance(stored, TensorStorageMetadata)
    ]
    assert said["tensors"] == tensors
    assert said["objects"] == objects
    assert said["index"] == (writer is FastWriter)
    assert said["save_id"] == metadata.storage_meta.save_id
    assert said["metadata"] == str(tmp_path / ".metadata")
    assert said["files"] == [
        {"name": file.name, "nbytes": file.stat().st_size, "rank": 0, "first_saved": None}
        for file in data_files(tmp_path)
    ]
    nbytes = sum(info.length for info in metadata.storage_data.values())
    assert said["ranks"] == [{"rank": 0, "nbytes": nbytes}]


def save_as_two_ranks(path: Path, states: list[dict[str, Any]]) -> None:
    """What two ranks and their coordinator do, one after another."""
    writer = FastWriter(path)
    planners = [DefaultSavePlanner() for _ in states]
    writer.set_up_storage_writer(True)
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
    local = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(local)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


def test_the_balance_of_ranks_is_told(tmp_path: Path) -> None:
    states = [{"a": torch.zeros(30_000)}, {"b": torch.zeros(10_000), "c": torch.zeros(5_000)}]
    save_as_two_ranks(tmp_path, states)
    one, two = (file.stat().st_size for file in data_files(tmp_path))

    said = inspected(tmp_path)
    status, printed = run_command("inspect", tmp_path)

    assert [file["rank"] for file in said["files"]] == [0, 1]
    per_rank = [rank["nbytes"] for rank in said["ranks"]]
    assert per_rank[0] == one
    assert two - 64 <= per_rank[1] <= two  # A gap between two slices is nobody's.
    assert status == SOUND
    most = 2 * per_rank[0] / sum(per_rank)
    assert f"the busiest of 2 ranks wrote {most:.2f} times the mean" in printed
    assert "rank 0: 117." in printed
    assert "2 files, " in printed


def test_the_table_has_a_line_for_everything(state: dict[str, Any], tmp_path: Path) -> None:
    save(state, FastWriter(tmp_path))

    status, printed = run_command("inspect", tmp_path)

    assert status == SOUND
    lines = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    rows = {(line[0], line[-1]) for line in lines}
    assert {
        ("float32", "model.wide"),
        ("bfloat16", "model.medium"),
        ("float32", "model.none"),
        ("object", "step"),
        ("object", "object"),
    } <= rows
    assert "[300, 50]" in printed
    lines = printed.splitlines()
    assert lines[0] == f"{tmp_path}/.metadata: checkpoint of torch_ckpt"
    assert lines[1].split() == ["dtype", "shape", "boxes", "size", "name"]
    (scalar,) = (line for line in lines if line.endswith("model.scalar"))
    assert scalar.split() == ["float32", "[]", "1", "4", "B", "model.scalar"]
    assert "5 tensors, 2 objects" in printed


def test_metadata_that_fail_their_checksum_are_damaged(
    state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FastWriter(tmp_path))
    flip(tmp_path / ".metadata", 60)
    status, printed = run_command("inspect", tmp_path)
    assert (status, "fail their checksum" in printed) == (DAMAGED, True)
    assert "5 tensors, 2 objects" in printed  # All that the index has.


def test_who_reads_only_the_first_lines_breaks_nothing(tmp_path: Path) -> None:
    save({f"tensor {i}": torch.zeros(1) for i in range(3000)}, FastWriter(tmp_path))
    command = " ".join([*MODULE, "inspect", str(tmp_path), "| head -n 2; echo ${PIPESTATUS[0]}"])

    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=tmp_path.root
    )

    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""


WATCH = """
import sys
seen = set()
sys.addaudithook(lambda event, _: seen.add(event) if event.startswith("pickle.") else None)
from torch_ckpt.cli.main import main
"""
OURS = """
for command in (["verify"], ["inspect"], ["inspect", "--json"]):
    assert main([*command, sys.argv[1]]) == 0
assert "torch_ckpt.cli.ls" not in sys.modules, "a command has imported others"
assert main(["ls", sys.argv[1] + "/.."]) == 0
print("\\nseen:", sorted(seen), "torch" in sys.modules)
import pickle
pickle.loads(pickle.dumps(print))
print("\\nseen:", sorted(seen), "torch" in sys.modules)
"""
STOCK = """
assert main(["inspect", sys.argv[1]]) == 0
print("\\nseen:", sorted(seen))
"""


def test_neither_torch_nor_a_pickle_is_loaded_where_there_is_an_index(
    state: dict[str, Any],
    run_new_python: Callable[..., str],
    run_python: Callable[..., str],
    tmp_path: Path,
) -> None:
    ours, stock = tmp_path / "run/step-1", tmp_path / "stock"
    save(state, FastWriter(ours))
    save(state, FileSystemWriter(stock))

    printed = [
        *run_new_python(WATCH + OURS, ours).splitlines(),
        *run_python(WATCH + STOCK, stock).splitlines(),
    ]

    assert [line for line in printed if line.startswith("seen")] == [
        "seen: [] False",
        "seen: ['pickle.find_class'] False",  # So that the watch is known to see it.
        "seen: []",  # Stock's metadata are read with torch's classes, but not by pickle.
    ]
