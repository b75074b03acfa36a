"""The registry of measurements, and what a record holds."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import poetmodel as pm
from cases import CASES, possible, smoke_cases
from poetmodel.schedule import RELATIONS
from records import Recorder, model_gap, solve_facts

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


def test_smoke_run_has_every_kind_of_case() -> None:
    """Each table and method has its small stand-in, each once."""
    small = smoke_cases()
    assert {(case.group, case.method) for case in CASES} == {
        (case.group, case.method) for case in small
    }
    assert len({case.name for case in small}) == len(small)


def test_record_holds_the_case_and_the_whole_result(tmp_path: Path) -> None:
    """A line of a record has every field of the result, relations aside, and finite numbers."""
    case = smoke_cases()[0]
    result = pm.solve(case.problem(), time_limit=case.limit_s)
    recorder = Recorder(tmp_path / "run.jsonl")
    for seconds in (1.5, 2.5):
        recorder.write("solve", case.name, seconds=seconds, **solve_facts(case, result))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert [json.loads(line)["seconds"] for line in lines] == [1.5, 2.5]
    assert set(record["case"]) == {field.name for field in fields(case)}
    whole = set(result.to_dict()) - {"nodes", "tensors", *RELATIONS}
    assert set(record["result"]) == whole
    assert record["result"]["energy_j"] == result.energy_j
    assert record["machine"]["versions"]["poetmodel"] == pm.__version__
    assert record["versions"]["highs"]


def test_model_gap_is_that_of_the_model_solved() -> None:
    """A restriction's own gap is closed although it bounds nothing of the problem."""
    case = next(case for case in smoke_cases() if case.group == "reference")
    model = pm.build(case.problem(), stages="events")
    result = pm.solve(model, time_limit=case.limit_s)
    assert result.gap == 1.0
    gap = model_gap(result)
    assert gap is not None
    assert gap <= 1e-4
