"""Builds the native modules: CMake compiles them, and setuptools puts them into the package.

Needs CMake, Ninja, a C++20 compiler, libdeflate and the headers of xxhash and pybind11, which torch
has as well. liburing, libzstd and CUDA's nvcc are used where they are found; ``TORCH_CKPT_CUDA=0``
builds without CUDA. torch is not needed: one build serves all its versions.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CORE = ROOT / "build/cpp"  # Where tests/check.py builds the C++ tests as well.
MODULES = ["_native", "_tensor_view"]


def pybind11_headers() -> Path:
    """Returns the folder of pybind11's headers: that of the package, or torch's copy."""
    for package in ("pybind11", "torch"):
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent / "include"
    raise SystemExit("pybind11 was not found: pip install pybind11")


def program(name: str, package: str) -> str:
    """Returns the path of a program. pip may have installed it beside this Python."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"{name} was not found: apt-get install {package}")
    return found


def run_cmake(*arguments: str | Path) -> None:
    """Runs CMake."""
    command = [program("cmake", "cmake"), *arguments]
    print(*command, flush=True)
    if subprocess.run(command).returncode:
        raise SystemExit("the native modules were not built; CMake's messages are above")


class Build(build_ext):
    """Builds all modules by CMake, which knows what has changed."""

    def run(self) -> None:
        """Builds all, and puts each where setuptools looks for it."""
        with_cuda = "OFF" if os.environ.get("TORCH_CKPT_CUDA") == "0" else "ON"
        headers = f"{sysconfig.get_path('include')};{pybind11_headers()}"
        run_cmake(
            *("-S", ROOT, "-B", CORE, "-G", "Ninja", f"-DTORCH_CKPT_CUDA={with_cuda}"),
            # That of an earlier build may be gone with the environment that pip made for it.
            f"-DCMAKE_MAKE_PROGRAM={program('ninja', 'ninja-build')}",
            f"-DTORCH_CKPT_PYTHON_INCLUDES={headers}",
        )
        run_cmake("--build", CORE, "--target", *MODULES)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Copies a module. The copy replaces the file: a running program may have it mapped."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = target.with_suffix(".new")
        shutil.copyfile(CORE / f"{ext.name.rpartition('.')[2]}.so", copy)
        copy.replace(target)


setup(
    ext_modules=[Extension(f"torch_ckpt._core.{name}", []) for name in MODULES],
    cmdclass={"build_ext": Build},
)
