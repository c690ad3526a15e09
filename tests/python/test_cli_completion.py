"""`torch-ckpt completion`: shells complete what the parser has, in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from command import SOUND, run_command

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
USAGE = 2


def completed(shell: str, line: str, folder: Path) -> list[str]:
    """The arguments of the command that was typed, in which each ~ is the key TAB."""
    status, script = run_command("completion", shell)
    assert status == SOUND
    (folder / "script").write_text(script)
    (folder / "some file").touch()
    show = "torch-ckpt() { printf '%s\\n' \"$@\" >arguments; }"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        SHELLS[shell],
        cwd=folder,
        env={**os.environ, "TERM": "dumb", "HOME": str(folder)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ):
        os.close(theirs)
        typed = line.replace("~", "\t")
        os.write(ours, f"{show}\n. ./script\ntorch-ckpt {typed}\nexit\n".encode())
        with contextlib.suppress(OSError):  # The shell has ended.
            while os.read(ours, 4096):
                pass
        os.close(ours)
    return (folder / "arguments").read_text().splitlines()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("v~", ["verify"]),
        ("--v~", ["--version"]),
        ("verify --q~ so~", ["verify", "--quiet", "some file"]),
        ("verify --rules so~", ["verify", "--rules", "some file"]),
        ("convert --to sa~", ["convert", "--to", "safetensors"]),
        ("completion z~", ["completion", "zsh"]),
        ("run --timeout 5 --no~", ["run", "--timeout", "5", "--no-verify"]),
        ("run so~ --no~", ["run", "some file", "--no"]),
    ],
)
def test_tab_completes_commands_options_choices_and_paths(
    shell: str, line: str, words: list[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert completed(shell, line, tmp_path) == words


def test_bash_completes_no_file_where_a_value_is_no_path(tmp_path: Path) -> None:
    assert completed("bash", "convert --prefix so~", tmp_path) == ["convert", "--prefix", "so"]
    assert completed("bash", "convert --to=sa~", tmp_path) == ["convert", "--to=safetensors"]


def test_a_shell_without_a_script_is_a_wrong_usage() -> None:
    assert run_command("completion", "fish")[0] == USAGE
