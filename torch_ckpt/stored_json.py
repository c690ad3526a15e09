"""Reads the JSON of small files, which may be damaged or from a stranger."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["from_json"]

T = TypeVar("T")


def from_json(text: str | bytes, use: Callable[[Any], T], **options: Any) -> T:
    """Returns the result of ``use`` for the value of a JSON text.

    Raises ValueError if the text is not JSON or is nested too deeply, or if ``use`` finds a value
    of another type than it expects. So each reader has one exception for every kind of damage.
    ``options`` are those of :func:`json.loads`.
    """
    try:
        return use(json.loads(text, **options))
    except ValueError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
