"""``tests/check.py`` installs what tests need that it does not let be skipped."""

from __future__ import annotations

import re
from pathlib import Path

from check import WITHOUT_DEPENDENCIES, extra

TESTS = Path(__file__).resolve().parents[1]
MARK = re.compile(r"mark\.framework\(([^*)]*)\)")
PACKAGES = {"megatron": "megatron_core"}  # Module -> the package that has it, by another name.


def test_each_module_that_a_test_needs_is_installed_by_name() -> None:
    requirements = [*extra("dev"), *extra("frameworks"), *WITHOUT_DEPENDENCIES]
    names = [re.split(r"[<>=~!\[; ]", each)[0] for each in requirements]
    installed = {name.replace("-", "_").lower() for name in names}
    needed = {
        module
        for file in TESTS.rglob("*.py")
        for marked in MARK.findall(file.read_text())
        for module in re.findall(r"\w+", marked)
    }
    assert "torchdata" in needed
    assert {PACKAGES.get(module, module) for module in needed} <= installed
