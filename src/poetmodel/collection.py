"""Fewer garbage collections while models are built and solved: they are no garbage."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOCATIONS: Final = 20_000
"""Allocations between two collections of the youngest objects; Python's own number is 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""Thresholds to return to, one entry for each solve that runs."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python collect garbage less often, until the last solve that runs within it has ended.

    Notes
    -----
    A model or a schedule of a large graph is hundreds of thousands of small objects, which Python
    would look through again and again while they are made: up to a third of the time around the
    solver. Nothing is changed where collections are off, or rarer still.
    """
    with _lock:
        found = gc.get_threshold()
        _before.append(_before[0] if _before else found)
        if 0 < found[0] < ALLOCATIONS:
            gc.set_threshold(ALLOCATIONS, *found[1:])
    try:
        yield
    finally:
        with _lock:
            thresholds = _before.pop()
            if not _before:
                gc.set_threshold(*thresholds)
