"""Programs of other libraries save and load through torch-ckpt, by `torch-ckpt run` alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 120

PROGRAMS = [
    "accelerate_fsdp1",
    "accelerate_fsdp2",
    "lightning_fabric",
    "lightning_trainer",
    "megatron",
    "megatron_async",
    "torchtitan",
    "torchtitan_async",
]

pytestmark = [
    pytest.mark.framework("accelerate", "lightning", "megatron", "torchtitan"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def loss_of(name: str, path: Path, mode: str, *, installed: bool, first: str = "") -> str:
    """Runs a program on two ranks; returns the loss that rank 0 prints.

    Modules are looked for in the directories ``first`` before others.
    """
    script = [str(ROOT / "tests/dist/programs.py"), name, str(path), mode]
    if installed:
        script = ["-m", "torch_ckpt", "run", *script]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, *script],
        cwd=path,
        env={**os.environ, "PYTHONPATH": f"{first}:{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss (.*)$", done.stdout, re.M)
    return str(loss)


def indexes_below(path: Path) -> int:
    """The number of checkpoints that torch-ckpt has written."""
    return len(list(path.rglob(".index.*")))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_resumes_bit_for_bit_from_our_checkpoint_and_from_stocks(
    name: str, tmp_path: Path
) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    ours.mkdir()
    stock.mkdir()
    loss = loss_of(name, ours, "save", installed=True)
    assert indexes_below(ours) == len(list(ours.rglob(".metadata"))) > 0
    assert loss_of(name, stock, "save", installed=False) == loss
    assert indexes_below(stock) == 0
    for path, installed in ((ours, True), (stock, True), (ours, False)):
        assert loss_of(name, path, "load", installed=installed) == loss


# ---- A later Megatron-Core, without nvidia-resiliency-ext ----


@pytest.fixture
def later(tmp_path: Path) -> str:
    """Directories of modules: Megatron-Core 0.19, and none of nvidia-resiliency-ext."""
    installed = ROOT / "build/megatron-core"
    if not installed.exists():
        pytest.skip("tests/check.py frameworks installs megatron-core 0.19")
    missing = tmp_path / "modules/nvidia_resiliency_ext"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ModuleNotFoundError(__name__)")
    return f"{missing.parent}:{installed}"


def test_an_asynchronous_save_of_megatron_needs_no_nvidia_resiliency_ext(
    tmp_path: Path, later: str
) -> None:
    loss = loss_of("megatron_training", tmp_path, "save", installed=True, first=later)
    assert indexes_below(tmp_path) == 1
    assert loss_of("megatron", tmp_path, "load", installed=False, first=later) == loss
    with pytest.raises(AssertionError, match="nvidia-resiliency-ext"):  # Without install().
        loss_of("megatron_training", tmp_path, "save", installed=False, first=later)


def test_install_replaces_what_megatrons_training_has_imported(tmp_path: Path, later: str) -> None:
    loss = loss_of("megatron_training_late", tmp_path, "save", installed=False, first=later)
    assert indexes_below(tmp_path) == 1
    assert loss_of("megatron_training_late", tmp_path, "load", installed=False, first=later) == loss


@pytest.mark.timeout(1200)
def test_the_tests_of_megatron_pass_with_a_later_megatron(tmp_path: Path, later: str) -> None:
    version = "import megatron.core; print(megatron.core.__version__)"
    names = ("", "_optimizer", "_ranks", "_runs")
    files = [f"{ROOT}/tests/frameworks/megatron/test_megatron{name}.py" for name in names]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "tests"]
    outputs = [
        subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{later}:{ROOT}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1000,
        )
        for command in (["-c", version], [*tests, *files])
    ]
    assert outputs[0].stdout.split(".")[:2] >= ["0", "19"]
    assert outputs[1].returncode == 0, outputs[1].stdout
    assert int(re.findall(r"(\d+) passed", outputs[1].stdout)[0]) > 40
