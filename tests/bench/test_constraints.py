"""Own constraints in the benchmark: what is run, and what a record of it holds."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

import constraints
from constraints import MODEL, TOTALS, WITHOUT, OwnRun, measure_own, runs
from grid import instances
from poetmodel.problem.io import parse_constraints

SMALL = {run.form: run for run in constraints.smoke_runs() if "at_most = 2" in run.text}
"""The same constraint in each form."""


# -- what is run -----------------------------------------------------------------------------------


def test_every_instance_is_one_of_the_grid() -> None:
    """With its own limit, too."""
    assert {run.instance for run in runs()} <= set(instances())


def test_every_constraint_comes_right_after_the_instance_without_it() -> None:
    """The same load then lies on both; runs differ from each other."""
    all_runs = list(runs())
    for before, run in pairwise(all_runs):
        if run.form == TOTALS:
            assert before == OwnRun(instance=run.instance, own=run.own, text=run.text, form=WITHOUT)
    assert len({run.key for run in all_runs}) == len(all_runs)


@pytest.mark.parametrize("run", [run for run in runs() if run.form == TOTALS])
def test_what_a_constraint_names_is_in_its_graph(run: OwnRun) -> None:
    """As a user's file it gives rows, or an objective."""
    problem = parse_constraints(run.text, run.instance.problem(), source=run.own)
    assert problem.constraints or problem.own_objective


@pytest.mark.parametrize("form", [WITHOUT, TOTALS, MODEL])
def test_a_record_says_how_the_constraint_was_stated(form: str) -> None:
    """Its cell has the text; a model is built before it is solved."""
    facts = measure_own(SMALL[form].to_dict())
    json.dumps(facts, allow_nan=False)
    assert facts["kind"] == constraints.KIND
    assert facts["name"].endswith(f"| at most 2 of 4 recomputations | {form}")
    assert facts["cell"] == SMALL[form].to_dict()
    assert facts["requested_gap"] == constraints.GAP
    assert facts["gap"] <= constraints.GAP
    assert facts["formulation"].startswith("compact" if form == MODEL else "lazy")
    assert 0 < facts["stated_s"] < facts["seconds"]


def test_a_constraint_holds_in_both_forms() -> None:
    """Both cost the same, and more than nothing."""
    cost = {form: measure_own(run.to_dict())["overhead_j"] for form, run in SMALL.items()}
    assert cost[TOTALS] == pytest.approx(cost[MODEL], rel=2 * constraints.GAP)
    assert cost[WITHOUT] < cost[TOTALS] * (1 - 2 * constraints.GAP)
