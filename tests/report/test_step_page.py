"""The section of a page about a compiled PyTorch step, without PyTorch."""

from __future__ import annotations

import json

import pytest

from kit.pages import read_page
from kit.report_steps import certificate, step_values
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.report.page import report_facts, report_page
from poetmodel.report.presenter import look_up
from poetmodel.report.step_file import step_subject

pytest.importorskip("jinja2")
pytest.importorskip("plotly")


def test_the_section_shows_what_was_measured() -> None:
    """Its answers stand first, its tables below the timeline; figures are those of the facts."""
    one = step_subject(step_values(skip_problem()), source="step.json")
    page = read_page(report_page([one]))
    order = ["step", "answers", "ram", "measured", "map"]
    assert [name for name in page.ids if name in order] == order
    entry = json.loads(json.dumps(report_facts([one])))["schedules"][0]
    shown = {key for _, key in page.values if key.startswith("step.")}
    assert {
        "step.certificate.heap_peak_bytes",
        "step.certificate.eager_time_s",
        "step.plan.written_bytes",
        "step.reserved_bytes",
    } <= shown
    for (_, key), value in page.values.items():
        assert look_up(entry, key) == value
    for words in (
        "Are the results those of eager PyTorch?",
        "energies: a nominal 1 W",
        "step = poetmodel.torch.compile(model, loss_fn, inputs, ram='50%')",
        "compiled with torch 2.13.0+cpu",
        "6 B of the step's RAM are reserved",
    ):
        assert words in page.text
    assert "poetmodel solve" not in page.text


def test_differences_are_listed_with_their_operations() -> None:
    """Twenty of them, and how many more; a name is only text."""
    differences = [
        {"name": f"gradient of <b>{k}</b>", "largest": None, "told": "by up to nan", "op": "0/mm"}
        for k in range(23)
    ]
    values = step_values(
        skip_problem(), certificate=certificate(equal=False, differences=differences)
    )
    page = read_page(report_page([step_subject(values, source="step.json")]))
    assert "gradient of <b>0</b> (by up to nan, from 0/mm)" in page.text
    assert "gradient of <b>19</b>" in page.text
    assert "gradient of <b>20</b>" not in page.text
    assert "and 3 more" in page.text
    assert "23 of 9 results differ" in page.text


def test_a_step_that_was_not_verified_says_how() -> None:
    """The page says that there is no certificate, and how to get one."""
    one = step_subject(step_values(skip_problem(), certificate=None), source="step.json")
    page = read_page(report_page([one]))
    assert "Not verified" in page.text
    assert "call step.verify(x, y)" in page.text
    assert ("A", "step.plan.peak_bytes") in page.values
    assert ("A", "step.certificate.heap_peak_bytes") not in page.values


def test_a_step_stands_beside_a_schedule() -> None:
    """Each has its column and its way to be made again; only the step has a section."""
    one = step_subject(step_values(skip_problem()), source="step.json")
    other = subject(skip_problem(), label="B")
    page = read_page(report_page([one, other]))
    assert page.values["A", "step.compile_s"] == 1.5
    assert page.values["B", "step.compile_s"] is None
    assert "poetmodel.torch.compile(" in page.text
    assert "poetmodel solve" in page.text


def test_pages_of_schedules_have_no_such_section() -> None:
    """Nothing of PyTorch where there is none."""
    assert "PyTorch" not in read_page(report_page([subject(skip_problem())])).text
