"""Builds the extension module torch_ckpt._native from csrc/; the rest is in pyproject.toml.

Needs torch in the environment (build with ``--no-build-isolation``), a C++20 compiler, libdeflate
and the headers of xxhash; uses liburing where it is found.
"""

import os
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
WITH_TORCH = [f"csrc/bindings/{name}.cc" for name in ("peers", "state_dict", "tensor_view")]
BINDINGS = sorted(
    {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/bindings/*.cc")} - {*WITH_TORCH}
)
COMPILE_ARGS = ["-std=c++20", "-O2", "-g1", "-fvisibility=hidden"]
CORE = [f"csrc/{line}" for line in (ROOT / "csrc/sources.txt").read_text().split()]


def static_library(name: str) -> str | None:
    """Path of the static library ``lib<name>.a`` that the compiler would link, if there is one."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


def engine() -> Extension:
    """The engine, without torch. Its libraries are linked statically so that a wheel has them."""
    libdeflate = static_library("deflate")
    if libdeflate is None:
        raise SystemExit("libdeflate was not found: apt-get install libdeflate-dev")
    liburing = static_library("uring")
    if liburing is None:
        print("liburing was not found (apt-get install liburing-dev): I/O will use threads")
    return Extension(
        "torch_ckpt._native",
        BINDINGS + CORE,
        # For pybind11, which both modules must have in the same version to share a class.
        include_dirs=[str(ROOT / "csrc"), *include_paths()],
        define_macros=[("TORCH_CKPT_HAVE_URING", "0" if liburing is None else "1")],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=[libdeflate, *([liburing] if liburing else []), "-Wl,--exclude-libs,ALL"],
        language="c++",
    )


def tensor_view() -> CppExtension:
    """The module that looks into a torch.Tensor."""
    return CppExtension(
        "torch_ckpt._tensor_view",
        [*WITH_TORCH, "csrc/base/dtype.cc", "csrc/base/status.cc"],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=COMPILE_ARGS,
    )


setup(ext_modules=[engine(), tensor_view()], cmdclass={"build_ext": BuildExtension})
