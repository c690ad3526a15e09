"""What each rank has of its own is saved for each rank, and found again on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastWriter, RankState
from torch_ckpt.errors import MismatchError

pytestmark = pytest.mark.timeout(180)

WAYS = ["stock", "fast"]
SAVE_TIMEOUT_S = 60
Numbers = tuple[torch.Tensor, list[float]]


class Position:
    """A place in the data, of which each rank has its own."""

    def __init__(self, place: Any = None) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        # A list of tensors: DCP would save each by itself, under the same name on every rank.
        return {"place": self.place, "buffer": [torch.full((3,), float(dist.get_rank()))]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.buffer = state["buffer"]


def save(way: str, state: dict[str, Any], path: Path) -> None:
    if way == "stock":
        dcp.save(state, storage_writer=FileSystemWriter(path))
    else:
        torch_ckpt.save(state, checkpoint_id=path)


def load(way: str, state: dict[str, Any], path: Path, planner: Any = None) -> None:
    if way == "stock":
        # On another number of ranks stock's own planner does not find what there is.
        planner = planner or FastLoadPlanner()
        dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)
    else:
        torch_ckpt.load(state, checkpoint_id=path, planner=planner)


def random_states(on_resize: Any = "error") -> dict[str, Any]:
    return {
        "torch": RankState(torch.get_rng_state, torch.set_rng_state, on_resize=on_resize),
        "python": RankState(random.getstate, random.setstate, on_resize=on_resize),
    }


def draw() -> Numbers:
    return torch.rand(100), [random.random() for _ in range(100)]


def seed_ranks(seed: int) -> None:
    torch.manual_seed(seed + dist.get_rank())
    random.seed(seed + dist.get_rank())


def same(one: Numbers, other: Numbers) -> bool:
    return torch.equal(one[0], other[0]) and one[1] == other[1]


def save_and_go_on(way: str, path: Path) -> Numbers:
    """Saves what each rank has of its own, and returns the random numbers that came next."""
    seed_ranks(7)
    draw()
    state = {
        "model": {"weight": torch.arange(12.0)},
        "data": RankState(Position(dist.get_rank() * 10)),
        **random_states(),
    }
    save(way, state, path)
    return draw()


def resume(way: str, path: Path, on_resize: Any, planner: Any = None) -> tuple[Any, Numbers, Any]:
    """Returns what is loaded: the place in the data, the next random numbers, the model."""
    seed_ranks(1000)
    data = Position("as it was")
    model = {"weight": torch.zeros(12)}
    random_resize = "drop" if callable(on_resize) else on_resize
    state = {
        "model": model,
        "data": RankState(data, on_resize=on_resize),
        **random_states(random_resize),
    }
    load(way, state, path, planner)
    return data.place, draw(), model["weight"]


def fresh_numbers() -> Numbers:
    seed_ranks(1000)
    return draw()


def places(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """A merge function: all that was saved, in order, and where it was merged."""
    assert [state["buffer"][0].tolist() for state in states] == [
        [float(saved)] * 3 for saved in range(len(states))
    ]
    all_places = [state["place"] for state in states]
    return {"place": (all_places, rank, world_size), "buffer": []}


@pytest.fixture(scope="module")
def saved_by(
    worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, str], tuple[Path, list[Numbers]]]:
    """Saves once for each number of ranks and way; returns where, and what each rank drew next."""
    kept: dict[tuple[int, str], tuple[Path, list[Numbers]]] = {}

    def find(world_size: int, way: str) -> tuple[Path, list[Numbers]]:
        if (world_size, way) not in kept:
            path = tmp_path_factory.mktemp("saved") / way
            kept[world_size, way] = path, worlds.run(world_size, save_and_go_on, way, path)
        return kept[world_size, way]

    return find


Saved = Callable[[int, str], tuple[Path, list[Numbers]]]


@pytest.mark.thin(1)
@pytest.mark.parametrize("on_resize", ["error", "drop", "by_rank", places])
@pytest.mark.parametrize("load_way", WAYS)
@pytest.mark.parametrize("save_way", WAYS)
def test_on_the_same_ranks_each_goes_on_as_if_never_interrupted(
    save_way: str, load_way: str, on_resize: Any, worlds: Worlds, saved_by: Saved
) -> None:
    path, expected = saved_by(2, save_way)
    assert not same(*expected), "the ranks draw the same numbers: nothing would be found out"
    planner = DefaultLoadPlanner() if load_way == "stock" else None
    loaded = worlds.run(2, resume, load_way, path, on_resize, planner)
    for rank, (place, numbers, weight) in enumerate(loaded):
        assert place == rank * 10
        assert same(numbers, expected[rank])
        assert torch.equal(weight, torch.arange(12.0))


@pytest.mark.parametrize("load_way", WAYS)
@pytest.mark.parametrize(
    ("saved", "on_resize", "expected_places"),
    [
        (2, "drop", ["as it was"] * 3),
        (2, "by_rank", [0, 10, "as it was"]),
        (4, "by_rank", [0, 10]),
    ],
    ids=["dropped", "on more ranks by rank", "on fewer ranks by rank"],
)
def test_on_other_ranks_those_that_take_none_have_what_they_had(
    load_way: str,
    saved: int,
    on_resize: str,
    expected_places: list[Any],
    worlds: Worlds,
    saved_by: Saved,
) -> None:
    path, numbers = saved_by(saved, load_way)
    fresh = worlds.run(len(expected_places), fresh_numbers)
    loaded = worlds.run(len(expected_places), resume, load_way, path, on_resize)
    for rank, (place, drawn, weight) in enumerate(loaded):
        assert place == expected_places[rank]
        assert same(drawn, fresh[rank] if place == "as it was" else numbers[rank])
        assert torch.equal(weight, torch.arange(12.0))


@pytest.mark.parametrize(("saved", "loading"), [(2, 3), (4, 2)])
@pytest.mark.parametrize("load_way", WAYS)
def test_on_other_ranks_each_merges_what_all_had(
    load_way: str, saved: int, loading: int, worlds: Worlds, saved_by: Saved
) -> None:
    path, _ = saved_by(saved, load_way)
    loaded = worlds.run(loading, resume, load_way, path, places)
    all_places = [10 * rank for rank in range(saved)]
    assert [place for place, _, _ in loaded] == [
        (all_places, rank, loading) for rank in range(loading)
    ]


def refusal(way: str, path: Path) -> tuple[list[Any], Any]:
    data = Position("as it was")
    weight = torch.zeros(12)
    try:
        load(way, {"model": {"weight": weight}, "data": RankState(data)}, path)
    except CheckpointException as error:
        errors = [error.failures[rank][0] for rank in sorted(error.failures)]
        return errors, (data.place, weight.tolist())
    return [], None


@pytest.mark.parametrize("load_way", WAYS)
def test_on_other_ranks_the_default_is_an_error_and_nothing_loaded(
    load_way: str, worlds: Worlds, saved_by: Saved
) -> None:
    path, _ = saved_by(2, load_way)
    for errors, left in worlds.run(3, refusal, load_way, path):
        assert [type(error) for error in errors] == [MismatchError] * 3
        assert "cannot load 'data' on 3 ranks: it was saved by 2 ranks" in str(errors[2])
        assert left == ("as it was", [0.0] * 12)


def refusal_of_stocks_planner(path: Path) -> tuple[str, str]:
    data = Position("as it was")
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"data": RankState(data, on_resize="by_rank")},
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(),
        )
    return str(caught.value), data.place


def test_on_other_ranks_stocks_planner_says_that_a_state_is_missing(
    worlds: Worlds, saved_by: Saved
) -> None:
    path, _ = saved_by(2, "stock")
    for message, place in worlds.run(3, refusal_of_stocks_planner, path):
        assert "Missing key in checkpoint state_dict: data.rank_00000_of_00003" in message
        assert place == "as it was"


class Application:
    """A ``Stateful`` that holds a `RankState`, and passes on its state."""

    def __init__(self, on_resize: Any) -> None:
        self.position = Position(dist.get_rank())
        self.data = RankState(self.position, on_resize=on_resize)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 3, "parts": {"data": self.data.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state["parts"]["data"])


def save_application(way: str, path: Path) -> None:
    save(way, {"app": Application("error")}, path)


def load_application(way: str, path: Path) -> Any:
    app = Application(places)
    app.position.place = None
    load(way, {"app": app}, path)
    names = set(FastReader(path).read_metadata().state_dict_metadata)
    return app.position.place, names


@pytest.mark.parametrize("way", WAYS)
def test_states_below_the_top_are_found_through_a_stateful(
    way: str, worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_application, way, tmp_path)
    names = {f"app.parts.data.rank_0000{rank}_of_00002" for rank in range(2)} | {"app.epoch"}
    assert worlds.run(2, load_application, way, tmp_path) == [(0, names), (1, names)]
    places_there = [([0, 1], rank, 3) for rank in range(3)]
    loaded = worlds.run(3, load_application, way, tmp_path)
    assert [place for place, _ in loaded] == places_there


def save_nested(path: Path, asynchronous: bool) -> None:
    rank = dist.get_rank()
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, 3.0)
    state = {"loaders": [{"b": RankState(Position(rank)), "a": RankState(Position(-rank))}, (net,)]}
    if asynchronous:
        saved: Any = torch_ckpt.async_save(state, checkpoint_id=path)
        saved.result(SAVE_TIMEOUT_S)
    else:
        torch_ckpt.save(state, checkpoint_id=path)


def load_nested(path: Path) -> Any:
    """Returns the loaded places, whether a getter was called, and a weight of the module."""
    positions = Position(), Position()
    asked = [0]

    def get() -> Any:
        asked[0] += 1
        return positions[1].state_dict()

    net = torch.nn.Linear(2, 2)
    second = RankState(get, positions[1].load_state_dict, on_resize=places)
    loaders = {"a": second, "b": RankState(positions[0], on_resize=places)}
    torch_ckpt.load({"loaders": [loaders, (net,)]}, checkpoint_id=path)
    return *(position.place for position in positions), asked[0], net.weight[0, 0].item()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_states_in_containers_are_of_each_rank(
    asynchronous: bool, worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_nested, tmp_path, asynchronous)
    assert worlds.run(2, load_nested, tmp_path) == [(0, 0, 0, 3.0), (1, -1, 0, 3.0)]
    assert worlds.run(3, load_nested, tmp_path) == [
        (([0, 1], rank, 3), ([0, -1], rank, 3), 0, 3.0) for rank in range(3)
    ]


def objects_read(path: Path, way: str, on_resize: Any) -> set[str]:
    """The names of the objects that one rank reads for its place in the data."""
    seen: set[str] = set()

    class Planner(FastLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            seen.add(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    load(way, {"data": RankState(Position(), on_resize=on_resize)}, path, Planner())
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_reads_only_what_it_needs(way: str, worlds: Worlds, saved_by: Saved) -> None:
    path, _ = saved_by(2, way)
    names = [f"data.rank_0000{rank}_of_00002" for rank in range(2)]
    assert worlds.run(2, objects_read, path, way, places) == [{names[0]}, {names[1]}]
    assert worlds.run(3, objects_read, path, way, places) == [set(names)] * 3
    assert worlds.run(3, objects_read, path, way, "by_rank") == [{names[0]}, {names[1]}, set()]
    assert worlds.run(3, objects_read, path, way, "drop") == [set()] * 3


def save_of_groups(way: str, path: Path) -> None:
    """Ranks 0 and 2 have the first state, 1 and 3 the second, as where two share one batch."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2]
    save(way, {"data": RankState(Position(dist.get_rank(group)), group=group)}, path)
    for each in groups:
        dist.destroy_process_group(each)


def load_place(way: str, path: Path) -> Any:
    data = Position()
    load(way, {"data": RankState(data)}, path)
    return data.place


@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_counted_in_their_group(way: str, worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, save_of_groups, way, tmp_path)
    assert worlds.run(2, load_place, way, tmp_path) == [0, 1]


@on_ranks(2)
def test_a_rank_outside_of_the_group_is_refused() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        RankState(Position(), group=group)
        return
    with pytest.raises(ValueError, match="rank 1 is not in the group"):
        RankState(Position(), group=group)


@pytest.mark.parametrize(
    ("way", "executor", "stager"),
    [
        *((way, AsyncCheckpointerType.THREAD, stager) for way in WAYS for stager in (False, True)),
        # Starts a process for each rank.
        pytest.param("fast", AsyncCheckpointerType.PROCESS, False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_asynchronous_saves_hold_the_states_of_the_moment(
    path: Path, way: str, executor: AsyncCheckpointerType, stager: bool
) -> None:
    seed_ranks(11)
    data = Position(["at", dist.get_rank()])
    writer = FileSystemWriter(path) if way == "stock" else FastWriter(path)
    future = dcp.async_save(
        {"data": RankState(data), **random_states()},
        storage_writer=writer,
        async_checkpointer_type=executor,
        async_stager=DefaultStager(StagingOptions(False, False, False, False)) if stager else None,
    )
    data.place[0] = "overwritten"
    expected = draw()
    future.result(SAVE_TIMEOUT_S)
    load(way, {"data": RankState(data), **random_states()}, path)
    assert data.place == ["at", dist.get_rank()]
    assert same(draw(), expected)
