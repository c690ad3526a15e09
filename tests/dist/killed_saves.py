"""A save by ranks that are processes of their own, some of which are killed at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from states import full_value, sharded
from syscalls import Listener, Stop, stop_before_changes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import FastWriter
from torch_ckpt.filesystems.location import Location

START_TIMEOUT_S = 60  # Forking ranks, and connecting them.
SAVE_TIMEOUT_S = 30  # Within which survivors have returned or raised.
# gloo misses it, now and then, when a rank dies between two collectives. The next one then waits
# as long as this, in stock's own broadcast, whatever writes.
COLLECTIVE_TIMEOUT_S = 15

# What a rank does in the order in which it does it; the directory of a first save aside.
RANK_MOMENTS = [
    "create data",
    "reserve data",
    "write data",
    "cut data",
    "sync data",
    "sync folder of data",
]
COORDINATOR_MOMENTS = [
    "create index",
    "write index",
    "sync index",
    "create metadata",
    "write metadata",
    "sync metadata",
    "sync folder of metadata",
    "commit",
    "sync folder of commit",
    "remove data",
    "remove metadata",
    "remove index",
]
MOMENTS = ["create folder", *RANK_MOMENTS, *COORDINATOR_MOMENTS]
BASED_MOMENTS = ["link data", *MOMENTS]  # Of a save with a base.

_SYNCED = ("sync data", "sync index", "sync metadata")  # Calls of their own without io_uring only.
_VERBS = {
    "create": "create",
    "fallocate": "reserve",
    "pwrite64": "write",
    "io_uring_enter": "write",
    "ftruncate": "cut",
    "fsync": "sync",
    "unlink": "remove",
    "link": "link",
    "mkdir": "create",
}
_KINDS = {
    r"__\d+_\d+_[0-9a-f]{16}\.distcp": "data",
    r"\.index(\.[0-9a-f]{16})?": "index",
    r"\.metadata(\.[0-9a-f]{16}\.tmp)?": "metadata",
}


@dataclass(frozen=True)
class Case:
    """What is saved, how, and who is killed when. Drawn from the seed alone."""

    world_size: int
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, str]]
    thread_count: int
    single_file_per_rank: bool
    queue: str
    victims: frozenset[int]
    moment: str | None  # One of `MOMENTS`; `None` for one at random.
    at_rank: int  # Whose moment it is.
    occurrence: int
    delay: float  # As a fraction of the time of a save.
    frozen: frozenset[str] = frozenset()  # Tensors that are the same in all versions.

    def value(self, name: str, version: int) -> torch.Tensor:
        """The whole tensor."""
        shape, dtype, _ = self.tensors[name]
        return full_value(f"{name} {0 if name in self.frozen else version}", shape, dtype)

    def whole(self, version: int) -> dict[str, Any]:
        """The state of a version, as one process holds it."""
        return {name: self.value(name, version) for name in self.tensors} | _objects(version)

    def part(self, version: int) -> dict[str, Any]:
        """This rank's part of it."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        placements = {"rows": (Shard(0),), "replicas": (Replicate(),)}
        state = _objects(version)
        for name, (_, _, how) in self.tensors.items():
            value = self.value(name, version)
            state[name] = value if how == "plain" else sharded(value, mesh, placements[how])
        return state


def _objects(version: int) -> dict[str, Any]:
    return {"version": version, "notes": {"of": [str(version)] * 100, "more": bytes([version % 9])}}


def draw_case(rng: random.Random, moment: str | None, victims: str) -> Case:
    """A case at one of `MOMENTS`, or at a random one, who dies given."""
    world_size = rng.choice([2, 2, 2, 3])
    shapes = [(1,), (7, 5), (64, 33), (1031, 17), (1024, 257)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    tensors = {
        f"t{i}": (rng.choice(shapes), rng.choice(dtypes), rng.choice(["rows", "replicas", "plain"]))
        for i in range(rng.randint(1, 6))
    }
    tensors["wide"] = ((64, 128), torch.float32, "rows")  # Something on every rank.
    return _drawn_case(rng, moment, victims, world_size, tensors)


def draw_frozen_case(
    rng: random.Random, moment: str | None, victims: str, like: Case | None
) -> Case:
    """A case of which most tensors are frozen: those of another one, or others.

    By one or two ranks.
    """
    if like is not None:
        case = _drawn_case(rng, moment, victims, like.world_size, like.tensors)
        return replace(case, frozen=like.frozen)
    case = draw_case(rng, moment, victims)
    tensors = case.tensors | {"tuned": ((8, 3), torch.float32, "rows")}  # Each rank writes it.
    frozen = frozenset(n for n in case.tensors if n == "wide" or rng.random() < 0.6)
    case = _drawn_case(rng, moment, victims, rng.choice([1, 2, 2]), tensors)
    return replace(case, frozen=frozen)


def _drawn_case(
    rng: random.Random,
    moment: str | None,
    victims: str,
    world_size: int,
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, str]],
) -> Case:
    doomed = {
        "all": range(world_size),
        "coordinator": [0],
        "another": [rng.randrange(1, world_size) if world_size > 1 else 0],
    }
    if victims == "any":
        weights = [2, 2, 1] if moment in COORDINATOR_MOMENTS else [1, 1, 1]
        (victims,) = rng.choices([*doomed], weights)
    return Case(
        world_size,
        tensors,
        thread_count=rng.choice([1, 2]),
        single_file_per_rank=rng.random() < 0.8,
        queue="threads" if moment in _SYNCED else rng.choice(["any", "threads"]),
        victims=frozenset(doomed[victims]),
        moment=moment,
        at_rank=0 if moment in COORDINATOR_MOMENTS else rng.randrange(world_size),
        occurrence=rng.randint(1, 3) if moment == "write data" else 1,
        delay=rng.uniform(0, 1.1),
    )


class CarelessWriter(FastWriter):
    """Removes the old checkpoint before there is a new one: what the campaign must notice."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Commits, after the harm is done."""
        (Path(self.path) / ".metadata").unlink(missing_ok=True)
        super().finish(*args, **kwargs)


class MovingWriter(FastWriter):
    """Moves files out of its base: what the campaign must notice, too."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Writes, and takes files of the base away."""

        def move(source: Location, target: Location, *, sync: bool) -> None:
            link(source, target, sync=sync)
            source.remove()

        link = Location.link
        with mock.patch.object(Location, "link", move):
            return super().write_data(*args, **kwargs)


WRITERS = {"fast": FastWriter, "careless": CarelessWriter, "moving": MovingWriter}


@dataclass
class Seen:
    """What one save has shown before all its ranks had ended."""

    outcome: dict[int, str] = field(default_factory=dict)  # By rank: returned, raised, killed...
    where: str = "after the save"  # The moment of the kill.
    seconds: float | None = None  # Until every rank had returned.
    commit_begun: bool | None = False  # `None` where nobody looked.
    commit_done: bool = False


def folder_of(path: Path) -> str:
    """The parent, as system calls name it."""
    return str(path.parent)


class KilledSave:
    """One save by ranks that may be killed. Leaves no process behind."""

    def __init__(
        self,
        forks: Forks,
        case: Case,
        path: Path,
        version: int,
        writer: str,
        base: Path | None = None,
    ) -> None:
        self.case = case
        self.path = path
        self.seen = Seen()
        self.watched = case.moment is not None
        # In the place of a directory that is not there yet.
        self._hidden = re.compile(rf"{re.escape(folder_of(path))}/\.partial\.[a-p.]+(?=/|$)")
        self._kill_at: str | None = None
        self._calls = 0  # Those of the case's moment.
        self._kinds: dict[int, str] = {}  # What each rank is at: data, index, metadata or commit.
        self._pipes: dict[connection.Connection, int] = {}
        self._listeners: dict[Listener, int] = {}
        self._processes: list[Any] = []
        store = (forks.store.port, str(forks.next_number()))
        try:
            for rank in range(case.world_size):
                process, pipe = forks.start(
                    *(_save_on_a_rank, rank, case, path, version, writer, base, store),
                    self.watched,
                )
                self._processes.append(process)
                self._pipes[pipe] = rank
                if self.watched:
                    assert pipe.poll(START_TIMEOUT_S), f"rank {rank} did not start"
                    self._listeners[Listener(reduction.recv_handle(pipe))] = rank
        except BaseException:
            self.close()
            raise

    def run(self, *, kill: bool, usual_s: float) -> Seen:
        """Saves; kills at the moment of the case, or once ``delay * usual_s`` has passed."""
        case = self.case
        self._until(lambda: len(self.seen.outcome) == case.world_size, START_TIMEOUT_S)
        if set(self.seen.outcome.values()) != {"ready"}:
            raise AssertionError(f"ranks did not come to save: {self.seen.outcome}")
        begin = time.monotonic()
        self._kill_at = case.moment if kill else None
        for pipe in [*self._pipes]:
            pipe.send("save")
        if kill and case.moment is None:
            self._until(self._is_over, case.delay * usual_s)
            self._kill("random, early" if case.delay < 0.5 else "random, late")
        self._until(self._is_over, SAVE_TIMEOUT_S)
        if set(self.seen.outcome.values()) == {"returned"}:
            self.seen.seconds = time.monotonic() - begin
        if not self.watched:
            self.seen.commit_begun = None
        return self.seen

    def __enter__(self) -> KilledSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what is left of the ranks, and waits for their end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for source in [*self._pipes, *self._listeners]:
            source.close()

    def _is_over(self) -> bool:
        return "ready" not in self.seen.outcome.values()

    def _until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Serves the ranks until ``done()``; false if that takes longer."""
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
        rank = self._pipes[pipe]
        try:
            self.seen.outcome[rank] = pipe.recv()
        except (EOFError, ConnectionResetError):
            if self.seen.outcome.get(rank) in (None, "ready"):
                self.seen.outcome[rank] = "ended"
            del self._pipes[pipe]
            pipe.close()
            for listener in [at for at, number in self._listeners.items() if number == rank]:
                del self._listeners[listener]
                listener.close()

    def _serve_stop(self, listener: Listener) -> None:
        if listener not in self._listeners:
            return
        stop = listener.receive()
        if stop is None:
            return
        rank = self._listeners[listener]
        moment = self._moment(rank, stop)
        if moment is not None:
            if rank == 0 and self.seen.commit_begun:
                self.seen.commit_done = True  # It is on to the next call.
            # Only the fastest creates the folder.
            here = rank == self.case.at_rank or moment == "create folder"
            if here and moment == self._kill_at:
                self._calls += 1
            if self._calls == self.case.occurrence and self._kill_at is not None:
                self._kill_at = None
                self._kill(moment)
                if rank in self.case.victims:
                    return
            if moment == "commit":
                self.seen.commit_begun = True
        listener.let_through(stop)

    def _moment(self, rank: int, stop: Stop) -> str | None:
        """One of `MOMENTS`, or what else happens in the directory; ``None`` if it is elsewhere."""
        if stop.call == "io_uring_enter":
            kind = self._kinds.get(rank)
            return None if kind is None else f"write {kind}"
        path = self._hidden.sub(str(self.path), stop.path, count=1)
        folder, name = os.path.split(path)
        if stop.call == "rename" and stop.path == str(self.path):
            self._kinds[rank] = "commit"
            return "commit"
        if path == folder_of(self.path) and self._last(rank) == "commit":
            return "sync folder of commit"
        if path == str(self.path):
            return "create folder" if stop.call == "mkdir" else f"sync folder of {self._last(rank)}"
        if folder != str(self.path):
            return None
        kind = next((kind for name_, kind in _KINDS.items() if re.fullmatch(name_, name)), None)
        if kind is None:
            return None
        if stop.call == "rename":
            if path != stop.path:
                return "rename metadata"  # The commit renames the directory.
            self._kinds[rank] = "commit"
            return "commit"
        if stop.call in ("create", "link"):
            self._kinds[rank] = kind
        return f"{_VERBS[stop.call]} {kind}"

    def _last(self, rank: int) -> str:
        return self._kinds.get(rank, "nothing")

    def _kill(self, where: str) -> None:
        for rank in sorted(self.case.victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGKILL)
        if not self._is_over():
            self.seen.where = where
        for rank in self.case.victims:
            if self.seen.outcome[rank] == "ready":
                self.seen.outcome[rank] = "killed"


def _save_on_a_rank(
    pipe: connection.Connection,
    rank: int,
    case: Case,
    path: Path,
    version: int,
    writer: str,
    base: Path | None,
    store: tuple[int, str],
    watched: bool,
) -> None:
    """A rank: says ``ready``, waits, saves, says how that went."""
    os.environ["TORCH_CKPT_IO"] = case.queue
    if watched:
        listener = stop_before_changes()
        reduction.send_handle(pipe, listener, None)
        os.close(listener)
    port, number = store
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(number, dist.TCPStore("127.0.0.1", port, is_master=False)),
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    state = case.part(version)
    storage_writer = WRITERS[writer](
        path, case.single_file_per_rank, sync_files=True, thread_count=case.thread_count, base=base
    )
    pipe.send("ready")
    pipe.recv()
    try:
        dcp.save(state, storage_writer=storage_writer)
    except BaseException as error:  # CheckpointException is no Exception.
        pipe.send(f"raised {type(error).__name__}: {error}"[:500])
        os._exit(1)  # As a training script that does not catch it: the others hear of it.
    pipe.send("returned")
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)
