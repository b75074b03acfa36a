"""Several schedules on common axes, and the RAM of their device."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import pytest

from kit.instances import random_instances
from kit.report_subjects import subject
from kit.worked import skip_problem
from poetmodel.device import Costs, Device
from poetmodel.device.room import keep_all_use
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.report.charts import gauge_chart, overlay_chart
from poetmodel.solver import solve


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_curves_are_those_of_the_plans(mode: str) -> None:
    """At each instruction a curve has the RAM that the plan checker found, its peak included."""
    one = subject(skip_problem(), mode=mode)
    other = subject(skip_problem(recompute=False), label="B", mode=mode)
    chart = overlay_chart([one, other])
    assert chart is not None
    assert [curve["label"] for curve in chart["curves"]] == ["A", "B"]
    for each, curve in zip((one, other), chart["curves"], strict=True):
        assert each.check is not None
        assert each.plan is not None
        assert curve["x"] == sorted(curve["x"])
        assert max(curve["y"]) == each.check.peak_ram_bytes  # in bytes, since it is below 1 KiB
        assert curve["budget"] == each.plan.ram_budget_bytes
        assert each.check.makespan_s is not None
        assert curve["x"][-1] == pytest.approx(each.check.makespan_s)
        following = each.check.moments[1:]
        for step, moment, after in zip(
            each.plan.program, each.check.moments, following, strict=False
        ):
            if after.issued_s > moment.issued_s:
                inside = (moment.issued_s + after.issued_s) / 2
                ram = moment.high_bytes if step.op == "compute" else moment.ram_bytes
                assert curve["y"][bisect_right(curve["x"], inside) - 1] == ram


def test_one_plan_is_no_overlay() -> None:
    """There is nothing to lay over it."""
    one = subject(skip_problem())
    assert overlay_chart([one]) is None
    assert overlay_chart([one, replace(one, plan=None, check=None, label="B")]) is None


def test_gauge_adds_up() -> None:
    """Parts and what is free make up the RAM; keep-all has its own peak."""
    graph = load_model("mlp")
    costs = Costs.estimate(graph, Device.load("nano33ble"))
    subjects = [
        subject(Problem(graph, costs, ram=ram), label=label)
        for ram, label in (("80%", "A"), ("100%", "B"))
    ]
    chart = gauge_chart(subjects)
    assert chart is not None
    assert [row["label"] for row in chart["rows"]] == ["A", "B"]
    for row in (*chart["rows"], *chart["keep_all"]):
        assert sum(row["parts"]) + row["free"] - row["missing"] == row["ram"]
    (whole,) = chart["keep_all"]
    resident = graph.total_resident_bytes
    assert sum(whole["parts"]) == checkpoint_all_peak_bytes(graph) + resident
    assert keep_all_use(graph).total_bytes == checkpoint_all_peak_bytes(graph)
    assert whole["missing"] > 0


def test_no_device_no_gauge() -> None:
    """Costs alone know no RAM."""
    assert gauge_chart([subject(skip_problem())]) is None


def test_random_plans_have_their_peaks() -> None:
    """The highest point of a curve is the peak, also where it lasts no time."""
    for problem in random_instances(20):
        if solve(problem).schedule is None:
            continue
        one = subject(problem, mode="dma")
        if one.plan is None or one.check is None:
            continue
        chart = overlay_chart([one, replace(one, label="B")])
        assert chart is not None
        assert max(chart["curves"][0]["y"]) == one.check.peak_ram_bytes
