"""Tables of parameters of which some are always tried, and all by the slow tests in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


def quick(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Return parameters, or tuples of them, marked slow but for those that are chosen."""
    return _marked(values, chosen, pytest.mark.slow)


def rotating(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Return parameters, or tuples of them, of a slow test: those that run always, and the rest.

    The rest are the same property once more, of which each run takes a share.
    """
    return _marked(values, always, pytest.mark.seeds)


def _marked(values: Iterable[Any], chosen: Container[Any], mark: Any) -> list[Any]:
    parts = [(v, v if isinstance(v, tuple) else (v,)) for v in values]
    return [v if v in chosen else pytest.param(*own, marks=mark) for v, own in parts]
