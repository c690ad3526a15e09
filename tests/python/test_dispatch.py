"""What DCP of the running torch asks about a value, and what our table knows of it."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import default_planner, planner_helpers, utils
from torch.distributed.tensor import DTensor

from torch_ckpt.planning import dispatch

FUNCTIONS: list[Callable[..., Any]] = [
    planner_helpers._create_write_items,
    planner_helpers._create_default_metadata_only_plan,
    planner_helpers._create_chunk_list,
    planner_helpers._create_read_items,
    planner_helpers._init_state_dict,
    planner_helpers._iterate_state_dict,
    default_planner._create_default_local_metadata,
    default_planner.create_default_local_save_plan,
    default_planner.create_default_local_load_plan,
    utils.find_state_dict_object,
    utils.find_tensor_shard,
    DTensor.__create_write_items__,
    DTensor.__create_chunk_list__,
    DTensor.__get_tensor_shard__,
]
"""Where DCP chooses how it saves or loads a value."""

VALUES = {"iter_object", "obj", "object", "tensor", "value", "_local_tensor"}
"""The names of the value in these functions."""

COMMON = {"device", "device_mesh", "size"}
"""Attributes that every tensor has, or every DTensor."""

OBJECTS = {bool, bytes, dict, float, int, io.BytesIO, list, str, tuple}
"""Classes of values that are no tensors."""


class Source:
    """The source of a function of torch, and the names that it can see."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        self.names = vars(sys.modules[function.__module__])

    def questions(self) -> Iterator[Any]:
        """What the function asks about a value: classes, names of attributes, other calls."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _name(node.func) in ("hasattr", "getattr"):
                if _name(node.args[0]) in VALUES:
                    yield ast.literal_eval(node.args[1])
            elif isinstance(node, ast.Call) and _name(node.func) == "isinstance":
                if _name(node.args[0]) in VALUES:
                    yield from self._classes(node.args[1])
            elif isinstance(node, ast.If | ast.IfExp | ast.While):
                yield from self._of_condition(node.test)
            elif isinstance(node, ast.Return) and node.value is not None:
                yield from self._of_condition(node.value, is_value=True)
            elif isinstance(node, ast.Match) and _name(node.subject) in VALUES:
                yield ast.unparse(node.subject)

    def _classes(self, node: ast.expr) -> Iterator[Any]:
        for each in node.elts if isinstance(node, ast.Tuple) else [node]:
            yield eval(ast.unparse(each), dict(self.names))

    def _of_condition(self, test: ast.expr, *, is_value: bool = False) -> Iterator[Any]:
        for node in ast.walk(test):
            if isinstance(node, ast.Attribute) and _name(node.value) in VALUES and not is_value:
                yield node.attr
            if not isinstance(node, ast.Call) or not any(_name(a) in VALUES for a in node.args):
                continue
            function = _name(node.func)
            if function in ("getattr", "hasattr", "isinstance") or (
                is_value and not function.startswith("_is")
            ):
                continue
            found = self.names.get(function)
            if inspect.isfunction(found):  # A function that answers the question.
                yield from Source(found).questions()
            else:
                yield ast.unparse(node)


def _name(node: ast.expr) -> str:
    """The name of a variable, or of the last attribute of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def unknown(function: Callable[..., Any], table: set[Any]) -> list[Any]:
    """What a function of DCP asks about a value, and is not in a table."""
    return [q for q in Source(function).questions() if q not in table | COMMON | OBJECTS]


def known() -> set[Any]:
    """All entries of our table."""
    return {*dispatch.CLASSES, *dispatch.PROTOCOLS, *dispatch.ATTRIBUTES}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_the_table_names_all_that_dcp_asks_about_a_value(function: Callable[..., Any]) -> None:
    asked = unknown(function, known())
    assert not asked, (
        f"torch {torch.__version__}: {function.__qualname__} asks for {asked}, which "
        "torch_ckpt/planning/dispatch.py does not name"
    )


@pytest.mark.parametrize(
    "entry", [*sorted(dispatch.METHODS), *dispatch.CLASSES, *dispatch.PROTOCOLS], ids=str
)
def test_an_entry_that_the_table_lacks_is_found(entry: Any) -> None:
    assert any(entry in unknown(function, known() - {entry}) for function in FUNCTIONS)


def is_sparse_part(value: Any) -> bool:
    """A question of a later torch."""
    return hasattr(value, "part_of")


def asks_by_another_function(value: Any) -> int:
    return 1 if is_sparse_part(value) else 2


def asks_by_attribute(tensor: Any) -> int:
    if tensor.part_of is not None:
        return 1
    return 2


def asks_by_class(obj: Any) -> int:
    is_part = isinstance(obj, torch.nn.Parameter)
    return int(is_part)


def asks_by_type(obj: Any) -> int:
    return 1 if type(obj) is torch.nn.Parameter else 2


@pytest.mark.parametrize(
    ("function", "question"),
    [
        (asks_by_another_function, "part_of"),
        (asks_by_attribute, "part_of"),
        (asks_by_class, torch.nn.Parameter),
        (asks_by_type, "type(obj)"),
    ],
)
def test_a_new_question_of_dcp_is_found_however_it_is_asked(
    function: Callable[..., Any], question: Any
) -> None:
    assert unknown(function, known()) == [question]
