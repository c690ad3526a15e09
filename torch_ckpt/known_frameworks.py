"""The table of frameworks: all that the core knows of them. This module imports no torch.

A framework is a directory of ``torch_ckpt/frameworks`` and a row of :data:`FRAMEWORKS`. The core
imports a function of it by the name in its row, when the function is needed, and in no other way.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ACCELERATE_FILE",
    "DEEPSPEED_MODEL_FILE",
    "DEEPSPEED_POINTERS",
    "DEEPSPEED_RANK_FILE",
    "FRAMEWORKS",
    "TORCH_CHECKPOINTING_FILE",
    "TORCH_CHECKPOINTING_METADATA",
    "VERL_FILE",
    "Fields",
    "Files",
    "Framework",
    "Switch",
    "Target",
    "first_match",
    "row_of_fields",
]


@dataclass(frozen=True)
class Files:
    """Files by which a directory is recognised, and the function that opens it.

    Attributes:
        names: Regular expression of their names.
        open: ``(path, names, *, verify, trust_pickle) -> Opened | None``; ``None`` if the directory
            is of another format.
        asked: ``"first"``, before all others. ``"alone"``: no other format has such files, so that
            files of two frameworks are an error. ``"last"``: after safetensors.
    """

    names: str
    open: str
    asked: Literal["first", "alone", "last"]


@dataclass(frozen=True)
class Target:
    """A format that ``torch-ckpt convert`` writes.

    Attributes:
        name: The value of ``--to``.
        help: What it is, for ``--help``.
        write: ``(source, target, overwrite) -> None``.
        at: ``(path) -> object | None``: what a directory has of the format.
        last: Names of files that are uploaded last to a store.
    """

    name: str
    help: str
    write: str
    at: str
    last: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fields:
    """A field that a framework adds to DCP's ``Metadata``, and what reads such metadata.

    Attributes:
        name: The name of the field.
        open: ``(directory, metadata, pickled) -> Opened | None``; ``None`` if the tensors are as in
            any metadata of DCP.
        plain: ``(metadata)``: metadata with DCP's fields only, and FQN -> why a value is damaged.
    """

    name: str
    open: str
    plain: str


@dataclass(frozen=True)
class Switch:
    """What ``installed()`` replaces of a framework.

    Attributes:
        after: The module of the framework, after whose import the functions are replaced.
        enter: ``(timeout_s=, io=, verify=, trust_pickle=)``: the context in which they are.
    """

    after: str
    enter: str


@dataclass(frozen=True)
class Framework:
    """A row. Functions are written as ``module:function``, with the module in the directory.

    Attributes:
        name: The directory in ``torch_ckpt/frameworks``.
        title: The name in messages.
        files: How directories are recognised.
        folder: Regular expression of names of files, one of which each folder of a checkpoint has.
            A directory above may have one of the files ``pointers``, which names such a folder.
        training_state: ``(path, names) -> Location | None``: the state of a training in a directory
            that has the files of a model as well.
        rules: As ``open`` of :class:`Files`, with the argument ``rules``.
        target: The format that a conversion writes.
        fields: A field of DCP's metadata.
        switch: What ``installed()`` replaces.
        former: The module that programs once imported as ``torch_ckpt.integrations.<key>``.
    """

    name: str
    title: str
    files: tuple[Files, ...] = ()
    folder: str = ""
    pointers: tuple[str, ...] = ()
    training_state: str = ""
    rules: str = ""
    target: Target | None = None
    fields: Fields | None = None
    switch: Switch | None = None
    former: tuple[tuple[str, str], ...] = ()

    def function(self, named: str) -> Any:
        """Imports a function that the row names."""
        module, _, function = named.partition(":")
        return getattr(importlib.import_module(self.module(module)), function)

    def module(self, name: str) -> str:
        """Returns the whole name of a module of the framework."""
        return f"torch_ckpt.frameworks.{self.name}.{name}"


def first_match(pattern: str, names: Iterable[str]) -> str | None:
    """Returns the first name that a regular expression of the table matches; ``None`` without."""
    return next(filter(re.compile(pattern).fullmatch, names), None) if pattern else None


# Names of files, in one place for the recogniser and for the framework, which uses the groups.
_NUMBER = r"(0|[1-9]\d{0,4})"
ACCELERATE_FILE = rf"(pytorch_model_fsdp|optimizer)_{_NUMBER}_rank{_NUMBER}\.bin"
DEEPSPEED_MODEL_FILE = r"mp_rank_(\d+)_model_states\.pt"
DEEPSPEED_POINTERS = ("latest", "latest_universal")
DEEPSPEED_RANK_FILE = r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt"
TORCH_CHECKPOINTING_FILE = r"(.+)_(0|[1-9]\d{0,6})\.(pt|json)"
TORCH_CHECKPOINTING_METADATA = "metadata.pkl"
VERL_FILE = rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt"

FRAMEWORKS = (
    Framework(
        "deepspeed",
        "DeepSpeed",
        (
            Files(
                "|".join([DEEPSPEED_RANK_FILE, DEEPSPEED_MODEL_FILE, *DEEPSPEED_POINTERS]),
                "opening:open_directory",
                "last",
            ),
        ),
        folder=f"{DEEPSPEED_RANK_FILE}|{DEEPSPEED_MODEL_FILE}",
        pointers=DEEPSPEED_POINTERS,
        training_state="folders:deepspeed_state",
        rules="opening:open_directory",
        target=Target(
            "universal",
            "a universal folder of DeepSpeed",
            write="universal_target:write_universal",
            at="folders:deepspeed_folder",
        ),
        former=(("deepspeed", "engine"),),
    ),
    Framework(
        "torch_checkpointing",
        "torch_checkpointing",
        (
            Files(re.escape(TORCH_CHECKPOINTING_METADATA), "opening:open_stated", "first"),
            Files(TORCH_CHECKPOINTING_FILE, "opening:open_by_names", "last"),
        ),
        target=Target(
            "torch_checkpointing",
            "a directory that torch_checkpointing's CheckpointManager loads",
            write="item_files:write_items",
            at="item_files:metadata_at",
            last=(TORCH_CHECKPOINTING_METADATA,),
        ),
    ),
    Framework(
        "accelerate",
        "accelerate",
        (Files(ACCELERATE_FILE, "opening:open_directory", "alone"),),
    ),
    Framework(
        "verl",
        "verl",
        (Files(VERL_FILE, "opening:open_directory", "alone"),),
        former=(("verl", "checkpoints"),),
    ),
    Framework(
        "megatron",
        "Megatron-Core",
        fields=Fields("mcore_data", "flattened:open_flattened", "flattened:unflattened"),
        switch=Switch(
            "megatron.core.dist_checkpointing.strategies.torch", "strategies:replaced_strategies"
        ),
        former=(("megatron", "strategies"), ("megatron_run", "sharded_state")),
    ),
    Framework(
        "transformers",
        "transformers",
        switch=Switch("transformers.modeling_utils", "loading:replaced_loading"),
        former=(("trainer", "trainer"),),
    ),
    Framework("lightning", "Lightning", former=(("lightning", "checkpoint_io"),)),
    Framework("ray", "Ray Train", former=(("ray_train", "train_run"),)),
    Framework("torchtitan", "torchtitan", former=(("torchtitan", "checkpoints"),)),
)
"""All frameworks. If several are asked at the same time, they are asked in this order."""


def row_of_fields(metadata: object) -> tuple[Framework, Fields] | None:
    """Returns the framework that added a field to metadata of DCP, and the field."""
    for row in FRAMEWORKS:
        if row.fields is not None and getattr(metadata, row.fields.name, None):
            return row, row.fields
    return None
