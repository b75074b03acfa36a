"""The registry of measurements, and what a record holds."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING

import poetmodel as pm
from cases import CASES, possible, smoke_cases
from harness import latest, record
from poetmodel.bench.measurement import solve_facts
from poetmodel.bench.tables import model_gap
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from pathlib import Path


def test_cases_are_distinct_and_possible() -> None:
    """Every case has a name of its own and a budget that some schedule could keep."""
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(possible(case) for case in CASES)


def test_budgets_below_the_floor_are_left_out() -> None:
    """VGG-16 needs more than half of its peak for one step, so that 50 % is no case."""
    one = next(case for case in CASES if case.model == "vgg16-cifar" and case.ram == "70%")
    assert not possible(replace(one, ram="50%"))
    assert not any(case.model == one.model and case.ram == "50%" for case in CASES)


def test_smoke_run_has_every_group() -> None:
    """Each table has its small case, once."""
    small = smoke_cases()
    assert {case.group for case in CASES} == {case.group for case in small}
    assert len({case.name for case in small}) == len(small)


def test_record_holds_the_case_and_the_whole_result(tmp_path: Path) -> None:
    """A line has every field of the result but relations and history, and finite numbers."""
    case = smoke_cases()[0]
    result = pm.solve(case.problem(), time_limit=case.limit_s)
    store = latest(tmp_path / "run.jsonl")
    for seconds in (1.5, 2.5):
        facts = {"seconds": seconds, "case": asdict(case), **solve_facts(result)}
        del facts["schedule"]
        store.add(record("solve", case.name, **facts))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["seconds"] for line in lines] == [1.5, 2.5]
    (found,) = latest(tmp_path / "run.jsonl").records()
    assert found["seconds"] == 2.5
    assert set(found["case"]) == {field.name for field in fields(case)}
    whole = set(result.to_dict()) - {"nodes", "tensors", "history", *RELATIONS}
    assert set(found["result"]) == whole
    assert found["result"]["energy_j"] == result.energy_j
    assert found["machine"]["versions"]["poetmodel"] == pm.__version__
    assert found["versions"]["highs"]


def test_model_gap_is_that_of_the_model_solved() -> None:
    """A restriction's own gap is closed although it bounds nothing of the problem."""
    case = next(case for case in smoke_cases() if case.group == "reference")
    model = pm.build(case.problem(), stages="events")
    result = pm.solve(model, time_limit=case.limit_s)
    assert result.gap == 1.0
    gap = model_gap(result.statistics)
    assert gap is not None
    assert gap <= 1e-4
