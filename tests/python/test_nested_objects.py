"""Objects with a state dict are restored wherever they are in the state dict, and never pickled."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils._pytree import tree_leaves

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, RankState, Run
from torch_ckpt.coordination.statefuls import StateDicts, state_dicts_of
from torch_ckpt.errors import MismatchError, UnsupportedError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

SAVE_TIMEOUT_S = 50


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals([Pair]):
        yield


class Position:
    """A place in the data. Its getter has the side effects of a data loader: it draws numbers."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        random.random()
        return {"place": self.place, "seen": torch.full([2], self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        assert state["seen"].tolist() == [self.place] * 2


class Warmup:
    """A schedule whose own state dict has another schedule, as that of a known package."""

    def __init__(self, after: Any) -> None:
        self.after, self.step = after, 0

    def state_dict(self) -> dict[str, Any]:
        return {"after": self.after, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Program:
    """A program with trained objects, whose values a seed determines."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net, self.other = nn.Linear(3, 2), nn.Linear(2, 2)
        self.optims = [torch.optim.Adam(net.parameters()) for net in (self.net, self.other)]
        for net, optim in zip((self.net, self.other), self.optims, strict=True):
            net(torch.rand(4, net.in_features)).sum().backward()
            optim.step()
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 3) for o in self.optims]
        for schedule in self.schedules:
            schedule.last_epoch = seed
        self.position, self.rank = Position(seed), Position(seed)
        self.warmup = Warmup(torch.optim.lr_scheduler.StepLR(self.optims[0], 3))
        self.warmup.after.last_epoch = self.warmup.step = seed
        self.number = seed

    def facts(self) -> Any:
        """What a restore must bring back."""
        return [
            *(tensor.tolist() for net in (self.net, self.other) for tensor in net.parameters()),
            *(
                tensor.tolist()
                for optim in self.optims
                for state in optim.state.values()
                for tensor in state.values()
            ),
            [schedule.last_epoch for schedule in self.schedules],
            [self.position.place, self.rank.place, self.warmup.after.last_epoch, self.warmup.step],
        ]

    def state(self) -> dict[str, Any]:
        return {
            "model": {"G": self.net, "inner": [{"D": self.other}]},
            "optims": self.optims,
            "schedules": (self.schedules[0], [self.number, {"other": self.schedules[1]}]),
            "pair": Pair(self.position, self.number),
            "ranks": [RankState(self.rank), {"x": RankState(lambda: self.number, print)}],
            "warmup": self.warmup,
            "number": self.number,
        }


def save(state: Any, path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path)


def save_in_thread(state: Any, path: Path) -> None:
    torch_ckpt.async_save(state, checkpoint_id=path).result(SAVE_TIMEOUT_S)  # type: ignore[union-attr]


def save_in_process(state: Any, path: Path) -> None:
    kind = AsyncCheckpointerType.PROCESS
    saved: Any = torch_ckpt.async_save(state, checkpoint_id=path, async_checkpointer_type=kind)
    saved.result(SAVE_TIMEOUT_S)


def save_by_stocks_writer(state: Any, path: Path) -> None:
    torch_ckpt.save(state, storage_writer=FileSystemWriter(path), planner=dcp.DefaultSavePlanner())


def save_installed(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.save(state, checkpoint_id=path)


def save_installed_in_thread(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.async_save(state, storage_writer=FileSystemWriter(path)).result(SAVE_TIMEOUT_S)


def save_installed_without_writer(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.async_save(state, checkpoint_id=path).result(SAVE_TIMEOUT_S)


def load(state: Any, path: Path) -> None:
    torch_ckpt.load(state, checkpoint_id=path)


def load_by_stocks_reader(state: Any, path: Path) -> None:
    torch_ckpt.load(state, storage_reader=FileSystemReader(path), planner=dcp.DefaultLoadPlanner())


def load_installed(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.load(state, storage_reader=FileSystemReader(path))


IN_PROCESS = pytest.param(save_in_process, marks=pytest.mark.slow, id="save_in_process")
SAVES = [
    *(save, save_in_thread, save_by_stocks_writer, IN_PROCESS),
    *(save_installed, save_installed_in_thread, save_installed_without_writer),
]
LOADS = [load, load_by_stocks_reader, load_installed]


def check_restored(restore: Callable[[dict[str, Any]], None]) -> None:
    """Restores other objects, and compares them with those that were saved from seed 1."""
    program = Program(2)
    objects = vars(program).copy()
    state = program.state()
    ranks = state["ranks"]
    restore(state)
    assert program.facts() == Program(1).facts()
    assert all(getattr(program, name) is value for name, value in objects.items())
    assert state["model"]["G"] is program.net
    assert state["optims"] is program.optims
    assert state["schedules"][0] is program.schedules[0]
    assert state["schedules"][1] == [1, {"other": program.schedules[1]}]
    assert state["pair"] == Pair(program.position, 1)
    assert state["ranks"] is ranks
    assert (state["warmup"], state["number"]) == (program.warmup, 1)
    assert program.warmup.after.optimizer is program.optims[0]


@pytest.mark.parametrize("save", SAVES)
def test_objects_below_the_top_are_restored(save: Callable[..., None], tmp_path: Path) -> None:
    save(Program(1).state(), tmp_path / "saved")
    names = set(FastReader(tmp_path / "saved").read_metadata().state_dict_metadata)
    assert {
        "model.G.weight",
        "optims.1.state.0.exp_avg",
        "schedules",
        "warmup.after.last_epoch",
    } < (names)
    for load in LOADS:
        check_restored(lambda state, load=load: load(state, tmp_path / "saved"))  # type: ignore[misc]


@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True}, {"asynchronous": True, "agent": True}]
)
def test_a_run_restores_objects_below_the_top(options: Any, tmp_path: Path) -> None:
    with Run(tmp_path, **options) as run:
        run.save(1, Program(1).state())
        check_restored(run.restore)  # From memory, with an agent.
        run.wait()
    with Run(tmp_path) as run:
        check_restored(run.restore)


@pytest.mark.parametrize("flattens", [True, False])
def test_a_planner_that_does_not_flatten_restores_them_too(flattens: bool, tmp_path: Path) -> None:
    def state(program: Program) -> dict[str, Any]:
        return {"optims": program.optims, "nets": {"a": program.net, "b": program.other}}

    saved, loaded = Program(1), Program(2)
    planner = FastSavePlanner(flatten_state_dict=flattens)
    torch_ckpt.save(state(saved), checkpoint_id=tmp_path, planner=planner)
    load_planner = FastLoadPlanner(flatten_state_dict=flattens)
    torch_ckpt.load(state(loaded), checkpoint_id=tmp_path, planner=load_planner)
    assert loaded.facts()[:-2] == saved.facts()[:-2]


OLD = {
    "in a dict": lambda net: {"model": {"G": net, "step": 1}},
    "in a list": lambda net: {"model": [torch.ones(1), net]},
    "in a tuple": lambda net: {"model": (1, net)},
}


@pytest.mark.parametrize("old", OLD)
def test_objects_that_were_pickled_by_older_versions_and_by_dcp_are_restored(
    old: str, tmp_path: Path
) -> None:
    saved, live = nn.Linear(2, 3), nn.Linear(2, 3)
    dcp.save(OLD[old](saved), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    state = OLD[old](live)
    torch_ckpt.load(state, checkpoint_id=tmp_path, trust_pickle=True)
    assert state.keys() == OLD[old](live).keys()
    assert any(value is live for value in tree_leaves(state))
    assert torch.equal(live.weight, saved.weight)


def test_dcps_load_with_our_planner_restores_them_too(tmp_path: Path) -> None:
    saved, live = nn.Linear(2, 3), nn.Linear(2, 3)
    dcp.save({"a": {"b": saved}}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    state, reader = {"a": {"b": live}}, FastReader(tmp_path, trust_pickle=True)
    dcp.load(state, storage_reader=reader, planner=FastLoadPlanner(), no_dist=True)
    assert state["a"]["b"] is live
    assert torch.equal(live.weight, saved.weight)


@pytest.mark.parametrize("planner", [None, FastSavePlanner()])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: {"G": nn.Linear(2, 2)}, "model.G"),
        (lambda: [1, nn.Linear(2, 2)], "model.1"),
        (lambda: (1, [nn.Linear(2, 2)]), "model.1.0"),
        (lambda: (1, {"x": RankState(Position(1))}), "model.1.x"),
    ],
)
def test_dcps_own_save_refuses_them_by_name(
    planner: Any, value: Callable[[], Any], named: str, tmp_path: Path
) -> None:
    state, writer = {"model": value()}, FastWriter(tmp_path / "saved")
    error = failure_of(dcp.save, state, storage_writer=writer, planner=planner, no_dist=True)
    assert isinstance(error, UnsupportedError)
    assert f"cannot save {named!r}: it is a Stateful" in str(error)
    assert "torch_ckpt.save" in str(error)
    assert not (tmp_path / "saved").exists()


def test_a_planner_that_converts_objects_itself_may_save_them(tmp_path: Path) -> None:
    class Converts(dcp.DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return value.state_dict() if isinstance(value, nn.Module) else value

    net = nn.Linear(2, 2)
    writer = FastWriter(tmp_path)
    dcp.save({"a": {"b": net}}, storage_writer=writer, planner=Converts(), no_dist=True)
    state: dict[str, Any] = {"a": {"b": None}}
    torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["a"]["b"]["weight"], net.weight)


@pytest.mark.parametrize(
    "save", [*SAVES, lambda s, p: Run(p, asynchronous=True, agent=True).save(1, s)]
)
def test_a_rank_state_in_a_tuple_is_refused_by_name(
    save: Callable[..., None], tmp_path: Path
) -> None:
    state = {"data": {"loaders": (RankState(Position(1)),)}}
    with pytest.raises(ValueError, match=r"'data.loaders.0' is a RankState in a tuple.*use a list"):
        save(state, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"'data.loaders.0' is a RankState in a tuple.*use a list"):
        torch_ckpt.load(state, checkpoint_id=tmp_path)


class Missing:
    """An object that finds no entry of its own name."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epoch")


def test_an_error_that_is_nothing_but_the_name_says_what_failed(tmp_path: Path) -> None:
    torch_ckpt.save({"epoch": Missing()}, storage_writer=FastWriter(tmp_path))
    with pytest.raises(KeyError, match="cannot load 'epoch': epoch"):
        torch_ckpt.load({"epoch": Missing()}, storage_reader=FastReader(tmp_path))


class Node:
    """An object whose state dict has the objects beside it, as they are."""

    def __init__(self) -> None:
        self.next: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"next": [self.next]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"][0]


def test_an_object_in_its_own_state_dict_is_refused_by_name(tmp_path: Path) -> None:
    outer, inner = Node(), Node()
    outer.next, inner.next = inner, outer
    with pytest.raises(ValueError, match=r"'a\.next\.0\.next\.0': it is the Node of 'a', whose"):
        torch_ckpt.save({"a": outer}, storage_writer=FastWriter(tmp_path / "c"))
    inner.next = 3
    state = {"a": outer, "b": inner}  # Twice, but not within itself.
    torch_ckpt.save(state, storage_writer=FastWriter(tmp_path / "c"))
    inner.next = 4
    torch_ckpt.load(state, storage_reader=FastReader(tmp_path / "c"))
    assert outer.next is inner
    assert inner.next == 3


def test_a_state_of_a_rank_in_a_tuple_of_another_state_dict_is_refused(tmp_path: Path) -> None:
    class Passes(Application):
        def state_dict(self) -> dict[str, Any]:
            return {"parts": ({"data": self.data.state_dict()},)}

    for save in (save_in_thread, globals()["save"]):
        with pytest.raises(ValueError, match=r"'app.parts.0.data' is a RankState in a tuple"):
            save({"app": Passes(1)}, tmp_path)
    writer = FastWriter(tmp_path)
    error = failure_of(dcp.save, {"app": Passes(1)}, storage_writer=writer, no_dist=True)
    assert "cannot save 'app.parts.0.data'" in str(error)


def test_a_rank_state_in_an_object_is_not_pickled(tmp_path: Path) -> None:
    state = {"data": {"odd": {RankState(Position(1))}}}
    for save in (save_by_stocks_writer, save_in_thread, globals()["save"]):
        with pytest.raises(BaseException, match="RankState in an object cannot be pickled"):
            save(state, tmp_path)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(RankState(Position(1)))


def test_what_is_no_object_with_a_state_is_left_alone() -> None:
    class Tree(dict[str, Any]):
        state_dict = load_state_dict = dict.copy

    class WithoutLoad:
        state_dict = None

    tuple_of_itself: tuple[Any, ...] = ([],)
    tuple_of_itself[0].append(tuple_of_itself)
    state = {
        "class": {"kind": nn.Linear, "tree": Tree(a=1)},
        "values": [1, {"x": (2, WithoutLoad())}, tuple_of_itself],
    }
    replaced = state_dicts_of(state)
    assert all(replaced[key] is state[key] for key in state)


def test_a_container_that_cannot_be_changed_is_named(tmp_path: Path) -> None:
    def state(net: Any, step: Any) -> dict[str, Any]:
        return {"a": {"b": MappingProxyType({"net": net, "step": step})}}

    saved, live = nn.Linear(2, 2), nn.Linear(2, 2)
    torch_ckpt.save(state(saved, (1,)), checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"cannot load 'a.b': its container cannot be changed"):
        torch_ckpt.load(state(live, (2,)), checkpoint_id=tmp_path)


def test_a_tuple_of_another_length_is_named(tmp_path: Path) -> None:
    def state(count: int) -> dict[str, Any]:
        return {"a": {"b": tuple(Position(number) for number in range(count))}}

    torch_ckpt.save(state(2), checkpoint_id=tmp_path)
    with pytest.raises(MismatchError, match=r"'a.b': the checkpoint has a tuple of 2 .* of 3"):
        torch_ckpt.load(state(3), checkpoint_id=tmp_path)


def test_objects_are_called_in_the_order_of_their_keys_in_a_load() -> None:
    called: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, Any]:
            called.append(self.name)
            return {"x": 1}

        def load_state_dict(self, _: Any) -> None:
            called.append(f"set {self.name}")

    state = {"b": {"z": Named("b.z"), "y": Named("b.y")}, "a": Named("a")}
    objects = StateDicts(state, for_load=True)
    objects.restore()
    assert called == ["a", "b.y", "b.z", "set a", "set b.y", "set b.z"]
    assert list(state) == ["b", "a"]


# ---- A load does not call getters ----


@contextlib.contextmanager
def unasked(*positions: Position) -> Iterator[None]:
    """Checks that the block calls no getter."""
    asked = [position.asked for position in positions]
    yield
    assert [position.asked for position in positions] == asked


class Application:
    """A ``Stateful`` that passes on the states of what it has."""

    def __init__(self, place: int) -> None:
        self.position = Position(place)
        self.data = RankState(self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": {"data": self.data.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state["parts"]["data"])


def load_by_dcp(state: Any, path: Path) -> None:
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)


def load_by_dcp_with_our_planner(state: Any, path: Path) -> None:
    reader = FastReader(path)
    dcp.load(state, storage_reader=reader, planner=FastLoadPlanner(), no_dist=True)


def load_by_dcp_alone(state: Any, path: Path) -> None:
    dcp.load(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(
    "load", [*LOADS, load_by_dcp, load_by_dcp_with_our_planner, load_by_dcp_alone]
)
def test_a_load_does_not_call_the_getters_of_rank_states(
    load: Callable[..., None], tmp_path: Path
) -> None:
    def state(app: Application, position: Position) -> dict[str, Any]:
        return {"app": app, "data": RankState(position), "py": RankState(*python_rng)}

    python_rng = random.getstate, random.setstate
    saved = Application(3), Position(4)
    torch_ckpt.save(state(*saved), checkpoint_id=tmp_path)
    expected = random.random()
    loaded = Application(0), Position(0)
    with unasked(loaded[0].position, loaded[1]):
        load(state(*loaded), tmp_path)
    assert [loaded[0].position.place, loaded[1].place] == [3, 4]
    assert random.random() == expected


def test_a_partial_load_without_a_stored_state_leaves_it(tmp_path: Path) -> None:
    torch_ckpt.save({"x": 1}, checkpoint_id=tmp_path)
    position = Position(5)
    with unasked(position):
        for planner in (FastLoadPlanner, dcp.DefaultLoadPlanner):
            torch_ckpt.load(
                {"x": 0, "data": RankState(position)},
                checkpoint_id=tmp_path,
                planner=planner(allow_partial_load=True),
            )
    assert position.place == 5


def test_a_state_that_the_program_asks_for_itself_is_the_present_one() -> None:
    state = RankState(Position(6))
    (entry,) = deepcopy(state.state_dict()).values()
    assert entry[0]["place"] == 6
