"""Builds the extension module torch_ckpt._native from csrc/; the rest is in pyproject.toml.

Needs torch in the environment (build with ``--no-build-isolation``), a C++20 compiler and
libdeflate; uses liburing where it is found.
"""

import os
import subprocess
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
BINDINGS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/bindings/*.cc"))
CORE = [f"csrc/{line}" for line in (ROOT / "csrc/sources.txt").read_text().split()]


def static_library(name: str) -> str | None:
    """Path of the static library ``lib<name>.a`` that the compiler would link, if there is one."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


def extension() -> CppExtension:
    """The extension, with the libraries it needs linked statically so that a wheel carries them."""
    libdeflate = static_library("deflate")
    if libdeflate is None:
        raise SystemExit("libdeflate was not found: apt-get install libdeflate-dev")
    liburing = static_library("uring")
    if liburing is None:
        print("liburing was not found (apt-get install liburing-dev): I/O will use threads")
    return CppExtension(
        "torch_ckpt._native",
        BINDINGS + CORE,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("TORCH_CKPT_HAVE_URING", "0" if liburing is None else "1")],
        extra_compile_args=["-std=c++20", "-O2", "-g1", "-fvisibility=hidden"],
        extra_link_args=[libdeflate, *([liburing] if liburing else []), "-Wl,--exclude-libs,ALL"],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
