"""What the shell offers when somebody presses the tab key: names, each with what it means."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FIGURES: Final = ("figure2", "figure3", "figure4", "figure5", "table3", "solvers")
"""The names of `poetmodel.bench.figures.FIGURES`, which would load numpy."""

Offer = list[tuple[str, str]]
"""Names and their meanings; those that do not begin with what was typed are left out later."""


def models() -> Offer:
    """Return the networks that come along."""
    from poetmodel.graph.catalogue import describe_model, model_names

    return [(name, describe_model(name)) for name in model_names()]


def devices() -> Offer:
    """Return the devices that come along."""
    from poetmodel.data import shipped

    paths = sorted(shipped("devices").glob("*.toml"), key=lambda path: path.stem)
    return [(path.stem, tomllib.loads(path.read_text("utf-8"))["name"]) for path in paths]


def methods() -> Offer:
    """Return the methods, the default one first."""
    from poetmodel.baselines.registry import METHODS

    return [(method.name, method.summary) for method in METHODS.values()]


def backends() -> Offer:
    """Return the back ends, whether installed or not."""
    from poetmodel.cli.options import Backend

    return [(name.value, "") for name in Backend]


def figures() -> Offer:
    """Return what ``poetmodel bench`` makes."""
    return [(name, "") for name in FIGURES]


def one(names: Callable[[], Offer]) -> Callable[[str], Offer]:
    """Return what completes one name."""

    def complete(incomplete: str) -> Offer:
        return [(name, text) for name, text in names() if name.startswith(incomplete)]

    return complete


def several(names: Callable[[], Offer]) -> Callable[[str], Offer]:
    """Return what completes the last of some names with commas between them."""

    def complete(incomplete: str) -> Offer:
        before, comma, last = incomplete.rpartition(",")
        typed = before.split(",")
        return [
            (f"{before}{comma}{name}", text)
            for name, text in names()
            if name.startswith(last) and name not in typed
        ]

    return complete
