"""The worlds of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks, Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of gloo ranks, kept for the whole session."""
    kept = Worlds()
    yield kept
    kept.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks of a test alone."""
    with Ranks(2) as ranks:
        yield ranks
