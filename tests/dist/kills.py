"""Kills ranks while they save and asks each time: is it exactly the old checkpoint, or the new one?

``python tests/dist/kills.py --kills 200 --seed 7`` prints how often each moment was hit and what
was found then, and ends with 1 if a single answer was neither. Half the moments are drawn at
random and killed from outside; half are system calls of the engine, before which a rank is stopped
(`syscalls`).

Ranks are forked from a server that has imported torch, so that a kill costs well under a second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import logging
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, get_context, reduction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import READERS, assert_same, full_value, sharded
from syscalls import Listener, Stop, can_stop, stop_before_changes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import FastWriter

__all__ = ["COORDINATOR_MOMENTS", "MOMENTS", "Campaign", "CarelessWriter"]

START_TIMEOUT_S = 60  # Of ranks: forking, meeting.
SAVE_TIMEOUT_S = 30  # Within which survivors have returned or raised.
CHECK_TIMEOUT_S = 60
COLLECTIVE_TIMEOUT_S = 300  # Longer than any round: a hang is found by the round's deadline.
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).resolve().parents[2]

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
    "rename index",
    "remove data",
    "remove metadata",
    "remove index",
]
MOMENTS = ["create folder", *RANK_MOMENTS, *COORDINATOR_MOMENTS]

_SYNCED = ("sync data", "sync index", "sync metadata")  # Calls of their own without io_uring only.
_VERBS = {
    "create": "create",
    "fallocate": "reserve",
    "pwrite64": "write",
    "io_uring_enter": "write",
    "ftruncate": "cut",
    "fsync": "sync",
    "unlink": "remove",
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
    moment: str | None  # Of `MOMENTS`; `None` for one at random.
    at_rank: int  # Whose moment it is.
    occurrence: int
    delay: float  # Of the time that a save takes.

    def value(self, name: str, version: int) -> torch.Tensor:
        """The whole tensor."""
        shape, dtype, _ = self.tensors[name]
        return full_value(f"{name} {version}", shape, dtype)

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
    doomed = {
        "all": range(world_size),
        "coordinator": [0],
        "another": [rng.randrange(1, world_size)],
    }
    victims = rng.choice([*doomed]) if victims == "any" else victims
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


WRITERS = {"fast": FastWriter, "careless": CarelessWriter}


@dataclass
class Seen:
    """What one save has shown before all its ranks had ended."""

    outcome: dict[int, str] = field(default_factory=dict)  # Of ranks: returned, raised, killed...
    where: str = "after the save"  # The moment of the kill.
    seconds: float | None = None  # Until every rank had returned.
    commit_begun: bool | None = False  # `None` where nobody looked.
    commit_done: bool = False


class _Save:
    """One save by ranks that may be killed. Ends with no process left."""

    def __init__(self, campaign: Campaign, case: Case, path: Path, version: int) -> None:
        self.case = case
        self.path = path
        self.seen = Seen()
        self.watched = case.moment is not None and campaign.can_stop
        self._kill_at: str | None = None
        self._calls = 0  # Of the moment of the case.
        self._kinds: dict[int, str] = {}
        self._pipes: dict[connection.Connection, int] = {}
        self._listeners: dict[Listener, int] = {}
        self._processes: list[Any] = []
        store = (campaign.store.port, f"{campaign.next_number()}")
        for rank in range(case.world_size):
            ours, theirs = campaign.context.Pipe()
            self._pipes[ours] = rank
            process = campaign.context.Process(
                target=_save_on_a_rank,
                args=(rank, case, path, version, campaign.writer, store, self.watched, theirs),
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            if self.watched:
                if not ours.poll(START_TIMEOUT_S):
                    raise AssertionError(f"rank {rank} did not start")
                self._listeners[Listener(reduction.recv_handle(ours))] = rank

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
        folder, name = os.path.split(stop.path)
        if stop.path == str(self.path):
            return "create folder" if stop.call == "mkdir" else f"sync folder of {self._last(rank)}"
        if folder != str(self.path):
            return None
        kind = next((kind for name_, kind in _KINDS.items() if re.fullmatch(name_, name)), None)
        if kind is None:
            return None
        if stop.call == "rename":
            self._kinds[rank] = "commit"
            return "commit" if kind == "metadata" else "rename index"
        if stop.call == "create":
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

    def __enter__(self) -> _Save:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for source in [*self._pipes, *self._listeners]:
            source.close()


class Campaign:
    """Kills saves in one directory after another. Owned by one thread; prints nothing.

    Every directory sees several saves, so that most of them replace a checkpoint, and some find
    what one or more killed ones have left behind.
    """

    def __init__(
        self, directory: Path, seed: int, *, writer: str = "fast", victims: str = "any"
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.writer = writer
        self.victims = victims
        self.can_stop = can_stop()
        self.tally: Counter[tuple[str, str]] = Counter()
        self.breaches: list[str] = []
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.context = get_context("forkserver")
        # What DTensor imports when it is first used takes seconds.
        self.context.set_forkserver_preload(["torch._dynamo", "kills"])
        self._numbers = itertools.count()
        self._usual_s = 0.1  # What a save takes.
        self._path = directory / "first"
        self._held: tuple[int, Case] | None = None  # What is committed there.

    def next_number(self) -> int:
        """A number that was never given out."""
        return next(self._numbers)

    def run(self, kills: int, moments: Sequence[str] | None = None) -> None:
        """Kills so often, at the given moments or at all kinds of them."""
        rng = random.Random(self.seed)
        if moments is None:
            deck = _deck(rng, MOMENTS if self.can_stop else [])
        else:
            deck = itertools.cycle(moments)
        with mock.patch.dict(os.environ, _environment()):
            for number in range(kills):
                case = draw_case(rng, next(deck), self.victims)
                if rng.random() < 0.15 or case.moment == "create folder":
                    self._path, self._held = self.directory / f"{number}", None
                save_after, by_ranks = rng.random() < 0.7, rng.random() < 0.3
                try:
                    self._prepare(case)
                    self._kill_once(case)
                    if save_after:
                        self._save(case, by_ranks=by_ranks)
                except AssertionError as error:
                    self.breaches.append(f"kill {number} of seed {self.seed}, {case}: {error}")
                    self._path, self._held = self.directory / f"{number}-anew", None

    def report(self) -> str:
        """The tally as a table, and the breaches."""
        outcomes = ["nothing", "old", "new"]
        rows = [f"{'killed before':<26}" + "".join(f"{name:>9}" for name in outcomes)]
        order = [*MOMENTS, *(where for where, _ in sorted(self.tally) if where not in MOMENTS)]
        for where in dict.fromkeys(order):
            counts = [self.tally[where, outcome] for outcome in outcomes]
            if any(counts):
                rows.append(f"{where:<26}" + "".join(f"{count:>9}" for count in counts))
        rows.append(f"{self.tally.total()} kills, seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join(rows + self.breaches)

    def _prepare(self, case: Case) -> None:
        """Sees to it that there is something to remove, where that is the moment."""
        if case.moment is None or not case.moment.startswith("remove"):
            return
        if self._held is None:
            self._save(case, by_ranks=False)
        (self._path / ".metadata.0123456789abcdef.tmp").write_bytes(b"of a save that was killed")
        (self._path / ".index.0123456789abcdef").write_bytes(b"of a save that was killed")

    def _kill_once(self, case: Case) -> None:
        version = self.next_number()
        with _Save(self, case, self._path, version) as save:
            seen = save.run(kill=True, usual_s=self._usual_s)
        candidates = dict(filter(None, [self._held, (version, case)]))
        found = self._in_a_process(_find, self._path, candidates)
        old = None if self._held is None else self._held[0]
        allowed = {old, version}
        if seen.commit_done or "returned" in seen.outcome.values():
            allowed = {version}
        elif seen.commit_begun is False:
            allowed = {old}
        what = f"{seen} found {found}, not one of {allowed} (old: {old}, new: {version})"
        assert len(set(found.values())) == 1, what
        assert set(found.values()) <= allowed, what
        assert "ready" not in seen.outcome.values(), f"a survivor hangs: {seen}"
        if version in found.values():
            self._held = (version, case)
            outcome = "new"
        else:
            outcome = "nothing" if old is None else "old"
        self.tally[seen.where, outcome] += 1

    def _save(self, case: Case, *, by_ranks: bool) -> None:
        """Saves without a kill, and asserts that nothing is left of whatever was there."""
        version = self.next_number()
        if by_ranks:
            with _Save(self, replace(case, moment=None), self._path, version) as save:
                seen = save.run(kill=False, usual_s=self._usual_s)
            assert seen.seconds is not None, f"the save after the kill failed: {seen}"
            self._usual_s += 0.3 * (seen.seconds - self._usual_s)
        found = self._in_a_process(_find, self._path, {version: case}, version, not by_ranks)
        assert set(found.values()) == {version}, f"the save after the kill left {found}"
        self._held = (version, case)

    def _in_a_process(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function(*args)`` returns in a fresh process."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_answer, args=(theirs, function, args))
        process.start()
        theirs.close()
        try:
            assert ours.poll(CHECK_TIMEOUT_S), f"{function.__name__} hangs"
            ok, answer = ours.recv()
        except EOFError:
            raise AssertionError(f"{function.__name__} ended without a word") from None
        finally:
            process.kill()
            process.join()
            ours.close()
        assert ok, answer
        return answer


def _deck(rng: random.Random, moments: Sequence[str]) -> Iterator[str | None]:
    """Each moment as often as any other, in random order, and as many kills at random as all."""
    while True:
        cards = [*moments, *[None] * max(len(moments), 1)]
        rng.shuffle(cards)
        yield from cards


def _environment() -> dict[str, str]:
    folders = [str(ROOT / "tests" / "dist"), str(ROOT), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }


def _be_quiet_and_mortal() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _save_on_a_rank(
    rank: int,
    case: Case,
    path: Path,
    version: int,
    writer: str,
    store: tuple[int, str],
    watched: bool,
    pipe: connection.Connection,
) -> None:
    """A rank: says ``ready``, waits, saves, says how that went."""
    _be_quiet_and_mortal()
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
        path, case.single_file_per_rank, sync_files=True, thread_count=case.thread_count
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


def _answer(
    pipe: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _be_quiet_and_mortal()
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _find(
    path: Path, candidates: dict[int, Case], save: int | None = None, alone: bool = False
) -> dict[str, int | None]:
    """The version that each reader finds, which is exactly that version.

    Args:
        path: Of the checkpoint.
        candidates: Versions that may be there.
        save: One that has been saved without harm, so that nothing else may be in the directory.
        alone: Whether it is for this process to save it.
    """
    if save is not None and alone:
        dcp.save(candidates[save].whole(save), storage_writer=FastWriter(path), no_dist=True)
    found: dict[str, int | None] = {}
    for name, reader in READERS.items():
        state: dict[str, Any] = {"version": -1}
        try:
            dcp.load(state, storage_reader=reader(path), no_dist=True)
        except CheckpointException:
            if (path / ".metadata").exists():
                raise
            found[name] = None
            continue
        version = found[name] = state["version"]
        assert version in candidates, f"{name} found {version}, not one of {[*candidates]}"
        case = candidates[version]
        loaded = dict.fromkeys(case.whole(version))
        loaded |= {key: torch.zeros_like(case.value(key, version)) for key in case.tensors}
        loaded["notes"] = {"of": [""] * 100, "more": b""}
        dcp.load(loaded, storage_reader=reader(path), no_dist=True)
        assert_same(loaded, case.whole(version))
    if save is not None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        referred = {info.relative_path for info in metadata.storage_data.values()}
        there = {file.name for file in path.iterdir()}
        assert there == referred | {".metadata", ".index"}, f"left behind: {there - referred}"
    return found


def main() -> int:
    """Runs a campaign and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--dir", help="where checkpoints go; a temporary folder by default")
    parser.add_argument("--writer", choices=WRITERS, default="fast")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-kills-", dir=options.dir) as folder:
        campaign = Campaign(Path(folder), options.seed, writer=options.writer)
        campaign.run(options.kills)
    print(campaign.report())
    print(f"{time.monotonic() - begin:.0f} s")
    if not campaign.can_stop:
        print("kills at random moments only: no system calls can be stopped here")
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    # So that ranks find its functions under the name that the server has imported.
    import kills

    sys.exit(kills.main())
