"""Compares the values of replicas, and warns of those that differ. Does not need torch.

Replicas are matched by FQN, dtype and box. Each rank computes a digest of the values of each
tensor, of 8 bytes. A plan divides a tensor between ranks only if the digests of all its replicas
are known and equal. If a plan is used again, each rank sends one digest for each set of ranks that
have the same replicas.
"""

from __future__ import annotations

import array
import hashlib
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from torch_ckpt.process_state import PROCESS

__all__ = [
    "DIGEST_NBYTES",
    "CheckReplicas",
    "Difference",
    "EqualReplicas",
    "agree",
    "as_mode",
    "combined",
    "numbers_of",
    "warn_of",
]

CheckReplicas = Literal["sample", "full", "off"]
"""How ranks compare their replicas: by a sample of each tensor, by all bytes, or not at all."""

Difference = tuple[str, list[tuple[int, int]], int]
"""FQN of a tensor, a few pairs of ranks with different values of a box, number of all such pairs.

The first rank of a pair is the lowest rank with the box."""

EqualReplicas = tuple[int, int, int]
"""Number of a set of ranks with the same replicas; first item and number of items of one rank."""

DIGEST_NBYTES = 8
"""Size of the digest of a tensor's values. Zeros mean that it is unknown."""

_SET = struct.Struct("<I8s")  # Number of a replica set, and the digest of all its values.
_MAX_NAMED = 4

_LOG = logging.getLogger("torch_ckpt")


def as_mode(value: str) -> CheckReplicas:
    """Returns the option. Raises ValueError if it is invalid."""
    for mode in get_args(CheckReplicas):
        if value == mode:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"check_replicas={value!r} is not one of {', '.join(get_args(CheckReplicas))}")


def numbers_of(equal: Iterable[EqualReplicas]) -> list[int]:
    """Returns the numbers of the items in runs of equal replicas."""
    return [number for _, first, count in equal for number in range(first, first + count)]


def combined(digests: bytes, equal: Iterable[EqualReplicas]) -> bytes:
    """Returns the digests of a rank, one for each replica set. See :func:`agree`.

    ``equal`` are the items whose replicas were equal when the plan was made.
    """
    values = array.array("Q", digests)
    sets: dict[int, list[bytes]] = {}
    for number, first, count in equal:
        run = values[first : first + count]
        # Unknown values differ from all others.
        sets.setdefault(number, []).append(os.urandom(8) if 0 in run else run.tobytes())
    return b"".join(
        _SET.pack(number, hashlib.blake2b(b"".join(runs), digest_size=DIGEST_NBYTES).digest())
        for number, runs in sorted(sets.items())
    )


def agree(answers: Iterable[bytes]) -> bool:
    """Returns whether all ranks of each replica set have equal digests.

    ``answers`` are the results of :func:`combined` on all ranks, for the same plan.
    """
    found: dict[int, bytes] = {}
    return all(
        found.setdefault(number, digest) == digest
        for answer in answers
        for number, digest in _SET.iter_unpack(answer)
    )


def warn_of(differences: Sequence[Difference]) -> None:
    """Warns of tensors whose replicas have different values, once for each set of FQNs."""
    fqns = frozenset(fqn for fqn, *_ in differences)
    if not fqns or fqns in PROCESS.warned_replicas:
        return
    PROCESS.warned_replicas.add(fqns)
    named = [
        f"{fqn!r} ({_names_of(pairs, count)})" for fqn, pairs, count in differences[:_MAX_NAMED]
    ]
    if len(fqns) > _MAX_NAMED:
        named.append(f"and {len(fqns) - _MAX_NAMED} more")
    _LOG.warning(
        "%d %s different values on ranks that have the same box of %s: %s. Each is stored whole "
        "from one replica, and the values of the others are not stored. If the value of each "
        "rank is meant, wrap it in torch_ckpt.RankState. If the values should be equal, "
        "synchronize them before the save.",
        len(fqns),
        "tensors have" if len(fqns) > 1 else "tensor has",
        "them" if len(fqns) > 1 else "it",
        ", ".join(named),
    )


def _names_of(pairs: Sequence[tuple[int, int]], count: int) -> str:
    """Returns the ranks that differ: "ranks 2, 4 differ from rank 0, rank 3 from rank 1"."""
    others: dict[int, list[int]] = {}
    for lowest, other in pairs:
        others.setdefault(lowest, []).append(other)
    named = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
        f"{'' if at else ' differ' if len(ranks) > 1 else ' differs'} from rank {lowest}"
        for at, (lowest, ranks) in enumerate(sorted(others.items()))
    ]
    if count > len(pairs):
        named.append(f"and {count - len(pairs)} more")
    return ", ".join(named)
