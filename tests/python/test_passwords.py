"""Secrets in URLs: a URL with a password is refused, and no message repeats a secret."""

from __future__ import annotations

import errno
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.errors import CheckpointError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location, name_of
from torch_ckpt.filesystems.object_store import file_system_of
from torch_ckpt.filesystems.passwords import has_password, without_secrets
from torch_ckpt.filesystems.store_client import StoreClient

REFUSED = [
    "s3://AKIA:SECRET@bucket/r",
    "s3://AKIA:1/SECRET@bucket/r",  # A bucket has no port.
    "s3://AKIA:SEC/RETSECRET+x@bucket/r",
    "s3://:SECRET@bucket/r",
    "s3:///AKIA:SECRET@bucket/r",
    "s3:/AKIA:SECRET@bucket/r",  # As `Path` changes a URL.
    "sftp://u:p/SECRET@host/x",
    "sftp://u:/SECRET@host/x",
    "sftp://u@company:SECRET@host/x",
    "sftp://u@company:p/SECRET@host/x",
    "sftp://u:p@SECRET@host:22/x",
    "hdfs://u:SECRET@host:8020/x",
    "file://u:SECRET@host/x",
    "unknown://u:SECRET@host/x",
]

ALLOWED = [
    "s3://bucket/a:b@c",
    "s3://bucket/a:b/c@d",
    "s3://bucket/step@1/a:b",
    "hdfs://host:8020/a@b",
    "hdfs://host:8020/a:b@c",
    "hdfs:///a:b@c",
    "sftp://user@host:22/a@b",
    "sftp://[::1]:22/a@b",
    "abfss://container@account.dfs.core.windows.net/a:b@c",
    "file:///a:b@c",
]

CALLS: dict[str, Callable[[str], object]] = {
    "Location": Location,
    "name_of": name_of,
    "save": lambda url: torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id=url),
    "load": lambda url: torch_ckpt.load({"w": torch.ones(2)}, checkpoint_id=url),
    "Run": Run,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("url", REFUSED)
def test_a_url_with_a_password_is_refused_without_repeating_it(url: str, call: str) -> None:
    with pytest.raises(BaseException, match="has a password") as error:
        CALLS[call](url)
    assert "SECRET" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("url", ALLOWED)
def test_a_key_may_have_colons_and_at_signs(url: str) -> None:
    try:
        assert str(Location(url)).rpartition("/")[2] == url.rpartition("/")[2]
    except UnsupportedError as error:
        if "not installed" not in str(error) and "is registered" not in str(error):
            raise
    scheme, _, rest = url.partition("://")
    assert not has_password(rest, may_have_port=scheme != "s3")
    assert without_secrets(f"GET {url} failed").endswith(" failed")
    if "@" not in rest.partition("/")[0]:
        assert without_secrets(f"GET {url} failed") == f"GET {url} failed"


TEXTS = [
    "error performing GET http://me:SECRET@host:9000/bucket/key in 3 s",
    "cannot connect to https://me:p/SECRET@host/bucket: refused",
    "(http://me:a)'\"SECRET@host) failed",
    "no answer of http://SECRET@host/bucket",
    "proxy http://me:x@SECRET@proxy:3128, then http://u:SECRET@host",
    "GET https://host/bucket/key?X-Amz-Signature=SECRET failed",
]

CLIENTS = {
    "obstore": ("s3", "torch_ckpt.filesystems.obstore_client", "ObstoreClient"),
    "fsspec": ("memory", "torch_ckpt.filesystems.fsspec_client", "FsspecClient"),
    "hdfs": ("hdfs", "torch_ckpt.filesystems.hdfs_client", "HdfsClient"),
}


def client_of(name: str) -> StoreClient:
    scheme, module, kind = CLIENTS[name]
    try:
        made = getattr(__import__(module, fromlist=[kind]), kind)
    except UnsupportedError as error:
        pytest.skip(str(error))
    client: StoreClient = made(scheme, {}) if name == "obstore" else made(scheme)
    return client


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, FileExistsError])
@pytest.mark.parametrize("name", CLIENTS)
def test_texts_of_clients_lose_their_secrets(name: str, kind: type[Exception]) -> None:
    client = client_of(name)
    if name == "obstore" and kind is FileExistsError:
        kind = pytest.importorskip("obstore.exceptions").AlreadyExistsError

    def fail(text: str) -> None:
        with client._naming("read", "bucket/key"):
            raise kind(text)

    for text in TEXTS:
        with pytest.raises(CheckpointError, match="bucket/key") as error:
            fail(text)
        assert "SECRET" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("name", CLIENTS)
def test_after_a_request_without_an_answer_the_next_one_connects_again(name: str) -> None:
    client = client_of(name)
    error: Exception = TimeoutError(errno.ETIMEDOUT, "no answer")
    if name == "obstore":
        error = pytest.importorskip("obstore.exceptions").GenericError("HTTP error")
    client._connected["bucket"] = object()
    with pytest.raises(StorageError), client._naming("read", "bucket/key"):
        raise RuntimeError("it is refused")
    assert client._connection("bucket/key")
    with pytest.raises(StorageError), client._naming("read", "bucket/key"):
        raise error
    assert not client._connected


def test_an_answer_in_xml_is_quoted_whole() -> None:
    answer = '403 Forbidden: <?xml version="1.0" encoding="UTF-8"?>\n<Error>AccessDenied</Error>'
    assert without_secrets(answer) == answer


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("s3", "AWS_ALLOW_HTTP"), ("gs", "GOOGLE_ALLOW_HTTP"), ("az", "AZURE_ALLOW_HTTP")],
)
def test_an_endpoint_of_http_names_the_variable_that_permits_it(scheme: str, variable: str) -> None:
    exceptions = pytest.importorskip("obstore.exceptions")
    client = client_of("obstore")
    client._scheme = scheme
    with pytest.raises(CheckpointError, match=f"set {variable}=true"), client._naming("reach", "b"):
        raise exceptions.GenericError(
            "Error performing GET http://host/b in 1ms - HTTP error: builder error"
        )


def test_s3_by_http_without_permission_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    if file_system_of("s3") is None:
        pytest.skip("no client of S3")
    variables = {"ENDPOINT_URL": "http://127.0.0.1:9", "SECRET_ACCESS_KEY": "b", "REGION": "here"}
    for name, value in {**variables, "ACCESS_KEY_ID": "a"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(CheckpointError, match="set AWS_ALLOW_HTTP=true"):
        Location("s3://bucket-by-http/run").names()


def test_an_endpoint_with_a_password_is_in_no_error_and_no_line_of_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if file_system_of("s3") is None:
        pytest.skip("no client of S3")
    variables = {"ENDPOINT_URL": "http://me:SECRET@127.0.0.1:9", "ALLOW_HTTP": "true"}
    for name, value in {**variables, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "SECRET"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(BaseException, match=r"127\.0\.0\.1:9") as error,
    ):
        torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id="s3://endpoint-with-password/r")
    assert "SECRET" not in "".join(traceback.format_exception(error.value))
    assert "SECRET" not in caplog.text
