"""The figures of a report: a fact for each schedule, with the value of its JSON."""

from __future__ import annotations

from kit.report_steps import step_values
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.report.facts import facts
from poetmodel.report.figures import figures, measured_rows, step_figures
from poetmodel.report.presenter import look_up


def test_figures_stand_beside_each_other() -> None:
    """A row per figure, a cell per schedule; what nobody states has no row."""
    both = [facts(subject(skip_problem())), facts(subject(skip_problem(recompute=False)))]
    rows = {row[0].key: row for _, part in figures(both) for row in part}
    assert [fact.value for fact in rows["energy_j"]] == [11.0, 12.0]
    assert rows["peak_ram_bytes"][0].text == f"{both[0]['peak_ram_bytes']} B"
    assert "problem.deadline_s" not in rows
    assert look_up(both[0], "problem.missing.more") is None


def test_rows_carry_the_values_of_the_step() -> None:
    """Each cell has its key and the value there; nothing is shown twice in another unit."""
    values = step_values(skip_problem())
    rows = {row[0].name: row for row in measured_rows(values)}
    assert list(rows) == ["peak RAM", "of which tensors", "paged out", "paged in", "time of a step"]
    cells = [fact for row in rows.values() for fact in row if fact.value is not None]
    assert len(cells) == 11
    for fact in cells:
        assert look_up({"step": values}, fact.key) == fact.value
    first, *others = rows["of which tensors"]
    assert (first.key, first.text) == ("step.certificate.storage_peak_bytes", "70 B")
    assert [fact.value for fact in others] == [None, None]


def test_figures_name_what_was_left_to_the_solver() -> None:
    """Coarsening, reserve, recomputations, solve and costs of compiling are there."""
    parts = dict(step_figures([{"step": step_values(skip_problem()), "status": "optimal"}]))
    texts = {row[0].key: row[0].text for rows in parts.values() for row in rows}
    assert texts["step.reserved_bytes"] == "6 B"
    assert texts["step.graph.threshold_bytes"] == "4 B"
    assert texts["step.graph.scheduled_tensors"] == "4"
    assert texts["step.compile_s"] == "1.5 s"
    assert texts["status"] == "optimal"
    assert "gap" not in texts
