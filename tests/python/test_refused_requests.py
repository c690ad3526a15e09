"""The error code of a request that a store refuses, for every kind of request."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch
from support.store_proxy import Fault, StoreProxy
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.store_client import StoreClient

pytestmark = pytest.mark.timeout(120)

PART = bytes(6 << 20)

Request = Callable[[StoreClient, str], object]


def obstore_client() -> StoreClient:
    pytest.importorskip("obstore")
    from torch_ckpt.filesystems.obstore_client import ObstoreClient

    return ObstoreClient("s3", {})


def upload(client: StoreClient, folder: str) -> None:
    client.put_stream(f"{folder}/s", len(PART), iter([PART, PART]))


REQUESTS: dict[str, tuple[tuple[str, ...], Request]] = {
    "reach": (("get", "list"), lambda _, folder: obstore_client().list(folder)),
    "head": (("head", "get"), lambda client, folder: client.find(f"{folder}/f", 0)),
    "get": (("get",), lambda client, folder: client.find(f"{folder}/f", 5)),
    "get a range": (("get",), lambda client, folder: client.get(f"{folder}/f", 0, 5)),
    "list": (("list",), lambda client, folder: client.list(folder)),
    "put": (("put",), lambda client, folder: client.put(f"{folder}/g", b"", None)),
    "put if absent": (("put",), lambda client, folder: client.put(f"{folder}/g", b"", "")),
    "create": (("create",), upload),
    "part": (("part",), upload),
    "complete": (("complete",), upload),
    "copy": (("copy",), lambda client, folder: client.copy(f"{folder}/f", f"{folder}/g")),
    "delete": (("delete",), lambda client, folder: client.remove(f"{folder}/f")),
    "delete all": (("list",), lambda client, folder: client.remove_all(folder)),
}

ANSWERS = {
    (400, "ExpiredToken"): errno.EACCES,
    (400, "InvalidArgument"): None,
    (401, "Unauthorized"): errno.EACCES,
    (403, "SignatureDoesNotMatch"): errno.EACCES,
    (404, "NoSuchBucket"): errno.ENODEV,
    (405, "MethodNotAllowed"): None,
}


@pytest.fixture
def client(store_proxy: StoreProxy) -> StoreClient:
    return obstore_client()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        pytest.param(kind, answer, id=f"{kind} {answer[1]}")
        for kind in REQUESTS
        for answer in ANSWERS
        if answer[0] != 404 or kind not in ("head", "delete")  # They do not find the object.
    ],
)
def test_a_refused_request_has_the_error_code_of_its_cause(
    client: StoreClient, store_proxy: StoreProxy, store_url: str, kind: str, answer: tuple[int, str]
) -> None:
    folder = store_url.removeprefix("s3://")
    client.put(f"{folder}/f", b"01234", None)
    requests, request = REQUESTS[kind]
    fault = Fault("status", requests=requests, status=answer[0], code=answer[1])
    store_proxy.add(fault)
    with pytest.raises(StorageError) as error:
        request(client, folder)
    assert fault.met
    assert error.value.errno == ANSWERS[answer]
    assert not isinstance(error.value, NotFoundError)


CALLS: dict[str, Callable[[str], object]] = {
    "restore": lambda url: Run(url).restore({"w": torch.ones(4)}),
    "save a step": lambda url: Run(url).save(1, {"w": torch.ones(4)}),
    "save": lambda url: torch_ckpt.save({"w": torch.ones(4)}, checkpoint_id=f"{url}/a"),
    "load": lambda url: torch_ckpt.load({"w": torch.ones(4)}, checkpoint_id=f"{url}/a"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("variable", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_credentials_are_refused_access(
    store_url: str, name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "wrong")
    with pytest.raises((StorageError, CheckpointException)) as caught:
        CALLS[name](store_url)
    error: BaseException = caught.value
    if isinstance(error, CheckpointException):
        ((error, _),) = error.failures.values()
    assert isinstance(error, StorageError)
    assert error.errno == errno.EACCES
