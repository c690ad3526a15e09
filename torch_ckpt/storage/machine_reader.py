"""MachineReader: loads a checkpoint whose data files lie on the disks of several machines."""

from __future__ import annotations

from torch_ckpt.formats.committed import files_in
from torch_ckpt.storage.reader import FastReader

__all__ = ["MachineReader"]


class MachineReader(FastReader):
    """Reads a checkpoint whose data files lie on the disks of several machines.

    Each rank names a directory of its own machine. All directories have the same ``.metadata`` and
    index, and each data file lies in at least one of them. A rank reads the files in its
    directory, and other ranks send it the bytes of the other files that it wants. A file of
    another length than the index states does not count. With one directory that has all files, it
    works as ``FastReader``.

    Example::

        dcp.load(state, storage_reader=MachineReader("/local-disk/step-100"))
    """

    def _reachable_files(self) -> frozenset[str] | None:
        index = self._opened.index
        return None if index is None else files_in(self._opened.directory, index.files)
