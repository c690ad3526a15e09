"""Which cases run, and the fixtures that tests of one and of several processes share.

A commit runs a subset, ``--full`` all. ``slow`` leaves a test to ``--full``. Of a test with several
cases, a commit runs half, of each test another half. The marker ``thin(0.25)`` keeps a quarter of
them instead, ``thin(n)`` as many as cover every combination of values of any n parameters, and
``thin("a", "b")`` those of these ids. ``thin(1.0)`` keeps all, where each case is a page or a file
of the repository, or another fault. A test with a loop of its own takes the fixture ``full``.

``framework("a", "b")`` marks a test that is skipped where these modules are missing. A commit runs
those that are also marked ``small``; ``tests/check.py frameworks`` runs all, and fails if one is
skipped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import changed
import frozen
import pytest
import unsearched  # noqa: F401  # Until all tests are collected.

# Before torch is imported: as in CI, and what copies to overlapping memory leave is defined.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from forks import TEST_FOLDERS

sys.path.extend(map(str, TEST_FOLDERS))

from support.fixtures import *  # noqa: F403
from support.hdfs_server import Hdfs
from support.places import Places
from support.radosgw import RadosGateway
from support.store_proxy import StoreProxy
from support.store_server import SeaweedFS, StoreServer
from waits import until

from torch_ckpt.agent.memory import has_agent
from torch_ckpt.process_state import PROCESS

SECONDS: dict[str, float] = defaultdict(float)  # Of each file.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every case, and the slow tests")
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("framework"):
            if missing := [name for name in mark.args if not is_installed(name)]:
                reason = f"no {', '.join(missing)}: tests/check.py frameworks installs it"
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("full"):
        return
    left_out = {item for item in items if item.get_closest_marker("slow")}
    cases_of = defaultdict(list)
    for item in items:
        if item not in left_out:
            cases_of[item.nodeid.partition("[")[0]].append(item)
    for cases in cases_of.values():
        left_out |= set(cases) - set(chosen(cases))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    frozen.search_rarely()


@pytest.fixture(scope="session", autouse=True)
def _spread(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets ext4 put the directory of each test into another block group.

    In one group, each new file waits for a search among those that were removed a moment ago.
    """
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(FileNotFoundError):  # Small images lack the program.
        subprocess.run(["chattr", "+T", folder], check=False, stderr=subprocess.DEVNULL)


@functools.cache
def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    options, files = session.config.option, session.config.args
    is_of_part = options.keyword or options.full or any("::" in file for file in files)
    if not hasattr(session.config, "workerinput") and not is_of_part:
        changed.remember(SECONDS)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped") if reporter else None  # Workers have no reporter.
    if skipped and session.config.getoption("no_skips"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("skipped") and terminalreporter.config.getoption("no_skips"):
        terminalreporter.write_line("failed: no test may be skipped here", red=True)
    if began := os.environ.get("CHECK_BEGAN"):  # Set by tests/check.py.
        taken = time.time() - float(began)
        terminalreporter.write_line(f"tests/check.py took {taken / 60:.1f} min")


def chosen(cases: list[Any]) -> Iterator[pytest.Item]:
    """The cases of a test that a commit runs."""
    marker = cases[0].get_closest_marker("thin")
    wanted = marker.args if marker else (0.5,)
    if isinstance(wanted[0], str):
        named = [case for case in cases if case.callspec.id in wanted]
        assert named or len(cases) == 1, f"no case of {cases[0].nodeid} has an id among {wanted}"
        yield from named
        return
    if isinstance(wanted[0], float):
        draw = random.Random(cases[0].nodeid.partition("[")[0])
        yield from draw.sample(cases, math.ceil(wanted[0] * len(cases)))
        return
    left = {}
    for case in random.Random(0).sample(cases, len(cases)):
        values = [(name, id(value)) for name, value in case.callspec.params.items()]
        left[case] = set(itertools.combinations(values, wanted[0]))
    while any(left.values()):
        case = max(left, key=lambda each: len(left[each]))
        covered = left.pop(case)
        for missing in left.values():
            missing -= covered
        yield case


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether a campaign runs at its full length."""
    return bool(request.config.getoption("full"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test: ``TEST_SEED``, which may be ``random``, or always the test's own."""
    asked = os.environ.get("TEST_SEED", "")
    own = zlib.crc32(request.node.nodeid.encode())
    found = random.SystemRandom().randrange(2**32) if asked == "random" else int(asked or own)
    print(f"TEST_SEED={found}  # repeats {request.node.nodeid}")
    return found


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """What a test draws without a generator depends on its seed, not on the tests before it."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also formats stacks.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run."""
    return tmp_path / "run"


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options, until the test ends."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"tmpfs {len(mounted)}"
        path.mkdir()
        if os.geteuid() != 0:
            pytest.skip("only root may mount a tmpfs")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    try:
        yield mount
    finally:
        for path in filter(os.path.ismount, mounted):
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of this test alone; its agents end with it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-test-"))
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(folder))
    yield folder
    machines = [folder, *folder.glob("machine-*")]
    for lock in (lock for machine in machines for lock in machine.glob("*/*/agent.lock")):
        with contextlib.suppress(OSError, ValueError):  # It may end meanwhile.
            if has_agent(lock.parent):  # Else the number may be anybody's by now.
                pid = int(lock.read_text())
                os.kill(pid, signal.SIGABRT)  # Its stacks go to the log.
                with contextlib.suppress(AssertionError):  # It is frozen.
                    until(lambda lock=lock: not has_agent(lock.parent), 2)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # Raises if another process has started it.
        with contextlib.suppress(OSError):  # For people, where a test has failed.
            print(lock.parent, lock.with_suffix(".log").read_text(), sep="\n")
    shutil.rmtree(folder, ignore_errors=True)  # An agent may be about to do the same.


@pytest.fixture(scope="session")
def server_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[type[StoreServer]], StoreServer]]:
    """The server of a kind that all tests of this process share. It starts when first asked for."""
    servers: dict[type[StoreServer], StoreServer] = {}
    with contextlib.ExitStack() as stack:

        def server_of(kind: type[StoreServer]) -> StoreServer:
            if not kind.is_installed():
                pytest.skip(f"{kind.PROGRAM} is missing: {kind.INSTALLED_BY}")
            if kind not in servers:
                folder = tmp_path_factory.mktemp(kind.PROGRAM)
                # pytest would keep it for three runs.
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                servers[kind] = stack.enter_context(kind(folder))
            return servers[kind]

        yield server_of


@pytest.fixture(scope="session")
def store_server(
    request: pytest.FixtureRequest, server_of: Callable[[type[StoreServer]], StoreServer]
) -> StoreServer:
    """An S3 server: SeaweedFS, or that of the parameter. A test that kills it starts it again."""
    return server_of(getattr(request, "param", SeaweedFS))


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    """Folders of several file systems, and a bucket of the S3 server."""
    server = request.getfixturevalue("store_server") if SeaweedFS.is_installed() else None
    with Places(tmp_path, server) as places:
        print(f"without {places.missing}")
        yield places


def name_in_environment(server: StoreServer | Hdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the variables by which this process, and those that it starts, reach a server."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    # Clients and the processes of saves know the environment of their time.
    monkeypatch.setattr(PROCESS, "file_systems", {})
    for process in PROCESS.save_processes.values():
        process.end()


@pytest.fixture
def url_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[StoreServer], str]:
    """A place on a server that is this test's alone; the environment then names the server."""

    def url_on(server: StoreServer) -> str:
        name_in_environment(server, monkeypatch)
        return f"s3://{server.bucket}/{tmp_path.name}"

    return url_on


@pytest.fixture
def store_url(store_server: StoreServer, url_on: Callable[[StoreServer], str]) -> str:
    """A place on the S3 server that is this test's alone; the environment names the server."""
    return url_on(store_server)


@pytest.fixture(scope="session")
def radosgw_server(server_of: Callable[[type[StoreServer]], StoreServer]) -> StoreServer:
    """The object gateway of Ceph that all tests of this process share."""
    return server_of(RadosGateway)


@pytest.fixture
def radosgw_url(radosgw_server: StoreServer, url_on: Callable[[StoreServer], str]) -> str:
    """As ``store_url``, on the object gateway of Ceph."""
    return url_on(radosgw_server)


@pytest.fixture
def store_proxy(
    store_server: StoreServer, store_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Iterator[StoreProxy]:
    """A proxy before the S3 server, which the environment names in the server's place."""
    with StoreProxy(store_server.endpoint, seed=seed) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="session")
def hdfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """A NameNode and a DataNode that all tests of this process share."""
    pytest.importorskip("hdfs_native")
    if missing := Hdfs.what_is_missing():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("hdfs")
    try:
        with Hdfs(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def hdfs_url(hdfs_server: Hdfs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A place on HDFS that is this test's alone; the environment names its configuration."""
    name_in_environment(hdfs_server, monkeypatch)
    return f"hdfs://{hdfs_server.bucket}/{tmp_path.name}"
