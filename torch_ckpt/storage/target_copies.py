"""Copies elements to the targets of a load whose memory the engine does not write itself."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import ReadItem

from torch_ckpt._core import _tensor_view
from torch_ckpt.errors import MismatchError, UnsupportedError
from torch_ckpt.formats.equality import same_bits
from torch_ckpt.planning.unscaled import why_unscaled
from torch_ckpt.storage.load_source import LoadSource

__all__ = ["Copies", "TargetCopies"]


class Copies:
    """Copies to targets whose elements may share memory."""

    def __init__(self) -> None:
        # FQN, target, and the elements that it must have: of targets whose elements may overlap.
        self._to_check: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def copy(self, fqn: str, target: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies elements to a target, with a cast if necessary.

        Raises:
            MismatchError: Torch refuses.
        """
        try:
            target.copy_(elements)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            raise MismatchError(
                f"cannot load {fqn!r} into a {type(target).__name__} of {target.dtype} and "
                f"{target.layout}: {error}"
            ) from error
        if _tensor_view.may_overlap_itself(target):
            self._to_check.append((fqn, target, elements.to(target.dtype, copy=True)))

    def check(self) -> None:
        """Checks the targets whose elements may overlap, after the last copy.

        Raises:
            ValueError: An element has the value of another one.
        """
        for fqn, target, elements in self._to_check:
            if not same_bits(target.cpu(), elements.cpu()):
                raise ValueError(
                    f"cannot load {fqn!r}: elements of its target share memory (strides "
                    f"{list(target.stride())}), and need different values; pass a clone of it"
                )


class TargetCopies(Copies):
    """The copies of one load."""

    def __init__(self, source: LoadSource) -> None:
        super().__init__()
        self._source = source
        self.cast: set[str] = set()
        """FQNs of targets of another dtype than their elements."""

    def put(self, item: ReadItem, target: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies elements to the target of an item, with a cast if necessary.

        Raises:
            MismatchError: Torch refuses.
            UnsupportedError: The tensor is quantised, and its scales would be lost.
        """
        fqn = item.dest_index.fqn
        if elements.dtype != target.dtype:
            opened, names = self._source.opened, self._source.metadata.state_dict_metadata
            stored = item.storage_index.fqn
            if why := why_unscaled(stored, elements.dtype, target.dtype, names, opened):
                raise UnsupportedError(why)
            self.cast.add(fqn)
        self.copy(fqn, target, elements)
