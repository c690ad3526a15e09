"""Versions of weights: published by one process, and taken up by others, bit for bit."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from safetensors.torch import load_file
from support.flips import flip
from support.published import Engine, engines_of, like, published, weights
from support.tensors import bits
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ckpt
from torch_ckpt import Publisher, Run, Subscriber
from torch_ckpt._core import _native
from torch_ckpt.commits import terms
from torch_ckpt.commits.model import ModelTransaction
from torch_ckpt.commits.terms import newest_term, take_term
from torch_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    StorageError,
    SupersededError,
    UnsupportedError,
)
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.publishing import chain, publisher, snapshot, subscriber
from torch_ckpt.publishing.examination import damage_of, facts_of
from torch_ckpt.publishing.version_files import committed_versions, read_version

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

BF16 = torch.bfloat16


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where versions are published."""
    if request.param == "s3":
        return str(request.getfixturevalue("store_url"))
    return str(tmp_path / "policy" if request.param == "local" else f"memory://{tmp_path.name}")


def version_of(root: str, number: int) -> Any:
    return read_version(Location(root), number)


@pytest.mark.parametrize("dtype", [BF16, None])
def test_each_version_has_the_values_of_the_training_bit_for_bit(
    root: str, dtype: torch.dtype | None
) -> None:
    workers = [(Subscriber(root), each) for each in engines_of(published(weights(0), dtype))]
    with Publisher(root, dtype=dtype, whole_every=4) as training:
        for version in range(1, 7):
            training.publish(version, state := weights(version))
            training.wait()
            for behind, (worker, engine) in enumerate(workers):
                if (version + behind) % 3 == 0:
                    continue  # The next time, it is several versions behind.
                assert worker.update(engine.tensors) == worker.version == version
                assert not worker.refused
                engine.assert_has(published(state, dtype))
        assert [version_of(root, n).is_whole for n in range(1, 7)] == [
            n in (1, 5) for n in range(1, 7)
        ]
        worker, engine = workers[0]
        assert worker.update(engine.tensors, version=3) == 3
        engine.assert_has(published(weights(3), dtype))
        assert worker.latest() == 6


def test_a_training_may_change_its_tensors_once_publish_has_returned(tmp_path: Path) -> None:
    state, worker = weights(1), Subscriber(tmp_path)
    engine = Engine(published(state, BF16))
    with Publisher(tmp_path, dtype=BF16) as training:
        for version in range(1, 5):
            for name, value in weights(version).items():
                state[name].copy_(value)
            training.publish(version, state)
            for value in state.values():
                value.view(-1)[:7] = 0
        training.wait()
    worker.update(engine.tensors)
    engine.assert_has(published(weights(4), BF16))


def test_a_whole_version_is_a_safetensors_model(tmp_path: Path) -> None:
    with Publisher(tmp_path, dtype=BF16) as training:
        training.publish(5, weights(5))
    loaded = load_file(tmp_path / "version-5/model.safetensors")
    expected = published(weights(5), BF16)
    assert set(loaded) == set(expected) - {"tied"}
    for name, value in loaded.items():
        assert bits(value) == bits(expected[name]), name


def test_a_module_with_tied_and_strided_parameters_is_published(tmp_path: Path) -> None:
    def make() -> torch.nn.Sequential:
        linear = [torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in ((90, 70), (70, 90))]
        linear[1].weight = torch.nn.Parameter(linear[0].weight.t())
        return torch.nn.Sequential(*linear)

    model, served = make(), make()
    served[0].weight.data.zero_()
    worker = Subscriber(tmp_path)
    with Publisher(tmp_path) as training:
        for version in range(3):
            with torch.no_grad():
                model[0].bias += 1
                model[0].weight[3] += 0.5
            training.publish(version, model)
            training.wait()
            # Two names of one memory with other strides are no ties: both are stored.
            with pytest.raises(ValueError, match="in part that of another tensor"):
                worker.update(served)
            own = {name: value.clone() for name, value in served.state_dict().items()}
            assert worker.update(own) == version
            for name, value in model.state_dict().items():
                assert bits(own[name]) == bits(value), name


def test_tied_names_may_have_memory_of_their_own_in_an_engine(tmp_path: Path) -> None:
    worker = Subscriber(tmp_path)
    served = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    only = {"tied": torch.zeros_like(served["tied"])}
    with Publisher(tmp_path) as training:
        for version in range(3):
            training.publish(version, state := weights(version))
            training.wait()
            worker.update(served)
            assert {n: bits(v) for n, v in served.items()} == {n: bits(v) for n, v in state.items()}
            Subscriber(tmp_path).update(only)
            assert bits(only["tied"]) == bits(state["matrix"])
    assert not worker.refused


def test_a_delta_is_small_and_a_slice_reads_its_part_of_it(tmp_path: Path) -> None:
    state = {"w": torch.randn(2048, 1024).to(BF16)}
    whole, quarter = Subscriber(tmp_path), Subscriber(tmp_path)
    served = {"w": torch.zeros(2048, 1024, dtype=BF16)}
    part = {"w": ((2048, 1024), (512, 0), torch.zeros(512, 1024, dtype=BF16))}
    with Publisher(tmp_path) as training:
        for version in range(2):
            training.publish(version, state)
            training.wait()
            whole.update(served)
            quarter.update(part)
            changed = torch.rand(2048, 1024) < 0.03
            state["w"] = torch.where(changed, state["w"] * 1.01, state["w"])
    nbytes = sum(file.nbytes for file in version_of(str(tmp_path), 1).files)
    assert 0 < nbytes < 0.1 * 2 * 2048 * 1024
    assert whole.read_nbytes <= nbytes
    assert quarter.read_nbytes <= 0.28 * nbytes


# ---- Refusals ----


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Versions 1, 2 and 3, of which the first is whole."""
    with Publisher(tmp_path / "policy", dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, weights(version))
    return tmp_path / "policy"


def at_version_2(policy: Path, **slices: int) -> tuple[Subscriber, Engine]:
    worker, engine = Subscriber(policy), Engine(published(weights(2), BF16), **slices)
    worker.update(engine.tensors, version=2)
    return worker, engine


@pytest.mark.parametrize("slices", [{}, {"number": 1, "count": 3, "dim": 1}])
def test_a_tensor_that_was_changed_is_refused_by_name_and_gets_its_values_from_a_whole_version(
    policy: Path, slices: dict[str, int]
) -> None:
    worker, engine = at_version_2(policy, **slices)
    changed = engine.tensors["matrix"]
    (changed[2] if slices else changed)[3, 7] += 1
    assert worker.update(engine.tensors) == 3
    assert list(worker.refused) == ["matrix"]
    assert "'matrix'" in worker.refused["matrix"]
    engine.assert_has(published(weights(3), BF16))
    assert worker.update(engine.tensors) == 3
    assert not worker.refused


def test_other_memory_gets_its_values_from_a_whole_version(policy: Path) -> None:
    worker, engine = at_version_2(policy)
    engine.tensors["long"] = torch.full_like(engine.tensors["long"], 7)
    assert worker.update(engine.tensors, version=2) == 2
    engine.assert_has(published(weights(2), BF16))
    other = Engine(published(weights(2), BF16))
    assert worker.update(other.tensors) == 3
    other.assert_has(published(weights(3), BF16))


def test_a_tensor_of_another_dtype_gets_cast_values(policy: Path) -> None:
    worker, engine = at_version_2(policy)
    engine.tensors["deep"] = engine.tensors["deep"].float()
    for version in (2, 3):
        worker.update(engine.tensors, version)
        expected = published(weights(version), BF16)
        engine.assert_has({**expected, "deep": expected["deep"].float()})


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [
        ("unknown", torch.zeros(3), MismatchError, "'unknown': version 3 has no such tensor"),
        ("long", torch.zeros(5), MismatchError, r"'long': version 3 has it in sizes \[200003\]"),
        ("long", ((200_003,), (200_000,), torch.zeros(9)), ValueError, "'long'.*not inside"),
        ("long", torch.zeros(1).expand(200_003), ValueError, "'long': its memory"),
        ("long", torch.zeros(200_003).to_sparse(), UnsupportedError, "'long'"),
        ("long", torch.zeros(200_003, device="meta"), (UnsupportedError, ValueError), "'long'"),
        ("long", 3, TypeError, "'long'.*no tensor"),
    ],
)
def test_a_tensor_that_cannot_be_updated_is_named_and_none_is_touched(
    policy: Path, name: str, value: Any, error: Any, says: str
) -> None:
    worker, engine = at_version_2(policy)
    before = engine.values()
    with pytest.raises(error, match=says):
        worker.update({**engine.tensors, name: value})
    assert engine.values() == before
    assert worker.update(engine.tensors) == 3


def test_memory_that_two_tensors_share_is_refused_and_columns_of_one_tensor_are_not(
    policy: Path,
) -> None:
    memory = torch.zeros(257, 2 * 523, dtype=BF16)
    halves = {"matrix": memory[:, :523], "long": memory.view(-1)[300:200_303]}
    with pytest.raises(ValueError, match="in part that of another tensor"):
        Subscriber(policy).update(halves)
    slices = {
        "matrix": torch_ckpt.planning.local_shards.LocalShards(
            (257, 523), [((0, 0), memory[:, 0::2][:, :260]), ((0, 260), memory[:, 1::2][:, :263])]
        )
    }
    Subscriber(policy).update(slices)
    matrix = weights(3)["matrix"].to(BF16)
    assert bits(memory[:, 0::2][:, :260]) == bits(matrix[:, :260])
    assert bits(memory[:, 1::2][:, :263]) == bits(matrix[:, 260:])


def failure_of(worker: Subscriber, engine: Engine) -> str:
    """The error of an update; empty if there is none."""
    try:
        worker.update(engine.tensors)
    except torch_ckpt.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("file", ["delta.json", "rank-", "version.json", "model.safetensors"])
def test_a_damaged_byte_is_named_and_no_tensor_is_touched(policy: Path, file: str, at: int) -> None:
    is_delta = file in ("delta.json", "rank-")
    folder = policy / ("version-3" if is_delta else "version-1")
    (damaged,) = (path for path in folder.iterdir() if path.name.startswith(file))
    if is_delta:
        worker, engine = at_version_2(policy)
    else:
        worker, engine = Subscriber(policy), Engine(published(weights(2), BF16))
    before, contents = engine.values(), damaged.read_bytes()
    changed = bytearray(contents)
    changed[len(changed) * at // 12 + (at == 0)] ^= 1 << at % 8
    damaged.write_bytes(changed)
    text = failure_of(worker, engine)
    if text:  # A bit of a safetensors header may be of no account.
        assert re.search(r"version-\d/|of version|version \d", text)
        assert engine.values() == before
        damaged.write_bytes(contents)
        assert worker.update(engine.tensors) == 3
    else:
        assert not is_delta
    engine.assert_has(published(weights(3), BF16))


@pytest.mark.parametrize("byte", [0, 8, 16, 20])
def test_a_damaged_block_table_is_named(policy: Path, byte: int) -> None:
    worker, engine = at_version_2(policy)
    (file,) = version_of(str(policy), 3).files
    box = next(box for box in file.boxes if box.fqn == "long")
    before, path = engine.values(), policy / "version-3" / file.name
    flip(path, box.table + byte)
    with pytest.raises(CorruptionError, match="the block table of 'long' does not match"):
        worker.update(engine.tensors)
    assert engine.values() == before
    flip(path, box.table + byte)
    assert worker.update(engine.tensors) == 3
    assert not worker.refused


def test_a_shorter_file_is_damaged(policy: Path) -> None:
    worker, engine = at_version_2(policy)
    (file,) = policy.glob("version-3/rank-*")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CorruptionError, match=r"version-3/rank-0.*damaged: it has"):
        worker.update(engine.tensors)


def test_a_version_of_another_chain_is_not_added(policy: Path, tmp_path: Path) -> None:
    worker, engine = at_version_2(policy)
    with Publisher(tmp_path / "other", dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, weights(version, seed=1))
    for file in (policy / "version-3").iterdir():
        file.unlink()
    for file in (tmp_path / "other/version-3").iterdir():
        file.rename(policy / "version-3" / file.name)
    before = engine.values()
    with pytest.raises(NotFoundError, match="chain"):
        worker.update(engine.tensors, version=3)
    assert engine.values() == before


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("by_delta", [True, False])
@pytest.mark.parametrize("after", [False, True])
def test_an_error_while_tensors_change_undoes_the_change(
    policy: Path,
    kind: type[BaseException],
    by_delta: bool,
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, engine = at_version_2(policy)
    tensors = engine.tensors
    if not by_delta:
        worker = Subscriber(policy)
    for fails_at in range(8):
        before, calls = engine.values(), 0

        def fail(
            part: Any,
            host: Any,
            change: Any,
            fails_at: int = fails_at,
            real: Callable[..., None] = subscriber._xor,
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at + 1 and not after:
                raise kind("here")
            real(part, host, change)
            if calls == fails_at + 1:
                raise kind("here")

        with monkeypatch.context() as patched:
            patched.setattr(subscriber, "_xor", fail)
            with pytest.raises(kind, match="here"):
                worker.update(tensors)
        assert engine.values() == before
        assert worker.version == (2 if by_delta else None)
    assert worker.update(tensors) == 3
    assert not worker.refused
    engine.assert_has(published(weights(3), BF16))


@pytest.mark.parametrize("slices", [{}, {"number": 1, "count": 3, "dim": 1}])
@pytest.mark.parametrize("name", ["version", "_chain", "_last", "_known"])
def test_an_interrupt_after_tensors_have_changed_leaves_no_wrong_digests(
    policy: Path, name: str, slices: dict[str, int]
) -> None:
    worker, engine = at_version_2(policy, **slices)
    interrupts = [KeyboardInterrupt()]

    class Interrupted(Subscriber):
        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute == name and interrupts:
                raise interrupts.pop()

    worker.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        worker.update(engine.tensors)
    assert worker.update(engine.tensors) == 3
    engine.assert_has(published(weights(3), BF16))


@pytest.mark.parametrize("by_delta", [True, False])
def test_tensors_of_another_device_change_through_copies_in_host_memory(
    policy: Path, by_delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber.Part, "host", lambda part: part.tensor.clone())
    monkeypatch.setattr(subscriber.Part, "store", lambda part, host: part.tensor.copy_(host))
    worker, engine = at_version_2(policy) if by_delta else (Subscriber(policy), None)
    engine = engine or Engine(published(weights(2), BF16), 1, 2)
    before, calls = engine.values(), 0

    def fail(*args: Any, real: Callable[..., None] = subscriber._xor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("here")
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(subscriber, "_xor", fail)
        with pytest.raises(RuntimeError, match="here"):
            worker.update(engine.tensors)
    assert engine.values() == before
    assert worker.update(engine.tensors) == 3
    assert not worker.refused
    engine.assert_has(published(weights(3), BF16))


# ---- The publisher ----


def test_numbers_must_rise(tmp_path: Path) -> None:
    with Publisher(tmp_path) as training:
        training.publish(4, weights(1))
        for version in (4, 3):
            with pytest.raises(AlreadyExistsError, match="it has version 4"):
                training.publish(version, weights(1))
        with pytest.raises(ValueError, match="negative"):
            training.publish(-1, weights(1))
        with pytest.raises(TypeError, match="not an integer"):
            training.publish(4.5, weights(1))  # type: ignore[arg-type]
        training.publish(5, weights(2))
    worker, engine = Subscriber(tmp_path), Engine(weights(2))
    assert worker.update(engine.tensors) == 5
    engine.assert_has(weights(2))


def test_a_new_publisher_goes_on_with_a_whole_version_and_ends_the_older_one(root: str) -> None:
    older = Publisher(root)
    older.publish(1, weights(1))
    older.wait()
    worker, engine = Subscriber(root), Engine(weights(1))
    worker.update(engine.tensors)
    with Publisher(root) as newer:
        newer.publish(2, weights(2))
        newer.wait()
        with pytest.raises(SupersededError, match="newer job"):
            older.publish(3, weights(3))
        older.close()
    assert version_of(root, 2).is_whole
    assert worker.update(engine.tensors) == 2
    engine.assert_has(weights(2))


def test_a_publisher_that_was_superseded_within_a_publish_commits_nothing(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Publisher(root)
    older.publish(1, weights(1))
    older.wait()

    def write(*args: Any, real: Any = publisher.write_differences) -> Any:
        file = real(*args)
        monkeypatch.setattr(publisher, "write_differences", real)
        with Publisher(root) as newer:
            newer.publish(2, weights(7))
        return file

    monkeypatch.setattr(publisher, "write_differences", write)
    older.publish(2, weights(2))
    with pytest.raises(SupersededError):
        older.wait()
    worker, engine = Subscriber(root), Engine(weights(7))
    assert worker.update(engine.tensors) == 2
    engine.assert_has(weights(7))


def test_old_versions_are_removed_unless_they_are_leased(root: str) -> None:
    with Publisher(root, whole_every=2, keep_whole=2) as training:
        for version in range(1, 6):
            training.publish(version, weights(version))
        training.wait()
        assert committed_versions(Location(root)) == [5, 4, 3]
        with subscriber.lease_of(Location(root) / "version-4", 4, subscriber.has_version):
            for version in range(6, 10):
                training.publish(version, weights(version))
            training.wait()
            assert committed_versions(Location(root)) == [9, 8, 7, 4, 3]
        training.publish(10, weights(10))
        training.wait()
        assert committed_versions(Location(root)) == [10, 9, 8, 7]
    worker, engine = Subscriber(root), Engine(weights(10))
    assert worker.update(engine.tensors) == 10
    engine.assert_has(weights(10))


def test_the_newest_version_is_found_without_latest_json_and_beside_a_wrong_one(
    policy: Path,
) -> None:
    latest = policy / "latest.json"
    contents = json.loads(latest.read_text())
    for text in (None, "", json.dumps({**contents, "number": 9}), "[]"):
        if text is None:
            latest.unlink()
        else:
            latest.write_text(text)
        worker, engine = Subscriber(policy), Engine(published(weights(3), BF16))
        assert worker.latest() == worker.update(engine.tensors) == 3
        engine.assert_has(published(weights(3), BF16))


@pytest.mark.parametrize("version", [3, 5])
def test_the_newest_version_is_found_although_latest_json_names_one_that_was_not_committed(
    root: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the network is gone")

    transaction = {3: publisher.DeltaTransaction, 5: ModelTransaction}[version]
    worker, engine = Subscriber(root), Engine(weights(1))
    with Publisher(root, whole_every=4) as training:
        for before in range(1, version):
            training.publish(before, weights(before))
        training.wait()
        with monkeypatch.context() as patched:
            patched.setattr(transaction, "commit", fail)
            with pytest.raises(OSError, match="the network is gone"):
                publish_and_wait(training, version, weights(version))
        assert json.loads((Location(root) / "latest.json").read())["number"] == version
        assert worker.latest() == worker.update(engine.tensors) == version - 1
        engine.assert_has(weights(version - 1))


@pytest.mark.parametrize("version", [1, 2])
def test_a_publish_fails_if_latest_json_cannot_be_written(
    root: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    with Publisher(root) as training:
        for before in range(1, version):
            training.publish(before, weights(before))
        training.wait()
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "write_latest", fail)
            with pytest.raises(OSError, match="the disk is full"):
                publish_and_wait(training, version, weights(version))
        assert committed_versions(Location(root)) == [*range(version - 1, 0, -1)]
        training.publish(version, weights(3))
    assert Subscriber(root).latest() == version


def test_a_delta_takes_few_requests_of_a_store(request: pytest.FixtureRequest) -> None:
    counts: Counter[str] = Counter()

    class Counting(FsspecClient):
        """A client that counts its requests."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("find", "get", "put", "put_stream", "list", "copy", "remove", "remove_all"):
                counts[name] += 1
            return super().__getattribute__(name)

    register("counted", _native.StoreFileSystem(Counting("memory")))
    root = f"counted://{request.node.name}"
    worker, engine = Subscriber(root), Engine(weights(1))
    with Publisher(root, record=False) as training:
        for version in (1, 2, 3):
            counts.clear()
            publish_and_wait(training, version, weights(version))
            published_with = dict(counts)
            counts.clear()
            worker.update(engine.tensors)
            engine.assert_has(weights(version))
    # This client reads the bytes that are found.
    assert published_with == {"list": 4, "put": 4, "find": 1, "get": 1, "remove": 1}
    counts["get"] -= counts["find"]
    assert counts == {"find": 2, "list": 2, "put": 1, "get": 2, "remove": 1}


def test_nothing_is_published_yet(root: str) -> None:
    worker = Subscriber(root)
    assert worker.latest() is None
    with pytest.raises(NotFoundError, match="no version is published"):
        worker.update({"a": torch.zeros(3)})


@pytest.mark.parametrize("version", [1, 3])
def test_a_publish_that_fails_leaves_nothing_and_the_next_version_is_whole(
    root: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("the disk is gone")

    with Publisher(root) as training:
        for before in range(1, version):
            training.publish(before, weights(before))
        training.wait()
        with monkeypatch.context() as patched:
            name = "write_digests" if version == 1 else "write_differences"
            patched.setattr(publisher, name, fail)
            training.publish(version, weights(version))
            with pytest.raises(OSError, match="the disk is gone"):
                training.wait()
        assert not any(name.startswith("rank") for name in _names(f"{root}/version-{version}"))
        training.publish(version, weights(version + 3))
        training.wait()
    assert version_of(root, version).is_whole
    worker, engine = Subscriber(root), Engine(weights(1))
    assert worker.update(engine.tensors) == version
    engine.assert_has(weights(version + 3))


@pytest.mark.parametrize("version", [1, 2])
def test_a_failure_after_the_commit_leaves_the_version_as_it_is(
    root: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, delta = (publisher._WholeWriter, "finish"), (publisher.DeltaTransaction, "commit")
    where, name = whole if version == 1 else delta
    commit = getattr(where, name)

    def fail(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        raise OSError("the network is gone")

    with Publisher(root) as training:
        for before in range(1, version):
            publish_and_wait(training, before, weights(before))
        with monkeypatch.context() as patched:
            patched.setattr(where, name, fail)
            with pytest.raises(OSError, match="the network is gone"):
                publish_and_wait(training, version, weights(version))
        worker, engine = Subscriber(root), Engine(weights(1))
        assert worker.update(engine.tensors, version) == version
        engine.assert_has(weights(version))
        with pytest.raises(AlreadyExistsError):
            publish_and_wait(training, version, weights(4))
        publish_and_wait(training, 3, weights(3))
    assert worker.update(engine.tensors) == 3
    engine.assert_has(weights(3))


def test_a_superseded_publisher_does_not_hide_the_newest_version(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_latest = publisher.write_latest

    def write(*args: Any) -> None:
        monkeypatch.setattr(publisher, "write_latest", write_latest)
        with Publisher(root) as newer:
            newer.publish(2, weights(2))
        write_latest(*args)

    monkeypatch.setattr(publisher, "write_latest", write)
    older = Publisher(root)
    older.publish(1, weights(1))
    with pytest.raises(SupersededError):
        older.wait()
    worker, engine = Subscriber(root), Engine(weights(2))
    assert worker.latest() == worker.update(engine.tensors) == 2
    engine.assert_has(weights(2))


def test_a_superseded_publisher_does_not_replace_the_version_of_the_newer_one(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_term = publisher.check_term

    def check(*args: Any, **options: Any) -> None:
        check_term(*args, **options)
        if not options:  # Before the commit.
            monkeypatch.setattr(publisher, "check_term", check_term)
            with Publisher(root) as newer:
                newer.publish(1, weights(2))

    monkeypatch.setattr(publisher, "check_term", check)
    older = Publisher(root)
    older.publish(1, weights(1))
    with pytest.raises(SupersededError):
        older.wait()
    worker, engine = Subscriber(root), Engine(weights(2))
    assert worker.latest() == worker.update(engine.tensors) == 1
    engine.assert_has(weights(2))


def test_a_superseded_publisher_that_fails_leaves_the_version_of_the_newer_one(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = ModelTransaction.commit
    is_late, has_failed = threading.Event(), threading.Event()

    def commit_late(*args: Any, **options: Any) -> list[str]:
        # The newer one has written version.json, and its model has not appeared yet.
        is_late.set()
        assert has_failed.wait(30)
        return commit(*args, **options)

    def write(*args: Any, real: Any = publisher.write_digests) -> Any:
        monkeypatch.setattr(publisher, "write_digests", real)
        monkeypatch.setattr(ModelTransaction, "commit", commit_late)
        newer.publish(1, weights(2))
        assert is_late.wait(30)
        raise OSError("the disk is gone")

    older, newer = Publisher(root), Publisher(root)
    monkeypatch.setattr(publisher, "write_digests", write)
    older.publish(1, weights(1))
    with pytest.raises(OSError, match="the disk is gone"):
        older.wait()
    has_failed.set()
    newer.close()
    worker, engine = Subscriber(root), Engine(weights(2))
    assert worker.update(engine.tensors) == 1
    engine.assert_has(weights(2))


def test_an_index_that_arrives_when_its_model_was_removed_is_no_version(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store carries out a request of a publisher that is dead, or was superseded, at any time."""
    commit = ModelTransaction.commit
    is_next, has_arrived = threading.Event(), threading.Event()

    def commit_next(*args: Any, **options: Any) -> list[str]:
        is_next.set()
        assert has_arrived.wait(30)
        return commit(*args, **options)

    def commit_late(*args: Any, **options: Any) -> list[str]:
        monkeypatch.setattr(ModelTransaction, "commit", commit_next)
        newer.publish(1, weights(2))
        assert is_next.wait(30)
        try:
            return commit(*args, **options)
        finally:
            has_arrived.set()

    older, newer = Publisher(root), Publisher(root)
    monkeypatch.setattr(ModelTransaction, "commit", commit_late)
    older.publish(1, weights(1))
    with contextlib.suppress(CheckpointError):
        older.wait()
    monkeypatch.setattr(ModelTransaction, "commit", commit)
    with contextlib.suppress(CheckpointError):
        newer.wait()
    for number in committed_versions(Location(root)):
        assert not damage_of(Location(root), number)
    newer.publish(2, weights(3))
    newer.wait()
    for number in committed_versions(Location(root)):
        assert not damage_of(Location(root), number)
    worker, engine = Subscriber(root), Engine(weights(3))
    assert worker.update(engine.tensors) == 2


def test_leftovers_that_cannot_be_removed_do_not_fail_a_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Location) -> None:
        raise StorageError(f"cannot remove {path}: Directory not empty (ENOTEMPTY)")

    (tmp_path / "version-1").mkdir()
    (tmp_path / "version-1/rank-0-0123456789abcdef.delta").write_bytes(b"of a superseded one")
    with Publisher(tmp_path) as training, monkeypatch.context() as patched:
        patched.setattr(Location, "remove_all", fail)
        training.publish(2, weights(2))
    worker, engine = Subscriber(tmp_path), Engine(weights(2))
    assert worker.update(engine.tensors) == 2
    engine.assert_has(weights(2))


def _names(path: str) -> list[str]:
    try:
        return Location(path).names()
    except NotFoundError:
        return []


def publish_and_wait(training: Publisher, version: int, state: Any) -> None:
    training.publish(version, state)
    training.wait()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "'odd'"),
        (torch.zeros(3).to_sparse(), "'odd'"),
        (torch.zeros(3, device="meta"), "'odd'"),
    ],
)
def test_a_value_that_cannot_be_published_is_named(tmp_path: Path, value: Any, says: str) -> None:
    with Publisher(tmp_path) as training:
        training.publish(1, weights(1))
        training.wait()
        with pytest.raises((UnsupportedError, torch_ckpt.CheckpointError), match=says):
            publish_and_wait(training, 2, {**weights(1), "odd": value})
        training.publish(2, weights(2))
    worker, engine = Subscriber(tmp_path), Engine(weights(2))
    assert worker.update(engine.tensors) == 2
    engine.assert_has(weights(2))


def test_tensors_may_come_go_and_change_their_sizes(tmp_path: Path) -> None:
    worker = Subscriber(tmp_path)
    with Publisher(tmp_path) as training:
        for version, sizes in enumerate([(3, 5), (3, 5), (4, 5), (4, 5)]):
            state = {"w": torch.randn(sizes), f"only {version // 2}": torch.randn(70_000)}
            training.publish(version, state)
            training.wait()
            served = like(state)
            assert worker.update(served) == version
            assert {name: bits(served[name]) for name in state} == {
                name: bits(value) for name, value in state.items()
            }


def test_names_that_are_no_longer_tied_have_values_of_their_own(tmp_path: Path) -> None:
    one, two = torch.rand(7, 300), torch.rand(7, 300)
    states = ({"a": one, "b": one}, {"a": one, "b": two}, {"a": two, "b": two})
    worker, served = Subscriber(tmp_path), {name: torch.zeros(7, 300) for name in "ab"}
    with Publisher(tmp_path) as training:
        for version, state in enumerate(states * 2):
            training.publish(version, state)
            training.wait()
            assert worker.update(served) == version
            assert {name: bits(served[name]) for name in state} == {
                name: bits(value) for name, value in state.items()
            }


def test_differences_wait_for_their_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_WAITING_NBYTES", 1)
    monkeypatch.setattr(snapshot, "_CHUNK_NBYTES", 1 << 16)
    monkeypatch.setattr(chain, "_GAP_NBYTES", 0)
    worker, engine = Subscriber(tmp_path), Engine(published(weights(1), BF16), 1, 2)
    with Publisher(tmp_path, dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, weights(version))
            training.wait()
            worker.update(engine.tensors)
            engine.assert_has(published(weights(version), BF16))


def test_a_cast_of_a_strided_tensor_copies_a_part_of_it_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Copies(TorchDispatchMode):
        """Finds the largest tensor that is made of another one."""

        numel = 0

        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kw: Any = None) -> Any:
            made = function(*args, **(kw or {}))
            of = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if of and isinstance(made, torch.Tensor):
                is_copy = made.untyped_storage().data_ptr() not in of
                self.numel = max(self.numel, made.numel() if is_copy else 0)
            return made

    monkeypatch.setattr(snapshot, "_CHUNK_NBYTES", 1 << 16)
    worker, served = Subscriber(tmp_path), torch.zeros(3, 5, 40_000, dtype=BF16)
    with Publisher(tmp_path, dtype=BF16) as training:
        for version, dims in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)]):
            order = sorted(range(3), key=dims.__getitem__)
            source = torch.randn([(3, 5, 40_000)[dim] for dim in dims]).permute(order)
            with Copies() as copies:
                training.publish(version, {"w": source})
            training.wait()
            worker.update({"w": served})
            assert bits(served) == bits(source.to(BF16))
            assert 0 < copies.numel <= 1 << 15


def test_arguments_are_checked(tmp_path: Path) -> None:
    for options in ({"whole_every": 0}, {"keep_whole": 0}, {"dtype": torch.int8}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Publisher(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s"):
        Publisher(tmp_path, timeout_s=0)


# ---- Processes that die ----

_KILLED = """
import os, sys
sys.path[:0] = {paths!r}
import torch
from support.flips import flip
from support.published import weights
from torch_ckpt import Publisher
from torch_ckpt.commits.delta import DeltaTransaction
from torch_ckpt.publishing import publisher, retention

def dying(module, name, before):
    real = getattr(module, name)
    def call(*args, **kwargs):
        if before:
            os._exit(9)
        real(*args, **kwargs)
        os._exit(9)
    setattr(module, name, call)

root, where = sys.argv[1:]
training = Publisher(root, dtype=torch.bfloat16, whole_every=3)
for version in (1, 2):
    training.publish(version, weights(version))
    training.wait()
owner, name, when = where.split()
owners = dict(publisher=publisher, delta=DeltaTransaction, whole=publisher._WholeWriter)
dying(owners[owner], name, when == "before")
for version in (3, 4):
    training.publish(version, weights(version))
    training.wait()
"""


@pytest.mark.thin(0.25)
@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("publisher write_differences before", 2),
        ("publisher write_differences after", 2),
        ("publisher write_latest before", 2),
        ("delta check before", 2),
        ("delta commit before", 2),
        ("delta commit after", 3),
        ("publisher write_digests after", 3),
        ("whole finish before", 3),
        ("whole finish after", 4),
    ],
)
def test_a_publisher_that_is_killed_leaves_whole_versions_and_the_next_one_removes_the_rest(
    tmp_path: Path, where: str, left: int
) -> None:
    root = tmp_path / "policy"
    script = _KILLED.format(paths=sys.path)
    done = forks.run_python("-c", script, root, where, folder=tmp_path, timeout_s=60)
    assert done.returncode == 9, done.stdout
    worker, engine = Subscriber(root), Engine(published(weights(1), BF16))
    newest = worker.update(engine.tensors)
    assert newest == left
    engine.assert_has(published(weights(newest), BF16))
    assert committed_versions(Location(root))[0] == left
    with Publisher(root, dtype=BF16, keep_whole=9) as training:
        training.publish(left + 2, weights(9))
    expected = [left + 2, *range(left, 0, -1)]
    assert committed_versions(Location(root)) == expected
    assert {path.name for path in root.glob("version-*")} == {f"version-{n}" for n in expected}
    assert worker.update(engine.tensors) == left + 2
    engine.assert_has(published(weights(9), BF16))


def test_an_interrupt_of_publish_ends_the_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with Publisher(tmp_path) as training:
        training.publish(1, weights(1))
        training.wait()
        with monkeypatch.context() as patched:
            patched.setattr(snapshot.Snapshot, "compare", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training.publish(2, weights(2))
        with pytest.raises(torch_ckpt.CheckpointError, match="interrupted"):
            training.wait()
        training.publish(2, weights(2))
    worker, engine = Subscriber(tmp_path), Engine(weights(2))
    assert worker.update(engine.tensors) == 2
    engine.assert_has(weights(2))


def test_an_interrupt_after_the_thread_has_begun_ends_the_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = publisher.in_thread, []

    def interrupt(*arguments: Any) -> Any:
        threads.append(real(*arguments))
        raise KeyboardInterrupt

    with Publisher(tmp_path) as training:
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "in_thread", interrupt)
            with pytest.raises(KeyboardInterrupt):
                training.publish(1, weights(1))
        assert threads[0].has_ended(20)
        with pytest.raises(torch_ckpt.CheckpointError, match="interrupted"):
            threads[0].result()
        training.publish(1, weights(1))
    assert committed_versions(Location(tmp_path)) == [1]


def test_a_publish_does_not_wait_for_ever_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_go_on = publisher.write_differences, threading.Event()

    def hang(*arguments: Any) -> Any:
        may_go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(snapshot, "_WAITING_NBYTES", 1)
    monkeypatch.setattr(snapshot, "_BATCH_NBYTES", 1)
    with Publisher(tmp_path, timeout_s=1.0) as training:
        training.publish(1, weights(1))
        training.wait()
        with monkeypatch.context() as patched:
            patched.setattr(publisher, "write_differences", hang)
            training.publish(2, weights(2))
            assert not may_go_on.is_set()
            may_go_on.set()
            with pytest.raises(torch_ckpt.CheckpointError, match=r"not compressed and written"):
                training.wait()
        training.publish(3, weights(3))
    assert committed_versions(Location(tmp_path)) == [3, 1]


def test_a_snapshot_without_memory_fails_one_publish_and_not_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for the snapshot")

    with Publisher(tmp_path) as training:
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, "_box_of", fail)
            training.publish(1, weights(1))
            with pytest.raises(MemoryError, match="no memory for the snapshot"):
                training.wait()
        training.publish(1, weights(1))
    assert committed_versions(Location(tmp_path)) == [1]


# ---- The directory ----


def test_a_publisher_refuses_the_directory_of_a_run(root: str) -> None:
    state = {"w": torch.zeros(3)}
    with Run(root) as run, Publisher(root) as training:
        run.save(1, state)
        with pytest.raises(CheckpointError, match=r"a Run saves there \(it has step-1\)"):
            training.publish(2, weights(2))
        run.save(2, state)
        assert Run(root).restore(state) == 2


def test_a_publisher_refuses_the_directory_of_a_run_whose_first_step_is_not_there_yet(
    root: str,
) -> None:
    take_term(Location(root), {0: 0})  # As a save of step 1 in the background takes it.
    says = r"a Run saves there \(it has term \d+, process"
    with Publisher(root) as training, pytest.raises(CheckpointError, match=says):
        training.publish(1, weights(1))
    assert not committed_versions(Location(root))


def test_a_run_refuses_the_directory_of_a_publisher(root: str) -> None:
    with Publisher(root) as training, Run(root) as run:
        publish_and_wait(training, 1, weights(1))
        with pytest.raises(CheckpointError, match=rf"cannot save to {root}: a Publisher publishes"):
            run.save(1, {"w": torch.zeros(3)})
        publish_and_wait(training, 2, weights(2))
    assert Run(root).latest_step() is None
    assert Subscriber(root).latest() == 2


def test_a_run_refuses_a_local_directory_of_a_publisher(tmp_path: Path) -> None:
    local = tmp_path / "policy"
    with Publisher(local) as training, Run(tmp_path / "run", local=local) as run:
        publish_and_wait(training, 1, weights(1))
        with pytest.raises(CheckpointError, match=f"cannot save to {local}: a Publisher publishes"):
            run.save(1, {"w": torch.zeros(3)})
        publish_and_wait(training, 2, weights(2))


def test_a_directory_that_an_earlier_version_let_a_run_and_a_publisher_share_is_that_of_the_run(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"n": 1}
    Run(root).save(1, state)
    with monkeypatch.context() as earlier, Publisher(root) as training:
        earlier.setattr(terms, "_check_use", lambda *_: None)
        training.publish(1, weights(1))
    with pytest.raises(CheckpointError, match="a Run saves there"):
        Publisher(root).publish(2, weights(2))
    run = Run(root)
    assert run.restore(state, step=1) == 1
    run.save(2, {"n": 2})
    assert Run(root).restore(state) == 2


def test_a_publisher_creates_its_directory_again_and_can_be_superseded_there(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Publisher(root, record=False)
    for version in (1, 2):
        publish_and_wait(first, version, weights(version))
    Location(root).remove_all()
    publish_and_wait(first, 3, weights(3))
    assert f"{root} is gone; this publish creates it again" in caplog.text
    publish_and_wait(first, 4, weights(4))
    assert [version_of(root, each).is_whole for each in (3, 4)] == [True, False]
    engine = Engine(weights(4))
    assert Subscriber(root).update(engine.tensors) == 4
    engine.assert_has(weights(4))
    with Publisher(root, record=False) as second:
        publish_and_wait(second, 5, weights(5))
        with pytest.raises(SupersededError):
            first.publish(6, weights(6))


@pytest.mark.parametrize("whole_every", [1, 50])
@pytest.mark.parametrize("begins_at", [1, 4])
def test_a_publisher_does_not_publish_to_a_directory_that_another_one_has_begun_again(
    root: str, begins_at: int, whole_every: int
) -> None:
    first = Publisher(root, whole_every=whole_every, record=False)
    publish_and_wait(first, 1, weights(1))
    Location(root).remove_all()
    with Publisher(root, record=False) as second:
        publish_and_wait(second, begins_at, weights(7))
        for version in (2, 6):
            with pytest.raises(SupersededError, match="a newer job saves there"):
                publish_and_wait(first, version, weights(2))
        assert committed_versions(Location(root)) == [begins_at]
        publish_and_wait(second, 8, weights(8))
    engine = Engine(weights(8))
    assert Subscriber(root).update(engine.tensors) == 8
    engine.assert_has(weights(8))


def test_a_publisher_does_not_publish_to_an_emptied_directory(tmp_path: Path) -> None:
    with Publisher(tmp_path / "policy", record=False) as training:
        publish_and_wait(training, 1, weights(1))
        (tmp_path / "policy").rename(tmp_path / "moved")
        (tmp_path / "policy").mkdir()  # As a mount point.
        for _ in range(2):
            with pytest.raises(CheckpointError, match="It may have been moved or unmounted"):
                training.publish(2, weights(2))
        (tmp_path / "policy").rmdir()
        (tmp_path / "moved").rename(tmp_path / "policy")
        publish_and_wait(training, 2, weights(2))
    engine = Engine(weights(2))
    assert Subscriber(tmp_path / "policy").update(engine.tensors) == 2


def test_a_publisher_takes_a_term_again_if_its_file_was_purged(root: str) -> None:
    first = Publisher(root, record=False)
    publish_and_wait(first, 1, weights(1))
    first_term = newest_term(Location(root)).number
    (Location(root) / f"term-{first_term}").remove()
    publish_and_wait(first, 2, weights(2))
    assert not version_of(root, 2).is_whole
    with Publisher(root, record=False) as second:
        publish_and_wait(second, 3, weights(3))
        with pytest.raises(SupersededError):
            first.publish(4, weights(4))


@pytest.mark.parametrize("root", ["local", "memory"], indirect=True)  # SeaweedFS lists it longer.
@pytest.mark.parametrize("removed", [1, 2, 3])
def test_the_next_version_is_whole_if_one_was_removed_to_which_it_would_be_added(
    root: str, removed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(root) as training:
        for version in (1, 2, 3):
            publish_and_wait(training, version, weights(version))
        (Location(root) / f"version-{removed}").remove_all()
        publish_and_wait(training, 4, weights(4))
        publish_and_wait(training, 5, weights(5))
    assert f"{root} lacks version {removed}, which was removed" in caplog.text
    assert [version_of(root, each).is_whole for each in (4, 5)] == [True, False]
    engine = Engine(weights(5))
    assert Subscriber(root).update(engine.tensors) == 5
    engine.assert_has(weights(5))


def test_the_next_version_is_whole_if_the_files_of_the_whole_one_were_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "policy"
    with Publisher(root, keep_whole=1) as training:
        for version in (1, 2):
            publish_and_wait(training, version, weights(version))
        for file in (root / "version-1").iterdir():
            file.unlink()  # As by `find -type f -mtime +30 -delete`.
        publish_and_wait(training, 3, weights(3))
    assert f"{root} lacks version 1, which was removed" in caplog.text
    assert not (root / "version-1").exists()
    engine = Engine(weights(3))
    assert Subscriber(root).update(engine.tensors) == 3
    engine.assert_has(weights(3))


def test_an_old_version_that_was_removed_makes_no_version_whole(root: str) -> None:
    with Publisher(root, whole_every=2) as training:
        for version in (1, 2, 3):
            publish_and_wait(training, version, weights(version))
        (Location(root) / "version-1").remove_all()
        publish_and_wait(training, 4, weights(4))
    assert not version_of(root, 4).is_whole


def removed_delta(root: str) -> tuple[Location, bytes]:
    """The file of a delta whose version was removed, and its contents: a store may get it late."""
    with Publisher(root, record=False) as older:
        for version in (1, 2):
            publish_and_wait(older, version, weights(version))
    file = Location(root) / "version-2/delta.json"
    contents = file.read()
    file.parent.remove_all()
    return file, contents


def test_a_delta_that_arrives_when_its_data_was_removed_is_no_version(root: str) -> None:
    late, contents = removed_delta(root)
    with Publisher(root, record=False) as newer:
        publish_and_wait(newer, 5, weights(5))
        late.parent.create_directories()
        late.write(contents, sync=False)
        found = {each["version"]: each["state"] for each in facts_of(Location(root))}
        assert found == {5: "files present", 2: "unfinished", 1: "files present"}
        assert committed_versions(Location(root)) == [5, 1]
        publish_and_wait(newer, 6, weights(6))
    assert not late.exists()
    for number in committed_versions(Location(root)):
        assert not damage_of(Location(root), number)


def test_a_delta_that_arrives_beside_a_whole_version_does_not_hide_it(root: str) -> None:
    late, contents = removed_delta(root)
    with Publisher(root, record=False) as newer:
        publish_and_wait(newer, 2, weights(7))
        late.parent.create_directories()
        late.write(contents, sync=False)
        publish_and_wait(newer, 3, weights(8))
    assert [(each["kind"], each["state"]) for each in facts_of(Location(root))] == [
        ("delta", "files present"),
        ("whole", "files present"),
        ("whole", "files present"),
    ]
    engine = Engine(weights(8))
    assert Subscriber(root).update(engine.tensors) == 3
    engine.assert_has(weights(8))


def test_a_delta_without_data_is_a_version(root: str) -> None:
    served = {"none": torch.zeros(0, 7)}
    with Publisher(root) as training:
        for version in (1, 2, 3):
            publish_and_wait(training, version, served)
    with Publisher(root) as training:
        publish_and_wait(training, 4, served)
    assert committed_versions(Location(root)) == [4, 3, 2, 1]
    assert Subscriber(root).update(served, version=2) == 2
