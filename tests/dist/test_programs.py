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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def loss_of(name: str, path: Path, mode: str, *, installed: bool) -> str:
    """Runs a program on two ranks; returns the loss that rank 0 prints."""
    script = [str(ROOT / "tests/dist/programs.py"), name, str(path), mode]
    if installed:
        script = ["-m", "torch_ckpt", "run", *script]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, *script],
        cwd=path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"},
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
    if name.startswith("torchtitan"):  # Its dependencies would bring another torch.
        pytest.importorskip("torchtitan", reason="tests/check.py full installs it")
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    ours.mkdir()
    stock.mkdir()
    loss = loss_of(name, ours, "save", installed=True)
    assert indexes_below(ours) == len(list(ours.rglob(".metadata"))) > 0
    assert loss_of(name, stock, "save", installed=False) == loss
    assert indexes_below(stock) == 0
    for path, installed in ((ours, True), (stock, True), (ours, False)):
        assert loss_of(name, path, "load", installed=installed) == loss
