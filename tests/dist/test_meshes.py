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
from states import assert_same, assert_stored
from support.safetensors_files import load_model
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, SafetensorsWriter

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


# ---- Shards that list their boxes ----------------------------------------------------------------


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
