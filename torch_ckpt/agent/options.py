"""How an agent behaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_ckpt.options import IoOptions

__all__ = ["AgentOptions"]


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How an agent behaves.

    Attributes:
        persist_on_failure: Whether the newest complete snapshot is brought to disk when trainers
            end without saying so.
        linger_s: Seconds that memory is kept for trainers to come back, once they have died.
        threads: Files that are written at a time.
        peers_timeout_s: Seconds that an agent waits for those of other machines, whose ranks have
            saved with its own; more than one may take longer to write than another. One that has to
            go on (it was told to end, or ranks have started anew) waits for half a minute at most.
        io: Tuning. ``background_nice`` is the niceness of the whole process.
    """

    persist_on_failure: bool = True
    linger_s: float = 1800.0
    threads: int = 2
    peers_timeout_s: float = 600.0
    io: IoOptions = field(default_factory=IoOptions)
