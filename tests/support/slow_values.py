"""An object that is pickled slowly."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

__all__ = ["Slow"]


class Slow:
    """Pickled in the background, which waits until it may go on."""

    may_go_on = threading.Event()
    fails = False

    def __deepcopy__(self, _: object) -> Slow:
        return self  # Or it would be pickled where the state is copied, too.

    def __reduce__(self) -> Any:
        assert self.may_go_on.wait(60)
        if self.fails:
            raise ValueError("cannot be pickled")
        return OrderedDict, ()
