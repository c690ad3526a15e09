"""DeepSpeed's own checkpoints load without conversion, onto any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from deepspeed_runs import (
    convert,
    has_deepspeed,
    load_quarter,
    loaded_whole,
    merged_by_deepspeed,
    resume_engine,
    resume_fsdp,
    resume_schedule,
    save_engine,
    save_schedule,
)
from ranks import Ranks, Worlds
from states import assert_same

from torch_ckpt.cli.main import main

# The ranks alone import it. Here it must not be needed.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]

KINDS = [f"{stage}-{dtype}" for stage in (1, 2, 3) for dtype in ("fp32", "bf16")]
Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """Two ranks that have imported DeepSpeed, which no other test should have around."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves a checkpoint with DeepSpeed: stage, dtype and perhaps net."""
    paths: dict[str, Path] = {}

    def save(kind: str) -> Path:
        if kind not in paths:
            path = tmp_path_factory.mktemp("deepspeed") / kind
            stage, *rest = kind.split("-")
            engines.run(save_engine, path, int(stage), *rest)
            paths[kind] = path
        return paths[kind]

    return save


@pytest.mark.thin("2-bf16", "3-fp32")
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_equals_what_deepspeed_merges(engines: Ranks, saved: Save, kind: str) -> None:
    path = saved(kind)
    expected = engines.run(merged_by_deepspeed, path)[0]
    before = has_deepspeed()  # A trainer of another test may have imported it.
    loaded = loaded_whole(path)
    assert has_deepspeed() == before

    assert torch.equal(loaded.pop("rng"), torch.arange(9))
    # The frozen layer and the buffers have no fp32 weights. DeepSpeed casts the latter.
    assert loaded["model.scale"].float().equal(expected["model.scale"].float())
    expected = {
        fqn: tensor.to(loaded[fqn].dtype) if fqn == "model.scale" else tensor
        for fqn, tensor in expected.items()
    }
    assert_same(loaded, expected)


@pytest.mark.thin("3-fp32")
@pytest.mark.parametrize("kind", KINDS)
def test_trained_parameters_load_where_frozen_tied_ones_are_excluded(
    engines: Ranks, saved: Save, kind: str
) -> None:
    path = saved(f"{kind}-lora")
    expected = engines.run(merged_by_deepspeed, path)[0]
    loaded = loaded_whole(path)
    del loaded["rng"]
    assert_same(loaded, expected)
    assert "model.base.weight" not in loaded
    assert ("model.head.weight" in loaded) == (kind[0] != "3")  # DeepSpeed excludes one name.


@pytest.mark.thin("3-3-fp32")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("fp32")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_continues_with_fsdp2_as_deepspeed_resumes_it(
    engines: Ranks, saved: Save, worlds: Worlds, kind: str, ranks: int
) -> None:
    path = saved(kind)
    expected, _, _ = engines.run(resume_engine, path, *_stage(kind))[0]
    for losses, options in worlds.run(ranks, resume_fsdp, path):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert options == [(1e-3, 0.1), (5e-4, 0.0)]


@pytest.mark.thin("3-fp32-wide")
@pytest.mark.parametrize("kind", ["1-fp32-wide", "3-fp32-wide"])
def test_each_rank_reads_only_the_ranges_of_its_shards(
    saved: Save, worlds: Worlds, kind: str
) -> None:
    for nbytes, whole in worlds.run(4, load_quarter, saved(kind)):
        assert nbytes < 0.27 * whole, nbytes / whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1-fp32", "2-bf16", "3-fp32"])
def test_a_universal_folder_loads_as_its_source_does(
    engines: Ranks, saved: Save, worlds: Worlds, kind: str
) -> None:
    path = saved(kind)
    folder = path / "universal"
    engines.run(convert, path / (path / "latest").read_text(), folder)
    assert_same(loaded_whole(folder), loaded_whole(path))
    if kind.endswith("fp32"):
        assert worlds.run(2, resume_fsdp, folder) == worlds.run(2, resume_fsdp, path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_state_of_another_optimizer_loads(engines: Ranks, tmp_path: Path, stage: int) -> None:
    options = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}
    engines.run(save_engine, tmp_path, stage, "fp32", "net", options)
    expected = engines.run(merged_by_deepspeed, tmp_path)[0]
    assert any(fqn.endswith("momentum_buffer") for fqn in expected)
    loaded = loaded_whole(tmp_path)
    del loaded["rng"]
    assert_same(loaded, expected)


@pytest.fixture(scope="module")
def other_engines() -> Iterator[Ranks]:
    """Three ranks for DeepSpeed."""
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.thin("3-fp32-2", "2-bf16-3")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["1-fp32", "2-bf16", "3-fp32"])
def test_deepspeed_resumes_from_a_universal_folder_on_other_ranks_and_stages(
    engines: Ranks, other_engines: Ranks, saved: Save, tmp_path: Path, kind: str, stage: int
) -> None:
    path, dtype = saved(kind), _stage(kind)[1]
    losses, options, client = engines.run(resume_engine, path, *_stage(kind))[0]
    target = tmp_path / "universal"
    assert main(["convert", str(path), str(target), "--to", "universal"]) == 0
    assert_same(loaded_whole(target), loaded_whole(path))
    resumed = other_engines.run(resume_engine, tmp_path, stage, dtype, True)
    for found, found_options, found_client in resumed:
        assert found == pytest.approx(losses, abs=1e-6 if dtype == "fp32" else 2e-2)
        assert found_client == client
        assert found_options == options
    assert not list(tmp_path.glob(".*"))


@pytest.mark.thin("1-3")
@pytest.mark.parametrize("target", [1, 3])
@pytest.mark.parametrize("source", [1, 3])
def test_a_schedule_of_several_groups_continues_from_a_universal_folder(
    engines: Ranks, other_engines: Ranks, tmp_path: Path, source: int, target: int
) -> None:
    """Engines of ZeRO-3 need the line of the warning: they load one option for all groups."""
    expected = engines.run(save_schedule, tmp_path / "saved", source)[0]
    folder = tmp_path / "folder" / "universal"
    with pytest.warns(UserWarning, match="An engine of ZeRO-3") as caught:
        assert main(["convert", str(tmp_path / "saved"), str(folder), "--to", "universal"]) == 0
    (warning,) = [str(one.message) for one in caught if "ZeRO-3" in str(one.message)]
    assert re.search(r"lr \([0-9.]+ in group 0, [0-9.]+ in group 1\)", warning)
    line = warning[warning.index("for group") :] if target == 3 else ""
    for losses in other_engines.run(resume_schedule, folder.parent, target, line):
        assert losses == pytest.approx(expected, abs=1e-6)


def _stage(kind: str) -> tuple[int, str]:
    stage, dtype = kind.split("-")
    return int(stage), dtype
