"""The advice that errors and warnings of a run give does what it says."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ROOT
from command import SOUND, run_command
from support.run_steps import restored, save_steps, state_of, steps_in, warned

import torch_ckpt
from torch_ckpt import CheckpointError, Run
from torch_ckpt.errors import CorruptionError, NotFoundError

pytestmark = pytest.mark.timeout(120)

MODES: dict[str, dict[str, Any]] = {
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
    "local": {"local": "disk of this machine"},
}


def follow_call(message: str, run: Run, folder: Path) -> None:
    [call] = re.findall(r"call run\.(discard_after\(\d+\))", message)
    removed = eval(f"run.{call}", {"run": run})
    assert removed


def follow_command(message: str, run: Run, folder: Path) -> None:
    [command] = re.findall(r"run: torch-ckpt (.*)$", message)
    run.close()
    status, printed = run_command(*shlex.split(command), "--yes")
    assert status == SOUND, printed


BELOW = "a step below the restored one is saved"

# What training does, and the step that it continues after the advice.
GOING_BACK: dict[str, tuple[list[tuple[str, int]], int]] = {
    "an older step is restored": ([("save", 3), ("save", 5), ("restore", 3)], 3),
    BELOW: (
        [("save", 1), ("save", 2), ("save", 3), ("restore", 3), ("save", 2)],
        2,
    ),
    "a step between is saved": (
        [("save", 3), ("save", 5), ("save", 7), ("begin", 0), ("restore", 3), ("save", 4)],
        3,  # The restore has warned.
    ),
    "a new training saves below": ([("save", 5), ("save", 7), ("begin", 0), ("save", 6)], 6),
    "the same training saves below": ([("save", 5), ("save", 7), ("save", 6)], 6),
}


@pytest.mark.parametrize("follow", [follow_call, follow_command])
@pytest.mark.parametrize(
    ("case", "mode"),
    [*((case, "direct") for case in GOING_BACK), *((BELOW, mode) for mode in MODES)],
)
@pytest.mark.usefixtures("memory")
def test_the_advice_for_a_run_that_goes_back_removes_the_newer_steps(
    case: str, mode: str, follow: Callable[[str, Run, Path], None], tmp_path: Path
) -> None:
    folder, options = tmp_path / "it's a run", dict(MODES.get(mode, {}))
    if "local" in options:
        options["local"] = tmp_path / options["local"]
    acts, last = GOING_BACK[case]
    run = Run(folder, **options)

    def train() -> None:
        nonlocal run
        for act, step in acts:
            if act == "begin":
                run.close()
                run = Run(folder, **options)
            elif act == "save":
                run.save(step, state_of(step))
                run.wait(promoted="local" in options)
            else:
                restored(run, step=step)

    [message] = [text for text in warned(train) if "is newer" in text]
    follow(message, run, folder)
    run.close()
    with Run(folder, **options) as run:
        assert restored(run) == last
    assert max(steps_in(folder)) == last


def test_a_checkpoint_is_not_a_run_and_its_run_is_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 7).close()
    with pytest.raises(NotFoundError, match="not a run") as raised:
        Run(tmp_path / "step-7").restore(state_of(-1))
    [folder] = re.findall(r"pass the directory of its run, (.*)$", str(raised.value))
    assert restored(Run(folder)) == 7


def test_a_checkpoint_of_no_run_is_loaded_by_the_call_that_is_named(tmp_path: Path) -> None:
    torch_ckpt.save(state_of(7), checkpoint_id=tmp_path / "best")
    state = state_of(-1)
    with pytest.raises(NotFoundError, match="not a run") as raised:
        Run(tmp_path / "best").restore(state)
    [call] = re.findall(r"call (torch_ckpt\.load\(.*\))$", str(raised.value))
    eval(call, {"torch_ckpt": torch_ckpt, "state": state})
    assert torch.equal(state["w"], state_of(7)["w"])


def test_another_directory_starts_over_where_no_step_is_whole(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 1).close()
    for path in (tmp_path / "run/step-1").glob("*.distcp"):
        path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptionError, match="to start over, use another directory"):
            restored(Run(tmp_path / "run"))
    assert restored(Run(tmp_path / "other")) is None


@pytest.mark.parametrize("advice", ["Use another directory", "or remove"])
def test_a_local_directory_of_another_run_is_left_or_removed(advice: str, tmp_path: Path) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    with Run(tmp_path / "first", local=local) as first:
        first.save(1, state_of(1))
    with pytest.raises(CheckpointError, match=advice):
        Run(run, local=local)
    if advice == "or remove":
        shutil.rmtree(local)
    else:
        local = tmp_path / "other"
    with Run(run, local=local) as going:
        going.save(2, state_of(2))
    assert steps_in(run) == [2]


def test_a_discard_succeeds_when_the_lease_has_ended(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 1, 2)
    with run.lease(2), pytest.raises(CheckpointError, match="Try again when it has ended"):
        run.discard_after(1)
    assert run.discard_after(1) == [2]


def test_a_step_is_whole_when_its_hidden_files_are_copied_as_well(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 3).close()
    source, copy = tmp_path / "run/step-3", tmp_path / "copy/step-3"
    copy.mkdir(parents=True)
    for path in source.glob("[!.]*"):
        shutil.copy(path, copy)
    [message] = warned(lambda: restored(Run(copy.parent)))
    assert message.endswith("begin with a dot: copy these as well")
    for path in source.glob(".*"):
        shutil.copy(path, copy)
    assert restored(Run(copy.parent)) == 3


def test_the_metric_that_is_asked_for_makes_the_call_valid(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass monitor"):
        Run(tmp_path, keep_best=1)
    with pytest.raises(ValueError, match="pass monitor"):
        Run(tmp_path).best_step()
    with Run(tmp_path, keep_best=1, monitor="loss") as run:
        run.save(1, state_of(1), metrics={"loss": 1.0})
        assert run.best_step() == 1


ADVICE = re.compile(
    r"\b(call|pass(?! on)|use another|try again|copy these|run: torch-ckpt) ", re.IGNORECASE
)
KNOWN = (
    *("run.discard_after(", "or run: torch-ckpt rm ", "call torch_ckpt.load(", "copy these "),
    *("pass the directory of its run", "pass monitor", "use another directory", "Use another "),
    "Try again when it has ended",
    "answer; nothing was removed there. Try again",  # It needs a storage that does not answer.
)


def test_every_advice_in_a_message_of_runs_is_followed_by_a_test() -> None:
    texts = [
        node.value + " "
        for path in sorted((ROOT / "torch_ckpt/runs").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    ]
    found = [text for text in texts if ADVICE.search(text) and not text.startswith('"""')]
    assert [text for text in found if not any(known in text for known in KNOWN)] == []
