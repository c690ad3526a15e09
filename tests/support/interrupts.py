"""Interrupts of a call at each of its instructions, one after the other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

__all__ = ["interrupts"]


def interrupts(
    call: Callable[[], Any], modules: list[ModuleType], *, every: int = 1, first: int = 0
) -> Iterator[BaseException]:
    """Calls a function again and again, and interrupts it at a later instruction each time.

    Only instructions of some modules count, of which ``every`` one is interrupted. Yields the
    errors of the calls, and ends when one was not interrupted. A signal handler may raise at fewer
    instructions.
    """
    files = {Path(str(module.__file__)).resolve() for module in modules}
    known: dict[str, bool] = {}
    for number in itertools.count(first, every):
        left, has_raised = number, False

        def instruction(_: FrameType, event: str, __: object) -> Any:
            nonlocal left, has_raised
            if event == "opcode":
                left -= 1
                if left < 0:
                    has_raised = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return instruction

        def called(frame: FrameType, _: str, __: object) -> Any:
            name = frame.f_code.co_filename
            if name not in known:
                known[name] = Path(name).resolve() in files
            if not known[name]:
                return None
            frame.f_trace_opcodes = True
            return instruction

        before = sys.gettrace()
        sys.settrace(called)
        try:
            call()
        except BaseException as error:
            sys.settrace(before)
            if not has_raised:
                raise
            yield error
        finally:
            sys.settrace(before)
        if not has_raised:
            return
