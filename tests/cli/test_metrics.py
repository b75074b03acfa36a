"""The registry of metrics: one entry feeds files, JSON, tables, pages, ``verify`` and ``diff``."""

import json
import re
from pathlib import Path

import pytest

from kit.commands import BOARD_FILE, CHAIN, invoke
from kit.worked import skip_problem
from poetmodel.plan.document import load_document as load_plan
from poetmodel.schedule import metrics
from poetmodel.schedule.document import load_document
from poetmodel.schedule.metrics import METRICS, Display, Group, Metric, MetricUnit, metrics_at
from poetmodel.solver import solve as solve_problem
from poetmodel.sweeps.measurement import measure_run
from poetmodel.sweeps.runs import Run
from poetmodel.sweeps.tables import rows

A, B = Path("a.schedule.json"), Path("b.schedule.json")
BOARD = ("--graph", CHAIN, "--device", BOARD_FILE)
TIGHT = ("--ram", "304B", "--no-recompute", "--deadline", "7.5s")
"""Limits within which a schedule of `chain` pages one tensor."""


def added(monkeypatch, key, of, unit=MetricUnit.COUNT, group=Group.MEMORY):
    """Add one entry to the registry, shown everywhere."""
    new = Metric(
        key=key,
        name=key.replace("_", " "),
        unit=unit,
        meaning="made up for a test",
        group=group,
        value_of=of,
        files=frozenset(Display),
        tables=frozenset(Display),
    )
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, new))


def solved(out, *limits):
    """Solve `chain`, write the file, and return the number of steps of the schedule."""
    how = ("--device", BOARD_FILE, *limits, "--out", out)
    table = invoke("solve", CHAIN, *how, status=0).out
    document = json.loads(out.read_text())
    assert re.search(rf"executed steps +{document['executed_steps']}\b", table)
    return document["executed_steps"]


def test_one_entry_is_a_metric_of_schedules_everywhere(monkeypatch):
    """In the file and its JSON, the tables, `verify`, `diff`, `explain` and the report."""
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    added(monkeypatch, "executed_steps", lambda simulation: len(simulation.curve))
    few, more = solved(A, "--ram", "100%"), solved(B, "--ram", "304B")
    assert few < more
    assert load_document(A).stated_metrics["executed_steps"] == few
    how = ("--device", BOARD_FILE, "--ram", "100%", "--json")
    assert invoke("solve", CHAIN, *how, status=0).json["executed_steps"] == few
    assert f"executed steps  {few}" in invoke("verify", A, *BOARD, status=0).lines_from("executed")
    assert invoke("verify", A, *BOARD, "--json", status=0).json["executed_steps"] == few
    change = rf"executed steps +{few} +{more} +\+{more - few}\b"
    assert re.search(change, invoke("diff", A, B, *BOARD, status=0).out)
    schedules = invoke("diff", A, B, *BOARD, "--json", status=0).json["schedules"]
    assert [side["executed_steps"] for side in schedules] == [few, more]
    assert invoke("explain", A, *BOARD, "--json", status=0).json["executed_steps"] == few
    page = Path("page.html")
    reported = invoke("report", A, *BOARD, "--out", page, "--json", status=0).json
    assert reported["schedules"][0]["executed_steps"] == few
    assert "executed steps" in page.read_text()


def test_a_new_metric_is_a_claim_that_verify_checks(monkeypatch):
    """A file with another number than the simulation is refused, and so is another type."""
    added(monkeypatch, "executed_steps", lambda simulation: len(simulation.curve))
    steps = solved(A, "--ram", "100%")
    document = json.loads(A.read_text())
    A.write_text(json.dumps(document | {"executed_steps": steps + 1}))
    said = invoke("verify", A, *BOARD, status=3).out
    assert f"executed_steps: the file says {steps + 1}" in said
    assert str(steps) in said
    A.write_text(json.dumps(document | {"executed_steps": "many"}))
    assert "executed_steps: expected a valid integer" in invoke("verify", A, *BOARD, status=2).err


def test_a_metric_that_is_no_entry_is_an_unknown_key(monkeypatch):
    """An unknown metric in a file is ignored with a warning."""
    with monkeypatch.context() as patched:
        added(patched, "executed_steps", lambda simulation: len(simulation.curve))
        solved(A, "--ram", "100%")
        invoke("verify", A, *BOARD, status=0)
    assert "executed_steps" in invoke("verify", A, *BOARD, status=0).err


def test_one_entry_is_a_metric_of_plans(monkeypatch):
    """In the plan file and its table, and checked by `verify`."""
    invoke("solve", CHAIN, "--device", BOARD_FILE, *TIGHT, "--out", A, "--quiet", status=0)
    added(monkeypatch, "idle_s", lambda check: (check.stall_s or 0.0) + 2.5, MetricUnit.SECONDS)
    monkeypatch.setattr(metrics, "METRICS", tuple(map(_of_plans, metrics.METRICS)))
    plan = Path("a.plan.json")
    assert "idle s" in invoke("plan", A, *BOARD, "--out", plan, status=0).out
    assert load_plan(plan).stated_metrics["idle_s"] == 2.5
    assert "idle s" in invoke("verify", plan, *BOARD, status=0).out
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"idle_s": 2.0}))
    assert "idle_s: the file says 2.0" in invoke("verify", plan, *BOARD, status=3).out


def _of_plans(metric):
    """Return a metric; the artificial one is of plans alone."""
    if metric.key != "idle_s":
        return metric
    plans = frozenset({Display.PLAN_FILE, Display.PLAN, Display.VERIFY_PLAN})
    return Metric(
        **{name: getattr(metric, name) for name in ("key", "name", "unit", "meaning", "group")},
        value_of=metric.value_of,
        files=plans,
        tables=plans,
    )


def test_one_entry_is_a_column_of_sweeps(monkeypatch):
    """In the rows of the CSV, from the record of each run."""
    added(monkeypatch, "executed_steps", lambda simulation: len(simulation.curve))
    run = Run(model=str(CHAIN), device=str(BOARD_FILE), ram="100%", method="checkpoint-all")
    (row,) = rows([measure_run(run.to_dict())])
    assert (row["status"], row["executed_steps"]) == ("optimal", 6)


def test_one_entry_is_a_metric_of_the_explorer(monkeypatch):
    """Of its points, and a cell of its page, which its script fills by the unit."""
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    pytest.importorskip("uvicorn")
    from poetmodel.explore.answer import Answer, Found, Point
    from poetmodel.explore.running import render_page
    from poetmodel.explore.tasks import schedule_metrics

    added(monkeypatch, "executed_steps", lambda simulation: len(simulation.curve))
    problem = skip_problem()
    simulation = solve_problem(problem).simulation
    one = Point(id="x", problem="y", ram_bytes=1, deadline_s=None)
    assert one.to_record()["executed_steps"] is None
    one.take(Answer(found=Found(metrics=schedule_metrics(problem, simulation))))
    assert one.to_dict(0.0, minimize="energy")["executed_steps"] == len(simulation.curve)
    assert 'id="executed_steps" data-unit="count"' in render_page()


def test_keys_are_unique_and_their_units_are_in_their_names():
    """Bytes, seconds and joules end keys; each metric has a name and a meaning."""
    keys = [metric.key for metric in METRICS]
    assert len(set(keys)) == len(keys)
    suffixes = {MetricUnit.BYTES: "_bytes", MetricUnit.SECONDS: "_s", MetricUnit.JOULES: "_j"}
    for metric in METRICS:
        assert metric.key.endswith(suffixes.get(metric.unit, ""))
        assert metric.name
        assert metric.meaning
        assert metric.files | metric.tables


def test_a_place_shows_the_metrics_that_name_it():
    """Of all groups, or of some."""
    for place in Display:
        shown = metrics_at(place)
        assert shown
        assert set(shown) == {m for m in METRICS if place in m.files | m.tables}
        parts = [metric for group in Group for metric in metrics_at(place, group)]
        assert sorted(m.key for m in parts) == sorted(m.key for m in shown)


SHOWN = {
    Display.EXPLORER: "energy_j overhead_j makespan_s peak_ram_bytes",
    Display.FILE: (
        "energy_j bound_j baseline_energy_j overhead_j overhead_bound_j gap "
        "peak_ram_bytes written_bytes steps_until_worn compute_s transfer_s makespan_s "
        "build_s solve_s primal_integral_s"
    ),
    Display.SWEEP: (
        "energy_j baseline_energy_j overhead_j overhead_bound_j gap peak_ram_bytes "
        "compute_s transfer_s makespan_s build_s solve_s primal_integral_s"
    ),
    Display.SOLVE: (
        "energy_j overhead_j peak_ram_bytes steps_until_worn compute_s transfer_s makespan_s"
    ),
    Display.PLAN_FILE: ("makespan_s stall_s transfer_s compute_s energy_j peak_ram_bytes"),
    Display.PLAN: (
        "makespan_s compute_s transfer_s stall_s energy_j peak_ram_bytes aux_used_bytes"
    ),
    Display.VERIFY: (
        "energy_j baseline_energy_j overhead_j peak_ram_bytes written_bytes read_bytes "
        "aux_used_bytes steps_until_worn compute_s transfer_s time_s makespan_s"
    ),
    Display.VERIFY_PLAN: (
        "makespan_s stall_s energy_j compute_s transfer_s peak_ram_bytes written_bytes "
        "read_bytes aux_used_bytes"
    ),
    Display.DIFF: (
        "energy_j overhead_j peak_ram_bytes written_bytes read_bytes compute_s transfer_s time_s"
    ),
    Display.EXPLAIN: ("energy_j overhead_j peak_ram_bytes time_s"),
    Display.REPORT: (
        "aux_used_bytes solve_s energy_j baseline_energy_j overhead_j peak_ram_bytes "
        "written_bytes read_bytes steps_until_worn compute_s transfer_s makespan_s "
        "build_s primal_integral_s"
    ),
    Display.PAGE: (
        "aux_used_bytes energy_j bound_j baseline_energy_j overhead_j overhead_bound_j "
        "peak_ram_bytes written_bytes read_bytes steps_until_worn compute_s transfer_s "
        "makespan_s build_s solve_s primal_integral_s"
    ),
}
"""Metrics of each display, in order."""


def test_displays_keep_their_metrics_and_order():
    """Files, tables and pages of earlier releases."""
    assert {
        place: " ".join(metric.key for metric in metrics_at(place)) for place in Display
    } == SHOWN
