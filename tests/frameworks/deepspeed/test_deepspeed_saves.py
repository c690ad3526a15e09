"""DeepSpeed engines save and load their own files through this package."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_runs import convert, loaded_whole, merged_by_deepspeed
from deepspeed_save_runs import (
    ENGINES,
    fail_on_one_rank,
    fail_to_save,
    refuse_other_engines,
    save_again,
    save_both,
    save_through_links,
    save_until_killed,
    value_of,
)
from ranks import RankError, Ranks, Worlds
from states import assert_same
from waits import until

from torch_ckpt.cli.main import main

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]

HOWS = {"sync": False, "async": True}


@pytest.mark.thin("zero-1-fp32-async", "zero-3-bf16-sync", "experts-2-async", "pipeline-sync")
@pytest.mark.parametrize(
    ("kind", "how"), [pytest.param(k, h, id=f"{k}-{h}") for k in ENGINES for h in HOWS]
)
def test_files_have_what_deepspeed_writes_and_engines_resume_from_them(
    worlds: Worlds, tmp_path: Path, kind: str, how: str
) -> None:
    stock, path = tmp_path / "stock", tmp_path / "ours"
    worlds.run(2 if kind.startswith("zero") else 4, save_both, kind, HOWS[how], stock, path)
    names = {file.relative_to(stock) for file in stock.rglob("*")}
    assert {file.relative_to(path) for file in path.rglob("*")} == names
    assert (path / "latest").read_text() == (stock / "latest").read_text()
    for name in (name for name in names if name.suffix == ".pt"):
        theirs = torch.load(stock / name, weights_only=False)
        assert_equal(torch.load(path / name, weights_only=False), theirs, str(name))


@pytest.mark.thin("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_tools_of_deepspeed_read_the_files(worlds: Worlds, tmp_path: Path, stage: int) -> None:
    stock, path = tmp_path / "stock", tmp_path / "ours"
    worlds.run(2, save_both, f"zero-{stage}-fp32", True, stock, path)
    ours, theirs = (worlds.run(2, merged_by_deepspeed, each)[0] for each in (path, stock))
    assert_same(ours, theirs)
    folder = path / (path / "latest").read_text()
    for named in (folder, path):  # Compares the CRC-32 of each record.
        assert main(["verify", str(named)]) == 0
    worlds.run(2, convert, folder, path / "universal")
    assert_same(loaded_whole(path / "universal"), loaded_whole(path))


@pytest.mark.parametrize("how", HOWS)
def test_an_error_of_a_rank_is_raised_on_all_and_latest_stays(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    found = worlds.agree(2, fail_to_save, tmp_path, HOWS[how])
    assert found == ["first", "latest", "zero_to_fp32.py", "zero_to_torch.py", "first", "fourth"]
    assert value_of(tmp_path) == 2


@pytest.mark.thin("1-sync", "3-async")
@pytest.mark.parametrize(
    ("stage", "how"), [pytest.param(s, h, id=f"{s}-{h}") for s in (1, 3) for h in HOWS]
)
def test_no_rank_waits_in_a_barrier_of_deepspeed_for_one_that_failed(
    worlds: Worlds, tmp_path: Path, stage: int, how: str
) -> None:
    for took in worlds.run(2, fail_on_one_rank, tmp_path / "run", stage, HOWS[how]):
        print({where: round(seconds, 2) for where, seconds in took.items()})
        assert max(took.values()) < 10, took


@pytest.mark.thin("sync")
@pytest.mark.parametrize("how", HOWS)
def test_a_tag_is_replaced_as_a_whole(worlds: Worlds, tmp_path: Path, how: str) -> None:
    worlds.run(2, save_again, tmp_path, HOWS[how])
    assert value_of(tmp_path) == 2
    assert sorted(os.listdir(tmp_path / "last")) == [
        "dataloader.pt",
        "logs",
        "mp_rank_00_model_states.pt",
        "notes.txt",
        *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)),
    ]
    names = ["aside", "last", "latest", "model.bin", "zero_to_fp32.py", "zero_to_torch.py"]
    assert sorted(os.listdir(tmp_path)) == names
    assert (torch.load(tmp_path / "model.bin")["weight"] == 3).all()


@pytest.mark.thin("sync")
@pytest.mark.parametrize("how", HOWS)
def test_names_that_are_links_stay_links_as_with_deepspeed(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    worlds.run(2, save_through_links, tmp_path, HOWS[how])
    run, disk = tmp_path / "run", tmp_path / "disk"
    names = {"last", "latest", "model.bin", "new", "stock"}
    assert {each.name for each in run.iterdir() if each.is_symlink()} == names
    assert {each.name for each in disk.iterdir()} == names
    files = ["mp_rank_00_model_states.pt"]
    files += [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert sorted(os.listdir(disk / "stock")) == sorted(os.listdir(disk / "new")) == files
    assert sorted(os.listdir(disk / "last")) == ["logs", *files[:1], "notes.txt", *files[1:]]
    assert os.readlink(disk / "last" / "logs") == "../../logs"
    assert value_of(run) == 3
    (disk / "latest").write_text("last")
    assert value_of(run) == 2


def test_engines_that_save_otherwise_are_refused(worlds: Worlds) -> None:
    worlds.run(2, refuse_other_engines)


@pytest.mark.timeout(900)
def test_kills_at_any_moment_leave_latest_on_a_whole_checkpoint(
    tmp_path: Path, seed: int, full: bool
) -> None:
    rng = random.Random(seed)
    former = 0
    for number in range(20 if full else 2):
        asynchronous, tag = bool(number % 2), rng.choice(["last", None])
        returned = kill(tmp_path, rng, number, asynchronous=asynchronous, ours=True, tag=tag)
        # The last save that has returned may not be committed if it is asynchronous.
        allowed = returned[: len(returned) - asynchronous]
        found = value_of(tmp_path)
        assert found >= (allowed[-1] if allowed else former), f"kill {number}"
        former = found
    # A save removes what killed ones have left.
    hidden = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(hidden) <= 3, hidden


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_deepspeeds_own_saves_leave_latest_on_a_broken_checkpoint(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    broken = []
    for number in range(8):
        kill(tmp_path / f"{number}", rng, 0, asynchronous=False, ours=False, tag="last")
        try:
            value_of(tmp_path / f"{number}")
        except (AssertionError, EOFError, OSError, RuntimeError) as error:
            broken.append(repr(error))
    print(broken)
    assert broken


def kill(
    path: Path, rng: random.Random, number: int, *, asynchronous: bool, ours: bool, tag: str | None
) -> range:
    """Kills one rank or both while they save; returns the values whose saves had returned."""
    path.mkdir(exist_ok=True)
    saved = path / "saved"
    saved.unlink(missing_ok=True)
    after_s, victims = rng.uniform(0.1, 0.7), rng.choice([[0], [1], [0, 1], [1, 0]])
    with Ranks(2) as ranks:

        def strike() -> None:
            until(lambda: saved.exists() and (path / "latest").exists(), 60)
            threading.Event().wait(after_s)
            for victim in victims:
                os.kill(ranks.pids[victim], signal.SIGKILL)

        striker = threading.Thread(target=strike)
        striker.start()
        first = 1 + 1_000_000 * number
        with pytest.raises(RankError):
            ranks.run(save_until_killed, path, first, asynchronous, ours, tag)
        striker.join(60)
    return range(first, int(saved.read_text() or first) + 1)


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """Equal, also in the types and strides of everything within.

    Where DeepSpeed clones what it saves, it makes tuples of sizes.
    """
    assert isinstance(ours, type(theirs)), f"{where}: {type(ours)}, {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.size()) == (theirs.dtype, theirs.size()), where
        assert ours.stride() == theirs.stride(), where
        assert ours.requires_grad == theirs.requires_grad, where
        assert_equal(vars(ours), vars(theirs), where)
        # Bits, since DeepSpeed's padding is not initialized.
        pair = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
        assert torch.equal(*pair), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_equal(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}.{number}")
    elif dataclasses.is_dataclass(theirs) or hasattr(theirs, "__dict__"):
        assert_equal(vars(ours), vars(theirs), where)
    else:
        assert ours == theirs, where
