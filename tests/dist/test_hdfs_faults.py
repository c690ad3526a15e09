"""Bad days of HDFS: ranks, the NameNode and the DataNode killed, jobs against each other."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forks import Forks
from ranks import Worlds
from store_kills import save_on_a_rank
from support.hdfs_server import Hdfs
from support.store_campaigns import LARGE, SMALL, assert_only_one, cause_of, loaded, save, state_of

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run
from torch_ckpt.cli.main import main
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.process_state import PROCESS

pytest.importorskip("hdfs_native")

import hdfs_native

from torch_ckpt.filesystems import hdfs_client

pytestmark = [pytest.mark.framework("hdfs_native"), pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 60.0
SAVE_S = 120.0


class Kills:
    """Two ranks save; some of them, or a node of HDFS, are killed at a moment of it.

    Attributes:
        breaches: What must not be.
        found: Which version was there afterwards, and how the save ended for the ranks that lived.
    """

    def __init__(self, server: Hdfs, folder: str, rng: random.Random) -> None:
        self.server, self.folder, self.rng = server, folder, rng
        self.breaches: list[str] = []
        self.found: list[tuple[int | None, tuple[str, ...]]] = []
        self._forks = Forks()
        self._usual_s: dict[int, float] = {}  # Rows -> what a save takes.

    def run(self, count: int, kill: Callable[[list[int], random.Random], None]) -> None:
        """Kills so often. ``kill`` gets the numbers of the ranks' processes."""
        for number in range(count):
            rows = LARGE if number % 2 else SMALL
            if rows not in self._usual_s:
                self._save(f"{self.folder}/usual-{rows}", rows, lambda _: None)
                began = time.monotonic()
                self._save(f"{self.folder}/usual-{rows}", rows, lambda _: None)
                self._usual_s[rows] = time.monotonic() - began
            self._case(f"{self.folder}/{number}", rows, 1 if number % 3 else None, kill)

    def _case(
        self,
        url: str,
        rows: int,
        former: int | None,
        kill: Callable[[list[int], random.Random], None],
    ) -> None:
        moment_s = self.rng.uniform(0, self._usual_s[rows])

        def strike(ranks: list[int]) -> None:
            time.sleep(moment_s)
            kill(ranks, self.rng)

        if former:
            save(url, former, rows)
        outcomes = self._save(url, rows, strike)
        what = f"{url}: {rows} rows, former {former}, killed after {moment_s:.3f} s, {outcomes}"
        PROCESS.file_systems.clear()
        version: int | None = None
        try:
            version = loaded(url, rows)
        except BaseException as error:
            if isinstance(error, AssertionError) or "no checkpoint" not in str(cause_of(error)):
                self.breaches.append(f"{what}: {cause_of(error)}")
        self.found.append((version, outcomes))
        if version not in (former, 2) or ("returned" in outcomes and version != 2):
            self.breaches.append(f"{what}: version {version} is there")
        if "hangs" in outcomes:
            self.breaches.append(f"{what}: a rank hangs")
        try:
            save(url, 3, rows)
            assert loaded(url, rows) == 3
            assert_only_one(url)
        except BaseException as error:
            self.breaches.append(f"{what}: the next save: {cause_of(error)!r}")

    def _save(self, url: str, rows: int, strike: Callable[[list[int]], None]) -> tuple[str, ...]:
        store = self._forks.store.port, str(self._forks.next_number())
        variables = self.server.environment()
        ranks = [
            self._forks.start(save_on_a_rank, rank, 2, store, variables, url, rows)
            for rank in range(2)
        ]
        try:
            for _, pipe in ranks:
                assert pipe.poll(START_S), "a rank does not start"
                assert pipe.recv() == "ready"
            for _, pipe in ranks:
                pipe.send("go")
            strike([process.pid for process, _ in ranks])
            deadline = time.monotonic() + SAVE_S
            outcomes = []
            for _, pipe in ranks:
                try:
                    answers = pipe.poll(max(deadline - time.monotonic(), 0))
                    outcomes.append(str(pipe.recv()) if answers else "hangs")
                except (EOFError, ConnectionResetError):
                    outcomes.append("killed")
            return tuple(outcomes)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def test_kills_of_ranks(hdfs_server: Hdfs, hdfs_url: str, seed: int) -> None:
    """The old checkpoint or the new one is there, and the next save leaves no other file."""

    def kill(ranks: list[int], rng: random.Random) -> None:
        for victim in rng.choice([(0,), (1,), (0, 1)]):
            os.kill(ranks[victim], signal.SIGKILL)

    campaign = Kills(hdfs_server, hdfs_url, random.Random(seed))
    campaign.run(20, kill)
    assert not campaign.breaches, "\n".join(campaign.breaches)
    assert {version for version, _ in campaign.found} > {1}, campaign.found


@pytest.mark.parametrize("node", ["name_node", "data_node"])
def test_kills_of_a_node(hdfs_server: Hdfs, hdfs_url: str, seed: int, node: str) -> None:
    """It is started again at once. The save succeeds, or fails with an error."""

    def kill(ranks: list[int], rng: random.Random) -> None:
        hdfs_server.restart(node)

    campaign = Kills(hdfs_server, hdfs_url, random.Random(seed))
    campaign.run(6, kill)
    assert not campaign.breaches, "\n".join(campaign.breaches)
    print(campaign.found)


# ---- Jobs against each other ----


def test_of_jobs_that_replace_one_version_one_does_it(hdfs_url: str) -> None:
    """Also where no one was there before."""
    path = hdfs_url.removeprefix("hdfs://") + "/file"
    clients = [hdfs_client.HdfsClient("hdfs") for _ in range(4)]
    for client in clients:
        client.list(path)  # Connects.
    version = ""
    with ThreadPoolExecutor(len(clients)) as threads:
        for number in range(20):
            gate = threading.Barrier(len(clients))

            def put(client: hdfs_client.HdfsClient, contents: bytes) -> int | None:
                gate.wait(10)  # noqa: B023
                try:
                    client.put(path, contents, version)  # noqa: B023
                except StorageError as error:
                    return error.errno
                return 0

            written = [f"{number} of {job}".encode() for job in range(len(clients))]
            outcomes = list(threads.map(put, clients, written))
            assert sorted(map(str, outcomes)) == sorted(map(str, [0, *[errno.EEXIST] * 3]))
            _, version, _, found = clients[0].find(path, 100)
            assert found == written[outcomes.index(0)]
    assert clients[0].list(path.rpartition("/")[0]) == ["file"]


def test_a_job_that_died_while_it_replaced_a_file_excludes_others_for_seconds(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_client, "_CLAIM_S", 2.0)
    path = hdfs_url.removeprefix("hdfs://") + "/file"
    client = hdfs_client.HdfsClient("hdfs")
    client.put(path, b"1", None)
    _, version, _, _ = client.find(path, 0)

    version_of = client._version_of
    with monkeypatch.context() as patched:

        def die(at: hdfs_native.Client, key: str) -> str:
            if key.endswith("/file"):  # After the claim of its version, before the rename.
                raise SystemExit
            return version_of(at, key)

        patched.setattr(client, "_version_of", die)
        patched.setattr(client, "_call", _all_but_deletes(client._call))
        with pytest.raises(SystemExit):
            client.put(path, b"2", version)
    (left,) = set(client.list(path.rpartition("/")[0])) - {"file"}
    assert left.startswith(PENDING)
    began = time.monotonic()
    client.put(path, b"3", version)
    assert 2 <= time.monotonic() - began < 5
    assert client.find(path, 10)[3] == b"3"
    assert client.list(path.rpartition("/")[0]) == ["file"]


def _all_but_deletes(call: Callable[..., object]) -> Callable[..., object]:
    """The calls of a process that is killed before it cleans up."""
    return lambda what, *rest: None if what.__name__ == "delete" else call(what, *rest)


# ---- What a user gets wrong ----


def failure(variables: dict[str, str], url: str) -> tuple[str, float]:
    """What a rank gets from a save, and after how many seconds."""
    os.environ.update(variables)
    PROCESS.file_systems.clear()
    began = time.monotonic()
    try:
        torch_ckpt.save(state_of(1), storage_writer=FastWriter(url), timeout_s=60)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", 0.0


WRONG = {
    "port": ({}, "127.0.0.1:9", "refused"),
    "host": ({}, "no-such-host.invalid:8020", "lookup"),
    "service": ({}, "no-such-service", "No NameNode hosts found"),
    "user": ({"HADOOP_USER_NAME": "alice"}, "", "Permission denied: user=alice"),
    "safe mode": ({}, "", "safe mode"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_to_all_ranks_soon(
    worlds: Worlds, hdfs_server: Hdfs, hdfs_url: str, what: str
) -> None:
    changed, host, reason = WRONG[what]
    variables = hdfs_server.environment() | changed
    url = f"hdfs://{host}/run" if host else f"{hdfs_url}/run"
    if what == "safe mode":
        hdfs_server.set_safe_mode("enter")
    try:
        found = worlds.run(2, failure, variables, url, timeout_s=60)
    finally:
        if what == "safe mode":
            hdfs_server.set_safe_mode("leave")
    for text, seconds in found:
        assert "StorageError" in text, text
        assert reason in text, text
        assert url.removesuffix("/run") in text, text
        assert str(hdfs_server.conf) in text, text
        assert seconds < 10, text


# ---- Names ----


def test_what_a_process_has_replaced_or_removed_is_not_read_any_more(hdfs_url: str) -> None:
    """The client remembers where the blocks of files are, and DataNodes keep them for a while."""
    client = hdfs_client.HdfsClient("hdfs")
    folder = hdfs_url.removeprefix("hdfs://")
    file, other = f"{folder}/file", f"{folder}/other"

    def contents() -> bytes:
        return bytes(client.get(file, 0, 3))

    for text in (b"one", b"two"):
        client.put(file, text, None)
        assert contents() == text
    client.put_stream(file, 2, iter([b"th", b"r"]))
    assert contents() == b"thr"
    client.put(other, b"six", None)
    client.copy(other, file)
    assert contents() == b"six"
    for remove in (lambda: client.remove(file), lambda: client.remove_all(folder)):
        remove()
        with pytest.raises(NotFoundError):
            contents()
        client.put(file, b"new", None)
        assert contents() == b"new"


def test_a_place_has_several_urls(hdfs_server: Hdfs, hdfs_url: str) -> None:
    """By its NameNode, as the default file system, and by mount tables."""
    save(hdfs_url, 1)
    name = hdfs_url.rpartition("/")[2]
    for other in ("hdfs:///tests", "viewfs://table/linked", "viewfs://table/tests"):
        assert loaded(f"{other}/{name}") == 1
        save(f"{other}/{name}", 1)
        assert_only_one(f"{other}/{name}")


def test_an_empty_directory_is_no_step(
    hdfs_server: Hdfs, hdfs_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of HDFS outlive their files."""
    run = f"{hdfs_url}/run"
    client = hdfs_native.Client(hdfs_server.endpoint)
    for step in (0, 7):
        client.mkdirs(f"/tests/{hdfs_url.rpartition('/')[2]}/run/step-{step}", 0o755, True)
    state = state_of(-1)
    with Run(run, keep_last=1) as made:
        assert made.restore(state) is None
        assert main(["ls", run]) == 0
        assert capsys.readouterr().out == ""  # A removed step may be such a directory.
        for step in (1, 8):
            made.save(step, state_of(step))
        assert made.restore(state) == 8
    assert main(["ls", run]) == 0
    assert re.findall(r"^ +(\d+) ", capsys.readouterr().out, re.M) == ["8"]
    assert Location(run).names() == ["step-8"]


def test_a_user_without_rights_loads_what_others_wrote(
    hdfs_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path below a file does not exist, though the NameNode says that it is forbidden."""
    save(f"{hdfs_url}/step", 1)
    Location(f"{hdfs_url}/file").write(b"1", sync=True)
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    PROCESS.file_systems.clear()
    assert loaded(f"{hdfs_url}/step") == 1
    assert not Location(f"{hdfs_url}/file/.metadata").exists()
    with pytest.raises(StorageError) as raised:
        Location(f"{hdfs_url}/file").remove()
    assert raised.value.errno == errno.EACCES


# ---- Calls of the NameNode ----


def test_a_save_of_many_tensors_makes_as_many_calls_as_one_of_few(
    hdfs_server: Hdfs, hdfs_url: str
) -> None:
    """And a load, whose tensors lie in one file."""
    calls = []
    for count in (3, 3000):
        state = {f"t{number}": torch.full((5,), number) for number in range(count)}
        save_of(hdfs_url, state)  # The next one replaces it.
        before = hdfs_server.calls()
        save_of(hdfs_url, state)
        saved = hdfs_server.calls()
        torch_ckpt.load(state, storage_reader=FastReader(hdfs_url), no_dist=True)
        calls.append((saved - before, hdfs_server.calls() - saved))
    for counted in (calls[0][0], calls[1][0]):  # The library asks until the block is reported.
        assert 4 <= counted.pop("Complete") <= 12
    assert calls[0] == calls[1]
    saves, loads = calls[0]
    print(saves, loads)
    assert saves["Create"] == 4, "data, pending, index, metadata"
    assert saves.total() <= 40, saves
    assert loads.total() <= 8, loads


def save_of(url: str, state: dict[str, object]) -> None:
    torch_ckpt.save(state, storage_writer=FastWriter(url), no_dist=True)
