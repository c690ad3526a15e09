"""`torch-ckpt ls`, and the commands on runs, single files and other formats."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from command import run_command
from progress_bars import Terminal
from safetensors.torch import save_file
from support.flips import flip_value

import torch_ckpt
from torch_ckpt.cli.main import main
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats import recognise
from torch_ckpt.formats.opened import ForeignFiles, Opened


def save_steps(run: Path, *steps: int) -> None:
    with torch_ckpt.Run(run) as saving:
        for step in steps:
            saving.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": 1 / step})


def test_ls_lists_steps_and_marks_damaged_and_unfinished_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 8, 16, 120)
    (data,) = (tmp_path / "step-120").glob("*.distcp")
    os.truncate(data, 100)
    (tmp_path / "step-130").mkdir()
    (tmp_path / "step-16" / ".first").mkdir()  # Sorts before all files.
    (tmp_path / "step-16" / "metrics.json").write_text('{"loss": 0.0625, "other": NaN}')
    hour_ago = (tmp_path / "step-8" / ".metadata").stat().st_mtime - 3700
    os.utime(tmp_path / "step-8" / ".metadata", (hour_ago, hour_ago))

    status, printed = run_command("ls", tmp_path)
    assert status == 1
    header, *lines = printed.splitlines()
    assert header.split() == ["step", "size", "age", "state", "metrics"]
    assert [line.split()[0] for line in lines] == ["130", "120", "16", "8"]
    assert header.index("state") == lines[0].index("unfinished") == lines[1].index("damaged")
    assert "unfinished" in lines[0]
    assert "damaged" in lines[1]
    assert "has 100 bytes instead of" in lines[1]
    assert lines[2].endswith("files present, newest  loss=0.0625 other=nan")
    assert "1 h ago  files present" in lines[3]
    assert len({line.index("KiB") for line in lines[1:]}) == 1

    _, printed = run_command("ls", "--json", tmp_path)
    facts = json.loads(printed, parse_constant=pytest.fail)
    assert facts["newest"] == 16
    assert facts["steps"][2]["metrics"] == {"loss": 0.0625, "other": "nan"}
    assert [step["state"] for step in facts["steps"]] == [
        "unfinished",
        "damaged",
        "files present",
        "files present",
    ]
    assert facts["steps"][2]["nbytes"] > 4000


def test_ls_counts_the_new_bytes_of_a_step_that_lacks_a_linked_file(tmp_path: Path) -> None:
    reused = torch.arange(100_000)
    with torch_ckpt.Run(tmp_path) as saving:
        for step in (1, 2):
            saving.save(step, {"reused": reused, "new": torch.full((1000,), float(step))})
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-2").iterdir()}
    linked = max(sizes, key=lambda name: sizes[name])
    assert sizes[linked] > reused.nbytes
    for lost in (0, sizes[linked]):
        step, _ = json.loads(run_command("ls", "--json", tmp_path)[1])["steps"]
        assert step["nbytes"] == sum(sizes.values()) - lost
        assert step["linked_nbytes"] == sizes[linked] - lost
        (tmp_path / "step-2" / linked).unlink(missing_ok=True)
    assert "-" not in run_command("ls", tmp_path)[1].splitlines()[1].split("damaged")[0]


def test_ls_names_the_files_that_a_copied_step_lacks(tmp_path: Path) -> None:
    save_steps(tmp_path, 8)
    for path in (tmp_path / "step-8").glob(".*"):
        path.unlink()
    status, printed = run_command("ls", tmp_path)
    assert status == 0
    assert "incomplete  loss=0.125" in printed
    assert "lacks .metadata and .index." in printed


def test_ls_of_no_run_says_what_it_is(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "one")
    assert run_command("ls", tmp_path / "one") == (
        3,
        f"torch-ckpt: {tmp_path}/one is not a run: it is a checkpoint\n",
    )
    (tmp_path / "file").write_text("text")
    printed = f"torch-ckpt: cannot list {tmp_path}/file: Not a directory (ENOTDIR)\n"
    assert run_command("ls", tmp_path / "file") == (3, printed)
    status, printed = run_command("ls", tmp_path / "absent")
    assert status == 3
    assert "does not exist" in printed


def test_inspect_and_verify_of_a_run_are_of_its_newest_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 8, 16)
    status, printed = run_command("verify", tmp_path)
    assert status == 0
    assert printed.startswith(f"the newest step is {tmp_path}/step-16\nsound (")
    status, printed = run_command("inspect", tmp_path)
    assert status == 0
    assert printed.startswith(f"{tmp_path}/step-16/.metadata: checkpoint of torch_ckpt\n")


def nested() -> dict[str, Any]:
    return {"model": {"w": torch.arange(5000.0), "v": torch.ones(3, 4)}, "step": 7}


def test_inspect_and_verify_of_a_file_of_torch_save(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(nested(), file)
    status, printed = run_command("inspect", file)
    assert status == 0
    assert printed.startswith(f"{file}: torch.save\n")
    assert re.search(r"^  float32 +\[5000\] +1 +\S+ KiB  model\.w$", printed, re.M)
    assert "2 tensors, 1 object\n" in printed
    status, printed = run_command("verify", "--json", file)
    assert status == 0
    assert json.loads(printed)["outcome"] == "sound"

    flip_value(file, torch.arange(5000.0), 77)
    status, printed = run_command("verify", file)
    assert status == 1
    assert "damaged: model.pt: Bad CRC-32 for file" in printed


@pytest.mark.parametrize("is_file", [True, False])
def test_inspect_and_verify_of_safetensors(is_file: bool, tmp_path: Path) -> None:
    save_file(nested()["model"], tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors" if is_file else tmp_path
    status, printed = run_command("inspect", path)
    assert status == 0
    assert printed.startswith(f"{path}: safetensors\n")
    assert "[3, 4]" in printed
    status, printed = run_command("verify", path)
    assert status == 2
    assert "cannot verify: model.safetensors has no checksums" in printed

    os.truncate(tmp_path / "model.safetensors", 4000)
    status, printed = run_command("verify", path)
    assert status == 1
    assert "damaged: " in printed


def test_inspect_and_verify_of_a_format_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_floats(path: Location, **_: Any) -> Opened:
        nbytes = path.nbytes()
        foreign = ForeignFiles(path, path.parent, "floats", [(path.name, nbytes)])
        properties = ("float32", "contiguous_format", False, False, [nbytes // 4])
        box = ((0,), (nbytes // 4,), 0, 0, nbytes, True, ())
        foreign.entries.append(("w", properties, [box]))
        return foreign.opened(Mock(), b"1")

    monkeypatch.setattr(recognise, "_open_file", open_floats)
    file = tmp_path / "model.floats"
    file.write_bytes(torch.arange(100.0).numpy().tobytes())
    loaded = {"w": torch.zeros(100)}
    torch_ckpt.load(loaded, checkpoint_id=file)
    assert torch.equal(loaded["w"], torch.arange(100.0))
    status, printed = run_command("inspect", file)
    assert status == 0
    assert printed.startswith(f"{file}: floats\n")
    status, printed = run_command("verify", file)
    assert status == 2
    assert "cannot verify: model.floats has no checksums" in printed


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"torch-ckpt {torch_ckpt.__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "torch_ckpt", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"torch-ckpt {torch_ckpt.__version__}\n"


def test_tables_have_the_same_cells_with_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Table = pytest.importorskip("rich.table").Table
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    save_steps(tmp_path, 8)
    _, plain = run_command("ls", tmp_path)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with patch("rich.table.Table", wraps=Table) as table:
        main(["ls", str(tmp_path)])
    table.assert_called_once()
    ours = [part for part in plain.split() if part not in "0123456789"]
    theirs = [part for part in terminal.getvalue().split() if part not in "0123456789"]
    assert ours == theirs


def printed_on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    terminal = Terminal()
    with monkeypatch.context() as there:
        there.setattr("sys.stdout", terminal)
        main(list(map(str, arguments)))
    return terminal.getvalue()


@pytest.mark.parametrize("has_rich", [True, False])
def test_states_have_colors_on_a_terminal_only(
    tmp_path: Path, has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr("torch_ckpt.cli.terminal.find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = tmp_path / "unfinished"  # Only words of the table are colored.
    save_steps(run, 8, 16)
    (data,) = (run / "step-16").glob("*.distcp")
    os.truncate(data, 100)
    _, plain = run_command("ls", run)
    shown = printed_on_a_terminal(monkeypatch, "ls", run)
    assert re.search(r"\x1b\[31mdamaged", shown)
    assert re.search(r"\x1b\[32mfiles present, newest", shown)
    uncolored = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert uncolored.split() == plain.split()
    assert "\x1b[32msound\x1b[0m (" in printed_on_a_terminal(
        monkeypatch, "verify", "--quiet", run / "step-8"
    )
    json.loads(printed_on_a_terminal(monkeypatch, "ls", "--json", run))
    for name, value in {"NO_COLOR": "1", "TERM": "dumb"}.items():
        with monkeypatch.context() as there:
            there.setenv(name, value)
            assert "\x1b" not in printed_on_a_terminal(there, "ls", run)
