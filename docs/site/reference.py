"""The pages that are made of docstrings: the API reference, and the tables of options.

The source is read, not imported: the site needs neither torch nor the native modules.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("mkdocs.hooks.reference")  # A warning fails a strict build.

Entries = dict[str, tuple[str, ...] | None]
"""Objects -> the members that are shown, or None for all that are public."""

PAGES: dict[str, tuple[str, Entries]] = {
    "save-and-load": (
        "Save and load",
        {
            "torch_ckpt.save": None,
            "torch_ckpt.load": None,
            "torch_ckpt.async_save": None,
            "torch_ckpt.async_load": None,
            "torch_ckpt.storage.host_load.LoadFuture": None,
            "torch_ckpt.reading": None,
            "torch_ckpt.planning.load_report.LoadReport": (),
            "torch_ckpt.FastWriter": ("path", "checkpoint_id", "save_id", "io_mode", "close"),
            "torch_ckpt.FastReader": ("path", "checkpoint_id"),
            "torch_ckpt.SafetensorsWriter": (),
            "torch_ckpt.IoOptions": (),
        },
    ),
    "planning": (
        "Planners, staging, shards",
        {
            "torch_ckpt.FastSavePlanner": (),
            "torch_ckpt.FastLoadPlanner": (),
            "torch_ckpt.SnapshotStager": ("reserve", "stage", "wait_staged", "is_busy", "close"),
            "torch_ckpt.RankState": (),
            "torch_ckpt.FlatShard": None,
        },
    ),
    "run": (
        "Run",
        {
            "torch_ckpt.Run": (
                *("directory", "should_save", "reserve", "save", "wait", "restore"),
                *("loaded", "latest_step", "best_step", "step_at", "lease", "discard_after"),
                *("saving_on_signal", "saving_on_exception", "on_event", "close"),
                *("saved", "skipped", "failures", "unpromoted"),
            ),
            "torch_ckpt.records.event.Event": ("seconds",),
            "torch_ckpt.records.reading.read_events": None,
            "torch_ckpt.records.exports.export_spans": None,
        },
    ),
    "publishing": (
        "Publish",
        {
            "torch_ckpt.Publisher": ("publish", "wait", "close"),
            "torch_ckpt.Subscriber": (
                *("update", "latest", "version", "refused", "read_nbytes", "close"),
            ),
        },
    ),
    "agent": (
        "Agent",
        {
            "torch_ckpt.agent.SnapshotAgent": (
                *("reserve", "async_save", "stage", "persist", "write_newest", "newest", "find"),
                *("has_in_memory", "close", "leave", "ranks_here", "superseded"),
            ),
            "torch_ckpt.agent.AgentOptions": (),
            "torch_ckpt.agent.MemoryCheckpoint": (),
            "torch_ckpt.agent.SnapshotReader": (),
        },
    ),
    "frameworks": (
        "Frameworks",
        {
            "torch_ckpt.installed": None,
            "torch_ckpt.install": None,
            "torch_ckpt.fsdp1_state_dict": None,
            "torch_ckpt.load_fsdp1_state_dict": None,
            "torch_ckpt.frameworks.deepspeed.engine.attach": None,
            "torch_ckpt.frameworks.deepspeed.engine.FastCheckpointEngine": ("wait",),
            "torch_ckpt.frameworks.lightning.checkpoint_io.FastCheckpointIO": (),
            "torch_ckpt.frameworks.megatron.strategies.FastSaveStrategy": (),
            "torch_ckpt.frameworks.megatron.strategies.FastLoadStrategy": (),
            "torch_ckpt.frameworks.megatron.sharded_state.ShardedState": (),
            "torch_ckpt.frameworks.ray.train_run.RayTrainRun": (),
            "torch_ckpt.frameworks.torchtitan.checkpoints.FastCheckpointManager": (),
            "torch_ckpt.frameworks.transformers.trainer.RunCallback": ("train",),
            "torch_ckpt.frameworks.verl.checkpoints.FastCheckpointManager": (),
        },
    ),
    "stores": (
        "Stores",
        {
            "torch_ckpt.filesystems.location.register": None,
            "torch_ckpt.filesystems.location.Location": (),
        },
    ),
    "errors": (
        "Errors",
        {
            "torch_ckpt.errors.CheckpointError": ("may_be_committed",),
            "torch_ckpt.errors.NotFoundError": (),
            "torch_ckpt.errors.AlreadyExistsError": (),
            "torch_ckpt.errors.StorageError": ("retriable",),
            "torch_ckpt.errors.SupersededError": (),
            "torch_ckpt.errors.MismatchError": (),
            "torch_ckpt.errors.CorruptionError": (),
            "torch_ckpt.errors.UnsupportedError": (),
            "torch_ckpt.errors.CancelledError": (),
            "torch_ckpt.errors.RankTimeoutError": (),
        },
    ),
}

SHOWN: Entries = {
    path: members for _, entries in PAGES.values() for path, members in entries.items()
}
NOT_CONSTRUCTED = ("torch_ckpt.errors.", "torch_ckpt.storage.host_load.")
"""Modules whose classes a program does not construct."""
PUBLIC = {path.rpartition(".")[2]: path for path in SHOWN}
"""Names that the reference has -> their paths."""


class Reference(griffe.Extension):
    """Turns the source into what the reference shows."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Changes all docstrings and defaults of the package."""
        for item in objects(pkg):
            if item.is_class and "__new__" in item.members:  # Its arguments are those of the class.
                item.set_member("__init__", item.members["__new__"])
            if item.docstring is not None:
                item.docstring.value = marked_down(item.docstring.value, item)
            if item.is_function:
                for parameter in item.parameters:
                    parameter.default = value_of(parameter.default, item)
                    parameter.annotation = value_of(parameter.annotation, item)
                item.returns = value_of(item.returns, item)


def objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """All objects below a module, itself included, which are defined there."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from objects(member)


def marked_down(text: str, item: griffe.Object) -> str:
    """A docstring with links for the roles of Sphinx, and fences around its example."""
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda role: link_to(role[1], item), text)
    example = re.search(r"^(Example[^\n:]*)::\n\n((?:    .*\n?|\n)+)", text, re.M)
    if example is None:
        return text
    code = textwrap.dedent(example[2]).strip()
    shown = f"**{example[1]}**\n\n```python\n{code}\n```\n"
    return text[: example.start()] + shown + "\n" + text[example.end() :]


def link_to(name: str, item: griffe.Object) -> str:
    """A link to the part of the reference about a name, as seen from an object."""
    first, _, rest = name.removeprefix("torch_ckpt.").partition(".")
    if first in PUBLIC:
        path = PUBLIC[first] + (f".{rest}" if rest else "")
        return f"[`{name}`][{path}]"
    owner = item if item.is_class else item.parent
    if owner is not None and owner.is_class:
        for path, members in SHOWN.items():
            shown = owner.package[path.partition(".")[2]]
            if not shown.is_class or owner.path not in lineage(shown):
                continue
            member = shown.all_members.get(name)
            if member is not None and member.docstring and (members is None or name in members):
                return f"[`{name}`][{path}.{name}]"
    return f"`{name}`"


def lineage(shown: griffe.Class | griffe.Alias) -> set[str]:
    """The paths of a class and its bases."""
    return {shown.canonical_path, *(base.canonical_path for base in shown.mro())}


def value_of(expression: Any, within: griffe.Object) -> Any:
    """A default or annotation, with the values of the constants and aliases that it names."""
    if isinstance(expression, griffe.ExprBinOp):
        expression.left = value_of(expression.left, within)
        expression.right = value_of(expression.right, within)
    if not isinstance(expression, griffe.ExprName):
        return expression
    try:
        named = within.modules_collection[expression.canonical_path]
    except (KeyError, griffe.AliasResolutionError):
        return expression
    return named.value if named.is_attribute and named.value is not None else expression


def load() -> griffe.Module:
    """The package, as its source has it."""
    return griffe.load(
        "torch_ckpt",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(Reference),
        docstring_parser="google",
    )


def check(package: griffe.Module) -> None:
    """Warns of public names, and of their arguments, that the reference does not describe."""
    for name in [*package.exports, *package["agent"].exports]:
        if name not in PUBLIC:
            LOG.warning("docs/site/reference.py: no page has the public name %s", name)
    for path, members in SHOWN.items():
        if path.startswith(NOT_CONSTRUCTED):
            continue
        item = package[path.partition(".")[2]]
        described = [item]
        if item.is_class:
            public = [name for name in item.all_members if name[0] != "_"]
            described += [item.all_members[name] for name in members or public if members != ()]
        for each in described:
            if each.is_class or each.is_function:
                for name in undescribed(each):
                    LOG.warning("%s: no description of %s", each.path, name)


def undescribed(item: griffe.Object | griffe.Alias) -> list[str]:
    """The arguments that a docstring does not describe."""
    names = {parameter.name for parameter in item.parameters} - {"self", "cls"}
    return sorted(names - descriptions(item).keys())


def reference_page(name: str) -> str:
    """The text of one page of the reference, which mkdocstrings fills."""
    title, entries = PAGES[name]
    page = [f"# {title}\n"]
    for path, members in entries.items():
        page.append(f"::: {path}")
        if members is not None:
            page.append(f"    options:\n      members: {[*members]}")
            if not members:
                page.append("      inherited_members: false")
        page.append("")
    return "\n".join(page)


def options_tables(package: griffe.Module) -> str:
    """A table of the options of each public class and function that has any."""
    text = []
    exports = {*package.exports, *package["agent"].exports} - {
        "CheckpointError",
        "MemoryCheckpoint",
    }
    for path in SHOWN:
        item = package[path.partition(".")[2]]
        if item.name in exports:
            text.append(f"## {item.name}\n\n[`{item.name}` in the API reference][{path}]\n")
            text.append("| option | default | meaning |\n|---|---|---|")
            text.extend(f"| {' | '.join(row)} |" for row in options_of(item))
            text.append("")
    return "\n".join(text)


def options_of(item: griffe.Object | griffe.Alias) -> Iterator[tuple[str, str, str]]:
    """A row for each option: its name, its default, and what the docstring has about it."""
    for name, description in descriptions(item).items():
        default = item.parameters[name].default
        is_many = item.parameters[name].kind.value.startswith("variadic")
        shown = "required" if default is None else f"`{default}`"
        meaning = " ".join(description.split()).replace("|", "\\|")
        yield f"`{name}`", "" if is_many else shown, meaning


def descriptions(item: griffe.Object | griffe.Alias) -> dict[str, str]:
    """The arguments that a docstring describes. Those of a dataclass are its attributes."""
    kinds = griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes
    sections = [] if item.docstring is None else item.docstring.parsed
    described = [each for section in sections if section.kind in kinds for each in section.value]
    described = [(each.name.lstrip("*"), each.description) for each in described]
    return {name: text for name, text in described if name in item.parameters}
