"""Garbage collection in tests: what was imported is not searched, and the rest rarely.

Imported last by the server of forked processes. The searches would take 4 % of all CPU time.
"""

import gc


def search_rarely() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


search_rarely()
