"""Builds the extension module torch_ckpt._native from csrc/; the rest is in pyproject.toml.

Needs torch in the environment (build with ``--no-build-isolation``), a C++20 compiler, libdeflate
and the headers of xxhash; uses liburing and CUDA's nvcc where they are found. Where nvcc is not
meant to be used, ``TORCH_CKPT_CUDA=0`` says so.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
WITH_TORCH = [f"csrc/bindings/{name}.cc" for name in ("peers", "state_dict", "tensor_view")]
BINDINGS = sorted(
    {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/bindings/*.cc")} - {*WITH_TORCH}
)
COMPILE_ARGS = ["-std=c++20", "-O2", "-g1", "-fvisibility=hidden"]
SOURCES = [f"csrc/{line}" for line in (ROOT / "csrc/sources.txt").read_text().split()]
CORE = [name for name in SOURCES if not name.endswith(".cu")]
KERNELS = [name for name in SOURCES if name.endswith(".cu")]


def static_library(name: str) -> str | None:
    """Path of the static library ``lib<name>.a`` that the compiler would link, if there is one."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run(
        [compiler, f"-print-file-name=lib{name}.a"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) else None


@dataclass(frozen=True)
class Cuda:
    """CUDA's compiler, headers and static runtime. A build with them needs no driver."""

    nvcc: str
    include: str
    cudart: str

    def compile(self, source: str, target: Path) -> None:
        """Compiles one kernel, unless what there is is newer than the room it comes from."""
        newest = max(path.stat().st_mtime for path in (ROOT / "csrc/device").iterdir())
        if target.exists() and target.stat().st_mtime > newest:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        options = ["--options-file", "csrc/device/nvcc.options", "-Icsrc"]
        command = [self.nvcc, *options, "-c", source, "-o", str(target)]
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


def find_cuda() -> Cuda | None:
    """CUDA as nvcc itself says where it is, or ``None`` and a word why."""
    if os.environ.get("TORCH_CKPT_CUDA") == "0":
        return None
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        print("nvcc was not found: CUDA tensors will be copied by torch")
        return None
    said = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
    ).stderr
    top = re.search(r"^#\$ TOP=(.*)$", said, re.M)
    for root in [Path(top[1]), *Path(top[1]).glob("targets/*")] if top else []:
        for library in (root / "lib64", root / "lib"):
            cudart = library / "libcudart_static.a"
            if cudart.exists() and (root / "include/cuda_runtime_api.h").exists():
                return Cuda(nvcc, str(root / "include"), str(cudart))
    print(f"{nvcc} comes without libcudart_static.a: CUDA tensors will be copied by torch")
    return None


CUDA = find_cuda()


class Build(BuildExtension):
    """Compiles the kernels as well, which no compiler of setuptools can."""

    def build_extension(self, ext: Extension) -> None:
        """Adds the kernels' objects to the engine's."""
        if CUDA is not None and ext.name == "torch_ckpt._native":
            for source in KERNELS:
                target = Path(self.build_temp).absolute() / f"{source}.o"
                CUDA.compile(source, target)
                ext.extra_objects.append(str(target))
        super().build_extension(ext)


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
        include_dirs=[str(ROOT / "csrc"), *include_paths(), *([CUDA.include] if CUDA else [])],
        define_macros=[
            ("TORCH_CKPT_HAVE_URING", "0" if liburing is None else "1"),
            ("TORCH_CKPT_HAVE_CUDA", "0" if CUDA is None else "1"),
        ],
        extra_compile_args=COMPILE_ARGS,
        extra_link_args=[
            libdeflate,
            *([liburing] if liburing else []),
            *([CUDA.cudart, "-ldl", "-lrt", "-lpthread"] if CUDA else []),
            "-Wl,--exclude-libs,ALL",
        ],
        depends=[path.as_posix() for path in (ROOT / "csrc/device").iterdir()],
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


setup(ext_modules=[engine(), tensor_view()], cmdclass={"build_ext": Build})
