"""The table of frameworks: what the core imports by it, and the former names of modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_ckpt.known_frameworks import FRAMEWORKS

FORMER = {former: row.module(module) for row in FRAMEWORKS for former, module in row.former}

IMPORT_BOTH = """
import importlib, sys
former, module = sys.argv[1:]
try:
    expected = importlib.import_module(module)
except ImportError as error:  # The framework is not installed.
    try:
        importlib.import_module(former)
    except ImportError as other:
        assert str(other) == str(error), (other, error)
else:
    assert importlib.import_module(former) is expected
    assert expected.__spec__.name == module
print("done", end="")
"""

USE_THE_CORE = """
import importlib, pathlib, sys, torch
import torch.distributed.checkpoint as dcp, torch_ckpt
package = pathlib.Path(torch_ckpt.__file__).parent
for path in package.rglob("*.py"):
    name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    if path.stem not in ("__init__", "__main__") and not name.startswith("torch_ckpt.frameworks."):
        importlib.import_module(name)
with torch_ckpt.installed():
    dcp.save({"x": torch.ones(3)}, checkpoint_id="checkpoint")
    dcp.load({"x": torch.zeros(3)}, checkpoint_id="checkpoint")
torch.save({"x": torch.ones(3)}, "file.pt")
dcp.load({"x": torch.zeros(3)}, storage_reader=torch_ckpt.FastReader("file.pt"))
print([name for name in sys.modules if name.startswith("torch_ckpt.frameworks")], end="")
"""


@pytest.mark.thin("megatron_run", "torchtitan")
@pytest.mark.parametrize("former", FORMER)
def test_a_program_imports_the_module_of_a_framework_by_its_former_name(
    former: str, run_python: Callable[..., str]
) -> None:
    printed = run_python(IMPORT_BOTH, f"torch_ckpt.integrations.{former}", FORMER[former])
    assert printed.endswith("done")


def test_the_core_imports_no_framework_before_it_meets_its_files(
    run_python: Callable[..., str],
) -> None:
    assert run_python(USE_THE_CORE).endswith("[]")


def test_a_recogniser_imports_the_framework_whose_files_are_there(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    torch.save({"a": torch.ones(2)}, files / "pytorch_model_fsdp_0_rank0.bin")
    printed = run_python(
        f"""
import sys, torch, torch.distributed.checkpoint as dcp, torch_ckpt
dcp.load({{"model": {{"a": torch.ones(2)}}}}, storage_reader=torch_ckpt.FastReader({str(files)!r}))
names = {{name.split(".")[2] for name in sys.modules if name.startswith("torch_ckpt.frameworks.")}}
print(sorted(names), end="")
"""
    )
    assert printed.endswith("['accelerate', 'rank_files']")
