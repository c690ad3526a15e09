"""Destination: where agents write a save, as slots and messages name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location

FILES = {"metrics.json": '{"loss": "1,5 \u20ac\0"}'.encode(), "branch.json": b""}


@pytest.mark.parametrize("base", [None, Location("/run/step-0")])
@pytest.mark.parametrize("shared", [None, Location("/shared")])
@pytest.mark.parametrize("files", [None, {}, FILES])
@pytest.mark.parametrize("name", ["/run/step-1", '/{"a"}/\u20ac'])
def test_a_destination_returns_from_its_text(
    name: str, shared: Location | None, files: dict[str, bytes] | None, base: Location | None
) -> None:
    made = Destination(Location(name), shared, files, base)
    assert Destination.decode(made.encode()) == made


def test_the_text_of_an_earlier_version_is_read() -> None:
    assert Destination.decode("/run/step-1") == Destination(Location("/run/step-1"))
    both = Destination(Location("/disk/step-1"), Location("/run"))
    assert Destination.decode("/disk/step-1\0/run") == both
    without_base = '{"directory": "/disk/step-1", "shared": "/run", "small_files": null}'
    assert Destination.decode(without_base) == both


def text_of(**changes: Any) -> str:
    return json.dumps({"directory": "/run/step-1", "shared": None, "small_files": None, **changes})


@pytest.mark.parametrize(
    "text",
    [
        *("{", "{}", '{"directory": 1}', text_of(directory=None), text_of(shared=[])),
        *(
            text_of(directory="/a\0b"),
            text_of(shared="\0"),
            text_of(base=1),
            "/a\0b\0c",
            '{"a":' * 100_000,
        ),
        *(text_of(small_files=files) for files in ([], ["metrics.json"], "", 0)),
        *(text_of(small_files={name: "x"}) for name in ("../../evil", "/evil", ".metadata", "")),
        *(text_of(small_files={"metrics.json": each}) for each in (None, 1, ["x"], "\ud800")),
    ],
    ids=lambda text: text[:70],
)
def test_a_text_that_is_no_destination_is_refused(text: str) -> None:
    with pytest.raises(CorruptionError, match="no sound destination"):
        Destination.decode(text)


@pytest.mark.usefixtures("memory")
def test_small_files_are_those_of_one_save(tmp_path: Path) -> None:
    agent, state = SnapshotAgent(tmp_path), {"w": torch.ones(3)}

    def save(name: str, **options: Any) -> None:
        future = agent.async_save(state, tmp_path / name, step=1, **options)
        assert future is not None
        future.result()

    save("first", small_files={"metrics.json": b"{}"})
    save("second")
    with pytest.raises(UnsupportedError, match="small file of the step is not UTF-8"):
        save("third", small_files={"metrics.json": b"\xff"})
    with pytest.raises(ValueError, match=r"notes\.txt. is no small file"):
        save("third", small_files={"notes.txt": b""})
    agent.close()
    found = {path.parent.name for path in tmp_path.glob("*/metrics.json")}
    assert found == {"first"}
    assert not (tmp_path / "third").exists()
