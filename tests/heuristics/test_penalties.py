"""What partial schedules are measured by agrees with the verifier."""

from __future__ import annotations

import pytest

from kit.instances import random_instances, seeded
from kit.worked import skip_problem
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import PenalizedObjective, price
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration
from poetmodel.problem import Quantity, weighted
from poetmodel.schedule import verify
from poetmodel.solver.outcome import verify_schedule


@pytest.mark.parametrize("minimize", list(Quantity))
def test_value_and_limits_are_those_of_the_verifier(minimize: str) -> None:
    """For 80 problems with every limit and a few random restorations each."""
    exceeding = 0
    for number, problem in enumerate(random_instances(80, (3, 8), seed=91, minimize=minimize)):
        rng = seeded(f"value/{number}")
        graph = problem.graph
        partial = PartialSchedule(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k) and rng.random() < 0.4:
                partial.add(Restoration(t, k, RECOMPUTE))
            for i in graph.outputs_of[k]:
                if problem.can_page and rng.random() < 0.4:
                    partial.add(Restoration(t, i, PAGE_IN))
        score = PenalizedObjective(problem).score(partial)
        candidate = verify_schedule(problem, partial.schedule())
        assert score.value == pytest.approx(candidate.value, abs=1e-9)
        others = ("peak RAM", "storage used")
        broken = [v for v in candidate.violations if not v.startswith(others)]
        assert (score.excess > 0) == bool(broken), candidate.violations
        exceeding += bool(broken)
    assert exceeding > 5


def test_prices_add_up() -> None:
    """At a weight, decision by decision."""
    problem = skip_problem()
    once = problem.energy.coefficients
    twice = weighted((once, 1.0), (once, 1.0))
    partial = PartialSchedule(problem.graph, [Restoration(3, 0, RECOMPUTE)])
    assert price(once, partial) > 0
    assert price(twice, partial) == pytest.approx(2 * price(once, partial))
    assert price(weighted((once, 0.0)), partial) == 0


def test_the_penalty_moves_prices_from_the_objective_to_the_limits() -> None:
    """Without limits it changes nothing; with them their use costs ever more."""
    free, bound = PenalizedObjective(skip_problem()), PenalizedObjective(skip_problem(deadline=12))
    assert free.prices(0.0) == free.prices(5.0)
    partial = PartialSchedule(skip_problem().graph, [Restoration(3, 0, RECOMPUTE)])
    cheap, dear = (price(bound.prices(penalty), partial) for penalty in (0.0, 1.0))
    assert cheap < dear
    assert bound.balance(partial) > 0
    assert not verify(skip_problem(deadline=12, ram=15), partial.schedule()).violations
