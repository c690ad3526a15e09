"""DDP, HSDP, and DTensors with several placements, over meshes of one to three dimensions.

The matrix of layouts saves and loads them in all combinations. Here each is loaded as it was saved,
exported, and saved asynchronously; our reader and stock's load the same bits from its files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix_layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matrix_layouts import LAYOUTS, TIMEOUT_S, WORLD
from matrix_states import fill_right, fill_wrong, load_by, save_by, state_of, unsharded
from ranks import Worlds, on_ranks
from states import assert_same, assert_stored, failures_of, full_value
from support.safetensors_files import load_model
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, SafetensorsWriter

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

MESHES = [
    "ddp_2",
    "hsdp_2x2",
    "fsdp_tp_2x2",
    "hsdp_tp_2x2x2",
    "grid_2x3",
    "rows_of_rows_2x2",
    "replicated_columns_2x2",
    "rows_of_grid_2x2x2",
]


def save_meshes(folder: Path) -> list[str]:
    """Saves each layout in three ways, and loads it; returns what this rank found wrong."""
    matrix_layouts.meet()
    wrong = []
    for layout in MESHES:
        if dist.get_rank() >= LAYOUTS[layout].ranks:
            continue
        group = matrix_layouts.group_of(LAYOUTS[layout])
        state = state_of(layout)
        fill_right(state)
        save_by("stock planners", state, layout, folder / "saved" / layout)
        exported = SafetensorsWriter(folder / "exported" / layout)
        dcp.save(state["model"], storage_writer=exported, process_group=group)
        writer = FastWriter(folder / "async" / layout)
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
        fill_wrong(state)  # As the next steps of a training do.
        future.result(TIMEOUT_S)
        for route in ("stock planners", "fast planners"):
            found = load_by(route, layout, folder / "saved" / layout, {})
            wrong += [f"{layout}, {route}, rank {dist.get_rank()}: {each}" for each in found]
    dist.barrier()  # All are committed.
    return wrong


@pytest.fixture(scope="module")
def meshes(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with the checkpoints and exports of all layouts, and what was wrong in loads."""
    folder = tmp_path_factory.mktemp("meshes")
    wrong = worlds.run(WORLD, save_meshes, folder, timeout_s=TIMEOUT_S)
    return folder, [each for rank in wrong for each in rank]


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
def test_a_mesh_loads_as_it_was_saved(meshes: tuple[Path, list[str]], layout: str) -> None:
    assert [each for each in meshes[1] if each.startswith(f"{layout},")] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
def test_an_asynchronous_save_of_a_mesh_holds_the_values_of_its_call(
    meshes: tuple[Path, list[str]], layout: str
) -> None:
    tensors, objects = unsharded()
    assert_stored(meshes[0] / "async" / layout, tensors | objects, no_dist=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MESHES)
def test_a_mesh_is_exported_as_whole_tensors(meshes: tuple[Path, list[str]], layout: str) -> None:
    named = unsharded()[0].items()
    expected = {fqn[6:]: tensor for fqn, tensor in named if fqn.startswith("model.")}
    assert_same(load_model(meshes[0] / "exported" / layout), expected)


# ---- Boxes that DCP gets wrong -------------------------------------------------------------------


def assert_refused(tensor: DTensor, path: Path) -> None:
    """Asserts that the planners refuse to save a tensor, and to load it from a sound checkpoint."""
    full = full_value("full", tuple(tensor.shape), tensor.dtype)
    torch_ckpt.save({"w": full}, storage_writer=FastWriter(path / "sound"))
    calls: list[Any] = [
        lambda: torch_ckpt.save({"w": tensor}, storage_writer=FastWriter(path / "save")),
        lambda: torch_ckpt.load({"w": tensor}, storage_reader=FastReader(path / "sound")),
    ]
    for call in calls:
        failures = failures_of(call)
        assert failures
        for kind, _, message in failures.values():
            assert kind == "UnsupportedError"
            assert "'w'" in message
            assert "_StridedShard(dim=0, sf=2)" in message
    assert not (path / "save" / ".metadata").exists()


@on_ranks(2)
def test_a_shard_of_several_ranges_is_refused(path: Path) -> None:
    """DCP stores a shard as one range: it would load rows 0 to 3 for rows 0, 1, 4 and 5."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(8.0)
    tensor = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    assert tensor.to_local()[:3].tolist() != [0, 1, 2]
    assert_refused(tensor, path)


@on_ranks(WORLD)
def test_fsdp_over_tp_is_refused_where_dcp_gives_rows_to_another_rank(path: Path) -> None:
    """FSDP chunks 5 and 4 rows by 4; the placements would have the last row on another TP rank."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    net = nn.Sequential(nn.Linear(3, 9, bias=False))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["fsdp"])
    tensor = net.state_dict()["0.weight"].detach()
    assert_refused(tensor, path)
    # Stock's planners check no sizes: the writers find it, and a load that lacks a row.
    expected = {FastWriter: "UnsupportedError", SafetensorsWriter: "MismatchError"}
    for writer, kind in expected.items():
        folder = path / writer.__name__
        failures = failures_of(dcp.save, {"w": tensor}, storage_writer=writer(folder))
        # Ranks that write the same file may find that a rank that failed has removed it.
        others = {"StorageError"} if writer is SafetensorsWriter else set()
        assert {failure.kind for failure in failures.values()} - others == {kind}
        assert any("'w'" in failure.message for failure in failures.values())
        assert not list(folder.glob(".metadata")) + list(folder.glob("*.safetensors"))
    assert failures_of(dcp.load, {"w": tensor}, storage_reader=FastReader(path / "sound"))


def uneven(values: torch.Tensor) -> DTensor:
    """5 and 1 of 6 rows, with functions that list their boxes, as Megatron-FSDP makes them."""
    first, count = ((0, 5), (5, 1))[dist.get_rank()]
    local = values[first : first + count].clone()
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(
        *(local, mesh, [Shard(0)]), run_check=False, shape=values.shape, stride=values.stride()
    )
    chunk = ChunkStorageMetadata(torch.Size((first, 0)), local.size())

    def write_items(fqn: str, whole: DTensor) -> list[WriteItem]:
        data = TensorWriteData(chunk, TensorProperties(dtype=local.dtype), whole.size())
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    kept: Any = tensor._local_tensor
    kept.__create_write_items__ = write_items
    kept.__create_chunk_list__ = lambda: [chunk]
    return tensor


@pytest.mark.parametrize("planner", [FastSavePlanner, dcp.DefaultSavePlanner])
@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_uneven_shards_that_list_their_boxes_are_stored_and_loaded(
    path: Path, asynchronous: bool, planner: type[dcp.DefaultSavePlanner]
) -> None:
    values = torch.arange(18.0).view(6, 3)
    state = {"w": uneven(values)}
    if asynchronous:
        saved = torch_ckpt.async_save(state, checkpoint_id=path, planner=planner())
        saved.result()
    else:
        torch_ckpt.save(state, checkpoint_id=path, planner=planner())
    whole, loaded = {"w": torch.zeros(6, 3)}, {"w": uneven(torch.zeros(6, 3))}
    torch_ckpt.load(whole, checkpoint_id=path)
    torch_ckpt.load(loaded, checkpoint_id=path)
    assert torch.equal(whole["w"], values)
    assert torch.equal(loaded["w"].to_local(), state["w"].to_local())
