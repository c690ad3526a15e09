"""The command ``torch-ckpt``, run in this process and as one of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import ROOT, data_files, random_tensor, save, xxh3
from command import DAMAGED, FAILED, MODULE, SOUND, UNKNOWN, run_command
from damage import BLOCK, slices_of
from progress_bars import Terminal
from support.commit_files import index_file
from support.flips import flip, flip_value, flipped
from torch.distributed.checkpoint import FileSystemWriter

from torch_ckpt import FastWriter
from torch_ckpt.cli.main import main
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import tie_directories
from torch_ckpt.storage import progress
from torch_ckpt.storage import verify as verifying

USAGE = 2


class Own:
    """A class that no pickle may request."""


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return {
        "model": {
            "wide": random_tensor([300, 500], torch.float32),
            "medium": random_tensor([200, 300], torch.bfloat16),
            "none": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5),
        },
        "step": 7,
        "object": "x" * 1000,
    }


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    """A checkpoint of ``state`` in two data files."""
    save(state, FastWriter(tmp_path / "saved", thread_count=2))
    return tmp_path / "saved"


def fqns_in(path: Path, file: str, begin: int, end: int) -> list[str]:
    """The FQNs that have bytes in a range, in the order in which they lie."""
    mine = [s for s in slices_of(path) if s.file == file and s.begin < end and s.end > begin]
    return [s.fqn for s in sorted(mine, key=lambda s: s.begin)]


def damaged_line(path: Path, file: str, begin: int, end: int) -> str:
    """How the command lists a damaged range."""
    fqns = fqns_in(path, file, begin, end)
    return f"damaged: {file} [{begin}, {end}): {', '.join(fqns) or 'no tensor or object'}"


# verify


def test_a_sound_checkpoint_exits_0_and_all_of_it_was_read(saved: Path) -> None:
    status, printed = run_command("verify", saved)

    assert status == SOUND
    nbytes = sum(file.stat().st_size for file in data_files(saved))
    assert printed.startswith(f"sound ({nbytes} bytes in ")
    assert printed.rstrip().endswith("GB/s)")


def test_the_installed_command_is_the_module(saved: Path, full: bool) -> None:
    command = shutil.which("torch-ckpt", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the package is not installed, only on the path")
    flip(data_files(saved)[0], 0)
    assert run_command("verify", saved, command=[command])[0] == DAMAGED
    if full:
        assert run_command("verify", saved.parent, command=[command])[0] == FAILED


def verify_damaged(path: Path) -> tuple[list[str], str]:
    status, printed = run_command("verify", path)
    assert status == DAMAGED
    return [line for line in printed.splitlines() if line.startswith("damaged: ")], printed


def test_every_damaged_range_is_listed_with_its_fqns(saved: Path) -> None:
    one, two = data_files(saved)
    nbytes = one.stat().st_size
    assert nbytes > 5 * BLOCK
    expected = []
    for file, at in [(one, 0), (one, 2 * BLOCK + 5), (one, nbytes - 1), (two, 100)]:
        flip(file, at)
        begin = at // BLOCK * BLOCK
        end = min(begin + BLOCK, file.stat().st_size)
        expected.append(damaged_line(saved, file.name, begin, end))

    lines, printed = verify_damaged(saved)

    assert lines == expected
    fqns = {fqn for line in expected for fqn in line.split("): ")[1].split(", ")}
    assert f"{len(fqns)} FQNs are damaged\n" in printed


def test_a_damaged_range_names_its_first_tensors_and_counts_the_others(tmp_path: Path) -> None:
    path = tmp_path / "many"
    save({f"layer.{n:03}": torch.full((100,), float(n)) for n in range(192)}, FastWriter(path))
    (file,) = data_files(path)
    os.truncate(file, 10)
    (line,), printed = verify_damaged(path)
    named = ", ".join(f"layer.{n:03}" for n in range(8))
    assert line.endswith(f": {named} and 184 more")
    assert "192 FQNs are damaged\n" in printed
    facts = json.loads(run_command("verify", "--json", path)[1])
    assert facts["fqns"] == [f"layer.{n:03}" for n in range(192)]


def test_metadata_of_other_bytes_is_called_damaged(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileSystemWriter(tmp_path))
    whole = (tmp_path / ".metadata").read_bytes()
    for contents in (bytes(len(whole)), whole[:100], b"notes of a user\n", b"", b"{}"):
        (tmp_path / ".metadata").write_bytes(contents)
        (line,), _ = verify_damaged(tmp_path)
        said = f"cannot read {tmp_path}/.metadata: it is damaged, or not metadata of DCP: "
        assert line.startswith(f"damaged: {said}")
        assert run_command("inspect", tmp_path)[1].startswith(f"torch-ckpt: {said}")
    flipped_name = whole.replace(b"torch.distributed", b"torch.distributee", 1)
    (tmp_path / ".metadata").write_bytes(flipped_name)
    assert "If it is not damaged and you trust its author" in run_command("verify", tmp_path)[1]


def test_damage_in_neighbouring_blocks_is_one_range(saved: Path) -> None:
    file = data_files(saved)[0]
    for block in (1, 2, 3):
        flip(file, block * BLOCK)

    assert verify_damaged(saved)[0] == [damaged_line(saved, file.name, BLOCK, 4 * BLOCK)]


@pytest.mark.parametrize("more", [-1, -BLOCK, -3 * BLOCK - 17, 1, 5 * BLOCK])
def test_a_file_that_was_cut_off_is_damaged_from_there_on_and_one_that_grew_where_nothing_lies(
    more: int, saved: Path
) -> None:
    file = data_files(saved)[0]
    nbytes = file.stat().st_size
    os.truncate(file, nbytes + more)

    line = f"damaged: {file.name} [{nbytes}, {nbytes + more}): no tensor or object"
    if more < 0:
        line = damaged_line(saved, file.name, (nbytes + more) // BLOCK * BLOCK, nbytes)
    assert verify_damaged(saved)[0] == [line]


def test_missing_empty_and_replaced_files_are_listed_with_all_they_held(saved: Path) -> None:
    one, two = data_files(saved)
    whole = two.read_bytes()
    missing, nbytes = one.name, one.stat().st_size
    one.unlink()
    for content in (b"", bytes(len(whole))):
        two.write_bytes(content)

        (first, second), printed = verify_damaged(saved)
        assert first.startswith(f"damaged: {missing} [0, {nbytes}): ")
        assert second == damaged_line(saved, two.name, 0, len(whole))
        fqns = {s.fqn for s in slices_of(saved)}
        assert f"{len(fqns)} FQNs are damaged\n" in printed
        here = [s.fqn for s in slices_of(saved) if s.file == missing]
        assert first.endswith(f": {', '.join(here)}")


def test_a_file_that_another_machine_has_is_not_damaged(saved: Path, tmp_path: Path) -> None:
    local, (one, two) = tmp_path / "local", data_files(saved)
    one.unlink()
    local.mkdir()
    tie_directories(Location(local), Location(tmp_path / "run"), is_part=True)
    saved.rename(local / "step-1")
    status, printed = run_command("verify", local / "step-1", "--quiet")
    assert status == UNKNOWN
    assert f"cannot verify: {one.name} is missing here: another machine may have it" in printed
    flip(local / "step-1" / two.name, 100)
    assert run_command("verify", local, "--quiet")[0] == DAMAGED
    (local / "local-of").unlink()
    assert f"damaged: {one.name} [0, " in run_command("verify", local, "--quiet")[1]


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("index", "missing", "the index of {path}/.metadata is missing or damaged"),
        ("index", "flipped", "the header of the index fails its checksum"),
        ("metadata", "missing", "it has an index, but .metadata is missing"),
        ("metadata", "flipped", "{path}/.metadata and its index contradict each other"),
    ],
)
def test_damaged_metadata_or_index_are_damage(
    name: str, damage: str, said: str, saved: Path
) -> None:
    path = index_file(saved) if name == "index" else saved / ".metadata"
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        # In the header; in the trailer.
        path.write_bytes(flipped(whole, 200 if name == "index" else -9))

    for command, prefix in (("verify", "damaged: "), ("inspect", "torch-ckpt: ")):
        status, printed = run_command(command, saved)
        assert status == DAMAGED
        assert said.format(path=saved) in printed
        assert printed.startswith(prefix)


def test_a_damaged_pickle_is_found_by_verify_and_in_nobodys_way(saved: Path) -> None:
    flip(saved / ".metadata", 200)

    (line,), _ = verify_damaged(saved)

    assert f"{saved}/.metadata: the " in line
    assert "bytes of its pickle fail their checksum" in line
    assert run_command("convert", saved, saved / "copy", "--to", "dcp")[0] == SOUND


@pytest.mark.parametrize("at", [0.2, 0.5, 0.99])
def test_damage_inside_an_index_is_listed_by_verify(at: float, saved: Path) -> None:
    nbytes = index_file(saved).stat().st_size
    flip(index_file(saved), 400 + int(at * (nbytes - 401)))

    lines, printed = verify_damaged(saved)

    if "cannot read" not in printed:
        (line,) = lines
        assert line.startswith("damaged: the index of .metadata [")
        assert f", {nbytes}): its checksum differs" in line


def test_a_stock_checkpoint_exits_2_as_long_as_nothing_contradicts_it(
    state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FileSystemWriter(tmp_path))
    status, printed = run_command("verify", tmp_path)
    assert status == UNKNOWN
    assert f"cannot verify: {tmp_path / '.metadata'} has no index" in printed
    assert "no damage found" in printed

    (file,) = data_files(tmp_path)
    wide = next(s for s in slices_of(tmp_path) if s.fqn == "model.wide")
    step = next(s for s in slices_of(tmp_path) if s.fqn == "step")
    flip_value(file, state["model"]["wide"], 1000)
    flip(file, step.begin + 67)  # In the pickle, behind the header of its record.
    lines, printed = verify_damaged(tmp_path)
    hit = sorted([wide, step], key=lambda s: s.begin)
    for line, at in zip(lines, hit, strict=True):
        assert line.startswith(f"damaged: {file.name} [{at.begin}, {at.end}): {at.fqn}: ")
    assert "2 FQNs are damaged\n" in printed

    file.unlink()
    assert {s.fqn for s in slices_of(tmp_path)} == {
        line.split("): ")[1].split(": ")[0] for line in verify_damaged(tmp_path)[0]
    }


def test_verify_names_tensors_that_a_former_writer_may_have_stored_wrongly(tmp_path: Path) -> None:
    state = {
        "a.odd": torch.zeros(300_001, dtype=torch.uint8),
        "b.wide": torch.ones(8, 9).t(),
        "c.bytes": torch.ones(8, 9, dtype=torch.uint8).t(),
        "d.short": torch.ones(3, dtype=torch.uint8),
        "e.even": torch.zeros(65_536),
    }
    save(state, FastWriter(tmp_path))
    assert run_command("verify", tmp_path)[0] == SOUND

    index = bytearray(index_file(tmp_path).read_bytes())
    assert index[52:56] == (1).to_bytes(4, "little")
    index[52:56] = bytes(4)  # As version 0.2.0 wrote it.
    index[312:320] = xxh3(bytes(index[:312]))
    index_file(tmp_path).write_bytes(index)
    status, printed = run_command("verify", tmp_path)
    assert status == UNKNOWN
    assert "a version before 0.3.0 wrote b.wide, e.even." in printed

    save({name: state[name] for name in ("b.wide", "d.short", "e.even")}, FastWriter(tmp_path))
    index[:] = index_file(tmp_path).read_bytes()
    index[52:56] = bytes(4)
    index[312:320] = xxh3(bytes(index[:312]))
    index_file(tmp_path).write_bytes(index)
    assert run_command("verify", tmp_path)[0] == SOUND


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "{empty}"], "no checkpoint is committed in {empty}"),
        (["inspect", "{empty}"], "no checkpoint is committed in {empty}"),
        (["verify", "{empty}/nowhere"], "{empty}/nowhere"),
        (["ls", "nowhere://bucket/run"], "no file system is registered for nowhere://"),
        (["watch", "{empty}", "--once", "--exec", "true"], "{empty} is not a run"),
        (["ls", "{empty}"], "{empty} is not a run: it has no directory step-<n>"),
        (["verify", "{empty}/file"], "{empty}/file"),
    ],
)
def test_what_cannot_be_done_exits_3_and_says_why(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    (tmp_path / "__0_0_0123456789abcdef.distcp").write_bytes(b"of a save that did not commit")

    status, printed = run_command(*(argument.format(empty=tmp_path) for argument in arguments))

    assert status == FAILED
    assert said.format(empty=tmp_path) in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--timeout", "-5", "script.py"], "--timeout: invalid seconds value: '-5'"),
        (["run", "--no-verify"], "a script is missing"),
        (["diff", "--atol", "-1", "a", "b"], "--atol: invalid tolerance value: '-1'"),
        (["watch", "{empty}", "--exec", " "], "--exec: invalid command value: ' '"),
        (["verify"], "path"),
        (["verify", "--fast", "{empty}"], "--fast"),
        (["inspect", "--jsn", "{empty}"], "--jsn"),
        (["repair", "{empty}"], "repair"),
        ([], "COMMAND"),
        (["ls", "--jsn", "run"], "--jsn"),
        (["rm", "run"], "one of the arguments --after --step is required"),
    ],
)
def test_a_wrong_usage_exits_2_as_that_of_other_commands(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    status, printed = run_command(*(argument.format(empty=tmp_path) for argument in arguments))
    assert (status, said in printed) == (USAGE, True)
    assert printed.startswith("usage: torch-ckpt")


def test_checkpoints_of_single_ranks_are_checked_one_by_one(
    world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    dcp.save(state, storage_writer=FastWriter(tmp_path), use_collectives=False)
    save(state, FastWriter(tmp_path))
    assert run_command("verify", tmp_path)[0] == SOUND
    alone = {s.file for s in slices_of(tmp_path)}
    (of_rank,) = (file for file in data_files(tmp_path) if file.name not in alone)
    flip(of_rank, 0)
    flip(index_file(tmp_path), 100)

    lines, _ = verify_damaged(tmp_path)
    assert any(line.startswith(f"damaged: {of_rank.name} [0, ") for line in lines)
    assert any("the index of" in line for line in lines)


@pytest.mark.parametrize("with_index", [True, False])
def test_verify_shows_a_bar_on_a_terminal(
    with_index: bool, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state, (FastWriter if with_index else FileSystemWriter)(tmp_path))
    terminal = Terminal()
    advancing = verifying._advancing

    def wait_for_bar(*arguments: Any) -> Any:
        advance = advancing(*arguments)
        end = time.monotonic() + 20
        while terminal.isatty() and "%" not in terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        return advance

    monkeypatch.setattr(verifying, "_advancing", wait_for_bar)
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.3)  # The bytes are counted by then.
    monkeypatch.setattr("sys.stderr", terminal)
    main(["verify", str(tmp_path)])
    assert f"verifying {tmp_path}: 100%" in terminal.getvalue()

    monkeypatch.setattr(verifying, "_advancing", advancing)
    terminal.truncate(0)
    main(["verify", "--quiet", str(tmp_path)])
    assert terminal.getvalue() == ""


def test_output_that_cannot_be_written_is_a_failure(saved: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MODULE, "verify", saved], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == FAILED
    assert b"No space left" in done.stderr


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("verify saved", "2>&-"),
        ("verify saved", ">&-"),
        ("ls --json .", ">&-"),
        ("ls .", "<&- >&- 2>&-"),
    ],
)
def test_a_command_without_a_standard_stream_has_its_status(
    words: str, closed: str, saved: Path
) -> None:
    (saved.parent / "step-1").symlink_to(saved)
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *MODULE, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        shell, cwd=saved.parent, env=environment, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (SOUND, b"")


def test_trusted_pickles_are_inspected_and_verified(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "own": Own()}, tmp_path / "model.pt")
    for command in ("inspect", "verify"):
        assert run_command(command, tmp_path / "model.pt")[0] == SOUND
    torch.save(Own(), tmp_path / "model.pt")
    for command in ("inspect", "verify"):
        status, printed = run_command(command, tmp_path / "model.pt")
        assert status == FAILED
        assert "GLOBAL test_cli.Own" in printed
        assert (
            "its value is a Own" in run_command(command, "--trust-pickle", tmp_path / "model.pt")[1]
        )


@pytest.mark.slow
def test_verify_reads_fast(tmp_path: Path) -> None:
    state = {str(i): torch.randint(0, 256, [64 << 20], dtype=torch.uint8) for i in range(4)}
    save(state, FastWriter(tmp_path))
    speeds = []
    for cached in (False, True):
        for file in data_files(tmp_path):
            if not cached:
                with open(file, "rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                file.read_bytes()
        status, printed = run_command("verify", tmp_path)
        assert status == SOUND
        speeds.append(printed.strip())
    print(f"256 MiB from the disk: {speeds[0]}; from the page cache: {speeds[1]}")
