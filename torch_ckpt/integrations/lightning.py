"""Has Lightning's ``Trainer`` write and read its checkpoints through this package."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt.api import async_save, load, save
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.runs.step_directories import remove_directory
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

# Lightning comes as two packages, of which each knows its own classes only.
if TYPE_CHECKING or not ("pytorch_lightning" in sys.modules and "lightning" not in sys.modules):
    from lightning.fabric.plugins import CheckpointIO
else:
    from lightning_fabric.plugins import CheckpointIO

__all__ = ["FastCheckpointIO"]

_SKELETON = "skeleton"
_TENSOR = "tensor of the checkpoint: "

_TIMEOUT_S = 1800.0


class FastCheckpointIO(CheckpointIO):
    """Lightning's checkpoints as directories of this package: a plugin for any of its strategies.

    ``ModelCheckpoint`` and ``ckpt_path`` decide what is saved, kept and resumed, as ever. Where a
    strategy has one rank save all that there is (a single device, DDP, FSDP with full state
    dicts), this plugin writes it. Where a strategy saves sharded, it calls DCP by itself and asks
    no plugin: ``with torch_ckpt.installed(): trainer.fit(...)`` serves those.

    A tensor is stored under the names of its place in the checkpoint, such as
    ``state_dict.layer.weight``; all else in one object. What is loaded comes as it was saved, to
    the types of the keys of an optimizer's state, but only what ``torch.load(weights_only=True)``
    allows, unless the trainer is told ``weights_only=False``.

    Args:
        asynchronous: Whether training goes on as soon as the checkpoint is copied. One save follows
            another; a checkpoint is removed when the one that replaces it is complete. An error
            is raised at the next call, or when training ends.
        writer: Arguments for the :class:`FastWriter` of all saves.
        reader: Arguments for each :class:`FastReader`.

    Example::

        trainer = Trainer(plugins=[FastCheckpointIO(asynchronous=True)], max_epochs=3)
        trainer.fit(model, data, ckpt_path="last")
    """

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        writer: dict[str, Any] | None = None,
        reader: dict[str, Any] | None = None,
    ) -> None:
        self.asynchronous = asynchronous
        self._writer_options, self._reader_options = dict(writer or {}), dict(reader or {})
        self._writer: FastWriter | None = None
        self._pending: BackgroundSave | None = None
        self._doomed: list[Any] = []  # Paths to remove when the save in the background is complete.
        self._saves = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Saves what a strategy has gathered, on the rank that calls this.

        Raises:
            CheckpointError: The save before, in the background, has failed.
            CheckpointException: This one has. No ``Exception``.
            TypeError: There are ``storage_options``.
        """
        if storage_options is not None:
            raise TypeError("FastCheckpointIO has no storage_options: see its writer argument")
        self._settle()
        tensors: dict[str, Any] = {}
        skeleton = _split(checkpoint, "", tensors)
        state = {**tensors, _SKELETON: (skeleton,)}
        if self._writer is None:
            self._writer = FastWriter(path, **self._writer_options)
        options: dict[str, Any] = {
            "checkpoint_id": Path(path),
            "storage_writer": self._writer,
            "no_dist": True,
        }
        self._saves += 1
        if not self.asynchronous:
            save(state, **options)
            return
        future = async_save(state, **options)
        assert isinstance(future, Future)
        self._pending = BackgroundSave(self._saves, future, lambda: None)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a whole checkpoint on the rank that calls this, into memory of the CPU.

        Args:
            path: Directory of the checkpoint.
            map_location: A device, where tensors are to be; anything else is the CPU.
            weights_only: ``False`` to unpickle whatever it asks for.

        Raises:
            CheckpointException: It cannot be loaded. No ``Exception``.
            NotFoundError: There is none.
        """
        self._settle()
        if Location(path).is_file():
            raise NotFoundError(f"no checkpoint of FastCheckpointIO is in {path}")
        options = {**self._reader_options}
        if weights_only is False:
            options["trust_pickle"] = True
        reader = FastReader(path, **options)
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            fqn: torch.empty(entry.size, dtype=entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for fqn, entry in stored.items()
        }
        load(state, storage_reader=reader, no_dist=True)
        (skeleton,) = state.pop(_SKELETON)
        if isinstance(map_location, str | torch.device):
            state = {fqn: tensor.to(map_location) for fqn, tensor in state.items()}
        loaded = _put_together(skeleton, state)
        assert isinstance(loaded, dict)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, so that nobody ever finds half of it."""
        if self._pending is not None:
            self._doomed.append(path)
            return
        location = Location(path)
        if location.is_file():  # Of Lightning's own, from before.
            location.remove()
        else:
            with contextlib.suppress(NotFoundError):
                remove_directory(location)

    def teardown(self) -> None:
        """Waits for the save in the background.

        Raises:
            CheckpointError: It has failed.
        """
        self._settle()

    def _settle(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        doomed, self._doomed = self._doomed, []
        pending.settle(_TIMEOUT_S)
        for path in doomed:  # Not if that failed: they may be all that there is.
            self.remove_checkpoint(path)


def _split(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """The value with a name in the place of each tensor, which goes to ``tensors``."""
    if isinstance(value, torch.Tensor):
        fqn = name
        while fqn in tensors or fqn == _SKELETON:
            fqn += "'"
        tensors[fqn] = value
        return _TENSOR + fqn
    # Only of plain types: others, such as named tuples, are pickled with what is in them.
    start = f"{name}." if name else ""
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        parts = {key: _split(part, f"{start}{key}", tensors) for key, part in value.items()}
        return type(value)(parts)
    if type(value) in (list, tuple):
        parts_in_order = enumerate(value)
        return type(value)([_split(part, f"{start}{at}", tensors) for at, part in parts_in_order])
    return value


def _put_together(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return type(value)((key, _put_together(part, tensors)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)([_put_together(part, tensors) for part in value])
    return value
