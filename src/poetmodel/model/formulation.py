"""Formulations as values: tuples of components, each a family of variables or constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

AFTER_VARIABLES: Final = frozenset({"variables"})
"""The requirement of nearly every component: the variables."""


@dataclass(frozen=True, slots=True)
class Component:
    """One family of variables or constraints."""

    name: str
    """Name of the family that it adds to the model."""
    build: Callable[[Any], None]
    """Adds the family to a model; its docstring states the inequality. Shipped components receive a
    `poetmodel.model.arrays.Model`; user-defined components receive the Pyomo model."""
    source: str
    """Paper and equation, or ``poetmodel:`` and the reason for its validity."""
    requires: frozenset[str] = frozenset()
    """Names of components that must come before."""

    @property
    def statement(self) -> str:
        """The docstring of the builder, with the inequality."""
        return self.build.__doc__ or ""


@dataclass(frozen=True, slots=True)
class Formulation:
    """An ordered tuple of components.

    Raises
    ------
    InputError
        If a component precedes one that it requires, or is repeated.
    """

    name: str
    """Name for users."""
    components: tuple[Component, ...]
    """The components, in build order."""

    def __post_init__(self) -> None:
        """Check that components are unique, and follow the components that they require."""
        preceding_names: set[str] = set()
        for component in self.components:
            missing_names = component.requires - preceding_names
            if missing_names:
                raise InputError(
                    f"formulation {self.name!r}: component {component.name!r} requires "
                    f"{', '.join(sorted(missing_names))} before it"
                )
            if component.name in preceding_names:
                raise InputError(
                    f"formulation {self.name!r}: component {component.name!r} comes twice"
                )
            preceding_names.add(component.name)

    def swap(self, component: Component, *, name: str) -> Formulation:
        """Return a formulation called `name`, with `component` in place of its namesake."""
        self._require(component.name, "swap")
        components = (
            component if present_component.name == component.name else present_component
            for present_component in self.components
        )
        return replace(self, name=name, components=tuple(components))

    def without(self, component: str, *, name: str) -> Formulation:
        """Return a formulation without the component of this name."""
        self._require(component, "leave out")
        components = tuple(
            present_component
            for present_component in self.components
            if present_component.name != component
        )
        return replace(self, name=name, components=components)

    def _require(self, component: str, purpose: str) -> None:
        """Raise `InputError` if there is no component of this name.

        `purpose` is the verb of the message, such as ``swap``.
        """
        if component not in {present_component.name for present_component in self.components}:
            raise InputError(
                f"formulation {self.name!r} has no component {component!r} to {purpose}"
            )

    def populate(self, model: object, *, without: Collection[str] = ()) -> None:
        """Build every component into a model, in order, except those named in `without`.

        A model of a shipped formulation is a `poetmodel.model.arrays.Model`.
        """
        for component in self.components:
            check_time_limit()
            if component.name not in without:
                component.build(model)
