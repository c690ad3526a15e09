"""Processes that publish and take up versions, and may be killed; what each version has."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from math import prod
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import Forks
from states import sharded
from support.tensors import bits
from syscalls import Listener, Stop, stop_before_changes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import Publisher, Subscriber
from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import register
from torch_ckpt.filesystems.object_store import object_store
from torch_ckpt.publishing import subscriber
from torch_ckpt.publishing.parts import view_of

__all__ = ["Killed", "Memory", "policy", "published_policy"]

BF16 = torch.bfloat16
OPTIONS: dict[str, Any] = {"dtype": BF16, "whole_every": 5, "keep_whole": 2}
TIMEOUT_S = 8.0  # Of the exchanges of a publish.
RETRY_S = 20.0  # For how long a request to a store is repeated: by default for three minutes.
START_S = 60.0
PUBLISH_S = 40.0  # Within which survivors have returned or raised.

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (389, 523),
    "long": (150_001,),
    "all": (70_003,),
    "still": (40_000,),
    "none": (0, 3),
    "scalar": (),
}


def policy(version: int, salt: int) -> dict[str, torch.Tensor]:
    """The weights of a version: one element in 20 has changed since the version before.

    Versions of one number that several trainings have published differ by their ``salt``.
    """
    state: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        index = torch.arange(prod(shape))
        every = 1 if name == "all" else 20
        last = 0 if name == "still" else version - (version - index) % every
        value = (index * 7919 + last * 104_729 + len(name)) % 65_521
        if name != "still":
            value += (index % 50 == salt % 50) * (salt + 1)
        state[name] = (value.float() / 65_521 - 0.5).view(shape)
        if name == "long":
            state["numbers"] = value
    state["tied"] = state["matrix"]
    return state


def published_policy(version: int, salt: int) -> dict[str, torch.Tensor]:
    """The values that subscribers get."""
    state = policy(version, salt)
    return {name: v.to(BF16) if v.is_floating_point() else v for name, v in state.items()}


class Memory:
    """Tensors of a served model in a file, which outlives the process that updates them."""

    def __init__(self, path: Path) -> None:
        like = published_policy(0, 0)
        nbytes = sum(value.numel() * value.itemsize for value in like.values())
        is_new = not path.exists()
        with path.open("w+b" if is_new else "r+b") as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        if is_new:
            memory[:] = os.urandom(nbytes)
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0
        for name, value in sorted(like.items(), key=lambda item: -item[1].itemsize):
            if name == "tied":
                continue
            own = torch.zeros(value.shape, dtype=value.dtype)
            if value.numel():
                found = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=at)
                own = found.view(value.shape)
            self.tensors[name] = own
            at += value.numel() * value.itemsize
        self.tensors["tied"] = self.tensors["matrix"]

    def values(self) -> dict[str, bytes]:
        """The bits of its tensors."""
        return {name: bits(value) for name, value in self.tensors.items()}


def rank_that_publishes(
    pipe: connection.Connection,
    rank: int,
    world: int,
    store: tuple[int, str],
    variables: dict[str, str],
    root: str,
    grid: str,
    versions: list[int],
    salt: int,
    watched: bool,
) -> None:
    """A rank: sends ``ready``, waits, publishes; sends each version that is committed."""
    os.environ.update(variables)
    if root.startswith("s3://"):
        limit = {"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_S)}
        register("s3", object_store("s3", retry_config=limit))
    if watched:
        listener = stop_before_changes()
        reduction.send_handle(pipe, listener, None)
        os.close(listener)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(
            store[1], dist.TCPStore("127.0.0.1", store[0], is_master=False, wait_for_workers=False)
        ),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * TIMEOUT_S),
    )
    states = [placed(policy(version, salt), grid) for version in versions]
    pipe.send("ready")
    pipe.recv()
    training = Publisher(root, record=False, timeout_s=TIMEOUT_S, **OPTIONS)
    try:
        for version, state in zip(versions, states, strict=True):
            training.publish(version, state)
            if version % 2:
                training.wait()
                pipe.send(version)
        training.close()
    except CheckpointError as error:
        pipe.send(f"raised {type(error).__name__}: {error}"[:500])
        os._exit(1)
    pipe.send(versions[-1])
    pipe.send("returned")
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


def placed(state: dict[str, torch.Tensor], grid: str) -> dict[str, Any]:
    """This rank's part of a state; plain tensors, and those without such a dimension, are whole."""
    if grid == "plain":
        return dict(state)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}[grid]
    made: dict[str, Any] = {
        name: sharded(value, mesh, (placements,)) if value.dim() == 2 else value
        for name, value in state.items()
    }
    made["tied"] = made["matrix"]
    return made


def process_that_updates(
    pipe: connection.Connection,
    root: str,
    file: Path,
    begin: int | None,
    stops_at: int | None,
) -> None:
    """A served model: brings its memory to version ``begin``; then, when told to, to the newest.

    Within that update it stops in the middle of the tensor ``stops_at``, and waits to be killed.
    """
    memory, worker = Memory(file), Subscriber(root)
    try:
        if begin is not None:
            worker.update(memory.tensors, begin)
    except BaseException as error:
        pipe.send(f"raised {error!r}")
        raise
    calls, change = 0, subscriber._xor

    def change_in_part(part: Any, host: torch.Tensor, mask: Any) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 != stops_at:
            change(part, host, mask)
            return
        half = host.view(-1)[: host.numel() // 2]
        view = view_of(half, part.fqn, writable=True)
        _native.apply_mask(view, memoryview(mask)[: half.numel() * half.itemsize], 1)
        pipe.send("within")
        pipe.recv()

    subscriber._xor = change_in_part
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send(worker.update(memory.tensors))
    except CheckpointError as error:
        pipe.send(f"raised {type(error).__name__}: {error}"[:500])
    with contextlib.suppress(EOFError):
        pipe.recv()


class Killed:
    """Processes of one call, which may be killed at a moment. Leaves none behind.

    Attributes:
        outcome: What each of them has sent last; ``killed`` or ``ended`` if it has ended.
        reached: The greatest version that any of them has sent as committed.
        where: The system call before which it was killed.
    """

    def __init__(self, forks: Forks, function: Callable[..., None], calls: list[tuple[Any, ...]]):
        self.outcome: dict[int, Any] = {}
        self.reached: int | None = None
        self.where = "after the end"
        self.changes = 0
        self._processes: list[Any] = []
        self._pipes: dict[connection.Connection, int] = {}
        self._listeners: dict[Listener, int] = {}
        self._kill_at: int | None = None
        self._victims: tuple[int, ...] = ()
        try:
            for number, arguments in enumerate(calls):
                process, pipe = forks.start(function, *arguments)
                self._processes.append(process)
                self._pipes[pipe] = number
                if function is rank_that_publishes and arguments[-1]:
                    assert pipe.poll(START_S), f"process {number} did not start"
                    self._listeners[Listener(reduction.recv_handle(pipe))] = number
            self.until(lambda: len(self.outcome) == len(calls), START_S)
            assert set(self.outcome.values()) == {"ready"}, f"they do not start: {self.outcome}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Killed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what is left, and waits for its end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for source in [*self._pipes, *self._listeners]:
            source.close()

    def go(self, victims: tuple[int, ...] = (), kill_at: int | None = None) -> None:
        """Lets them begin; kills the victims before the change ``kill_at`` of a file, if given."""
        self._victims, self._kill_at = victims, kill_at
        for pipe in self._pipes:
            pipe.send("go")

    def is_over(self) -> bool:
        """Whether each has ended, returned or raised."""
        return all(
            isinstance(told, str) and told not in ("ready", "within")
            for told in self.outcome.values()
        )

    def kill(self, where: str) -> None:
        """Kills the victims."""
        self._kill_at = None
        if not self.is_over():
            self.where = where
        for number in self._victims:
            self._processes[number].kill()
            if not str(self.outcome[number]).startswith(("returned", "raised")):
                self.outcome[number] = "killed"

    def until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Serves the processes until ``done()``; false if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while not done():
            sources: list[Any] = [*self._pipes, *self._listeners]
            ready = connection.wait(sources, max(deadline - time.monotonic(), 0))
            if not ready:
                return False
            for source in ready:
                if isinstance(source, Listener):
                    self._serve_stop(source)
                elif source in self._pipes:
                    self._serve_message(source)
        return True

    def _serve_message(self, pipe: connection.Connection) -> None:
        number = self._pipes[pipe]
        try:
            told = pipe.recv()
        except (EOFError, ConnectionResetError):
            if self.outcome.get(number) in (None, "ready") or isinstance(self.outcome[number], int):
                self.outcome[number] = "ended"
            del self._pipes[pipe]
            pipe.close()
            for listener in [at for at, of in self._listeners.items() if of == number]:
                del self._listeners[listener]
                listener.close()
            return
        if isinstance(told, int):
            self.reached = max(told, self.reached or 0)
        if self.outcome.get(number) != "killed":
            self.outcome[number] = told

    def _serve_stop(self, listener: Listener) -> None:
        stop = listener.receive() if listener in self._listeners else None
        if stop is None:
            return
        self.changes += 1
        if self._kill_at is not None and self.changes > self._kill_at:
            self.kill(_moment(stop))
            if self._listeners[listener] in self._victims:
                return
        listener.let_through(stop)


def _moment(stop: Stop) -> str:
    name = Path(stop.path).name
    kinds = {"rank-": "data", ".safetensors": "model", "delta.json": "delta.json"}
    kinds |= {"version.json": "version.json", "latest.json": "latest.json", "term": "term"}
    kind = next((kind for part, kind in kinds.items() if part in name), "another file")
    return f"{stop.call} {kind}" if stop.path else stop.call
