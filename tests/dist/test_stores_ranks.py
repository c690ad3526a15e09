"""Several ranks on an object store: saves, resharding loads, runs, errors that all ranks get."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from support.radosgw import on_servers
from support.store_proxy import Fault, StoreProxy
from support.store_server import SECRET_KEY, StoreServer, reaching
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, Run, SafetensorsWriter
from torch_ckpt.filesystems.location import Location

pytestmark = pytest.mark.timeout(150)

ROWS = (
    700_001  # Each has 20 bytes: a file of 2 ranks has several parts, and no two shards are equal.
)
TIMEOUT_S = 60


def state_of(step: int, rows: int = ROWS) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(rows * 5.0).reshape(rows, 5) + step
    replica = torch.arange(2_000_000, dtype=torch.int32) + step
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "replica": replica, "step": step}


def differences(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    found = []
    for name, value in state.items():
        wanted = expected[name]
        if isinstance(value, DTensor):
            value, wanted = value.to_local(), wanted.to_local()
        if not (torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted):
            found.append(name)
    return found


def save(variables: dict[str, str], path: str, step: int) -> None:
    with reaching(variables):
        dcp.save(state_of(step), storage_writer=FastWriter(path))


def load(variables: dict[str, str], path: str, step: int) -> list[str]:
    with reaching(variables):
        state = state_of(-1)
        torch_ckpt.load(state, storage_reader=FastReader(path))
        return differences(state, state_of(step))


PLACES = {
    "s3": ("store_server", "store_url"),
    "radosgw": ("radosgw_server", "radosgw_url"),
    "hdfs": ("hdfs_server", "hdfs_url"),
}
slow = [
    pytest.param("radosgw", marks=pytest.mark.slow),
    pytest.param("hdfs", marks=[pytest.mark.framework("hdfs_native"), pytest.mark.slow]),
]


@pytest.fixture(params=["s3", *slow])
def place(request: pytest.FixtureRequest) -> tuple[dict[str, str], str]:
    """The variables by which ranks reach a store, and the URL of a folder there."""
    server, url = PLACES[request.param]
    variables = request.getfixturevalue(server).environment()
    return variables, str(request.getfixturevalue(url))


def test_ranks_save_and_others_load(worlds: Worlds, place: tuple[dict[str, str], str]) -> None:
    variables, url = place
    worlds.run(2, save, variables, f"{url}/step", 1, timeout_s=TIMEOUT_S)
    for ranks in (3, 1):
        found = worlds.run(ranks, load, variables, f"{url}/step", 1, timeout_s=TIMEOUT_S)
        assert found == [[]] * ranks


def model_of(step: int, rows: int = ROWS) -> dict[str, Any]:
    """Also a tensor whose shards lie side by side in a file, and a tied one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = torch.arange(300 * 64.0).reshape(300, 64) + step
    state = state_of(step, rows) | {"columns": distribute_tensor(columns, mesh, [Shard(1)])}
    return {**state, "step": torch.tensor(step), "tied": state["replica"]}


class _Failing(FastSavePlanner):
    """A planner that fails on the second rank, when the first one may have written its file."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if dist.get_rank() == 1:
            raise ValueError("no such tensor")
        return super().finish_plan(new_plan)


def save_model(
    variables: dict[str, str], path: str, step: int, planner: type[FastSavePlanner]
) -> list[str]:
    """The names that are there after a save as safetensors, which may fail."""
    with reaching(variables):
        writer = SafetensorsWriter(path, thread_count=2)
        with contextlib.suppress(CheckpointException):
            torch_ckpt.save(model_of(step), storage_writer=writer, planner=planner())
        dist.barrier()
        place = Location(path)
        return [
            name for name in place.names() if (place / name).is_file() or (place / name).names()
        ]


def load_model(variables: dict[str, str], path: str, step: int) -> list[str]:
    with reaching(variables):
        state = model_of(-1)
        torch_ckpt.load(state, storage_reader=FastReader(path))
        return differences(state, model_of(step))


def test_ranks_save_a_model_and_others_load(
    worlds: Worlds, place: tuple[dict[str, str], str]
) -> None:
    variables, url = place
    path = f"{url}/model"
    for step, planner in enumerate([_Failing, FastSavePlanner, _Failing, FastSavePlanner]):
        names = worlds.run(2, save_model, variables, path, step, planner, timeout_s=TIMEOUT_S)
        count = (0, 1, 1, 2)[step]  # The second model that replaces another has an index.
        assert [len(each) for each in names] == [count] * 2, names
    for ranks in (3, 1):
        found = worlds.run(ranks, load_model, variables, path, 3, timeout_s=TIMEOUT_S)
        assert found == [[]] * ranks


def train(variables: dict[str, str], path: str) -> list[str]:
    with reaching(variables), Run(path, asynchronous=True, keep_last=2, timeout_s=TIMEOUT_S) as run:
        for step in range(4):
            run.save(step, state_of(step, 1000))
        run.wait()
        state = state_of(-1, 1000)
        assert run.restore(state) == 3
        return differences(state, state_of(3, 1000))


def test_ranks_of_a_run_resume(worlds: Worlds, place: tuple[dict[str, str], str]) -> None:
    variables, url = place
    assert worlds.run(2, train, variables, f"{url}/run", timeout_s=TIMEOUT_S) == [[], []]


def failure(variables: dict[str, str], path: str) -> tuple[str, float]:
    """What a rank gets from a save, and after how many seconds."""
    began = time.monotonic()
    with reaching(variables):
        try:
            torch_ckpt.save(state_of(1, 10), storage_writer=FastWriter(path), timeout_s=TIMEOUT_S)
        except BaseException as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "s3://checkpoints"),
    "bucket": ({}, "s3://no-such-bucket"),
    "host": ({"AWS_ENDPOINT_URL": "http://no-such-host.invalid:9"}, "s3://checkpoints"),
    "port": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "s3://checkpoints"),
}


@on_servers
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_to_all_ranks_soon(
    worlds: Worlds, store_server: StoreServer, store_url: str, what: str
) -> None:
    changed, bucket = WRONG[what]
    variables = {**store_server.environment(), **changed}
    url = f"{bucket}/{store_url.rpartition('/')[2]}"
    for text, seconds in worlds.run(2, failure, variables, url, timeout_s=TIMEOUT_S):
        assert bucket in text, text
        assert "StorageError" in text, text
        assert "wrong-secret" not in text
        assert SECRET_KEY not in text
        assert seconds < 10


def save_in_background(variables: dict[str, str], folder: str) -> None:
    with reaching(variables):
        dcp.save(state_of(1), storage_writer=FastWriter(f"{folder}/first"))
        state = state_of(2)
        future = torch_ckpt.async_save(state, storage_writer=FastWriter(f"{folder}/second"))
        assert not future.done()
        state["replica"].zero_()  # Training goes on.
        future.result()


@on_servers
def test_training_goes_on_while_the_network_is_down(
    worlds: Worlds, store_server: StoreServer, store_url: str
) -> None:
    """And the save succeeds once it is back."""
    with StoreProxy(store_server.endpoint) as proxy:
        down = Fault("reset", path="/second/", times=12)
        proxy.faults.append(down)
        variables = store_server.environment(proxy.endpoint)
        worlds.run(2, save_in_background, variables, store_url, timeout_s=TIMEOUT_S)
    assert down.met == 12
    variables = store_server.environment()
    found = worlds.run(2, load, variables, f"{store_url}/second", 2, timeout_s=TIMEOUT_S)
    assert found == [[], []]
