"""Human-readable numbers: two significant digits, and a unit."""

from __future__ import annotations

__all__ = ["digits", "nbytes_text", "pair_of_rates", "percent", "rate_text", "seconds_text"]

_NBYTES_UNITS = (("TB", 1e12, 1.0), ("GB", 1e9, 0.1), ("MB", 1e6, 0.1), ("kB", 1e3, 0.1))
"""Names of units, their sizes, and the number from which they are used."""


def digits(value: float) -> str:
    """Returns a number of at least 0.1 with two significant digits, or more before the point."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def seconds_text(seconds: float) -> str:
    """Returns a duration: ``2.1 s``, ``31 s``, ``25 ms``, or from ten minutes on ``12 min``."""
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else f"{1000 * seconds:.1f} ms"
    return f"{digits(seconds)} s"


def nbytes_text(nbytes: float) -> str:
    """Returns a number of bytes: ``1.9 GB``. A GB has 10^9 bytes, as in GB/s."""
    for unit, size, least in _NBYTES_UNITS:
        if nbytes >= least * size:
            return f"{digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(bytes_per_s: float) -> str:
    """Returns a rate: ``1.9 GB/s``."""
    return f"{nbytes_text(bytes_per_s)}/s"


def pair_of_rates(first: float, second: float) -> tuple[str, str]:
    """Returns two rates to compare; omits the unit of the second if it is the same."""
    one, other = rate_text(first), rate_text(second)
    number, _, unit = other.partition(" ")
    return one, number if one.endswith(f" {unit}") else other


def percent(share: float) -> str:
    """Returns a share as ``95 %``."""
    return f"{100 * share:.0f} %"
