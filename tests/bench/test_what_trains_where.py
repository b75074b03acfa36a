"""Whole steps of built-in graphs: what is run, and what a record of it holds."""

from __future__ import annotations

import json

import pytest

import against
from poetmodel.bench.measurement import NOT_APPLICABLE
from poetmodel.device.io import device_names
from poetmodel.graph import checkpoint_all_peak_bytes
from what_trains_where import (
    BOARDS,
    IN_PLACE,
    METHODS,
    PARTS,
    POLICIES,
    SMALL,
    StepRun,
    boards,
    measure_step,
    runs,
    smoke_runs,
)

# -- what is run -----------------------------------------------------------------------------------


def test_runs_differ_and_every_network_meets_every_board() -> None:
    """No two runs have the same record."""
    everything = list(runs())
    assert len({run.key for run in everything}) == len(everything)
    assert {run.part for run in everything} == set(PARTS)
    met = {(run.network, run.device) for run in everything if run.part == BOARDS}
    assert set(device_names()) - set(boards()) == {"a100", "h100", "rtx4090"}
    assert met == {(network, device) for network in SMALL for device in boards()}


def test_methods_meet_at_the_same_budgets() -> None:
    """From the floor to keep-all, all right after each other."""
    policies = [run for run in runs() if run.part == POLICIES]
    for first in range(0, len(policies), len(METHODS)):
        together = policies[first : first + len(METHODS)]
        assert [run.method for run in together] == list(METHODS)
        assert len({(run.network, run.device, run.ram) for run in together}) == 1
    for run in policies[: 4 * len(METHODS)]:
        problem = run.problem()
        most = checkpoint_all_peak_bytes(problem.graph)
        assert problem.floor.bytes <= problem.ram_budget_bytes <= most
        if run.ram == "least+0%":
            assert problem.ram_budget_bytes == problem.floor.bytes
        if run.ram == "least+100%":
            assert problem.ram_budget_bytes == most


@pytest.mark.slow
@pytest.mark.parametrize("run", list(smoke_runs()), ids=lambda run: run.name)
def test_a_record_holds_what_was_measured(run: StepRun) -> None:
    """Every kind of run at its smallest size."""
    facts = measure_step(run.to_dict())
    json.dumps(facts, allow_nan=False)
    assert facts["cell"] == run.to_dict()
    assert facts["status"] in ("optimal", "feasible", "infeasible", NOT_APPLICABLE)


def test_a_board_too_small_is_proved_so() -> None:
    """The record has the reason, and what the step needs."""
    run = StepRun(part=BOARDS, network="mlp", graph=IN_PLACE, device="mkr1000")
    facts = measure_step(run.to_dict())
    assert facts["status"] == "infeasible"
    assert facts["floor_bytes"] > facts["ram_budget_bytes"]
    assert "the minimum RAM is" in facts["reason"]


# -- against an earlier state of the code ----------------------------------------------------------


def test_both_states_solve_each_instance_in_turns() -> None:
    """One right after the other, and who is first changes."""
    found = list(against.runs(2))
    assert len({run.key for run in found}) == len(found) == 4 * len(against.SAMPLE)
    assert [run.code for run in found[:4]] == ["before", "here", "here", "before"]
    assert len({run.instance for run in found[:4]}) == 1


@pytest.mark.slow
def test_a_checkout_solves_by_its_own_runner() -> None:
    """The record says which commit it was."""
    run = next(against.runs())
    facts = against.measure_code(run.to_dict(), checkout=str(against.ROOT))
    assert facts["status"] == "optimal", facts
    assert facts["cell"] == run.to_dict()
    assert len(facts["commit"]) == 40
