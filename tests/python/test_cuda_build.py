"""A build with CUDA inside is a build for machines without it, too."""

import shutil
import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import importlib.util, sys
spec = importlib.util.find_spec("torch_ckpt._core._native")
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
print(native.why_no_cuda())
"""


def test_the_engine_imports_without_a_driver_and_says_why_there_is_no_gpu():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        timeout=60,
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    reason = done.stdout.strip()
    if shutil.which("nvcc") is None:
        pytest.skip(f"nothing to build CUDA with: {reason}")
    assert reason.startswith("cannot find a GPU: cudaError"), reason
