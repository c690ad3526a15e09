"""Replacement: a file or folder that is renamed to its final name once it is complete.

For formats whose readers open a single name, such as a file of ``torch.save``, a folder of
DeepSpeed, or a pointer file that names the newest folder. The previous file or folder is removed
only at the end.
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

    Its block first removes the remains of dead processes beside the target. At its end, it removes
    the files if they were not committed, or else the replaced ones.

    Args:
        target: The final path. Links in it must be resolved: a link at this path is replaced.
        is_folder: Whether to create a folder.
        name: Name of the target in messages; its path by default.

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
        self._left: Location | None = None  # Removed at the end.

    def __enter__(self) -> Self:
        parent = self.target.parent
        parent.create_directories()
        if remove_abandoned(parent, self.target.name):  # Others remain.
            remove_abandoned(parent)
        check_commit(parent, self._name, sync=True, directories=self._is_folder)
        self._left = self.unpublished
        if self._is_folder:
            try:
                self.unpublished.create_directories()
            except BaseException:  # `__exit__` is not called.
                self._remove_left()
                raise
        return self

    def commit(self) -> None:
        """Renames the file or folder to its final name. Requires: it is complete and synced."""
        replaced = None
        if self._is_folder:
            replaced = replace_directory(self.unpublished, self.target)
        else:
            self.unpublished.rename(self.target)
        self._left = None
        self.target.parent.sync()  # If this fails, the replaced files remain.
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
    """Replaces a file, such as a pointer file. A crash leaves either the old or the new one."""
    with Replacement(target) as new:
        new.unpublished.write(contents, sync=True)
        new.commit()
