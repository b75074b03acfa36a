"""Shell completion: the names that the tab key offers, each with its meaning."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FIGURES: Final = ("figure2", "figure3", "figure4", "figure5", "table3", "solvers")
"""The names of `poetmodel.bench.figures.FIGURES`, which would load numpy."""

Offer = list[tuple[str, str]]
"""Names and their meanings; typer leaves out those that do not begin with what was typed."""


def models() -> Offer:
    """Return the built-in networks."""
    from poetmodel.graph.catalogue import describe_model, model_names

    return [(name, describe_model(name)) for name in model_names()]


def devices() -> Offer:
    """Return the built-in devices."""
    from poetmodel.files import shipped

    paths = sorted(shipped("devices").glob("*.toml"), key=lambda path: path.stem)
    return [(path.stem, tomllib.loads(path.read_text("utf-8"))["name"]) for path in paths]


def methods() -> Offer:
    """Return the methods, the default first, and those that installed packages bring."""
    from poetmodel.baselines.own import own_names
    from poetmodel.baselines.registry import METHODS

    brought = [(name, "a method of one's own") for name in own_names()]
    return [*((method.name, method.summary) for method in METHODS.values()), *brought]


def backends() -> Offer:
    """Return the back ends, also those that are not installed."""
    from poetmodel.backends.registry import backend_names

    return [(name, "") for name in backend_names()]


def figures() -> Offer:
    """Return the names that ``poetmodel bench`` takes."""
    return [(name, "") for name in FIGURES]


def several(names: Callable[[], Offer]) -> Callable[[str], Offer]:
    """Return a function that completes the last of several names, separated by commas."""

    def complete(incomplete: str) -> Offer:
        before, comma, _ = incomplete.rpartition(",")
        typed = before.split(",")
        return [(f"{before}{comma}{name}", text) for name, text in names() if name not in typed]

    return complete
