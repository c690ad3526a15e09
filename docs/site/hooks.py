"""Makes the site of the documents: its pages, and links that work there as they do on GitHub.

The pages are those that docs/README.md lists, in its order. Some lie outside docs/, and some are
made here: the list of source files, the API reference, and the tables of options.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(Path(__file__).parent))

from reference import PAGES, check, load, options_tables, reference_page  # noqa: E402
from source_files import files_page  # noqa: E402

ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", re.M)
# A link, outside code.
LINK = re.compile(r"```.*?```|`[^`\n]+`|(?<=\]\()[^()\s]+(?=\))|(?<=(?:src|ref)=\")[^\"]+", re.S)
TABLES = "<!-- the site has the tables here -->"


def on_config(config: MkDocsConfig) -> None:
    """Takes addresses from pyproject.toml, and the navigation from docs/README.md."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url = urls["Documentation"]
    config.repo_url = urls["Repository"]
    config.repo_name = posixpath.basename(config.repo_url)
    groups = re.split(r"^## (.*)$", (DOCS / "README.md").read_text(), flags=re.M)[1:]
    config.nav = [{"Home": "README.md"}]
    for title, text in zip(groups[::2], groups[1::2], strict=True):
        config.nav.append({title: [entry(*row, config.site_url) for row in ROW.findall(text)]})
    config.nav.append({"API": [{title: f"api/{name}.md"} for name, (title, _) in PAGES.items()]})


def entry(title: str, target: str, site_url: str) -> dict[str, Any]:
    """The entry of a page in the navigation; that of a folder has all pages of its README."""
    if target.startswith(site_url):
        return {title: target.removeprefix(site_url).rstrip("/") + ".md"}
    if not target.endswith("/README.md"):
        return {title: target.removeprefix("../")}
    folder = posixpath.dirname(target)
    pages = [{each: f"{folder}/{page}"} for each, page in ROW.findall((DOCS / target).read_text())]
    return {title: [target, *pages]}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that lie outside docs/, and those that are made here."""
    files.remove(files.src_uris["README.md"])  # The home page is the README of the repository.
    outside = re.findall(r"\]\(\.\./([^)]+\.md)\)", (DOCS / "README.md").read_text())
    for path in ("README.md", *outside):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    made = {f"api/{name}.md": reference_page(name) for name in PAGES}
    made["files.md"] = files_page(f"{config.repo_url}/blob/main")
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adds the tables of options, and changes each link to what has its target on the site."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    if TABLES in markdown:
        package = load()
        check(package)
        markdown = markdown.replace(TABLES, options_tables(package))
    here, repository = Path(source).parent, f"{config.repo_url}/blob/main/"
    pages = {file.abs_src_path: file.src_uri for file in files}

    def changed(link: re.Match[str]) -> str:
        target, mark, anchor = link[0].partition("#")
        if target.startswith(config.site_url):
            name = target.removeprefix(config.site_url).rstrip("/")
            path = f"{name}.md" if name else "README.md"
        elif not target or target[0] == "`" or re.match(r"[a-z]+:", target):
            return link[0]
        else:
            there = (here / target).resolve()
            path = pages.get(str(there), "")
            if not path and there.exists() and there.is_relative_to(ROOT):
                return repository + there.relative_to(ROOT).as_posix() + mark + anchor
        if not path:
            return link[0]
        return posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".") + mark + anchor

    return LINK.sub(changed, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Lets code in tables, such as a path, break where a narrow screen needs it."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)[_/.,=:](?=\w)", r"\g<0><wbr>", code[0])

    cells = re.compile(r"(?<=<td>).*?(?=</td>)", re.S)
    return cells.sub(lambda cell: re.sub(r"(?<=<code>)[^<]{16,}", breakable, cell[0]), html)
