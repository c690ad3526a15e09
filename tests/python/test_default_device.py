"""A default device such as "meta" is for the program's own tensors, and changes nothing else."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed_checkpoints
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, differences
from forks import run_python
from support.states import blanked, random_state, same
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter, SnapshotStager
from torch_ckpt.cli.main import main

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


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (way == save_in_process), id=way.__name__)
        for way in WAYS
    ],
)
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
    on_meta: Callable[[], Any], tmp_path: Path, rng: random.Random, full: bool
) -> None:
    def saved_and_loaded(number: int, loaded: dict[str, Any]) -> dict[str, Any]:
        save(state, tmp_path / f"{number}")
        reader = FastReader(tmp_path / f"{number}", trust_pickle=True)
        torch_ckpt.load(loaded, storage_reader=reader, no_dist=True)
        return loaded

    compared = 0
    for number in range(40 if full else 12):
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
    assert compared > (10 if full else 3)


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


def write_torch_save(path: Path) -> None:
    odd = {
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "generator": torch.Generator(),
        "tuple": (torch.ones(2), np.arange(3)),
    }
    torch.save({**model_state(), **odd}, path)


def write_shards(path: Path) -> None:
    """Shards whose parameter is computed: averaged, compared, cast and turned, with a scale."""
    parts = {name: torch.randn(4, 6) for name in ("row", "mean", "same", "norm")}
    info = {
        "parameter_with_row_parallelism_patterns": ["row"],
        "parameter_to_average_patterns": ["mean"],
        "tp_replicated_parameter_patterns": ["same", "norm"],
    }
    deepspeed_checkpoints.write_shards(path, [parts, parts], info=info)


def write_torch_checkpointing(path: Path) -> None:
    """Shards that torch assembles, since they are not stored in row-major order."""
    facts = {
        "global_shape": [6, 4],
        "dtype": "torch.float32",
        "stride": [4, 1],
        "mesh_spec": {"mesh_shape": (2,), "mesh_data": (0, 1)},
        "placements": [{"type": "Shard", "dim": 0}],
    }
    sharding = {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": facts}}
    item = {
        "nested_path_to_metadata": {'["w"]': [{**sharding, "ranks": (0, 1)}]},
        "rank_to_layout_info": {0: None, 1: None},
    }
    path.mkdir()
    metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    for rank, part in enumerate(torch.randn(6, 4).chunk(2)):
        turned = part.t().contiguous().t()
        torch.save({"w": turned, "rng": torch.randn(3)}, path / f"model_{rank}.pt")


FOREIGN: dict[str, Callable[[Path], None]] = {
    "torch.save": write_torch_save,
    "ZeRO-2": lambda path: deepspeed_checkpoints.write(path, 2),
    "ZeRO-3": lambda path: deepspeed_checkpoints.write(path, 3),
    "tensor parallel": write_shards,
    "torch_checkpointing": write_torch_checkpointing,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FOREIGN)
def test_checkpoints_of_other_programs_are_loaded_and_converted_under_it(
    form: str, on_meta: Callable[[], Any], tmp_path: Path
) -> None:
    path = tmp_path / "source"
    FOREIGN[form](path)

    def load(path: Path, **options: Any) -> dict[str, Any]:
        with torch.device("cpu"):
            loaded = {
                fqn: torch.zeros(stored.size, dtype=stored.properties.dtype)
                if hasattr(stored, "chunks")
                else None
                for fqn, stored in FastReader(path).read_metadata().state_dict_metadata.items()
            }
        reader = FastReader(path, **options)
        torch_ckpt.load(loaded, storage_reader=reader, no_dist=True)
        return loaded

    expected = load(path)
    with on_meta():
        found = [load(path, verify="full"), load(path, trust_pickle=form == "torch.save")]
        for to in ("dcp", "torch", "universal"):
            if form == "torch.save" or (to == "universal" and "ZeRO" not in form):
                continue
            assert main(["convert", str(path), str(tmp_path / to), "--to", to]) == 0
            if to != "universal":
                assert main(["diff", str(path), str(tmp_path / to)]) == 0
    for loaded in found:
        for fqn, value in expected.items():
            is_strided = torch.is_tensor(value) and value.layout == torch.strided
            if isinstance(value, torch.Generator):
                assert torch.equal(loaded[fqn].get_state(), value.get_state())
            elif torch.is_tensor(value) and (not is_strided or value.is_nested):
                assert str(loaded[fqn]) == str(value)
            else:
                assert same(loaded[fqn], value), fqn
    if "ZeRO" in form:
        universal = load(tmp_path / "universal")
        assert all(same(universal[fqn], v) for fqn, v in expected.items() if fqn[:5] == "optim")


@pytest.mark.thin("torch.device('meta').__enter__()")
@pytest.mark.parametrize(
    "start", ["torch.set_default_device('meta')", "torch.device('meta').__enter__()"]
)
def test_the_package_is_imported_and_used_under_it(start: str, tmp_path: Path) -> None:
    """A process of its own, since modules are imported once."""
    script = f"""
import sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_ckpt"]:
    del sys.modules[name]
state = {{"w": torch.ones(3), "o": (torch.ones(2),)}}
{start}
import torch_ckpt
torch_ckpt.async_save(state, checkpoint_id=sys.argv[1]).result()
loaded = {{"w": torch.zeros(3, device="cpu"), "o": None}}
torch_ckpt.load(loaded, checkpoint_id=sys.argv[1])
assert loaded["w"].tolist() == [1, 1, 1] and loaded["o"][0].tolist() == [1, 1]
"""
    done = run_python("-c", script, tmp_path / "saved", folder=tmp_path)
    assert done.returncode == 0, done.stdout
