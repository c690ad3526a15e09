"""The documents: every snippet runs when it is pasted alone, links lead somewhere, lines are short.

A ``python`` block runs in a process of its own in an empty directory. A ``bash`` block runs in a
directory that has what a clone has. Blocks below a comment such as ``<!-- run command -->`` install
packages or take minutes: CI runs the test command, and a reader the others.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import run_python

import torch_ckpt
import torch_ckpt.agent
from torch_ckpt import CheckpointError
from torch_ckpt.agent import MemoryCheckpoint
from torch_ckpt.errors import SITE

pytestmark = pytest.mark.thin(1.0)  # Each page and each name is a case.

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "csrc/**/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
)
RUN_TIMEOUT_S = 120
MAX_WORDS = 35
MAX_COLUMNS = 120
FRAMEWORKS = re.compile(
    r"^(?:from|import) (accelerate|deepspeed|lightning|peft|transformers)\b", re.M
)
UNTRIED = re.compile(r"<!-- (run command|test command|long: not run by the tests) -->")


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str) -> Iterator[pytest.ParameterSet]:
    """The code blocks of one language, named by document and line."""
    for path in DOCUMENTS:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line == f"```{language}" and not UNTRIED.fullmatch(lines[number - 1]):
                end = lines.index("```", number)
                code = "\n".join(lines[number + 1 : end]) + "\n"
                is_slow = re.search(r"torchrun|python examples/", code)
                marks = [pytest.mark.slow] if is_slow else []
                if frameworks := FRAMEWORKS.findall(code):
                    marks.append(pytest.mark.framework(*sorted({*frameworks})))
                yield pytest.param(code, id=f"{names(path)}:{number + 1}", marks=marks)


def environment() -> dict[str, str]:
    """What a snippet has in its environment, besides the shared memory of the test."""
    return {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run(command: list[str], folder: Path) -> None:
    """Runs a snippet; ends all that it has started."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"does not end:\n{output}")
    assert process.returncode == 0, output


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("code", list(blocks("python")))
def test_a_python_snippet_runs_alone(code: str, tmp_path: Path) -> None:
    if "megatron" in code:
        pytest.importorskip("megatron.core")
    script = tmp_path / "snippet.py"
    script.write_text(code)
    done = run_python(script, folder=tmp_path, timeout_s=RUN_TIMEOUT_S, **environment())
    assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("code", list(blocks("bash")))
def test_a_shell_snippet_runs_alone(code: str, tmp_path: Path) -> None:
    if "bin/torch-ckpt" in code and not Path(sys.prefix, "bin/torch-ckpt").exists():
        pytest.skip("the program torch-ckpt is not installed: pip install --no-deps -e .")
    for name in ("examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    run(["bash", "-euo", "pipefail", "-c", code], tmp_path)


def test_loops_save_their_last_step() -> None:
    paths = [*DOCUMENTS, *ROOT.glob("examples/*.py"), *ROOT.glob("torch_ckpt/**/*.py")]
    loops = [
        (names(path), line.strip())
        for path in paths
        for line in path.read_text().splitlines()
        if re.match(r" +if run\.should_save\(", line)
    ]
    assert len(loops) > 10
    assert [loop for loop in loops if "or step ==" not in loop[1]] == [
        ("docs/agent.md", "if run.should_save(step):"),  # It saves each step.
        # It stops as if it were killed.
        ("examples/resume_dataloader.py", "if run.should_save(training.step):"),
    ]


def documented(public: Any) -> dict[str, str]:
    """The options of a class or function -> their text in `help()`, without markup."""
    document = inspect.cleandoc(public.__doc__)
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", document, re.M | re.S)
    entries = inspect.cleandoc("\n" + section[1]) if section else ""
    entries = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", entries).replace("`", "")
    pairs = re.findall(r"^\**(\w+): (.*?)(?=^\S|\Z)", entries, re.M | re.S)
    return {name: " ".join(text.split()) for name, text in pairs}


def test_help_describes_every_option_of_a_public_name_in_the_order_of_its_signature() -> None:
    for name in (*torch_ckpt.__all__, *torch_ckpt.agent.__all__):
        public = getattr(torch_ckpt, name, None) or getattr(torch_ckpt.agent, name)
        if public not in (CheckpointError, MemoryCheckpoint):
            texts = documented(public)
            assert list(texts) == list(inspect.signature(public).parameters), name
            assert all(texts.values()), name


def test_messages_name_pages_of_the_site_that_exist() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == SITE
    named = []
    for path in ROOT.glob("torch_ckpt/**/*.py"):
        text = path.read_text()
        assert not re.search(r"\bdocs/[\w-]+\.md", text), path
        named += re.findall(r"\{SITE\}([\w-]+)/", text)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / "docs" / f"{name}.md").exists()] == []


def test_the_tests_that_contributing_runs_as_examples_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"`pytest (\S+?)(?: -k (\w+))?`", page)
    assert len(commands) >= 3
    for path, word in commands:
        assert (ROOT / path).exists(), path
        if word:
            assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text(), re.M), word
    (suite,) = re.findall(r"--gtest_filter='(\w+)\.\*'", page)
    assert any(f"({suite}, " in path.read_text() for path in ROOT.glob("tests/cpp/*.cc"))


def heading_ids(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=names)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in heading_ids(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=names)
def test_lines_and_sentences_are_short(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > MAX_COLUMNS]
    sentences = re.split(r"(?<=[.;:?!])\s|\n\s*\n|\n(?=[-*#|] )", "\n".join(lines))
    assert not [s for s in sentences if len(s.split()) > MAX_WORDS]


@pytest.mark.parametrize("path", DOCUMENTS, ids=names)
def test_each_table_begins_with_a_heading(path: Path) -> None:
    lines = re.sub(r"```.*?```", "", path.read_text(), flags=re.S).splitlines()
    for number, line in enumerate(lines):
        if line.startswith("|") and not lines[number - 1].startswith("|"):
            assert re.fullmatch(r"\|[-:|]+\|", lines[number + 1]), line


def without_targets(text: str) -> str:
    """The text with the targets of its links left out."""
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_every_test_that_the_list_of_programs_names_exists() -> None:
    page = (ROOT / "tests" / "PROGRAMS.md").read_text()
    named = re.findall(r"\]\(([\w/]+\.py)\): ((?:`\w+`(?:, )?)+)", page)
    assert len(named) > 20
    for path, tests in named:
        for name in re.findall(r"\w+", tests):
            assert f"def {name}(" in (ROOT / "tests" / path).read_text(), (path, name)


def test_the_compatibility_page_lists_the_programs_that_are_tested() -> None:
    page, tests = (ROOT / "docs" / "compatibility.md", ROOT / "tests" / "PROGRAMS.md")
    rows = re.findall(r"^\| (.*?) \| .*? \| \[.* \|$", tests.read_text(), re.M)
    assert len(rows) > 20
    listed = without_targets(page.read_text())
    assert [row for row in rows if f"| {without_targets(row)} |" not in listed] == []
