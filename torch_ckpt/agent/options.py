"""Options of the agent process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from torch_ckpt.options import IoOptions
from torch_ckpt.planning.replica_check import CheckReplicas, as_mode

__all__ = ["AgentOptions"]


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of the agent process: those of the rank that has registered last.

    Attributes:
        persist_on_failure: Whether the agent writes the newest complete snapshot to disk after a
            trainer dies without detaching, and when the agent receives SIGTERM.
        linger_s: Seconds that the agent retains the snapshots after the last trainer has died, so
            that restarted trainers can load them.
        threads: Number of files that the agent writes at a time.
        peers_timeout_s: Seconds that an agent waits for the agents of other machines, where the
            ranks of a save are on several machines. Must exceed the largest difference between
            the write times of two machines. The agent waits at most 30 s after SIGTERM, or once
            the ranks have restarted.
        io: I/O tuning. ``background_nice`` is the niceness of the whole agent process, from its
            start.
        check_replicas: How ranks and agents find out whether replicas are equal: see
            :class:`~torch_ckpt.storage.writer.FastWriter`.

    Raises:
        ValueError: ``check_replicas`` is not one of ``"sample"``, ``"full"`` and ``"off"``.
    """

    persist_on_failure: bool = True
    linger_s: float = 1800.0
    threads: int = 2
    peers_timeout_s: float = 600.0
    io: IoOptions = field(default_factory=IoOptions)
    check_replicas: CheckReplicas = "sample"

    def __post_init__(self) -> None:
        as_mode(self.check_replicas)

    def encode(self) -> str:
        """Returns the options as JSON, for a command line or a message."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> AgentOptions:
        """Returns the options of some JSON; an option that it lacks has its default.

        Raises:
            ValueError: The text is not an object of options.
        """
        try:
            fields = json.loads(text)
            return AgentOptions(**{**fields, "io": IoOptions(**fields.get("io", {}))})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{text} is not an object of options: {error}") from error
