"""Shell completion of names, with their descriptions; imports no solver."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Suggestions: TypeAlias = list[tuple[str, str]]
"""(name or comma-separated names, description) of each completion of the typed text. The alias
exists at runtime, because typer evaluates annotations."""


def complete_models(incomplete: str) -> Suggestions:
    """Return the built-in networks and published graphs whose names begin with `incomplete`."""
    from poetmodel.graph.catalogue import describe_model, model_names

    return _filter_names(incomplete, ((name, describe_model(name)) for name in model_names()))


def complete_devices(incomplete: str) -> Suggestions:
    """Return the built-in devices whose names begin with `incomplete`."""
    from poetmodel.files import shipped_folder

    paths = sorted(shipped_folder("devices").glob("*.toml"))
    tables = ((path.stem, tomllib.loads(path.read_text("utf-8"))) for path in paths)
    return _filter_names(incomplete, ((name, str(table["name"])) for name, table in tables))


def complete_methods(incomplete: str) -> Suggestions:
    """Return the shipped and registered methods whose names begin with `incomplete`."""
    from poetmodel.baselines.own import registered_names
    from poetmodel.baselines.registry import METHODS

    shipped = ((method.name, method.summary) for method in METHODS.values())
    registered = ((name, "a registered method") for name in registered_names())
    return _filter_names(incomplete, (*shipped, *registered))


def complete_list(complete: Callable[[str], Suggestions]) -> Callable[[str], Suggestions]:
    """Return a completion function for options with several comma-separated names."""

    def complete_last(incomplete: str) -> Suggestions:
        """Return `incomplete` with each completion of its last name that it does not list yet."""
        earlier_names, comma, last = incomplete.rpartition(",")
        typed_names = earlier_names.split(",")
        return [
            (earlier_names + comma + name, text)
            for name, text in complete(last)
            if name not in typed_names
        ]

    return complete_last


def _filter_names(incomplete: str, names: Iterable[tuple[str, str]]) -> Suggestions:
    return [(name, text) for name, text in names if name.startswith(incomplete)]


COMPLETERS: Final = {
    "--device": complete_devices,
    "--devices": complete_list(complete_devices),
    "--method": complete_methods,
    "--methods": complete_list(complete_methods),
    "--power-from": complete_devices,
    "MODEL": complete_models,
    "MODELS...": complete_models,
    "FILE|MODEL": complete_models,
    "NAME|FILE": complete_devices,
}
"""Completion functions by option name, else by the placeholder of the value or argument."""
