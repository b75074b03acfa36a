"""Garbage is collected less often during a solve, and as before after it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from poetmodel.collection import ALLOCATIONS, rare_collections

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_rare_collections_end_with_the_outermost_solve() -> None:
    """Two solves at once: the thresholds return when the last one ends."""
    gc.set_threshold(700, 11, 12)
    with rare_collections():
        with rare_collections():
            assert gc.get_threshold() == (ALLOCATIONS, 11, 12)
        assert gc.get_threshold() == (ALLOCATIONS, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)


def test_rare_collections_end_with_an_error() -> None:
    """A solve that fails leaves the thresholds as they were."""
    gc.set_threshold(700, 11, 12)
    with pytest.raises(KeyboardInterrupt), rare_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("first", [0, 2 * ALLOCATIONS])
def test_rare_collections_leave_rarer_ones_alone(first: int) -> None:
    """Where collections are off or rarer still, nothing is changed."""
    gc.set_threshold(first, 11, 12)
    with rare_collections():
        assert gc.get_threshold() == (first, 11, 12)
    assert gc.get_threshold() == (first, 11, 12)
