"""Errors of the client of HDFS that need no server."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_ckpt.errors import CheckpointError, StorageError, UnsupportedError, is_damage
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

pytest.importorskip("hdfs_native")

from torch_ckpt.filesystems import hdfs_client
from torch_ckpt.filesystems.hdfs_client import HdfsClient

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a configuration that says nothing."""
    monkeypatch.setattr(PROCESS, "file_systems", {})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def configure(conf: Path, **values: str) -> None:
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in values.items()
    )
    (conf / "core-site.xml").write_text(f"<configuration>{properties}</configuration>")


def failure(url: str) -> StorageError:
    """The error of a first request, which does not take long."""
    began = time.monotonic()
    with pytest.raises(StorageError) as raised:
        Location(url).exists()
    assert time.monotonic() - began < 8
    assert f"cannot reach {url.rpartition('/run')[0]}: " in str(raised.value)
    return raised.value


@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid:8020"])
def test_a_name_node_that_is_not_there_is_reported(conf: Path, host: str) -> None:
    error = failure(f"hdfs://{host}/run")
    assert error.retriable
    assert f"HADOOP_CONF_DIR={conf}" in str(error)


def test_a_name_node_that_is_silent_is_reported(silent: str) -> None:
    assert failure(f"hdfs://{silent}/run").errno == errno.ETIMEDOUT


@pytest.mark.parametrize("host", ["no-such-service", "host:port", "host:1:2"])
def test_a_host_that_is_none_is_a_wrong_setting(
    host: str, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("HADOOP_HOME", str(conf))
    error = failure(f"hdfs://{host}/run")
    assert error.errno == errno.EINVAL
    assert f"HADOOP_HOME={conf}" in str(error)


def test_a_broken_configuration_is_a_wrong_setting(conf: Path) -> None:
    (conf / "core-site.xml").write_text("<configuration>")
    assert failure("hdfs://127.0.0.1:9/run").errno == errno.EINVAL


def test_the_default_file_system_and_a_name_service_are_those_of_the_configuration(
    conf: Path,
) -> None:
    """The errors are those of connections, so the addresses were found."""
    names = {"dfs.ha.namenodes.cluster": "a", "dfs.namenode.rpc-address.cluster.a": "127.0.0.1:9"}
    configure(conf, **names, **{"fs.defaultFS": "hdfs://127.0.0.1:9"})
    for url in ("hdfs:///run", "hdfs://cluster/run"):
        assert "refused" in str(failure(url))


def test_several_name_nodes_have_errors_of_their_own() -> None:
    client = HdfsClient("hdfs")
    for host in ("127.0.0.1:9", "127.0.0.1:10", "127.0.0.1:9"):
        with pytest.raises(StorageError, match=f"cannot reach hdfs://{host}: "):
            client.find(f"{host}/run/file", 0)


def test_a_host_that_was_not_reached_fails_at_once_for_a_second(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_client, "_FIRST_S", 0.5)
    failure(f"hdfs://{silent}/run")
    began = time.monotonic()
    with pytest.raises(StorageError):
        Location(f"hdfs://{silent}/run").remove()
    assert time.monotonic() - began < 1


END = """
import socket, sys, time
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems import hdfs_client

class Slow:
    def __del__(self):
        time.sleep(1)

listener = socket.create_server(("127.0.0.1", 0))
hdfs_client._FIRST_S = 1.0
try:
    hdfs_client.HdfsClient("hdfs").list(f"127.0.0.1:{listener.getsockname()[1]}")
except StorageError as error:
    print(error)
sys.modules["slow"] = Slow()  # The interpreter takes long to end.
listener.close()  # The library gives up meanwhile.
"""


def test_a_call_without_an_answer_does_not_crash_the_end_of_a_process(
    run_new_python: Callable[..., str],
) -> None:
    assert "no answer in 1 s" in run_new_python(END)


def test_a_forked_process_is_refused() -> None:
    client = HdfsClient("hdfs")
    with pytest.raises(StorageError):
        client.list("127.0.0.1:9/run")
    child = os.fork()
    if not child:
        try:
            client.list("127.0.0.1:9/run")
        except UnsupportedError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_url_with_a_password_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="password"):
        Location("hdfs://user:secret@127.0.0.1:9/run")


@pytest.mark.parametrize(
    ("text", "is_damaged"),
    [
        ("ChecksumError", True),
        ('BlocksNotFound("/run/step-1")', False),
        ('InternalError("unexpected")', False),
        ('InvalidArgument("unexpected")', False),
    ],
)
def test_only_a_checksum_is_damage(text: str, is_damaged: bool) -> None:
    with pytest.raises(CheckpointError) as raised, HdfsClient("hdfs")._naming("read", "a/b"):
        raise RuntimeError(text)
    assert is_damage(raised.value) == is_damaged


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("no code"),
        RuntimeError('RPCError("org.apache.hadoop.security.AccessControlException", "denied")'),
    ],
    ids=["of a file", "of the NameNode"],
)
def test_a_refused_access_has_its_code_and_is_not_repeated(error: Exception) -> None:
    client, calls = HdfsClient("hdfs"), 0

    def refuse() -> None:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(StorageError) as raised, client._naming("read", "a/b"):
        client._patiently(refuse)
    assert (raised.value.errno, calls) == (errno.EACCES, 1)


UNANSWERED = """
import sys, time
import hdfs_native
from torch_ckpt.filesystems.hdfs_client import HdfsClient

for _ in range(6):
    try:
        HdfsClient("hdfs")._call(hdfs_native.Client(sys.argv[1]).get_file_info, "/", seconds=0.1)
    except OSError as error:
        assert "no answer" in str(error)
print(time.monotonic())
"""


def test_calls_without_an_answer_delay_the_exit_together(silent: str) -> None:
    """The interpreter waits for them, because it would crash if one ended while it shuts down."""
    script = [sys.executable, "-c", UNANSWERED, f"hdfs://{silent}/"]
    ended = subprocess.run(script, capture_output=True, text=True, check=True, timeout=50)
    assert time.monotonic() - float(ended.stdout) < 4 * hdfs_client._EXIT_S
