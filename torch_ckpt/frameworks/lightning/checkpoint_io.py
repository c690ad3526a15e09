"""FastCheckpointIO: saves and loads the checkpoints of Lightning's ``Trainer``."""

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
from torch_ckpt.ladder.removal import remove_directory
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

# Lightning has two packages, and each accepts only its own classes.
if TYPE_CHECKING or not ("pytorch_lightning" in sys.modules and "lightning" not in sys.modules):
    from lightning.fabric.plugins import CheckpointIO
else:
    from lightning_fabric.plugins import CheckpointIO

__all__ = ["FastCheckpointIO"]

_SKELETON = "skeleton"
_TENSOR = "tensor of the checkpoint: "

_TIMEOUT_S = 1800.0


class FastCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """A Lightning plugin that saves checkpoints as directories of this package.

    ``ModelCheckpoint`` and ``ckpt_path`` still determine which checkpoints are saved, retained and
    resumed. The plugin works on a single device and with DDP. It does not work with
    ``FSDPStrategy`` and ``ModelParallelStrategy``: with full state dicts, they refuse a checkpoint
    that is a directory, and with sharded ones, they call DCP directly. For these, save sharded
    state dicts, and use ``with torch_ckpt.installed(): trainer.fit(...)`` instead.

    A tensor is stored under its path in the checkpoint, such as ``state_dict.layer.weight``. All
    other values are stored in one object. A loaded checkpoint equals the saved one, including the
    types of the keys of an optimizer's state. Only types that ``torch.load(weights_only=True)``
    allows can be loaded, unless the trainer passes ``weights_only=False``.

    Args:
        asynchronous: Whether training continues as soon as the checkpoint is copied. Saves do not
            overlap. A checkpoint that Lightning removes during a save is removed after that save.
            Errors are raised by the next call, or when training ends.
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
        self._to_remove: list[Any] = []  # Paths to remove after the background save.
        self._saves = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Saves the checkpoint that a strategy has gathered on the calling rank.

        Args:
            checkpoint: Content of the checkpoint.
            path: Directory of the checkpoint.
            storage_options: Must be ``None``.

        Raises:
            CheckpointError: The previous background save failed.
            CheckpointException: This save failed. It does not derive from ``Exception``.
            TypeError: ``storage_options`` is given.
        """
        if storage_options is not None:
            raise TypeError("FastCheckpointIO accepts no storage_options: use its writer argument")
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
        """Loads a whole checkpoint on the calling rank.

        Args:
            path: Directory of the checkpoint.
            map_location: Device of the loaded tensors; any other value means the CPU.
            weights_only: ``False`` to unpickle objects of any type.

        Returns:
            The content of the checkpoint.

        Raises:
            CheckpointException: The checkpoint cannot be loaded. It does not derive from
                ``Exception``.
            NotFoundError: No checkpoint exists at ``path``.
        """
        self._settle()
        if Location(path).is_file():
            raise NotFoundError(
                f"cannot load {path}: it is a file, not a checkpoint of FastCheckpointIO"
            )
        options = {**self._reader_options}
        if weights_only is False:
            options["trust_pickle"] = True
        reader = FastReader(path, **options)
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            fqn: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if isinstance(entry, TensorStorageMetadata)
            else None
            for fqn, entry in stored.items()
        }
        load(state, storage_reader=reader, no_dist=True)
        (skeleton,) = state.pop(_SKELETON)
        if isinstance(map_location, str | torch.device):
            state = {fqn: tensor.to(map_location) for fqn, tensor in state.items()}
        loaded = _assemble(skeleton, state)
        assert isinstance(loaded, dict)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, so that no reader ever finds a partly deleted one.

        During a background save, the checkpoint is removed when that save is complete.

        Args:
            path: Directory of the checkpoint, or a file that Lightning itself saved.
        """
        if self._pending is not None:
            self._to_remove.append(Location(path).absolute().checkpoint_id)
            return
        location = Location(path)
        if location.is_file():  # A checkpoint that Lightning itself saved.
            location.remove()
        else:
            with contextlib.suppress(NotFoundError):
                remove_directory(location)

    def teardown(self) -> None:
        """Waits for the background save.

        Raises:
            CheckpointError: The save failed.
        """
        self._settle()

    def _settle(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        to_remove, self._to_remove = self._to_remove, []
        pending.settle(_TIMEOUT_S)
        for path in to_remove:  # Not after a failed save: they may be the only checkpoints.
            self.remove_checkpoint(path)


def _split(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """Returns the value with tensors replaced by names; adds the tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        fqn = name
        while fqn in tensors or fqn == _SKELETON:
            fqn += "'"
        tensors[fqn] = value
        return _TENSOR + fqn
    # Only plain containers: others, such as named tuples, are pickled with their content.
    start = f"{name}." if name else ""
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        items = {key: _split(item, f"{start}{key}", tensors) for key, item in value.items()}
        return type(value)(items)
    if type(value) in (list, tuple):
        numbered = enumerate(value)
        return type(value)([_split(item, f"{start}{at}", tensors) for at, item in numbered])
    return value


def _assemble(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return type(value)((key, _assemble(item, tensors)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)([_assemble(item, tensors) for item in value])
    return value
