"""A default device such as "meta" is for the program's own tensors, and changes nothing else."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import ROOT, blank, differences
from random_states import blanked, random_state, same
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter, SnapshotStager

pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def set_for_the_program() -> Iterator[None]:
    """As models are built without memory."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(params=[set_for_the_program, lambda: torch.device("meta")], ids=["set", "with"])
def on_meta(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """A context in which tensors are made on the meta device, unless another one is named."""
    return request.param


def model_state() -> dict[str, Any]:
    flat = torch.arange(1 << 16, dtype=torch.float32)
    return {
        "w": flat.view(256, 256),
        "part": flat[1000:2000],
        "sparse": flat[:: 1 << 10],
        "bf16": torch.ones(3, 5).bfloat16().t(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "step": 7,
        "object": ("text", torch.ones(3), flat[:4]),
    }


def save(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)


def save_by_dcp(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FastWriter(path), no_dist=True)


def save_in_thread(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_save(state, checkpoint_id=path).result()


def save_in_process(state: dict[str, Any], path: Path) -> None:
    process = AsyncCheckpointerType.PROCESS
    torch_ckpt.async_save(state, checkpoint_id=path, async_checkpointer_type=process).result()


def save_staged(state: dict[str, Any], path: Path) -> None:
    stager = SnapshotStager()
    stager.reserve(state)
    save(stager.stage(state), path)


def save_in_run(state: dict[str, Any], path: Path, **options: Any) -> None:
    with torch.device("cpu"):
        loaded = blank(state)
    with torch_ckpt.Run(path.parent, **options) as run:
        run.save(1, state)
        run.wait()
        assert run.restore(loaded) == 1  # With an agent, from memory.
    with torch.device("cpu"):
        assert differences(state, loaded) == []
    (path.parent / "step-1").rename(path)


def save_by_agent(state: dict[str, Any], path: Path) -> None:
    save_in_run(state, path, asynchronous=True, agent=True)


WAYS = [save, save_by_dcp, save_in_thread, save_in_process, save_staged, save_in_run, save_by_agent]


@pytest.mark.parametrize("way", WAYS)
def test_states_are_saved_and_loaded_under_it(
    way: Callable[..., None],
    on_meta: Callable[[], Any],
    tmp_path: Path,
    memory: Path,
    world_of_one: None,
) -> None:
    state = model_state()
    loaded = blank(state)
    with on_meta():
        way(state, tmp_path / "run" / "saved")
        torch_ckpt.load(loaded, checkpoint_id=tmp_path / "run" / "saved", no_dist=True)
    assert differences(state, loaded) == []


def test_any_state_is_staged_saved_and_loaded_under_it(
    on_meta: Callable[[], Any], tmp_path: Path, rng: random.Random
) -> None:
    def saved_and_loaded(number: int, loaded: dict[str, Any]) -> dict[str, Any]:
        save(state, tmp_path / f"{number}")
        reader = FastReader(tmp_path / f"{number}", trust_pickle=True)
        torch_ckpt.load(loaded, storage_reader=reader, no_dist=True)
        return loaded

    compared = 0
    for number in range(40):
        state = random_state(rng)
        try:
            expected = saved_and_loaded(2 * number, blanked(state))
        except (CheckpointException, Exception):
            continue  # Keys that clash, for example.
        loaded = blanked(state)
        with on_meta():
            staged = SnapshotStager().stage(state)
            saved_and_loaded(2 * number + 1, loaded)
        assert same(staged, state)
        assert same(loaded, expected)
        compared += 1
    assert compared > 10


def test_sharded_tensors_are_saved_and_loaded_under_it(
    on_meta: Callable[[], Any], tmp_path: Path, world_of_one: None
) -> None:
    """Torch makes tensors on the default device to find their boxes."""
    mesh = init_device_mesh("cpu", (1, 1))

    def sharded(fill: float) -> dict[str, DTensor]:
        local = torch.full((6, 4), fill)
        placements = {"a": [Shard(0), Shard(1)], "b": [_StridedShard(0, split_factor=1), Shard(0)]}
        return {
            name: DTensor.from_local(
                local.clone(), mesh, each, run_check=False, shape=local.shape, stride=local.stride()
            )
            for name, each in placements.items()
        }

    state = sharded(3.0)
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    with on_meta():
        for way in (save, save_in_thread):
            way(state, tmp_path / way.__name__)
        with torch.device("cpu"):
            loaded = [sharded(0.0) for _ in range(3)]
        for name, targets in zip(("stock", "save", "save_in_thread"), loaded, strict=True):
            torch_ckpt.load(targets, checkpoint_id=tmp_path / name)
    for targets in loaded:
        assert [target.to_local().unique().tolist() for target in targets.values()] == [[3], [3]]


def test_tensors_are_cast_and_read_from_other_formats_under_it(
    on_meta: Callable[[], Any], tmp_path: Path
) -> None:
    state = {name: value for name, value in model_state().items() if torch.is_tensor(value)}
    del state["conj"], state["sparse"]
    expected = {name: tensor.detach().double() for name, tensor in state.items()}
    torch.save(state, tmp_path / "x.pt")
    with on_meta():
        writer = SafetensorsWriter(tmp_path / "model")
        torch_ckpt.save(state, storage_writer=writer, no_dist=True)
    for path in ("model", "x.pt"):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        with on_meta():
            torch_ckpt.load(loaded, checkpoint_id=tmp_path / path, no_dist=True)
        assert differences(expected, loaded) == []


@pytest.mark.parametrize(
    "start", ["torch.set_default_device('meta')", "torch.device('meta').__enter__()"]
)
def test_the_package_is_imported_and_used_under_it(start: str, tmp_path: Path) -> None:
    """A process of its own, since modules are imported once."""
    script = f"""
import sys, torch
state = {{"w": torch.ones(3), "o": (torch.ones(2),)}}
{start}
import torch_ckpt
torch_ckpt.async_save(state, checkpoint_id=sys.argv[1]).result()
loaded = {{"w": torch.zeros(3, device="cpu"), "o": None}}
torch_ckpt.load(loaded, checkpoint_id=sys.argv[1])
assert loaded["w"].tolist() == [1, 1, 1] and loaded["o"][0].tolist() == [1, 1]
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
