"""The relations on a model: every entry of the triangle can be addressed, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import random_instances
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.errors import ModelError
from poetmodel.model import build
from poetmodel.model.relations import Relation
from poetmodel.problem import Problem
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from poetmodel.graph import Graph

MODELS = [
    pytest.param({"formulation": "compact"}, id="compact"),
    pytest.param({"formulation": "compact", "stages": "events"}, id="events"),
    pytest.param({"formulation": "compact", "reductions": False}, id="unreduced"),
    pytest.param({"formulation": "paper"}, id="paper"),
]


def triangle(name: str, graph: Graph) -> set[tuple[int, int]]:
    """Return the entries that a relation has by the contract."""
    n = len(graph.nodes)
    if name == "R":
        return {(t, k) for t in range(n) for k in range(t + 1)}
    return {
        (t, i)
        for t in range(n)
        for i, k in enumerate(graph.node_of)
        if (k <= t if name == "M_out" else k < t)
    }


def usable(entry: Any) -> bool:
    """Return whether an entry can stand in a constraint and in a sum."""
    m = pyo.ConcreteModel()
    m.row = pyo.Constraint(expr=2 * entry + 1 <= 3)
    return m.row.body is not None


@pytest.mark.parametrize("choices", MODELS)
@pytest.mark.parametrize("name", RELATIONS)
def test_every_entry_is_addressable(name: str, choices: dict[str, Any]) -> None:
    """Variable, expression or constant: each entry can be used, and iteration finds them all."""
    problem = skip_problem()
    relation = getattr(build(problem, **choices), name)
    expected = triangle(name, problem.graph)
    assert set(relation) == set(relation.keys()) == expected
    assert len(relation) == len(expected)
    assert all(index in relation for index in expected)
    assert all(usable(relation[index]) for index in expected)
    assert all(usable(entry) for entry in relation.values())


@pytest.mark.parametrize("choices", MODELS)
@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("index", [(0, 4), (4, 0), (-1, 0), (1, -1), (1, 2), (9, 9)])
def test_entries_outside_raise(name: str, index: tuple[int, int], choices: dict[str, Any]) -> None:
    """A stage or index that there is not, or one before its time, is an error."""
    relation = getattr(build(skip_problem(), **choices), name)
    assert index not in relation
    with pytest.raises((ModelError, KeyError)):
        relation[index]


def test_several_outputs_have_entries_of_their_own() -> None:
    """Tensors 2 and 3 are both made by node 2; R is over nodes, the others over tensors."""
    graph = skip_graph(mask=True)
    model = build(Problem(graph, even_costs(graph), ram=13))
    for name in RELATIONS:
        assert set(getattr(model, name)) == triangle(name, graph)
    assert (3, 3) in model.S_RAM
    assert (2, 3) in model.M_out
    assert (2, 3) not in model.M_in
    assert (3, 4) not in model.S_RAM
    assert (3, 4) in model.M_out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("R", "R is defined for stage t and node k with 0 <= k <= t < 4"),
        ("S_RAM", "S_RAM is defined for stage t and tensor i with node\\(i\\) < t < 4"),
        ("M_out", "M_out is defined for stage t and tensor i with node\\(i\\) <= t < 4"),
    ],
)
def test_the_error_says_where_a_relation_is_defined(name: str, words: str) -> None:
    """Somebody who counts from one, or swaps stage and tensor, learns what is meant."""
    relation = getattr(build(skip_problem()), name)
    with pytest.raises(ModelError, match=words):
        relation[4, 4]


@pytest.mark.parametrize("index", ["x", 3, (1,), (1, 0, 0), (1.0, 0), (None, 0)])
def test_what_is_no_pair_of_whole_numbers_raises(index: Any) -> None:
    """Nothing but a stage and an index addresses an entry."""
    relation = build(skip_problem()).S_RAM
    assert index not in relation
    with pytest.raises(ModelError, match="no such entry"):
        relation[index]


def test_numpy_integers_address_entries() -> None:
    """An index out of an array is as good as a plain one."""
    relation = build(skip_problem()).S_RAM
    assert relation[np.int64(2), np.int32(0)] is relation[2, 0]


def test_get_returns_the_default_outside() -> None:
    """A relation is a mapping, also in this."""
    relation = build(skip_problem()).S_RAM
    assert relation.get((0, 0)) is None
    assert relation.get((0, 0), 5) == 5
    assert relation.get((2, 0)) is relation[2, 0]


def test_decided_entries_are_constants() -> None:
    """What the formulation decided has a value before any solve, the rest has none."""
    model = build(skip_problem())
    assert pyo.value(model.R[2, 2]) == 1
    assert pyo.value(model.M_out[3, 0]) == 0
    assert pyo.value(model.S_RAM[3, 1]) == 0  # `b` is dominated: nothing reads it after stage 2
    assert pyo.value(model.R[3, 0], exception=False) is None
    assert model.S_AUX[2, 0] is model.S_AUX[3, 0]
    assert model.M_out[0, 0] is model.S_AUX[3, 0]


def test_tensors_on_storage_are_there_from_the_start() -> None:
    """Their S_AUX is 1 everywhere, and they are never paged out."""
    graph = skip_graph(on_aux=True)
    model = build(Problem(graph, even_costs(graph), ram=13))
    assert {pyo.value(model.S_AUX[t, 0]) for t in range(1, 4)} == {1}
    assert {pyo.value(model.M_out[t, 0]) for t in range(4)} == {0}


@pytest.mark.parametrize("reductions", [True, False])
def test_triangles_of_random_graphs(reductions: bool) -> None:
    """Iteration, length and membership agree with the contract for every graph."""
    for problem in random_instances(40, (1, 6), seed=5):
        model = build(problem, reductions=reductions)
        for name in RELATIONS:
            relation = getattr(model, name)
            expected = triangle(name, problem.graph)
            assert set(relation) == expected
            assert len(relation) == len(expected)


def test_a_relation_asks_for_entries_of_its_triangle_only() -> None:
    """The function behind a relation never sees an index that does not exist."""
    asked: list[tuple[int, int]] = []

    def entry(t: int, k: int) -> int:
        asked.append((t, k))
        return 0

    relation = Relation("S_RAM", skip_graph(), entry)
    list(relation.values())
    assert (0, 0) not in relation
    assert set(asked) == triangle("S_RAM", skip_graph())
