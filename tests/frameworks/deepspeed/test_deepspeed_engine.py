"""The checkpoint engine for DeepSpeed on one rank, without an engine of DeepSpeed."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.staging.live_state import FileStager

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("deepspeed"),
]


class Program:
    """What ``attach`` needs of an engine of DeepSpeed, which saves one file."""

    def __init__(self) -> None:
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (
            TorchCheckpointEngine,
        )

        self.checkpoint_engine: Any = TorchCheckpointEngine(None)
        self.state: Any = {"w": torch.arange(600_000.0)}

    def use_node_local_storage(self) -> bool:
        return False

    def save_checkpoint(
        self, save_dir: str, tag: str = "t", exclude_frozen_parameters: bool = False
    ) -> bool:
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

        engine = self.checkpoint_engine
        engine.makedirs(save_dir, exist_ok=True)
        engine.create(CheckpointCommitInfo(tag, save_dir, True))
        engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        engine.save(self.state, os.path.join(save_dir, tag, "model.pt"))
        return True

    def save_16bit_model(self, save_dir: str, name: str) -> None:
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

        engine = self.checkpoint_engine
        info = CheckpointCommitInfo("t", save_dir, False)
        engine.create(info)
        engine.save(self.state, os.path.join(save_dir, name))
        engine.commit(info)

    def load_checkpoint(self, load_dir: str, tag: str = "t", load_module_only: bool = False) -> Any:
        return self.checkpoint_engine.load(os.path.join(load_dir, tag, "model.pt"))


def test_methods_keep_the_names_of_their_arguments() -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    program = Program()
    expected = [inspect.signature(m) for m in (program.save_checkpoint, program.load_checkpoint)]
    attach(program)
    assert expected == [
        inspect.signature(m) for m in (program.save_checkpoint, program.load_checkpoint)
    ]


def test_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    monkeypatch.chdir(tmp_path)
    program = Program()
    attach(program)
    with pytest.raises(UnsupportedError, match="s3://bucket/run"):
        program.save_checkpoint("s3://bucket/run")
    with pytest.raises(UnsupportedError, match="s3://bucket/run"):
        program.save_16bit_model("s3://bucket/run", "model.bin")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tags_may_have_folders_and_the_program_may_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    program = Program()
    checkpoints = attach(program, asynchronous=asynchronous)
    for tag in ("epoch-1/step-1", "epoch-1/step-2", "epoch-1/step-2"):
        program.save_checkpoint("run", tag=tag)
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.wait()
        monkeypatch.chdir(tmp_path)
        assert Path("run/latest").read_text() == tag
        assert torch.equal(program.load_checkpoint("run", tag)["w"], program.state["w"])
    assert sorted(os.listdir("run")) == ["epoch-1", "latest"]
    assert sorted(os.listdir("run/epoch-1")) == ["step-1", "step-2"]
    assert not os.listdir("elsewhere")


def test_the_error_of_a_save_is_logged_if_python_destroys_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    program = Program()
    checkpoints = attach(program, asynchronous=True)
    (tmp_path / "latest" / "in the way").mkdir(parents=True)
    program.save_checkpoint(str(tmp_path))
    with caplog.at_level(logging.ERROR), pytest.raises(CheckpointError):
        checkpoints.cleanup()  # DeepSpeed calls it in __del__, and ignores the error.
    assert "latest" in caplog.text


def test_files_of_changing_names_do_not_keep_their_staging_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_ckpt.frameworks.deepspeed import engine as deepspeed

    stagers: weakref.WeakSet[FileStager] = weakref.WeakSet()

    class CountedStager(FileStager):
        def __init__(self) -> None:
            super().__init__()
            stagers.add(self)

    monkeypatch.setattr(deepspeed, "FileStager", CountedStager)
    program = Program()
    checkpoints = deepspeed.attach(program, asynchronous=True)
    for number in range(3):
        program.save_16bit_model(str(tmp_path), f"model-{number}.bin")
        program.save_checkpoint(str(tmp_path), tag=f"step-{number}")
        checkpoints.wait()
    assert len(stagers) == 1  # That of "model.pt".


def test_a_wait_for_staging_memory_has_the_deadline_of_the_save(tmp_path: Path) -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    program = Program()
    attach(program, asynchronous=True, timeout_s=0.5)
    save = program.checkpoint_engine.save

    def save_twice(state: Any, path: str) -> None:
        save(state, path)
        save(state, path)

    program.checkpoint_engine.save = save_twice
    program.save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="no snapshot was free within"):
        program.checkpoint_engine.wait()
    assert not os.listdir(tmp_path)


_KILLED = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_deepspeed_engine import Program
from torch_ckpt.frameworks.deepspeed.engine import attach
program = Program()
attach(program)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
getattr(program, sys.argv[3])(sys.argv[1], "name")
"""


@pytest.mark.parametrize("method", ["save_checkpoint", "save_16bit_model"])
def test_the_next_save_removes_the_files_of_a_killed_one(tmp_path: Path, method: str) -> None:
    from torch_ckpt.frameworks.deepspeed.engine import attach

    here = os.path.dirname(__file__)
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(tmp_path), here, method]
    assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGXFSZ
    assert os.listdir(tmp_path)
    program = Program()
    attach(program)
    program.save_checkpoint(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"]
