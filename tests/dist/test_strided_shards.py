"""Shards that are several boxes of a tensor, or another one than DCP lists, in saves and loads.

A strided shard is ranges of a dimension that lie apart. `full_tensor()` says which: tensors of
random meshes, placements and sizes are saved, and loaded over others, and whole by stock's reader.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks, Worlds, on_ranks
from states import assert_same, failures_of, full_value, zeroed
from support.placing import meshes_of
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ckpt
from torch_ckpt import (
    FastLoadPlanner,
    FastReader,
    FastSavePlanner,
    FastWriter,
    Run,
    SafetensorsWriter,
)
from torch_ckpt.planning.dtensor_boxes import boxes_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
State = dict[str, Any]


def strided(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """This rank's shard of a tensor that all ranks have."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


# ---- Random meshes, placements and sizes ---------------------------------------------------------


def wholes(seed: int, count: int = 9) -> dict[str, torch.Tensor]:
    """Tensors of random sizes, some of which are smaller than a mesh."""
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3))) for _ in range(count)]
    shapes += [(17, 2), (3, 0)]
    return {
        f"{number}": full_value(f"{seed} {number}", shape, rng.choice(DTYPES))
        for number, shape in enumerate(shapes)
    }


def random_placements(rng: random.Random, mesh: DeviceMesh, dims: int) -> list[Placement]:
    """Placements, often of one dimension of the tensor, and often strided."""
    only = rng.randrange(dims)
    chosen: list[Placement] = []
    for _ in range(mesh.ndim):
        dim = only if rng.random() < 0.6 else rng.randrange(dims)
        kinds: list[Placement] = [Replicate(), Shard(dim)]
        kinds += [_StridedShard(dim, split_factor=rng.randint(1, 5)) for _ in range(4)]
        chosen.append(rng.choice(kinds))
    return chosen


def spread(seed: int, layout: str) -> State:
    """The tensors over meshes of all ranks, by random placements of this name."""
    world = dist.get_world_size()
    rng = random.Random(f"{seed} {layout}")
    meshes = [mesh for mesh in meshes_of(world) if mesh.mesh.flatten().tolist() == [*range(world)]]
    state: State = {}
    for name, full in wholes(seed).items():
        mesh = rng.choice(meshes)
        state[name] = strided(full, mesh, *random_placements(rng, mesh, full.dim()))
        whole = gathered(state[name])
        if not is_nested(state[name]):
            assert_same(whole, full)
    return state


def gathered(tensor: DTensor) -> torch.Tensor:
    """All elements. Torch 2.11 refuses most strided shards: there, each rank numbers its own."""
    try:
        return tensor.full_tensor()
    except ValueError as error:
        if "unable to be interpreted" not in str(error):
            raise
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    own = strided(numbers, tensor.device_mesh, *tensor.placements)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (own.to_local(), tensor.to_local()))
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for at, values in parts:
        whole.view(-1)[at.reshape(-1)] = values.reshape(-1)
    return whole


def is_nested(tensor: DTensor) -> bool:
    """Whether strided shards cut one dimension twice, of which torch 2.13 gathers some wrongly."""
    shards = [each for each in tensor.placements if not isinstance(each, Replicate)]
    return len({each.dim for each in shards}) < len(shards)


def save_spread(path: Path, seed: int, way: str) -> list[int]:
    """Saves the tensors; returns the number of boxes of each on this rank."""
    state = spread(seed, "saved")
    counts = [len(boxes_of(tensor, name)) for name, tensor in state.items()]
    if way == "async":
        future = torch_ckpt.async_save(state, storage_writer=FastWriter(path))
        for tensor in state.values():
            tensor.to_local().zero_()  # The save has its own copy.
        future.result(60)
    else:
        save: Callable[..., Any] = dcp.save if "dcp" in way else torch_ckpt.save
        writer = FileSystemWriter if "stock writer" in way else FastWriter
        planner = DefaultSavePlanner if "stock planner" in way else FastSavePlanner
        save(state, storage_writer=writer(path), planner=planner())
    return counts


def load_spread(path: Path, seed: int) -> None:
    """Loads them onto this world's meshes, by each reader and planner of which one is ours."""
    expected = spread(seed, "loaded")
    for reader, planner in (
        (FastReader, FastLoadPlanner),
        (FastReader, DefaultLoadPlanner),
        (FileSystemReader, FastLoadPlanner),
    ):
        loaded = zeroed(expected)
        dcp.load(loaded, storage_reader=reader(path), planner=planner())
        assert_same(loaded, expected)
    whole = wholes(seed)
    for reader in (FileSystemReader, FastReader):
        found = zeroed(whole)
        dcp.load(found, storage_reader=reader(path), planner=DefaultLoadPlanner())
        assert_same(found, whole)


WAYS = ("fast planner", "dcp, stock planner", "dcp, fast planner, stock writer", "async")


def test_shards_of_several_boxes_load_over_other_meshes_and_by_stock(
    worlds: Worlds, tmp_path: Path, full: bool, seed: int
) -> None:
    rng = random.Random(seed)
    several = 0
    for number in range(60 if full else 3):
        path, own = tmp_path / f"{number}", rng.randrange(2**32)
        saved_by = rng.choice((2, 3, 4)) if full else 4
        counts = worlds.run(saved_by, save_spread, path, own, WAYS[number % 4])
        several += sum(count > 1 for rank in counts for count in rank)
        others = (2, 3, 4) if full else (4,)
        for world in others:
            worlds.run(world, load_spread, path, own)
    assert several > 3


# ---- Libraries -----------------------------------------------------------------------------------


def two_layers(rows: int) -> nn.Sequential:
    torch.manual_seed(rows)
    return nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 5))


def sharded(rows: int, mesh: tuple[int, int]) -> nn.Module:
    """A net under tensor parallelism, then FSDP."""
    net: nn.Module = two_layers(rows)
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "tp"))
    parallelize_module(net, grid["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(net, mesh=grid["fsdp"])


def state_of(net: nn.Module) -> State:
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def save_uneven(folder: Path, sizes: Sequence[int], mesh: tuple[int, int]) -> None:
    for rows in sizes:
        state = state_of(sharded(rows, mesh))
        if rows >= 2 * mesh[1]:  # Torch 2.13 may hang if a TP rank has no elements.
            full = {name: tensor.full_tensor() for name, tensor in state.items()}
            assert_same(full, state_of(two_layers(rows)))
        torch_ckpt.save(state, storage_writer=FastWriter(folder / f"{rows}"))
        dcp.save(state, storage_writer=FastWriter(folder / f"{rows} stock planner"))
        dcp.save(state, storage_writer=SafetensorsWriter(folder / f"{rows} safetensors"))
        future = torch_ckpt.async_save(state, storage_writer=FastWriter(folder / f"{rows} async"))
        future.result(60)


def load_uneven(
    folder: Path, sizes: Sequence[int], mesh: tuple[int, int], planners: Sequence[Any]
) -> None:
    """Loads each checkpoint, with its planners."""
    for rows in sizes:
        expected = state_of(sharded(rows, mesh))
        whole = state_of(two_layers(rows))
        names = (f"{rows}", f"{rows} stock planner", f"{rows} safetensors", f"{rows} async")
        for name, of_name in zip(names, planners, strict=True):
            for planner in of_name:
                loaded = zeroed(expected)
                dcp.load(loaded, storage_reader=FastReader(folder / name), planner=planner())
                assert_same(loaded, expected)
            if "safetensors" not in name:
                found = zeroed(whole)
                dcp.load(found, storage_reader=FileSystemReader(folder / name))
                assert_same(found, whole)


@pytest.mark.thin("3x2")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [((3, 2), (2, 2)), ((2, 2), (3, 2)), ((2, 3), (3, 2)), ((4, 2), (2, 3))],
    ids=["3x2", "2x2", "2x3", "4x2"],
)
def test_fsdp_over_tensor_parallelism_loads_where_nothing_divides_the_sizes(
    worlds: Worlds,
    tmp_path: Path,
    saved_by: tuple[int, int],
    loaded_by: tuple[int, int],
    full: bool,
) -> None:
    """FSDP chunks the rows of each TP rank: 4 and 3 of 7, of which the placements mean others."""
    sizes = range(1, 14) if full else (1, 7)
    worlds.run(saved_by[0] * saved_by[1], save_uneven, tmp_path, sizes, saved_by, timeout_s=240)
    one, other = (FastLoadPlanner,), (DefaultLoadPlanner,)
    for number, mesh in enumerate([saved_by, loaded_by]):
        if mesh == saved_by and not full:  # As in the tests of layouts.
            continue
        planners = [one + other] * 4 if full else ([one, other] * 3)[number : number + 4]
        ranks = mesh[0] * mesh[1]
        worlds.run(ranks, load_uneven, tmp_path, sizes, mesh, planners, timeout_s=240)


def mixtral(folder: Path, **plan: Any) -> nn.Module:
    """A small model of transformers, whose experts keep gate and up in one parameter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    if not plan:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        experts = {"num_local_experts": 4, "num_hidden_layers": 1}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))
    model: nn.Module = MixtralForCausalLM.from_pretrained(folder, **plan)
    return model


def save_experts(folder: Path) -> None:
    from transformers.distributed import DistributedConfig

    whole = mixtral(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "hub")  # type: ignore[operator]
    dist.barrier()
    state = state_of(mixtral(folder / "hub", distributed_config=DistributedConfig(tp_size=2)))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert state[name].placements == (_StridedShard(1, split_factor=2),)
    assert len(boxes_of(state[name], name)) == 2
    torch_ckpt.save(state, storage_writer=FastWriter(folder / "saved"))
    dcp.save(state, storage_writer=SafetensorsWriter(folder / "exported"))
    for path in (folder / "saved", folder / "exported"):
        loaded = zeroed(state)
        torch_ckpt.load(loaded, storage_reader=FastReader(path))
        assert_same(loaded, state)
    found = zeroed(state_of(whole))
    dcp.load(found, storage_reader=FileSystemReader(folder / "saved"))
    assert_same(found, state_of(whole))


@pytest.mark.framework("transformers")
@pytest.mark.slow
def test_tensor_parallel_experts_of_transformers_are_saved_and_loaded(tmp_path: Path) -> None:
    with Ranks(2) as world:
        world.run(save_experts, tmp_path, timeout_s=240)


# ---- One shape of experts, in all ways -----------------------------------------------------------


def whole_experts() -> torch.Tensor:
    return full_value("gate_up_proj", (4, 16, 3), torch.float32)


def experts(fill: float | None = None, *, replicated: bool = False) -> State:
    """Gate and up projections in one tensor, as tensor-parallel experts have them."""
    full = whole_experts()
    if fill is not None:
        full.fill_(fill)
    if replicated:
        mesh = init_device_mesh("cpu", (2, 2))
        return {"w": strided(full, mesh, Replicate(), _StridedShard(1, split_factor=2))}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": strided(full, mesh, _StridedShard(1, split_factor=2))}


@on_ranks(2)
def test_a_shard_lists_as_many_boxes_as_it_has_ranges(path: Path) -> None:
    state = experts()
    planner = FastSavePlanner()
    torch_ckpt.save(state, storage_writer=FastWriter(path), planner=planner)
    stored: Any = FastReader(path).read_metadata().state_dict_metadata["w"]
    assert sorted(tuple(chunk.offsets) for chunk in stored.chunks) == [
        (0, row, 0) for row in (0, 4, 8, 12)
    ]
    assert state["w"].to_local()[:, 4:].equal(whole_experts()[:, 8:][:, rank_rows()])


def rank_rows() -> slice:
    return slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)


@on_ranks(4)
def test_replicas_of_several_boxes_are_written_once_and_staged_again(path: Path) -> None:
    state = experts(replicated=True)
    for number in range(3):  # The later saves reuse the plan, and what each rank has to stage.
        saved = torch_ckpt.async_save(state, storage_writer=FastWriter(path / f"{number}"))
        saved.result(60)
        found = {"w": torch.zeros(4, 16, 3)}
        dcp.load(found, storage_reader=FileSystemReader(path / f"{number}"))
        assert_same(found, {"w": whole_experts()})
    stored: Any = FastReader(path / "2").read_metadata().state_dict_metadata["w"]
    assert sum(chunk.sizes.numel() for chunk in stored.chunks) == 4 * 16 * 3
    loaded = experts(0, replicated=True)
    torch_ckpt.load(loaded, storage_reader=FastReader(path / "2"))
    assert_same(loaded, state)


def run_in_memory(folder: Path, step: int | None) -> None:
    run = Run(folder, asynchronous=True, agent=True)
    if step is not None:
        run.save(step, experts())
        run.wait()
    loaded = experts(0)
    restored = run.restore(loaded)
    assert restored is not None
    assert_same(loaded, experts())
    run.close()


@pytest.mark.usefixtures("memory")
def test_an_agent_persists_and_restores_several_boxes(run: Path) -> None:
    with Ranks(2) as world:
        world.run(run_in_memory, run, 1)
    with Ranks(3) as world:
        world.run(run_in_memory, run, None)


class Refusing(FastSavePlanner):
    """A planner that makes DCP's own plans."""

    def create_local_plan(self) -> Any:
        return super().create_local_plan()


class Resolving(FastLoadPlanner):
    """A planner that resolves each read by itself."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


@on_ranks(2)
def test_planners_that_resolve_items_one_by_one_resolve_boxes(path: Path) -> None:
    for name, planner in (("columns", FastSavePlanner()), ("items", Refusing())):
        for writer in (FastWriter, FileSystemWriter):
            where = path / f"{name} {writer.__name__}"
            torch_ckpt.save(experts(), storage_writer=writer(where), planner=planner)
            for reader in (FastReader, FileSystemReader):
                loaded = experts(0)
                torch_ckpt.load(loaded, storage_reader=reader(where), planner=Resolving())
                assert_same(loaded, experts())


@on_ranks(2)
def test_a_state_dict_of_the_program_keeps_its_tensors(path: Path) -> None:
    """A planner that flattens nothing plans the program's own state dict."""
    state, loaded = experts(), experts(0)
    own, target = state["w"], loaded["w"]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=FastWriter(path), planner=planner)
    reads = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(loaded, storage_reader=FastReader(path), planner=reads)
    assert state["w"] is own
    assert loaded["w"] is target
    assert_same(loaded, state)


@on_ranks(2)
def test_a_local_tensor_of_other_sizes_than_the_placements_imply_is_refused(path: Path) -> None:
    """Nothing says which rows it holds."""
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), _StridedShard(0, split_factor=2)):
        local = torch.zeros(5 - 4 * dist.get_rank())
        tensor = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size([6]), stride=(1,)
        )
        calls: list[Any] = [
            lambda t=tensor: torch_ckpt.save({"w": t}, storage_writer=FastWriter(path / "save")),
            lambda t=tensor: dcp.save({"w": t}, storage_writer=FastWriter(path / "stock")),
        ]
        for call in calls:
            failures = failures_of(call)
            # Under a stock planner, a rank that fails removes the files that others open.
            kinds = {failure.kind for failure in failures.values()} - {"StorageError"}
            assert kinds == {"UnsupportedError"}, failures
            assert any("'w'" in failure.message for failure in failures.values())
