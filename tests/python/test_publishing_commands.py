"""The commands on published versions: ``ls``, ``verify``, ``report`` and ``follow``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.flips import flip
from support.published import Engine, published, weights
from support.tensors import bits

from torch_ckpt import Publisher, Subscriber
from torch_ckpt.cli import follow
from torch_ckpt.cli.follow import FOLLOWED
from torch_ckpt.cli.main import main
from torch_ckpt.commits.leases import lease_of
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.version_files import has_version

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

BF16 = torch.bfloat16


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Versions 1, 2 and 3, of which the first is whole."""
    with Publisher(tmp_path / "policy", dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, weights(version))
    return tmp_path / "policy"


def printed(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    return capsys.readouterr().out


def test_ls_lists_the_versions(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (policy / "version-4").mkdir()
    with lease_of(Location(policy) / "version-2", 2, has_version):
        facts = json.loads(printed(capsys, "ls", "--json", policy))["versions"]
    columns = ("version", "kind", "leases", "state")
    assert [tuple(each[name] for name in columns) for each in facts] == [
        (4, None, 0, "unfinished"),
        (3, "delta", 0, "files present"),
        (2, "delta", 1, "files present"),
        (1, "whole", 0, "files present"),
    ]
    assert 1 < facts[3]["share"] < 1.1
    assert 0 < facts[1]["share"] < 0.9
    table = printed(capsys, "ls", policy).splitlines()
    assert table[0].split() == ["version", "kind", "size", "share", "age", "state"]
    assert table[2].split()[:2] == ["3", "delta"]
    next(policy.glob("version-3/rank-*")).write_bytes(b"")
    assert "damaged" in printed(capsys, "ls", policy, status=1)


def test_verify_reads_the_newest_version_with_those_that_it_is_added_to(
    policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "version 3: sound" in printed(capsys, "verify", "--quiet", policy)
    file = next(policy.glob("version-2/rank-*"))
    flip(file, 99)
    text = printed(capsys, "verify", "--quiet", policy, status=1)
    assert f"{file}: " in text
    assert "version 3: damaged" in text
    facts = json.loads(printed(capsys, "verify", "--quiet", "--all", "--json", policy, status=1))
    found = [(each["version"], each["outcome"]) for each in facts["versions"]]
    assert found == [(3, "damaged"), (2, "damaged"), (1, "sound")]
    assert len(facts["versions"][0]["damage"]) == 1


def test_follow_keeps_a_model_at_the_newest_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, model = tmp_path / "policy", tmp_path / "model"
    assert main(["follow", "--once", str(url), str(model)]) == 3
    model.mkdir()
    (model / "config.json").write_text("{}")
    with Publisher(url, dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, weights(version))
            training.wait()
            words = ["--once"] if version == 2 else ["--until-version", version]
            told = printed(capsys, "follow", *words, url, model, *["--json"] * (version == 3))
            facts = {"version": version, "directory": str(model)}
            assert told == (json.dumps(facts) if version == 3 else f"version {version}") + "\n"
            expected = published(weights(version), BF16)
            found = load_file(model / "model.safetensors")
            assert {**found, "tied": found["matrix"]}.keys() == expected.keys()
            for name, value in found.items():
                assert bits(value) == bits(expected[name]), name
            assert json.loads((model / FOLLOWED).read_text()) == {"version": version}
    assert {file.name for file in model.iterdir()} == {
        *("config.json", "model.safetensors", FOLLOWED)
    }


def test_follow_writes_a_model_again_that_it_could_not_write(
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, failures = follow._write, [StorageError(f"no space left in {tmp_path}")]

    def write(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        real(*arguments)

    monkeypatch.setattr(follow, "_write", write)
    words = ["--until-version", 3, "--interval", 0.01, policy, tmp_path / "model"]
    assert printed(capsys, "follow", *words) == "version 3\n"
    found = load_file(tmp_path / "model" / "model.safetensors")
    for name, value in found.items():
        assert bits(value) == bits(published(weights(3), BF16)[name]), name


def test_follow_writes_the_tensors_of_one_version_while_the_next_one_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, model = tmp_path / "policy", tmp_path / "model"
    real, one, two = follow._fitting, torch.ones(2), {"one": torch.ones(2), "two": torch.ones(2)}
    with Publisher(url) as training:
        training.publish(1, {"one": one})
        training.wait()

        def fitting(*arguments: Any) -> Any:
            made = real(*arguments)
            training.publish(2, two)
            training.wait()
            return made

        monkeypatch.setattr(follow, "_fitting", fitting)
        assert printed(capsys, "follow", "--once", url, model) == "version 1\n"
    assert load_file(model / "model.safetensors").keys() == {"one"}
    assert json.loads((model / FOLLOWED).read_text()) == {"version": 1}


def test_publishes_and_updates_are_recorded(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts: dict[str, Any] = json.loads(printed(capsys, "report", "--json", policy))
    assert (facts["kind"], facts["step"], facts["result"]) == ("publish", 3, "ok")
    phases = {each["phase"]: each for each in facts["phases"]}
    assert set(phases) == {"begin", "stage", "write", "commit", "retain"}
    assert phases["write"]["bytes"] == next(policy.glob("version-3/rank-*")).stat().st_size
    (tmp_path / "engine").mkdir()
    worker = Subscriber(policy, record=tmp_path / "engine")
    worker.update(Engine(published(weights(1), BF16)).tensors)
    worker.close()
    facts = json.loads(printed(capsys, "report", "--json", tmp_path / "engine"))
    assert (facts["kind"], facts["step"], facts["result"]) == ("update", 3, "ok")
    assert {each["phase"] for each in facts["phases"]} == {"choose", "read", "apply"}
