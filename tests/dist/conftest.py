"""The worlds of ranks that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks, Worlds


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Worlds of gloo ranks. Each group of a rank has a thread that wakes up 100 times a second."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks of a test alone."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def engines() -> Iterator[Ranks]:
    """Four ranks that import DeepSpeed, which no other test should have around."""
    with Ranks(4) as ranks:
        yield ranks
