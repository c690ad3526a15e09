"""Small files of JSON: each reader answers every kind of damage as it answers a torn file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ROOT

from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.saves import Saves
from torch_ckpt.commits import leases
from torch_ckpt.commits.small_files import BRANCH, METRICS
from torch_ckpt.commits.terms import term_at, term_in
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.model_config import model_config
from torch_ckpt.formats.recognise import open_stored
from torch_ckpt.ladder import step_files
from torch_ckpt.records.reading import read_events

WRONG: dict[str, Any] = {
    "continued_from": {},
    "term": [],
    "lineage": 5,
    "process": 5,
    "renewed_s": 10**400,
    "loss": 10**400,
    "io": 5,
    "call": {},
    "directory": 5,
}
DAMAGE = {
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "null": b"null",
    "a number": b"7",
    "a text": b'"text"',
    "a list": b"[1, null]",
    "an object of other types": json.dumps(WRONG).encode(),
    "bytes that are no text": b"\xff\xfe\xff",
}
TORN = b'{"term": 1, "li'

SOUND: dict[tuple[str, str], object] = {
    ("announced removal", "a text"): False,
    ("announced removal", "a list"): False,
    ("announced removal", "an object of other types"): False,
    ("configuration of a model", "an object of other types"): WRONG,
}
"""What is no damage to a reader, and what it returns."""


def old(file: Path) -> Path:
    """A file that was written long ago: only its contents can say that a lease is valid."""
    os.utime(file, (0, 0))
    return file


def failure_of(folder: Path) -> object:
    saves = object.__new__(Saves)
    saves._folder, saves._failures = folder, {}
    return saves.failure_of((bytes(16), 7))


# What is read (the name of its file, "" for a text that is no file), and how.
READERS: dict[str, tuple[str, Callable[[Path, bytes], object]]] = {
    "metrics": (METRICS, lambda step, _: step_files.metrics_of(Location(step))),
    "branch": (BRANCH, lambda step, _: step_files.branch_of(Location(step))),
    "term of a step": ("", lambda _, text: term_in({BRANCH: text})),
    "term": ("term-7", lambda run, _: term_at(Location(run), 7)),
    "lease": (".lease-5-ab", lambda run, _: step_files.leased_steps(Location(run))),
    "lease on a store without times": (
        "lease",
        lambda run, _: leases._renewed_s(Location(run / "lease")),
    ),
    "announced removal": (
        "removal",
        lambda run, _: leases._announces(Location(run / "removal"), "step-5"),
    ),
    "record": ("events.jsonl", lambda run, _: read_events(Location(run))),
    "options of an agent": ("", lambda _, text: AgentOptions.decode(text.decode(errors="replace"))),
    "failed save of an agent": (
        f"failed-{'0' * 32}-7",
        lambda folder, _: failure_of(folder),
    ),
    "destination of a save in memory": (
        "",
        lambda _, text: Destination.decode("{" + text.decode(errors="replace")),
    ),
    "configuration of a model": ("config.json", lambda model, _: model_config(Location(model))),
    "index of a model": (
        "model.safetensors.index.json",
        lambda model, _: open_stored(Location(model), verify=True, trust_pickle=False),
    ),
}


def answer(reader: str, text: bytes, folder: Path) -> object:
    """What a reader returns for a text, or the class of its error."""
    name, read = READERS[reader]
    if name:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
        old(folder / name)
    try:
        return read(folder, text)
    except (CheckpointError, ValueError) as error:
        return CheckpointError if isinstance(error, CheckpointError) else ValueError


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_every_damage_of_a_small_file_is_answered_as_a_torn_file_is(
    reader: str, damage: str, tmp_path: Path
) -> None:
    found = answer(reader, DAMAGE[damage], tmp_path / "folder")
    torn = answer(reader, TORN, tmp_path / "folder")
    assert found == SOUND.get((reader, damage), torn)


def test_files_are_parsed_by_one_reader() -> None:
    messages = {
        "agent/messages.py",
        "coordination/connect.py",
        "coordination/contributions.py",
        "coordination/relay.py",
        "filesystems/obstore_client.py",
        "formats/safetensors/layout.py",
        "frameworks/torch_checkpointing/stated_items.py",
        "frameworks/transformers/trainer.py",
        "records/record.py",
    }
    package = ROOT / "torch_ckpt"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"json\.loads?\b", path.read_text())
    }
    assert found == {*messages, "stored_json.py"}
