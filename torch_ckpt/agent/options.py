"""Options of the agent process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from torch_ckpt.options import IoOptions
from torch_ckpt.planning.replica_check import CheckReplicas, as_mode
from torch_ckpt.stored_json import from_json

__all__ = ["AgentOptions"]

_MIN_RATE = 1 << 20
"""Minimum rate of replicas in bytes per second: at lower rates, the connection seems lost."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of the agent process, which uses those of the rank that connected last.

    Attributes:
        persist_on_failure: Whether the agent writes the newest complete snapshot to disk after a
            trainer dies without detaching, and when the agent receives SIGTERM.
        linger_s: Seconds that the agent retains the snapshots after the last trainer has died, so
            that restarted trainers can load them.
        peers_timeout_s: Seconds that an agent waits for the agents of other machines, if the ranks
            of a save are on several machines. Must exceed the largest difference between the write
            times of two machines. After SIGTERM, or once the ranks have restarted, the agent waits
            for at most 30 s.
        io: Memory budgets and I/O modes. ``background_nice`` is the niceness of the whole agent
            process.
        check_replicas: How to check that replicas are equal; see
            :class:`~torch_ckpt.storage.writer.FastWriter`.
        reuse: Whether saves store digests, and take unchanged tensors from their ``base``; see
            :class:`~torch_ckpt.storage.writer.FastWriter`. A ``Run`` sets it.
        replicas: 1 to also send each save to the memory of another machine, the buddy of this one.
            If a machine is lost, the others and its replacement can then restore the save from
            memory. Doubles the memory for slots.
        failure_domain: Name of the set of machines that fail together with this one, such as its
            rack. Machines choose a buddy in another failure domain. Defaults to the host name.
        replicate_bytes_per_s: Maximum rate at which the agent sends replicas, in bytes per second;
            at least 1 MiB. Unlimited if ``None``.

    Raises:
        ValueError: ``check_replicas`` is not one of ``"sample"``, ``"full"`` and ``"off"``,
            ``replicas`` is neither 0 nor 1, ``replicate_bytes_per_s`` is less than 1 MiB, or
            ``linger_s`` or ``peers_timeout_s`` is negative or not a number.
    """

    persist_on_failure: bool = True
    linger_s: float = 1800.0
    peers_timeout_s: float = 600.0
    io: IoOptions = field(default_factory=IoOptions)
    check_replicas: CheckReplicas = "sample"
    reuse: bool = False
    replicas: int = 0
    failure_domain: str | None = None
    replicate_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        as_mode(self.check_replicas)
        if self.replicas not in (0, 1):
            raise ValueError(f"replicas={self.replicas!r} is neither 0 nor 1")
        for name in ("linger_s", "peers_timeout_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not seconds >= 0:
                raise ValueError(f"{name}={seconds!r} is not a number of seconds, or is negative")
        rate = self.replicate_bytes_per_s
        if rate is not None and not rate >= _MIN_RATE:
            raise ValueError(f"replicate_bytes_per_s={rate!r} is less than {_MIN_RATE}")

    def encode(self) -> str:
        """Returns the options as JSON, for a command line or a message."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> AgentOptions:
        """Returns the options in a JSON text. Missing options have their defaults.

        Raises:
            ValueError: The text is not an object of options.
        """
        try:
            return from_json(
                text, lambda o: AgentOptions(**{**o, "io": IoOptions(**o.get("io", {}))})
            )
        except ValueError as error:
            raise ValueError(f"{text[:200]} is not an object of options: {error}") from error
