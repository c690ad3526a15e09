"""Builds the native modules: CMake compiles the core, setuptools the bindings, which link it.

Needs torch in the environment (build with ``--no-build-isolation``), CMake, Ninja, a C++20
compiler, libdeflate and the headers of xxhash. liburing and CUDA's nvcc are used where they are
found; ``TORCH_CKPT_CUDA=0`` builds without CUDA.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
CORE = ROOT / "build/cpp"  # Where tests/check.py builds the C++ tests as well.
SOURCES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/bindings/*.cc")}
WITH_TORCH = {f"csrc/bindings/{name}.cc" for name in ("peers", "state_dict", "tensor_view")}
OPTIONS = {
    "include_dirs": [str(ROOT / "csrc")],
    "extra_compile_args": ["-std=c++20", "-O2", "-g1", "-fvisibility=hidden"],
    "extra_link_args": ["-s", "-Wl,--exclude-libs,ALL"],
    # A change of any of them rebuilds the modules.
    "depends": [path.as_posix() for path in ROOT.glob("csrc/**/*.*")],
}


def build_core() -> list[str]:
    """Builds the core. Returns the static libraries that a module links, the core first."""
    # pip may have installed CMake and Ninja beside this Python.
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    for name, package in (("cmake", "cmake"), ("ninja", "ninja-build")):
        if shutil.which(name, path=path) is None:
            raise SystemExit(f"{name} was not found: apt-get install {package}")
    with_cuda = "OFF" if os.environ.get("TORCH_CKPT_CUDA") == "0" else "ON"
    for command in (
        ["cmake", "-S", ROOT, "-B", CORE, "-G", "Ninja", f"-DTORCH_CKPT_CUDA={with_cuda}"],
        ["cmake", "--build", CORE, "--target", "torch_ckpt_core"],
    ):
        print(*command, flush=True)
        if subprocess.run(command, env={**os.environ, "PATH": path}).returncode:
            raise SystemExit("the core was not built; CMake's messages are above")
    return [
        str(CORE / "libtorch_ckpt_core.a"),
        *(CORE / "module_libraries.txt").read_text().split(),
    ]


class Build(BuildExtension):
    """Builds the core before the modules that link it."""

    def build_extensions(self) -> None:
        """Builds all."""
        libraries = build_core()
        for extension in self.extensions:
            extension.extra_link_args[:0] = libraries
        super().build_extensions()


setup(
    ext_modules=[
        # The engine, which does without torch but for the headers of pybind11: both modules need
        # the same version of them to share a class.
        Extension(
            "torch_ckpt._core._native",
            sorted(SOURCES - WITH_TORCH),
            language="c++",
            **{**OPTIONS, "include_dirs": OPTIONS["include_dirs"] + include_paths()},
        ),
        # The module that sees inside a torch.Tensor.
        CppExtension("torch_ckpt._core._tensor_view", sorted(WITH_TORCH), **OPTIONS),
    ],
    cmdclass={"build_ext": Build},
)
