"""The log lines and the progress bar of a save or load."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from torch_ckpt.filesystems.location import Location

__all__ = ["Phases", "is_first", "is_terminal", "progress_bar", "readable_nbytes"]

_LOG = logging.getLogger("torch_ckpt")

_BAR_AFTER_S = 3.0
"""Duration after which a save or load shows a progress bar."""

_BAR_INTERVAL_S = 0.2


def is_first(ranks: int) -> bool:
    """Returns whether this rank logs a save or load, and shows its progress bar.

    With several ranks, the coordinator does; ``ranks`` is their number there, and 0 on other ranks.
    If each rank saves or loads alone, rank 0 does.
    """
    import torch.distributed as dist  # Not above: torch-ckpt verify runs without torch.

    is_alone = ranks == 1 and dist.is_available() and dist.is_initialized()
    return ranks > 0 and not (is_alone and dist.get_rank())


class Phases:
    """The durations of the phases of one save or load on one rank, for the log.

    Example::

        phases = Phases("planning")
        phases.begin("writing")
        phases.end("saved", nbytes, path, "4 ranks", is_first=True)
    """

    def __init__(self, first: str) -> None:
        self._begun = [(first, time.monotonic())]

    def begin(self, phase: str) -> None:
        """Ends the current phase, and begins another."""
        self._begun.append((phase, time.monotonic()))

    def end(self, done: str, nbytes: int, path: Location, *details: str, is_first: bool) -> None:
        """Ends the last phase; logs all phases since the previous call at level DEBUG.

        The first rank also logs one line at level INFO, with the details. ``done`` is ``"saved"``
        or ``"loaded"``.
        """
        end = time.monotonic()
        begun, self._begun = self._begun, []
        ends = [begin for _, begin in begun[1:]] + [end]
        for (phase, begin), until in zip(begun, ends, strict=True):
            _LOG.debug("%s: %s took %.3f s", path, phase, until - begin)
        if is_first:
            seconds = max(end - begun[0][1], 1e-6)
            _LOG.info(
                "%s %s: %s in %.2f s, %.2f GB/s, %s",
                *(done, path, readable_nbytes(nbytes), seconds, nbytes / seconds / 1e9),
                ", ".join(details),
            )


def is_terminal(stream: object) -> bool:
    """Returns whether a standard stream is a terminal.

    A daemon may have none, or a closed one, and a program may have replaced it by an object with
    only ``write``.
    """
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


@contextlib.contextmanager
def progress_bar(
    doing: str,
    path: Location,
    nbytes: Callable[[], int] = lambda: 0,
    done_nbytes: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Shows a progress bar if the block takes longer than 3 s.

    Shows nothing unless ``sys.stderr`` is a terminal and tqdm is installed. ``doing`` names the
    phase, such as ``"saving"`` or ``"reading"``. Another thread calls ``nbytes``, the total, and
    ``done_nbytes``. If ``nbytes`` returns 0, the total is unknown, and the bar shows the time.
    """
    if not is_terminal(sys.stderr) or find_spec("tqdm") is None:
        yield
        return
    ended = threading.Event()

    def show() -> None:
        if ended.wait(_BAR_AFTER_S):
            return
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        total = nbytes() or None  # The agent does not report the total.
        bar_format = None if total else "{desc} [{elapsed}]"

        def done() -> int:
            return min(done_nbytes(), total or 0)

        desc, scaled = f"{doing} {path}", {"unit": "B", "unit_scale": True}
        with tqdm(total=total, desc=desc, bar_format=bar_format, **scaled) as bar:
            while not ended.wait(_BAR_INTERVAL_S):
                bar.update(done() - bar.n)
            bar.update(done() - bar.n)

    thread = threading.Thread(target=show, name="torch_ckpt-progress", daemon=True)
    with contextlib.suppress(RuntimeError):  # The system has no more threads.
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def readable_nbytes(nbytes: int) -> str:
    """Returns a number of bytes with a binary unit, such as ``"1.07 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
