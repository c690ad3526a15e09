"""Kills publishers, subscribers and stores, damages files, and asks each time: is it one version?

``PYTHONPATH=tests python tests/dist/publish_kills.py --kills 200 --seed 7`` prints how often each
kind of fault was met and what was found then, and ends with 1 if a single value was wrong, a
version was mixed, or a refusal did not name what it refused.

Publishers of 1 to 3 ranks are killed at random moments, and before a random change of a file
(`syscalls`). Subscribers are killed in the middle of a tensor, and a successor finds their memory.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from forks import Forks
from killed_publishes import (
    OPTIONS,
    PUBLISH_S,
    Killed,
    Memory,
    policy,
    process_that_updates,
    published_policy,
    rank_that_publishes,
)
from support.published import Engine
from support.store_proxy import Fault, Request, StoreProxy
from support.store_server import SeaweedFS, StoreServer, reaching
from support.tensors import bits
from syscalls import can_stop

from torch_ckpt import Publisher, Subscriber
from torch_ckpt.errors import CheckpointError, SupersededError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.examination import damage_of
from torch_ckpt.publishing.version_files import committed_versions, listed_versions, read_version

KINDS = ["publisher", "publisher", "subscriber", "damage", "damage", "base", "superseded"]
STORE_KINDS = ["store", "store", "answers"]
NAMED = re.compile(r"version-\d|version \d|latest\.json|'(matrix|long|all|still|numbers|scalar)'")


class Campaign:
    """Makes faults in one directory of versions after another. Owned by one thread.

    Some subscribers remain for all of a directory's faults, and get deltas; others are new. After
    each fault, all that update have the values of one version, which is there as a whole.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.seed = seed
        self.tally: Counter[tuple[str, str]] = Counter()
        self.breaches: list[str] = []
        self._directory = directory
        self._rng = random.Random(seed)
        self._forks = Forks()
        self._usual: dict[int, tuple[float, int]] = {}  # Ranks -> seconds and changes of files.
        self._training: Publisher | None = None  # The one that publishes without faults.
        self._begin("first")

    def run(self, kills: int, kinds: Sequence[str] = KINDS) -> None:
        """Makes so many faults."""
        deck: list[str] = []
        for number in range(kills):
            if not deck:
                deck = [*kinds]
                self._rng.shuffle(deck)
            kind = deck.pop()
            if self._rng.random() < 0.1:
                self._begin(f"{number}")
            try:
                self.tally[getattr(self, f"_fault_of_{kind}")()] += 1
                self._check()
                if self._rng.random() < 0.5:
                    self._publish(1)
                    self._check_files()
                    self._check()
            except (AssertionError, CheckpointError) as error:
                self.breaches.append(f"fault {number} of seed {self.seed}, {kind}: {error!r}")
                self._begin(f"{number}-anew")

    def report(self) -> str:
        """The tally as a table, and the breaches."""
        rows = [
            f"{kind:<34}{outcome:<30}{n:>5}" for (kind, outcome), n in sorted(self.tally.items())
        ]
        rows.append(f"{self.tally.total()} faults, seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join([*rows, *self.breaches])

    # ---- The versions, and who has them ----

    def _begin(self, name: str) -> None:
        """Begins with a directory without versions."""
        self._end_training()
        self._root = self._new_root(name)
        self._tried: defaultdict[int, set[int]] = defaultdict(set)  # Version -> salts.
        self._committed = 0  # The newest version that must be there.
        like = published_policy(0, 0)
        self._followers = [
            (Subscriber(self._root), Engine(like, number, count, dim))
            for number, count, dim in ((0, 1, 0), (1, 2, 0), (1, 3, 1))
        ]
        self._publish(2)

    def _new_root(self, name: str) -> str:
        return str(self._directory / name)

    def _publish(self, count: int) -> list[int]:
        """Publishes so many versions without a fault."""
        versions, salt = self._next(count)
        if self._training is None:
            self._training = self._new_training()
        for version in versions:
            self._training.publish(version, policy(version, salt))
        self._training.wait()
        self._committed = versions[-1]
        return versions

    def _new_training(self) -> Publisher:
        return Publisher(self._root, record=False, timeout_s=60, **OPTIONS)

    def _end_training(self) -> None:
        """Lets another publisher publish next."""
        if self._training is not None:
            self._training.close()
        self._training = None

    def _next(self, count: int) -> tuple[list[int], int]:
        first = max([0, *committed_versions(Location(self._root))]) + self._rng.randint(1, 2)
        versions, salt = list(range(first, first + count)), self._forks.next_number()
        for version in versions:
            self._tried[version].add(salt)
        return versions, salt

    def _assert_is(self, version: int, engine: Engine | Memory) -> None:
        """Checks that all tensors have the values of one version, bit for bit."""
        for salt in sorted(self._tried[version], reverse=True):
            state = published_policy(version, salt)
            if isinstance(engine, Memory):
                if engine.values() == {name: bits(value) for name, value in state.items()}:
                    break
                continue
            with contextlib.suppress(AssertionError):
                engine.assert_has(state)
                break
        else:
            raise AssertionError(f"the tensors have not the values of version {version}")
        self._tried[version] = {salt}  # It never changes.

    def _check(self) -> None:
        """Checks that each subscriber finds one version as a whole, which is new enough."""
        newest = Subscriber(self._root).latest() or 0
        assert newest >= self._committed, f"{newest} is the newest, and was {self._committed}"
        for worker, engine in self._followers:
            if self._rng.random() < 0.6:
                found = worker.update(engine.tensors)
                assert found == newest, f"an update returned {found}, and {newest} is the newest"
                assert not worker.refused, worker.refused
                self._assert_is(found, engine)
        self._committed = newest
        if self._rng.random() < 0.2:
            for version in committed_versions(Location(self._root)):
                damage = damage_of(Location(self._root), version)
                assert not damage, f"version {version}: {damage}"

    def _check_files(self) -> None:
        """Checks that nothing is left of what has failed, once a version was published since."""
        root = Location(self._root)
        assert self._listed() == committed_versions(root), self._listed()
        for number in committed_versions(root):
            version = read_version(root, number)
            found = {name for name in (root / f"version-{number}").names() if "rank-" in name}
            assert found == {file.name for file in version.files}, f"version {number}: {found}"

    def _listed(self) -> list[int]:
        return listed_versions(Location(self._root))

    def _tries(self, worker: Subscriber, engine: Engine, version: int | None = None) -> str:
        """Updates where something is wrong: gets right values, or refuses by name without harm."""
        before, own, refusal = engine.values(), worker.version, ""
        try:
            found = worker.update(engine.tensors, version)
        except CheckpointError as error:
            refusal = str(error)
        if refusal:
            assert engine.values() == before, f"a refused update changed tensors: {refusal}"
            assert worker.version == own, f"a refused update changed the version: {refusal}"
            assert NAMED.search(refusal), f"the refusal names nothing: {refusal}"
            return "refused"
        self._assert_is(found, engine)
        for text in worker.refused.values():
            assert NAMED.search(text), f"the refusal names nothing: {text}"
        return "some refused" if worker.refused else "right values"

    # ---- Faults ----

    def _fault_of_publisher(self) -> tuple[str, str]:
        """Kills ranks of a publisher."""
        rng = self._rng
        self._end_training()
        world, before = rng.choice([1, 2, 2, 3]), self._committed
        doomed = [tuple(range(world)), (0,), (world - 1,)]
        victims = doomed[rng.choice([0, 0, 1, 2])]
        versions, salt = self._next(rng.choice([1, 2, 3]))
        seconds, changes = self._usual.get(world, (0.5, 100))
        watched = can_stop() and rng.random() < 0.6
        kill_at = rng.randrange(changes) if watched else None
        grid = rng.choice(["plain", "rows", "columns", "replicas"])
        store = (self._forks.store.port, str(self._forks.next_number()))
        calls: list[tuple[Any, ...]] = [
            (rank, world, store, {}, self._root, grid, versions, salt, watched)
            for rank in range(world)
        ]
        with Killed(self._forks, rank_that_publishes, calls) as publish:
            begin = time.monotonic()
            publish.go(victims, kill_at)
            if not watched:
                publish.until(publish.is_over, rng.uniform(0, 1.1) * seconds)
                publish.kill("a random moment")
            is_patient = len(victims) == world or rng.random() < 0.3
            publish.until(publish.is_over, PUBLISH_S if is_patient else 0.2)
            if is_patient:
                assert publish.is_over(), f"a survivor hangs: {publish.outcome}"
            if set(publish.outcome.values()) == {"returned"}:
                taken = (time.monotonic() - begin, publish.changes or changes)
                self._usual[world] = taken
        self._committed = publish.reached or before
        newest = Subscriber(self._root).latest() or 0
        outcome = "old version" if newest == before else "new version"
        return f"publisher, {publish.where}", outcome

    def _fault_of_subscriber(self) -> tuple[str, str]:
        """Kills a served model in the middle of a tensor, and perhaps its successor as well."""
        rng, file = self._rng, self._directory / f"memory-{self._forks.next_number()}"
        begin: int | None = self._committed
        self._publish(rng.randint(1, 2))
        deaths = rng.choice([1, 1, 2])
        for _ in range(deaths):
            arguments = (self._root, file, begin, stops_at := rng.randrange(7))
            with Killed(self._forks, process_that_updates, [arguments]) as update:
                update.go((0,))
                update.until(lambda: update.outcome[0] != "ready", PUBLISH_S)
                assert update.outcome[0] != "ready", "an update hangs"
                update.kill("")
            if rng.random() < 0.7:
                begin = None  # The successor does not know what the memory has.
            if rng.random() < 0.3:
                self._publish(1)
        memory, worker = Memory(file), Subscriber(self._root)
        self._assert_is(worker.update(memory.tensors), memory)
        file.unlink()
        where = "after the update" if stops_at > 5 else "within an update"
        return f"subscriber, {where}", f"brought right after {deaths}"

    def _fault_of_damage(self) -> tuple[str, str]:
        """Damages a file of a version."""
        rng = self._rng
        files = [file for file in Path(self._root).rglob("*") if file.is_file()]
        files = [file for file in files if file.stat().st_size]
        files = [file for file in files if re.search(r"version-\d+/|latest\.json", str(file))]
        file = rng.choice(files)
        contents = file.read_bytes()
        how = rng.choice(["changed", "changed", "changed", "shorter", "longer", "removed"])
        found = bytearray(contents)
        if how == "changed":
            for _ in range(rng.randint(1, 3)):
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        elif how == "shorter":
            del found[rng.randrange(len(found)) :]
        else:
            found += os.urandom(rng.randint(1, 5000))
        file.write_bytes(found) if how != "removed" else file.unlink()
        fresh = (
            Subscriber(self._root),
            Engine(published_policy(0, 0), *rng.choice([(0, 1), (2, 3)])),
        )
        number = re.search(r"version-(\d+)/", str(file))
        wanted = int(number[1]) if number and rng.random() < 0.5 else None
        outcomes = {self._tries(*fresh, wanted)}
        outcomes |= {self._tries(*follower) for follower in self._followers}
        file.write_bytes(contents)
        kind = re.sub(r"-\d+-[0-9a-f]+|-\d+-of-\d+", "", file.name)
        return f"damage, {kind} {how}", " / ".join(sorted(outcomes))

    def _fault_of_base(self) -> tuple[str, str]:
        """Gives a subscriber tensors that are not of the version that it has."""
        rng = self._rng
        worker, engine = rng.choice(self._followers)
        worker.update(engine.tensors)
        name = rng.choice(["matrix", "long", "all", "numbers"])
        how = rng.choice(["changed", "older", "foreign"])
        value = engine.tensors[name]
        tensor = value[2] if isinstance(value, tuple) else value
        older = tensor.clone()
        self._publish(rng.randint(1, 2))
        if how == "changed":
            tensor.view(torch.uint8)[..., rng.randrange(tensor.itemsize)] ^= 1
        elif how == "older":
            worker.update(engine.tensors)
            tensor.copy_(older)
            self._publish(1)
        else:  # As another directory's version with the same number has it.
            state = published_policy(worker.version or 0, -1)[name].to(tensor.dtype)
            at = value[1] if isinstance(value, tuple) else (0,) * tensor.dim()
            for dim, (begin, size) in enumerate(zip(at, tensor.size(), strict=True)):
                state = state.narrow(dim, begin, size)
            tensor.copy_(state)
        line = [number for number, _ in read_version(Location(self._root), self._committed).line]
        expected = "some refused" if worker.version in line else "right values"
        outcome = self._tries(worker, engine)
        assert outcome == expected, f"{name} was {how}: {outcome}, and not {expected}"
        names = {name, *(("tied", "matrix") if name == "matrix" else ())}
        assert set(worker.refused) <= names, f"{name} was {how}: {worker.refused}"
        return f"base, {how}", outcome

    def _fault_of_superseded(self) -> tuple[str, str]:
        """Lets a publisher go on after another one has begun, and puts its version elsewhere."""
        rng = self._rng
        versions, salt = self._next(3)
        self._end_training()
        older = self._new_training()
        older.publish(versions[0], policy(versions[0], salt))
        if rng.random() < 0.5:
            older.wait()
        # Both may write and remove files of one version, so that either fails, and tries again.
        failures: list[str] = []
        while len(failures) < 4:
            try:
                self._publish(1)
                break
            except CheckpointError as error:
                failures.append(str(error))
        assert len(failures) < 4, f"the newer publisher fails: {failures}"
        assert all(map(NAMED.search, failures)), f"a failure names nothing: {failures}"
        refusals: list[CheckpointError] = []
        for version in versions[1:]:
            try:
                older.publish(version, policy(version, salt))
                older.wait()
            except CheckpointError as error:
                refusals.append(error)
        assert isinstance(refusals[-1], SupersededError), f"an older publisher: {refusals}"
        assert all(self._root in str(error) for error in refusals), f"unnamed: {refusals}"
        with contextlib.suppress(SupersededError):
            older.close()
        return "superseded publisher", "refused"


def has_objects(path: Location) -> bool:
    """Whether there is an object in a folder of a store, or in one inside."""
    inner = [path / name for name in path.names()]
    return any(each.exists() or has_objects(each) for each in inner)


class StoreCampaign(Campaign):
    """Makes faults of an S3 server under publishers and subscribers."""

    def __init__(self, directory: Path, seed: int, server: StoreServer, proxy: StoreProxy) -> None:
        self._server, self._proxy = server, proxy
        self._requests = 60  # Of a publish.
        super().__init__(directory, seed)

    def _new_root(self, name: str) -> str:
        return f"s3://{self._server.bucket}/{self._directory.name}-{self.seed}/{name}"

    def _listed(self) -> list[int]:
        """The versions with any object: SeaweedFS shows empty folders as well."""
        root = Location(self._root)
        return [each for each in super()._listed() if has_objects(root / f"version-{each}")]

    def _fault_of_store(self) -> tuple[str, str]:
        """Has the store fail at a request of a publish."""
        rng = self._rng
        self._end_training()
        world, before = rng.choice([1, 2]), self._committed
        how = rng.choice(["killed", "paused", "reset", "lose", "status"])
        versions, salt = self._next(rng.choice([1, 2]))
        store = (self._forks.store.port, str(self._forks.next_number()))
        variables = self._server.environment(self._proxy.endpoint)
        calls: list[tuple[Any, ...]] = [
            (rank, world, store, variables, self._root, "plain", versions, salt, False)
            for rank in range(world)
        ]
        at = rng.randrange(self._requests)
        with Killed(self._forks, rank_that_publishes, calls) as publish:
            self._proxy.forget()
            if how in ("reset", "lose", "status"):
                kind: Any = how
                self._proxy.add(Fault(kind, skip=at, times=rng.choice([1, 2, 40])))
            else:
                self._proxy.add(Fault("delay", skip=at, times=1, when=self._fail(how, at)))
            publish.go()
            is_over = publish.until(publish.is_over, 3 * PUBLISH_S)
            assert is_over, f"a publisher hangs: {publish.outcome}"
            self._requests = max(len(self._proxy.requests), 20)
        self._proxy.forget()
        self._committed = publish.reached or before
        newest = Subscriber(self._root).latest() or 0
        raised = any(str(told).startswith("raised") for told in publish.outcome.values())
        what = "new" if newest > before else "old"
        return f"store, {how}", f"{what} version, {'raised' if raised else 'returned'}"

    def _fail(self, how: str, at: int) -> Callable[[Request], bool]:
        """Kills the server and starts it again, or pauses it, at a request."""

        def fail(_: Request) -> bool:
            if len(self._proxy.requests) == at + 1:
                self._proxy.requests.append(self._proxy.requests[-1])  # Only once.
                if how == "killed":
                    self._server.kill()
                    self._server.start()
                else:
                    self._server.pause()
                    time.sleep(1.0)
                    self._server.resume()
            return False

        return fail

    def _fault_of_answers(self) -> tuple[str, str]:
        """Has answers to subscribers be cut, changed, late or missing."""
        rng = self._rng
        if rng.random() < 0.7:
            self._publish(1)
        kind: Any = rng.choice(["flip", "flip", "truncate", "cut", "status", "reset", "shorten"])
        at, times = rng.random(), rng.choice([1, 2, 30])
        self._proxy.add(
            Fault(kind, ("get",), path="version-", skip=rng.randrange(6), times=times, at=at)
        )
        engines = [(0, 1), (2, 3)]
        fresh = Subscriber(self._root), Engine(published_policy(0, 0), *rng.choice(engines))
        outcomes = {self._tries(*follower) for follower in [*self._followers, fresh]}
        self._proxy.forget()
        return f"answers, {kind}", " / ".join(sorted(outcomes))


@contextlib.contextmanager
def store_campaign(folder: Path, seed: int) -> Iterator[StoreCampaign]:
    """A campaign on a server of its own."""
    with (
        SeaweedFS(folder / "server") as server,
        StoreProxy(server.endpoint, seed=seed) as proxy,
        reaching(server.environment(proxy.endpoint)),
    ):
        yield StoreCampaign(folder, seed, server, proxy)


def main() -> int:
    """Runs a campaign and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--dir", help="where versions go; a temporary folder by default")
    parser.add_argument("--store", action="store_true", help="faults of an S3 server")
    parser.add_argument("--only", choices=sorted({*KINDS, *STORE_KINDS}), help="kind of fault")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        new = tempfile.TemporaryDirectory(prefix="torch_ckpt-publish-kills-", dir=options.dir)
        folder = Path(stack.enter_context(new))
        campaign: Campaign
        if options.store:
            campaign = stack.enter_context(store_campaign(folder, options.seed))
            campaign.run(options.kills, [options.only] if options.only else STORE_KINDS)
        else:
            campaign = Campaign(folder, options.seed)
            campaign.run(options.kills, [options.only] if options.only else KINDS)
        print(campaign.report())
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    # So that processes find its functions under the name that the server has imported.
    import publish_kills

    sys.exit(publish_kills.main())
