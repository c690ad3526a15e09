"""Messages that the package logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["logged"]


class _Lines(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged(at: int = logging.INFO) -> Iterator[list[str]]:
    """Collects the messages of this level and above, within the block."""
    handler, logger = _Lines(at), logging.getLogger("torch_ckpt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(at)
    try:
        yield handler.lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
