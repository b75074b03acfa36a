"""Shell completion: names that the tab key offers, with their meanings. No solver is imported."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Offer: TypeAlias = list[tuple[str, str]]
"""Names that begin with a text, and their meanings; typer evaluates the annotation."""


def models(incomplete: str) -> Offer:
    """Return the built-in networks whose names begin with a text."""
    from poetmodel.graph.catalogue import describe_model, model_names

    return _offer(incomplete, ((name, describe_model(name)) for name in model_names()))


def devices(incomplete: str) -> Offer:
    """Return the built-in devices whose names begin with a text."""
    from poetmodel.files import shipped_folder

    paths = sorted(shipped_folder("devices").glob("*.toml"))
    tables = ((path.stem, tomllib.loads(path.read_text("utf-8"))) for path in paths)
    return _offer(incomplete, ((name, str(table["name"])) for name, table in tables))


def methods(incomplete: str) -> Offer:
    """Return the methods whose names begin with a text, also those of installed packages."""
    from poetmodel.baselines.own import registered_names
    from poetmodel.baselines.registry import METHODS

    shipped = ((method.name, method.summary) for method in METHODS.values())
    own = ((name, "a method of an installed package") for name in registered_names())
    return _offer(incomplete, (*shipped, *own))


def several(complete: Callable[[str], Offer]) -> Callable[[str], Offer]:
    """Return a function that completes the last of several names with commas between them."""

    def complete_last(incomplete: str) -> Offer:
        before, comma, last = incomplete.rpartition(",")
        typed = before.split(",")
        return [(before + comma + name, text) for name, text in complete(last) if name not in typed]

    return complete_last


def _offer(incomplete: str, names: Iterable[tuple[str, str]]) -> Offer:
    return [(name, text) for name, text in names if name.startswith(incomplete)]


COMPLETED: Final = {
    "--device": devices,
    "--devices": several(devices),
    "--method": methods,
    "--methods": several(methods),
    "--power-from": devices,
    "MODEL": models,
    "MODELS...": models,
    "FILE|MODEL": models,
    "NAME|FILE": devices,
}
"""What options and arguments complete, by the option, else by the words for its value."""
