"""Whole steps of built-in graphs: what is run, and what the page says of its records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import against
from kit.measured_records import CIRCUMSTANCES
from kit.measured_records import step_record as record
from poetmodel.bench.measurement import NOT_APPLICABLE
from poetmodel.device.io import device_names
from poetmodel.graph import checkpoint_all_peak_bytes
from result_pages.rendering import render
from result_pages.trains import (
    BUDGETS,
    StepRecord,
    budgets,
    bytes_of,
    code_section,
    headline,
    page,
    verdict,
)
from what_trains_where import (
    BOARDS,
    IN_PLACE,
    LEAST,
    MAPPED,
    METHODS,
    PAGED,
    PARTS,
    POLICIES,
    SMALL,
    SPEED,
    TILES,
    StepRun,
    boards,
    measure_step,
    runs,
    smoke_runs,
)

if TYPE_CHECKING:
    from kit.messages import Told

KIB = 1024


def least(bound: int, value: int, *, graph: str = TILES, **changes: Any) -> dict[str, Any]:
    """Return the record of a least RAM between two figures [KiB]."""
    proved = "optimal" if bound == value else "feasible"
    figures = {"objective_bound": bound * KIB, "objective_value": value * KIB, "status": proved}
    return record(LEAST, graph=graph, minimize="ram", **figures | changes)


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
def test_a_record_holds_what_the_page_says(run: StepRun) -> None:
    """Every kind of run at its smallest size."""
    facts = measure_step(run.to_dict())
    json.dumps(facts, allow_nan=False)
    assert facts["cell"] == run.to_dict()
    assert facts["status"] in ("optimal", "feasible", "infeasible", NOT_APPLICABLE)
    assert page([facts], "run.jsonl")


def test_a_board_too_small_is_proved_so() -> None:
    """The record has the reason, and what the step needs."""
    run = StepRun(part=BOARDS, network="mlp", graph=IN_PLACE, device="mkr1000")
    facts = measure_step(run.to_dict())
    assert facts["status"] == "infeasible"
    assert facts["floor_bytes"] > facts["ram_budget_bytes"]
    assert "the minimum RAM is" in facts["reason"]


# -- the headline ----------------------------------------------------------------------------------


def test_a_budget_is_kept_or_proved_impossible_or_open(told: Told) -> None:
    """As the bounds say, with whole weights first, then in tiles."""
    records = [
        StepRecord(each)
        for each in (
            least(300, 300, graph=IN_PLACE, device=PAGED),
            least(200, 280, device=PAGED),
            least(400, 400, graph=IN_PLACE),
            least(300, 300),
        )
    ]
    kinds = {budget: verdict(records, "resnet8", PAGED, budget) for budget in BUDGETS}
    assert kinds == dict(zip(BUDGETS, ("open", "yes", "yes", "yes"), strict=True))
    kinds = {budget: verdict(records, "resnet8", MAPPED, budget) for budget in BUDGETS}
    assert kinds == dict(zip(BUDGETS, ("no", "in tiles", "yes", "yes"), strict=True))
    assert bytes_of("320 KiB") == 320 * KIB
    told(headline(records))
    told(render("built-in-steps", block="budgets", **budgets(records)), "table")


# -- pages -----------------------------------------------------------------------------------------

NOTHING = dict.fromkeys(("energy_j", "overhead_j", "gap", "peak_ram_bytes", "time_s"))
REFUSED = {"status": NOT_APPLICABLE, "energy_j": None}
SLOW = {"status": "feasible", "gap": 0.3, "seconds": 20.0}
HALF = {"ram": "least+50%"}
DRY = {"paging": False, "device": PAGED}
VISION = {"network": "mobilenetv2-035, 48 x 48", "device": "nrf52840"}
RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "boards": (
        record(),
        record(device="mkr1000", status="infeasible", **NOTHING),
        record(device="rp2350", status="unknown", **NOTHING | {"seconds": 12.0}),
        record(device="nano33ble", status="feasible", gap=0.25, steps_until_worn=None),
    ),
    "methods": (
        record(POLICIES, **HALF),
        record(POLICIES, method="resident", **REFUSED, **HALF),
        record(POLICIES, method="zero-offload", overhead_j=2.0, **HALF),
        record(POLICIES, method="offload-all", overhead_j=3.0, **HALF),
    ),
    "missed": (
        record(POLICIES, ram="least+0%", **SLOW),
        record(SPEED, network="BERT, 4 blocks", device="rpi4b", **HALF, **SLOW),
    ),
    "least RAM": (
        least(100, 120, graph="activations", **DRY),
        least(500, 500, graph="state", **DRY),
        least(400, 450, graph=IN_PLACE, **DRY),
        least(300, 300, graph=IN_PLACE, device=PAGED),
        least(180, 180, graph=IN_PLACE),
    ),
    "built-in graphs alone": (record(**VISION, status="infeasible", **NOTHING),),
}


@pytest.mark.parametrize("case", RECORDS)
def test_page_is_what_the_records_say(case: str, told: Told) -> None:
    """Energy, time and wear as multiples; methods beside the optimum; goals met and missed."""
    told(page(RECORDS[case], "run.jsonl"))


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


def test_the_quicker_time_of_each_counts(told: Told) -> None:
    """With the ratio of both, and the commits."""
    times = {("before", 0): 4.0, ("here", 0): 3.0, ("here", 1): 1.0, ("before", 1): 2.0}
    records = []
    for run in against.runs(2):
        if run.instance == against.SAMPLE[0]:
            facts = {"status": "optimal", "gap": 0.0, "commit": run.code * 10}
            cell = {"cell": run.to_dict(), "cpu_s": times[run.code, run.turn]}
            records.append({**CIRCUMSTANCES, **facts, **cell, "name": run.name})
    told(code_section(records, "run.jsonl"))
