"""Tables of parameters of which some are tried by the quick tests, and all by the slow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


def quick(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Return parameters, or tuples of them, marked slow but for those that are chosen."""
    return [v if v in chosen else pytest.param(*_values(v), marks=pytest.mark.slow) for v in values]


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
