"""Places where files appear together: how each is begun, written, committed and read.

Each version of the files has its own contents, so that a reader finds out which one it has.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp

from torch_ckpt import FastWriter
from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.delta import DELTA, DeltaTransaction, data_file
from torch_ckpt.commits.machine import CommitFiles, MachineTransaction
from torch_ckpt.commits.model import ModelTransaction
from torch_ckpt.commits.replacement import Replacement
from torch_ckpt.commits.terms import term_of
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.formats.safetensors.layout import ModelLayout, TensorFacts

__all__ = ["PLACES", "Place", "Saving", "save"]

_MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_VERSIONS = range(1, 7)


class Saving(Protocol):
    """One save of a version to a target, step by step, as a writer makes it."""

    foreign: tuple[str, ...]
    """Names in the target that belong to somebody else."""

    def begin(self) -> None: ...
    def write(self) -> None: ...
    def commit(self) -> None: ...
    def abandon(self) -> None:
        """Ends a save that has failed, as its writer does."""

    def names(self) -> set[str]:
        """The names in the target after this save, if it is committed."""

    @staticmethod
    def found(target: Location) -> set[int | None]:
        """The versions that readers find, whole; ``None`` for a reader that finds nothing."""


def save(saving: Saving) -> None:
    """Saves, and ends the save if it fails."""
    try:
        saving.begin()
        saving.write()
        saving.commit()
    except BaseException:
        saving.abandon()
        raise


@dataclass(frozen=True)
class _Stored:
    """A checkpoint that was saved elsewhere: what a save to another directory writes."""

    save_id: str
    metadata: bytes
    index: bytes
    files: dict[str, bytes]


@functools.cache
def _stored(version: int) -> _Stored:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stored")
        state = {name: torch.full((3,), version) for name in "ab"}
        writer = FastWriter(path, single_file_per_rank=False, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
        _, index = open_committed(Location(path), "")
        assert index is not None
        files = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
        encoded = (path / f".index.{index.save_id}").read_bytes()
        assert len(files) == 2
        return _Stored(index.save_id, (path / ".metadata").read_bytes(), encoded, files)


class Checkpoint:
    """A checkpoint of DCP."""

    prefix = ""
    foreign = ("model.safetensors", "__0_0_0123456789abcdef.distcp.bak")

    def __init__(self, target: Location, version: int, **options: Any) -> None:
        self.stored = _stored(version)
        self.transaction = CheckpointTransaction(target, self.stored.save_id, **options)
        self._may_be_committed = False

    def begin(self) -> None:
        self.transaction.begin()

    def write(self) -> None:
        for name, contents in self.stored.files.items():
            (self.transaction.directory / name).write(contents, sync=True)
        if self.transaction.directory.file_system.has_folders:
            self.transaction.directory.sync()

    def commit(self) -> None:
        self.transaction.check(self.stored.files)
        self._may_be_committed = True
        self.transaction.commit(self.stored.metadata, self.stored.index, self.stored.files)

    def abandon(self) -> None:
        self.transaction.abandon(() if self._may_be_committed else self.stored.files)

    def names(self) -> set[str]:
        commit_files = (".metadata", f".index.{self.stored.save_id}")
        return {*self.stored.files, *(self.prefix + name for name in commit_files)}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        try:
            _, index = open_committed(target, cls.prefix)
        except NotFoundError:
            return {None}
        assert index is not None
        (version,) = (v for v in _VERSIONS if _stored(v).save_id == index.save_id)
        stored = _stored(version)
        for name, contents in stored.files.items():
            assert (target / name).read() == contents, name
        metadata = (target / f"{cls.prefix}.metadata").read()
        assert _native.with_term(metadata, 0) == stored.metadata
        return {version}


class Step(Checkpoint):
    """A step of a run. The term of each version is its number."""

    def __init__(self, target: Location, version: int, **options: Any) -> None:
        files = {"branch.json": json.dumps({"term": version}).encode()}
        super().__init__(target, version, small_files=files, **options)

    def names(self) -> set[str]:
        return {*super().names(), "branch.json"}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        found = super().found(target)
        assert found in ({None}, {term_of(target)})
        return found


class RankCheckpoint(Checkpoint):
    """The checkpoint of rank 0 alone."""

    prefix = "__0"
    foreign = ("__1.metadata", "__1.index.0123456789abcdef", "__1_0_0123456789abcdef.distcp")

    def __init__(self, target: Location, version: int, **options: Any) -> None:
        super().__init__(target, version, rank=0, **options)


class MachinePart(Checkpoint):
    """The part of a machine without the coordinator, whose first rank commits for it."""

    transaction: MachineTransaction

    def __init__(self, target: Location, version: int, **options: Any) -> None:
        super().__init__(target, version)
        own_id = f"{version:016x}"
        self.transaction = MachineTransaction(target, own_id, is_first=True, **options)

    def begin(self) -> None:
        self.transaction.join(None, 1)

    def commit(self) -> None:
        self.transaction.check(self.stored.files)
        self._may_be_committed = True
        stored = self.stored
        self.transaction.commit_as(
            CommitFiles(stored.save_id, stored.metadata, stored.index, stored.files)
        )


class MachineStep(Step, MachinePart):
    """The part of such a machine in a step of a run."""


class Copy(Checkpoint):
    """A copy of a checkpoint: it keeps its files after an error, and its next try finds them."""

    def __init__(self, target: Location, version: int) -> None:
        super().__init__(target, version, keeps_files=True)

    def begin(self) -> None:
        self.transaction.target.create_directories()
        self.transaction.create_pending()

    def write(self) -> None:
        for name, contents in self.stored.files.items():
            path = self.transaction.target / name
            exists = path.exists()
            if not exists or path.read() != contents:
                path.write(contents, sync=True, update=exists)

    def commit(self) -> None:
        self.transaction.resume()
        super().commit()

    def abandon(self) -> None:
        pass


class Model:
    """The safetensors files of a model."""

    foreign = ("__0_0_0123456789abcdef.distcp", ".index.0123456789abcdef", "config.json")

    def __init__(self, target: Location, version: int, *, count: int = 1, **options: Any) -> None:
        self.transaction = ModelTransaction(target, f"{version:016x}", **options)
        self.contents = _model_files(version, count)
        self._may_be_committed, self._names = False, [""]

    def begin(self) -> None:
        self.transaction.begin(len(self.contents))

    def write(self) -> None:
        for name, contents in zip(self.transaction.files, self.contents, strict=True):
            (self.transaction.target / name).write(contents, sync=True, update=True)

    def commit(self) -> None:
        self.transaction.check(self.transaction.files)
        self._may_be_committed = True
        self._names = self.transaction.commit(self._layout)

    @property
    def _layout(self) -> ModelLayout:
        return _layout(len(self.contents))

    def abandon(self) -> None:
        self.transaction.abandon(() if self._may_be_committed else self.transaction.files)

    def names(self) -> set[str]:
        return {*self._names, *([] if self._names == [_MODEL] else [_INDEX])}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        """What a loader finds that opens the single file first, and one that opens the index."""
        return {_loaded(target, (_MODEL, _INDEX)), _loaded(target, (_INDEX, _MODEL))}


class BoxedModel(Model):
    """A model of one file that states boxes, as DCP's own writer names it."""

    usual = "shard-00001-model-00001-of-00001.safetensors"

    def begin(self) -> None:
        self.transaction.begin(usual=[self.usual], states_boxes=True)

    def names(self) -> set[str]:
        return {self.usual}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        """What DCP's reader finds, which merges all files."""
        if target.is_missing():
            return {None}
        files = [name for name in target.names() if re.fullmatch(r"[^.].*\.safetensors", name)]
        return {_version_of([(target / name).read() for name in files])} if files else {None}


def _loaded(target: Location, order: Sequence[str]) -> int | None:
    for name in order:
        if (target / name).exists():
            files = [_MODEL]
            if name == _INDEX:
                files = sorted(set(json.loads((target / name).read())["weight_map"].values()))
            return _version_of([(target / file).read() for file in files])
    return None


def _version_of(contents: list[bytes]) -> int:
    (version,) = (v for v in _VERSIONS if _model_files(v, len(contents)) == contents)
    return version


@functools.cache
def _layout(count: int) -> ModelLayout:
    facts = [TensorFacts(f"t{number}", "uint8", (100,)) for number in range(count)]
    return ModelLayout.of(facts, max_shard_nbytes=100 if count > 1 else 1 << 30)


@functools.cache
def _model_files(version: int, count: int) -> list[bytes]:
    return [file.header + bytes([version]) * 100 for file in _layout(count).files]


class Delta:
    """The data files of two ranks, and the file whose appearance commits them."""

    foreign = ("model.safetensors", "rank-0.delta", "version.json")

    def __init__(self, target: Location, version: int, **options: Any) -> None:
        self.version, self.id = version, f"{version:016x}"
        self.transaction = DeltaTransaction(target, self.id, **options)
        self.files = [data_file(rank, self.id) for rank in range(2)]
        self._may_be_committed = False

    def begin(self) -> None:
        self.transaction.begin()

    def write(self) -> None:
        for name in self.files:
            (self.transaction.target / name).write(_contents(self.version), sync=True)

    def commit(self) -> None:
        self.transaction.check(self.files)
        self._may_be_committed = True
        self.transaction.commit(self.id.encode(), self.files)

    def abandon(self) -> None:
        self.transaction.abandon(() if self._may_be_committed else self.files)

    def names(self) -> set[str]:
        return {*self.files, DELTA}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        try:
            found = (target / DELTA).read().decode()
        except NotFoundError:
            return {None}
        (version,) = (v for v in _VERSIONS if f"{v:016x}" == found)
        for rank in range(2):
            assert (target / data_file(rank, found)).read() == _contents(version)
        return {version}


class ReplacedFile:
    """A file that gets its name once it is complete."""

    foreign: tuple[str, ...] = ()
    is_folder = False

    def __init__(self, target: Location, version: int) -> None:
        self.target, self._version = target, version
        self._replacement = Replacement(target, is_folder=self.is_folder)
        self._has_begun = False

    def begin(self) -> None:
        self._replacement.__enter__()
        self._has_begun = True

    def write(self) -> None:
        self._replacement.unpublished.write(_contents(self._version), sync=True)

    def commit(self) -> None:
        self._replacement.commit()
        self._replacement.__exit__(None, None, None)

    def abandon(self) -> None:
        if self._has_begun:  # A block that did not begin has no end.
            self._replacement.__exit__(None, None, None)

    def names(self) -> set[str]:
        return {""}

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        if target.is_missing():
            return {None}
        return {_contents_version(target.read())}


class ReplacedFolder(ReplacedFile):
    """A folder that gets its name once it is complete."""

    is_folder = True
    files = ("one", "two")

    def write(self) -> None:
        for name in self.files:
            (self._replacement.unpublished / name).write(_contents(self._version), sync=True)
        self._replacement.unpublished.sync()

    def names(self) -> set[str]:
        return set(self.files)

    @classmethod
    def found(cls, target: Location) -> set[int | None]:
        if target.is_missing():
            return {None}
        (version,) = {_contents_version((target / name).read()) for name in cls.files}
        return {version}


def _contents(version: int) -> bytes:
    return bytes([version]) * 50


def _contents_version(contents: bytes) -> int:
    (version,) = (v for v in _VERSIONS if _contents(v) == contents)
    return version


Make = Callable[..., Saving]


@dataclass(frozen=True)
class Place:
    """Where files appear together.

    Attributes:
        name: What the tests call it.
        make: Makes a save of a version to a target.
        before: Makes the save that was there before; ``None`` if the target does not exist.
        on_store: Whether it is on a store.
        owns_folder: Whether all in the target belongs to the save.
        keeps: Whether files of a failed save stay for its next try.
        appears_when: The step with which the files appear.
        options: The options that say what it may replace.
    """

    name: str
    make: Make
    before: Make | None
    on_store: bool = False
    owns_folder: bool = False
    keeps: bool = False
    appears_when: str = "commit"
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


_Hidden = functools.partial(Checkpoint, can_hide=True)
_REPLACE, _ANY = ("may_replace",), ("may_replace", "supersedes")
_Shards = functools.partial(Model, count=2)

PLACES = (
    Place("checkpoint in its directory", Checkpoint, Checkpoint, options=_ANY),
    Place("first checkpoint", Checkpoint, None, options=_ANY),
    Place("new checkpoint", _Hidden, None, owns_folder=True, options=_ANY),
    Place("checkpoint with its directory", Checkpoint, None, owns_folder=True, options=_ANY),
    Place("checkpoint of a rank", RankCheckpoint, RankCheckpoint, options=_ANY),
    Place("part of a machine", MachinePart, MachinePart, options=_ANY),
    Place("first part of a machine", MachinePart, None, options=_ANY),
    Place("copy of a checkpoint", Copy, Checkpoint, keeps=True),
    Place("step of a run", Step, Step, options=_ANY),
    Place("first step of a run", Step, None, options=_ANY),
    Place("part of a machine in a step of a run", MachineStep, MachineStep, options=_ANY),
    Place("step of a run on a store", Step, Step, on_store=True, options=_ANY),
    Place("checkpoint on a store", Checkpoint, Checkpoint, on_store=True, options=_ANY),
    Place("first checkpoint on a store", Checkpoint, None, on_store=True, options=_ANY),
    Place("model of one file", Model, Model, options=_REPLACE),
    Place("model with an index", _Shards, _Shards, options=_REPLACE),
    Place("first model", _Shards, None, options=_REPLACE),
    Place("model with its directory", Model, None, owns_folder=True, options=_REPLACE),
    Place("index in place of a file", _Shards, Model, options=_REPLACE),
    Place("file in place of an index", Model, _Shards, options=_REPLACE),
    Place("model of boxes", BoxedModel, BoxedModel, options=_REPLACE),
    Place("model on a store", _Shards, _Shards, on_store=True, options=_REPLACE),
    Place(
        *("first model on a store", Model, None),
        on_store=True,
        appears_when="write",
        options=_REPLACE,
    ),
    Place("index in place of a file on a store", Model, Model, on_store=True, options=_REPLACE),
    Place("delta", Delta, Delta, options=_REPLACE),
    Place("first delta", Delta, None, options=_REPLACE),
    Place("delta with its directory", Delta, None, owns_folder=True, options=_REPLACE),
    Place("delta on a store", Delta, Delta, on_store=True, options=_REPLACE),
    Place("replaced file", ReplacedFile, ReplacedFile, owns_folder=True),
    Place("replaced folder", ReplacedFolder, ReplacedFolder, owns_folder=True),
    Place("new folder", ReplacedFolder, None, owns_folder=True),
)
