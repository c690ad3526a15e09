"""Times: ages of steps and points in time, as users write them.

This module imports no torch.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

__all__ = ["age_s", "time_s", "time_text"]

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS_S)})", re.ASCII)


def age_s(name: str, value: object) -> float:
    """Returns an age that a caller passed, such as ``"24h"`` or a timedelta, in seconds.

    Raises TypeError for a value of another type, and ValueError for other text and ages that are
    not positive. Both name the argument.
    """
    if isinstance(value, timedelta):
        found = value.total_seconds()
    elif isinstance(value, str):
        match = _AGE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{name}={value!r} is not an age such as '90min', '24h' or '7d'")
        found = float(match[1]) * _UNITS_S[match[2]]
    else:
        raise TypeError(f"{name}={value!r} is not an age such as '24h', or a timedelta")
    if not found > 0:
        raise ValueError(f"{name}={value!r} is not positive")
    return found


def time_s(value: object) -> float:
    """Returns a time that a caller passed, in seconds since 1970.

    It is a datetime, or text in the format of ISO 8601. Without a time zone, it is local time.
    Raises TypeError for a value of another type, and ValueError for other text.
    """
    if not isinstance(value, str | datetime):
        raise TypeError(f"time={value!r} is not a datetime, or text such as '2026-11-28 14:30'")
    try:
        time = datetime.fromisoformat(value.strip()) if isinstance(value, str) else value
        return time.timestamp()
    except (ValueError, OverflowError, OSError) as error:  # Such as the year 1, as local time.
        raise ValueError(
            f"time={value!r} is not a time such as '2026-11-28 14:30': {error}"
        ) from None


def time_text(time_s: float) -> str:
    """Returns a time as ISO 8601, in seconds of local time, or as its number outside the years."""
    try:
        time = datetime.fromtimestamp(time_s).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s after 1970"
    return time.isoformat(sep=" ", timespec="seconds")
