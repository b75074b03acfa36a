"""What rules a problem out before any solver: true sentences, and the limits as a phrase."""

from __future__ import annotations

import pytest

from instances import random_instances
from poetmodel.graph import floor
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import limits_in_words, obstacle
from worked import even_costs, skip_graph, skip_problem


def test_a_feasible_problem_has_no_obstacle() -> None:
    """Budgets at the floor, at one pass and at the baseline are in order."""
    assert obstacle(skip_problem(ram=12, deadline=10, energy_budget=10)) is None


@pytest.mark.parametrize(
    ("limits", "subject"),
    [
        ({"ram": 11}, "RAM budget 11 B"),
        ({"deadline": 9.999}, "deadline 9.999 s"),
        ({"energy_budget": 9.999}, "energy budget 9.999 J"),
    ],
)
def test_each_limit_is_held_against_what_every_schedule_pays(
    limits: dict[str, float], subject: str
) -> None:
    """The sentence begins with the limit that is too small."""
    sentence = obstacle(skip_problem(**limits))
    assert sentence is not None
    assert sentence.startswith(subject)


def test_limits_hold_to_the_relative_tolerance() -> None:
    """A deadline of one pass less rounding errors is a deadline of one pass."""
    assert obstacle(skip_problem(deadline=10 * (1 - 5e-10))) is None
    assert obstacle(skip_problem(deadline=10 * (1 - 5e-9))) is not None


def test_the_workspace_of_the_step_is_named() -> None:
    """`d` needs 12 bytes; with 9 bytes of workspace `b` needs more."""
    graph = skip_graph(workspace=True)
    assert floor(graph).node == 3
    sentence = obstacle(Problem(graph, even_costs(graph), ram=10))
    assert sentence is not None
    assert "workspace" not in sentence
    problem = skip_problem(ram=1)
    for limited in random_instances(60, (3, 5), seed=81, below_floor=True):
        step = limited.graph.nodes[floor(limited.graph).node]
        words = obstacle(limited)
        if words is not None and words.startswith("RAM"):
            assert ("workspace (" in words) == (step.workspace_bytes > 0)
            problem = limited
    assert problem.graph.name == "random"


def test_limits_in_words() -> None:
    """Every limit that there is, and no other."""
    assert limits_in_words(skip_problem()) == "the RAM budget of 13 B"
    problem = skip_problem(
        ram=12345, deadline=20, deadline_counts="compute", energy_budget=30, aux_bytes=7,
        recompute=False,
    )  # fmt: skip
    assert limits_in_words(problem) == (
        "the RAM budget of 12,345 B, the deadline of 20 s (compute), the energy budget of 30 J, "
        "the storage of 7 B, no recomputation"
    )
    unpaged = skip_problem(paging=False, aux_bytes=7)
    assert limits_in_words(unpaged) == "the RAM budget of 13 B, no paging"
