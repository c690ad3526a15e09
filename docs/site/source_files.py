"""The page that has one line for each source file, in the file's own words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def first_sentence(path: Path) -> str:
    """What a file is: the beginning of its docstring, or of the comment that opens a header."""
    text = path.read_text()
    if path.suffix == ".py":
        opening = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        comment = re.search(r"^#pragma once\n\n((?://.*\n)+)", text)
        lines = [] if comment is None else comment[1].splitlines()
        opening = "\n".join(line[2:].strip() for line in lines).partition("\n\n")[0]
    sentence = re.split(r"(?<=[.])\s", " ".join(opening.split()))[0]
    sentence = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", sentence)
    return sentence.rstrip(".:").replace("``", "`").replace("|", "\\|")


def source_files() -> list[Path]:
    """The modules of the package and the headers of the engine, by folder."""
    modules = [path for path in (ROOT / "torch_ckpt").rglob("*.py") if path.read_text().strip()]
    headers = (ROOT / "csrc").rglob("*.h")
    return [*sorted(modules, key=by_folder), *sorted(headers, key=by_folder)]


def by_folder(path: Path) -> tuple[Path, str]:
    """The key that sorts files by their folders."""
    return path.parent, path.name


def files_page(address: str) -> str:
    """The text of the page.

    Args:
        address: Address of the folder of the repository, which each file is linked to.
    """
    page = ["# Files\n", "One line for each source file, in the file's own words."]
    folder = None
    for path in source_files():
        if path.parent != folder:
            folder = path.parent
            page.append(f"\n## {folder.relative_to(ROOT)}\n\n| file | content |\n|---|---|")
        link = f"{address}/{path.relative_to(ROOT).as_posix()}"
        page.append(f"| [`{path.name}`]({link}) | {first_sentence(path)} |")
    return "\n".join(page) + "\n"
