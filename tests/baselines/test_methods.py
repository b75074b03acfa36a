"""Every method there is, on the same problems, with the same verifier."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING

import pytest

from kit.instances import random_instance, random_training_graph, seeded
from kit.rotation import quick
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import METHODS, Method, run
from poetmodel.errors import MethodNotApplicableError
from poetmodel.planner import verify
from poetmodel.problem import Problem

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

GAP = 1e-4


def _problems() -> dict[str, Problem]:
    found: dict[str, Problem] = {}
    for share in (100, 85, 70):
        chain = training_chain([3, 5, 2, 4, 6, 1, 3], gradient_bytes=2)
        costs = chain_costs(chain, seconds=[1 + k % 4 for k in range(len(chain.nodes))])
        found[f"chain {share}%"] = Problem(chain, costs, ram=f"{share}%", deadline_counts="serial")
        for seed in range(2):
            network = random_training_graph(seeded(f"methods/{seed}"), 5)
            found[f"network {seed} {share}%"] = Problem(
                network, chain_costs(network), ram=f"{share}%", deadline_counts="compute"
            )
    for seed in range(5):
        fixed = {"minimize": "energy", "deadline": None}
        found[f"random {seed}"] = random_instance(seeded(f"any/{seed}"), (3, 6), **fixed)
    return found


PROBLEMS = _problems()


@cache
def best(name: str) -> SolveResult:
    """Return the proven optimum of one of the problems."""
    return run(PROBLEMS[name], "optimal", gap=GAP)


@pytest.mark.parametrize(
    "problem",
    quick(
        PROBLEMS,
        ("chain 85%", "chain 70%", "network 0 70%", "network 1 85%", "random 0", "random 1"),
    ),
)
@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_schedule_is_valid_or_refused_and_never_beats_the_optimum(
    entry: Method, problem: str
) -> None:
    """The verifier accepts it, within all limits; its energy is no less than the proven bound."""
    stated = PROBLEMS[problem]
    try:
        result = run(stated, entry.name)
    except MethodNotApplicableError as error:
        assert str(error).startswith(f"{entry.name}: ")  # noqa: PT017 - either outcome is fine
        return
    optimum = best(problem)
    assert (result.schedule is None) == (optimum.schedule is None)
    if result.schedule is None or optimum.bound_j is None:
        return
    assert verify(stated, result.schedule).valid
    assert result.energy_j is not None
    assert result.energy_j >= optimum.bound_j * (1 - 1e-9)
    assert entry.pages or not (result.schedule.M_in or result.schedule.M_out)
    assert entry.recomputes or all(t == k for t, k in result.schedule.R)


@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_entry_is_complete(entry: Method) -> None:
    """Each has a function with a docstring, a source and its assumptions."""
    function = entry.function()
    assert next(iter(inspect.signature(function).parameters)) == "problem"
    assert inspect.getdoc(function)
    assert entry.summary
    assert entry.source
    assert entry.assumptions
