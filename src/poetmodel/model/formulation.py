"""Formulations as values: tuples of components that add variables, constraints or the objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

AFTER_VARIABLES: Final = frozenset({"variables"})
"""`Component.requires` of nearly every component: the variables."""


@dataclass(frozen=True, slots=True)
class Component:
    """One or more families of variables or constraints, or the objective."""

    name: str
    """Name of the component, unique in a formulation; often also the name of a family."""
    build: Callable[[Any], None]
    """Function that adds the families to a model, and states the inequalities in its docstring. It
    receives a `poetmodel.model.arrays.Model` or, if user-defined, the Pyomo model."""
    source: str
    """Paper and equation, or ``poetmodel:`` and the reason for its validity."""
    requires: frozenset[str] = frozenset()
    """Names of components that must precede this one."""

    @property
    def statement(self) -> str:
        """The docstring of the builder, with the inequality; "" if it has none."""
        return self.build.__doc__ or ""


@dataclass(frozen=True, slots=True)
class Formulation:
    """An ordered tuple of components.

    Raises
    ------
    InputError
        If a component is repeated, or does not follow all components that it requires.
    """

    name: str
    """Name of the formulation."""
    components: tuple[Component, ...]
    """The components, in build order."""

    def __post_init__(self) -> None:
        """Raise `InputError` if a component is repeated, or does not follow all it requires."""
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
                    f"formulation {self.name!r}: component {component.name!r} is repeated"
                )
            preceding_names.add(component.name)

    def swap(self, component: Component, *, name: str) -> Formulation:
        """Return a formulation called `name`; `component` replaces the component of its name.

        Raises `InputError` if there is no such component, or if the new formulation is invalid.
        """
        self._require_component(component.name, "swap")
        components = (
            component if member.name == component.name else member for member in self.components
        )
        return replace(self, name=name, components=tuple(components))

    def without(self, component_name: str, *, name: str) -> Formulation:
        """Return a formulation called `name`, without the component `component_name`.

        Raises `InputError` if there is no such component, or if another component requires it.
        """
        self._require_component(component_name, "leave out")
        components = tuple(member for member in self.components if member.name != component_name)
        return replace(self, name=name, components=components)

    def _require_component(self, component_name: str, verb: str) -> None:
        """Raise `InputError` if there is no component to `verb`, such as ``swap``."""
        if component_name not in {member.name for member in self.components}:
            raise InputError(
                f"formulation {self.name!r} has no component {component_name!r} to {verb}"
            )

    def populate(self, model: object, *, omitted_names: Collection[str] = ()) -> None:
        """Build all components but those of `omitted_names` into a model, in order.

        Names of no component are ignored. A model of a shipped formulation is a
        `poetmodel.model.arrays.Model`. Raises `TimeLimitError`.
        """
        for component in self.components:
            check_time_limit()
            if component.name not in omitted_names:
                component.build(model)
