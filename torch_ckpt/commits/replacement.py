"""Replacement: a file or a folder that gets its name once it is complete.

It is for formats whose readers open one name, such as a file of ``torch.save``, a folder of
DeepSpeed, or a pointer file that names the newest folder. What had the name before is removed at
the end only.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.temporary import (
    TMP,
    remove_abandoned,
    remove_temporary,
    replace_directory,
    temporary,
)
from torch_ckpt.filesystems.location import Location

__all__ = ["Replacement", "replace_file"]


class Replacement:
    """A file or a folder under a hidden name, :attr:`unpublished`, until its commit.

    Its block begins with the removal of what dead processes have left beside the target, and
    removes in the end what is not committed, or what was replaced.

    Args:
        target: The name. Links in its path must be resolved: a link that has the name is replaced.
        is_folder: Whether it is a folder, which the block creates.
        name: What messages call the target; its path by default.

    Raises:
        StorageError: The file system refuses a call that the commit needs, or has failed.

    Example::

        with Replacement(target) as new:
            new.unpublished.write(contents, sync=True)
            new.commit()
    """

    def __init__(
        self, target: Location, *, is_folder: bool = False, name: Location | None = None
    ) -> None:
        self.target = target
        self.unpublished = temporary(target, TMP)
        self._is_folder = is_folder
        self._name = target if name is None else name
        self._left: Location | None = None  # What the end removes.

    def __enter__(self) -> Self:
        parent = self.target.parent
        parent.create_directories()
        if remove_abandoned(parent, self.target.name):  # There are others.
            remove_abandoned(parent)
        check_commit(parent, self._name, sync=True, directories=self._is_folder)
        self._left = self.unpublished
        if self._is_folder:
            try:
                self.unpublished.create_directories()
            except BaseException:  # Without an end of the block.
                self._remove_left()
                raise
        return self

    def commit(self) -> None:
        """Gives the file or folder its name. Requires: all of it is complete and synced."""
        replaced = None
        if self._is_folder:
            replaced = replace_directory(self.unpublished, self.target)
        else:
            self.unpublished.rename(self.target)
        self._left = None
        self.target.parent.sync()  # If this fails, what was replaced stays.
        self._left = replaced

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_left()

    def _remove_left(self) -> None:
        left, self._left = self._left, None
        if left is None:
            return
        if self._is_folder:
            remove_temporary(left)
        else:
            left.discard()


def replace_file(target: Location, contents: bytes) -> None:
    """Replaces a file, such as a pointer that moves last. A crash leaves the old one or the new."""
    with Replacement(target) as new:
        new.unpublished.write(contents, sync=True)
        new.commit()
