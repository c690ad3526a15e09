"""What a disk may hold after a power cut or a kill at any instant of a real save."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import files, save

from torch_ckpt.filesystems.location import register

LIMIT, SAMPLES, SEED = 600, 150, 7


def record(recorder: Any, path: Path, *others: Path) -> Any:
    """Records what is done below ``recorded://``; what these directories have is durable."""
    folder = path if path.exists() else path.parent
    initial = {
        str(each / name): contents
        for each in (path, *others)
        for name, contents in files(each).items()
    }
    recording = recorder.RecordingFileSystem(initial, str(folder))
    register("recorded", recording)
    return recording


def trees_of_a_save(
    recorder: Any, path: Path, writer: Any, state: dict[str, Any], *others: Path
) -> Iterator[tuple[dict[str, bytes], bool, str]]:
    """Saves; yields each tree that a cut or kill may leave, whether all is done, and a message.

    The trees have the files of ``others``, too.
    """
    recording = record(recorder, path, *others)
    writer.reset(f"recorded://{path}")
    save(state, writer)
    cuts = recorder.PowerCuts(recording, LIMIT, SAMPLES, SEED)
    for instant in range(cuts.last_instant + 1):
        for tree in [*cuts.trees_after(instant), cuts.tree_after_kill(instant)]:
            where = f"instant {instant}, after: {cuts.change_before(instant)}; {sorted(tree)}"
            yield tree, instant == cuts.last_instant, where


def rebuild(tree: dict[str, bytes], path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, contents in tree.items():
        if Path(name).parent.name == "saved":
            (path / Path(name).name).write_bytes(contents)
