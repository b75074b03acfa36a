"""Formulations as values: what may be put together, exchanged and left out."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pyomo.environ as pyo
import pytest

from poetmodel.errors import InputError
from poetmodel.model import FORMULATIONS, Component, Formulation
from poetmodel.model.compact import COMPACT
from poetmodel.model.unreduced import UNREDUCED


def _first(m: pyo.ConcreteModel) -> None:
    """Say that x is at most 1."""
    m.x = pyo.Var(bounds=(0, 1))


def _second(m: pyo.ConcreteModel) -> None:
    m.row = pyo.Constraint(expr=m.x >= 1)


def _second_anew(m: pyo.ConcreteModel) -> None:
    m.row = pyo.Constraint(expr=m.x >= 0.5)


FIRST = Component("first", _first, "made up")
SECOND = Component("second", _second, "made up", frozenset({"first"}))
BOTH = Formulation("both", (FIRST, SECOND))


def test_components_are_built_in_order() -> None:
    """Each component finds what the ones before it have built."""
    m = pyo.ConcreteModel()
    BOTH.populate(m)
    assert [item.name for item in m.component_objects()] == ["x", "row"]


def test_a_component_before_what_it_requires_is_refused() -> None:
    """The error names formulation, component and what is missing."""
    with pytest.raises(InputError, match="'bad': component 'second' requires first before it"):
        Formulation("bad", (SECOND, FIRST))


def test_a_missing_requirement_is_refused() -> None:
    """Leaving out what another component requires is no formulation either."""
    with pytest.raises(InputError, match="component 'second' requires first"):
        BOTH.without("first", name="half")


def test_a_component_that_comes_twice_is_refused() -> None:
    """Two components of one name would build the same thing."""
    with pytest.raises(InputError, match="'twice': component 'first' comes twice"):
        Formulation("twice", (FIRST, SECOND, FIRST))


def test_swap_puts_one_component_in_the_place_of_another() -> None:
    """An ablation is one line; the formulation that it comes from stays."""
    anew = Component("second", _second_anew, "made up", frozenset({"first"}))
    swapped = BOTH.swap(anew, name="anew")
    assert (swapped.name, swapped.components) == ("anew", (FIRST, anew))
    assert BOTH.components == (FIRST, SECOND)
    m = pyo.ConcreteModel()
    swapped.populate(m)
    assert pyo.value(m.row.lower) == 0.5


def test_swap_of_an_unknown_component_is_refused() -> None:
    """Swapping in what is not there would silently add it, or do nothing."""
    with pytest.raises(InputError, match="'both' has no component 'third' to swap"):
        BOTH.swap(Component("third", _first, "made up"), name="three")


def test_without_leaves_one_component_out() -> None:
    """What is left keeps its order."""
    assert BOTH.without("second", name="one") == Formulation("one", (FIRST,))


def test_without_an_unknown_component_is_refused() -> None:
    """A misspelt ablation must not pass for one."""
    with pytest.raises(InputError, match="'both' has no component 'secnd' to leave out"):
        BOTH.without("secnd", name="one")


def test_statement_is_the_docstring_of_the_builder() -> None:
    """Documentation is made from it; a builder without one states nothing."""
    assert FIRST.statement == "Say that x is at most 1."
    assert SECOND.statement == ""


def test_formulations_are_frozen() -> None:
    """A formulation that somebody else uses cannot change."""
    with pytest.raises(FrozenInstanceError):
        COMPACT.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("formulation", [*FORMULATIONS.values(), UNREDUCED], ids=lambda f: f.name)
def test_every_shipped_component_states_itself_and_its_source(formulation: Formulation) -> None:
    """One family each: an inequality or an explanation, and where it comes from."""
    for part in formulation.components:
        assert len(part.statement.strip()) > 20, part.name
        assert part.source, part.name


def test_formulations_are_known_by_their_names() -> None:
    """The name that people type is the formulation's own."""
    assert {name: formulation.name for name, formulation in FORMULATIONS.items()} == {
        "compact": "compact",
        "paper": "paper",
    }
