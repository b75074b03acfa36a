"""The registry of the grid: complete, distinct, and run in an order that is fair when cut short."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import grid
from grid import (
    FLOOR,
    GOALS,
    METHODS,
    PROFILE,
    Instance,
    graph_of,
    in_running_order,
    instances,
    smoke_instances,
)
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph, floor, operation

if TYPE_CHECKING:
    from pathlib import Path


def test_instances_are_distinct() -> None:
    """Every instance has a name of its own."""
    names = [each.name for each in instances()]
    assert len(set(names)) == len(names)


def test_published_grid_is_a_full_product() -> None:
    """Seven graphs, three devices, ten budgets and four deadlines, none chosen by hand."""
    published = instances((1,))
    assert len(published) == 7 * 3 * 10 * 4
    for key, count in (("model", 7), ("device", 3), ("ram", 10), ("deadline", 4)):
        assert len({getattr(each, key) for each in published}) == count
    assert len(instances((2,))) == 7 * 4 * 4


def test_scale_has_its_own_limits() -> None:
    """BERT of 24, 48 and 96 blocks has a minute, three and ten, and as many nodes as it should."""
    limits = {each.model: each.limit_s for each in instances((4,))}
    assert limits == {"paper/bert-24": 60.0, "paper/bert-48": 180.0, "paper/bert-96": 600.0}
    assert [len(graph_of(model).nodes) for model in limits] == [387, 771, 1539]


def test_comparison_solves_each_instance_by_every_method() -> None:
    """What is compared are the same instances."""
    problems: dict[str, set[str]] = {}
    for each in instances((5,)):
        same = replace(each, method="default", limit_s=0.0)
        problems.setdefault(same.name, set()).add(each.method)
    assert all(methods >= {"default", "compact", "paper"} for methods in problems.values())
    assert set.union(*problems.values()) == set(METHODS)


def test_traced_graphs_are_found_in_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph file has its budgets, without and with a deadline, measured and estimated."""
    graph = Graph(name="one", nodes=(operation("a", output_bytes=8),))
    graph.save(tmp_path / "one-test.graph.json")
    (tmp_path / "one-test.profile.csv").write_text(
        "name,compute_time_s,compute_energy_j,page_in_time_s,page_in_energy_j,"
        "page_out_time_s,page_out_energy_j\na,2,3,1,1,1,1\n"
    )
    monkeypatch.setattr(grid, "TRACED", tmp_path)
    found = instances((3,))
    assert Counter(each.deadline for each in found) == {None: 8, "150%": 8}
    assert {each.model for each in found} == {"traced/one-test"}
    assert graph_of("traced/one-test") == graph
    measured, estimated = (
        next(each for each in found if each.device == device) for device in (PROFILE, "rpi4b")
    )
    assert measured.problem().baseline_energy_j == 3.0
    assert estimated.problem().costs.device is not None


def test_captured_models_have_four_budgets_each() -> None:
    """Costs are as measured; with an optimizer they have twice the time."""
    for goal, folder, count, limit_s in ((6, "models", 12, 60.0), (7, "whole-steps", 6, 120.0)):
        found = instances((goal,))
        models = Counter(each.model for each in found)
        assert set(models.values()) == {4}
        assert len(models) == count
        assert all(model.startswith(f"traced/{folder}/") for model in models)
        assert {each.ram for each in found} == {"60%", "40%", "25%", FLOOR}
        assert {(each.device, each.limit_s) for each in found} == {(PROFILE, limit_s)}


def test_floor_budget_is_just_above_the_floor() -> None:
    """The tightest budget is 2 % above what one step needs."""
    each = Instance(goal=1, model="paper/linear", device="paper-m4", ram=FLOOR)
    least = floor(graph_of(each.model)).bytes
    assert each.problem().ram_budget_bytes == int(1.02 * least)


def test_problem_states_what_the_instance_says() -> None:
    """Budget, deadline and its meaning reach the problem; without a deadline the device decides."""
    each = Instance(goal=1, model="paper/linear", device="paper-m4", ram="50%", deadline="115%")
    problem = each.problem()
    assert problem.deadline_counts == "serial"
    assert problem.deadline_s == pytest.approx(1.15 * problem.pass_time_s)
    assert replace(each, deadline=None).problem().deadline_s is None
    costs = Costs.estimate(graph_of(each.model), Device.load("paper-m4"))
    assert problem.table == costs.table(graph_of(each.model))


def test_order_is_fixed_and_complete() -> None:
    """All instances are run, in the same order every time."""
    whole = instances()
    order = in_running_order(whole)
    assert sorted(each.name for each in order) == sorted(each.name for each in whole)
    assert order == in_running_order(whole)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_order_cut_short_keeps_the_share_of_every_goal(share: float) -> None:
    """The first part of the order has that part of each goal's instances, to within one."""
    whole = Counter(each.goal for each in instances())
    order = in_running_order(instances())
    part = Counter(each.goal for each in order[: int(share * len(order))])
    for goal, count in whole.items():
        assert part[goal] == pytest.approx(share * count, abs=1.0)


def test_order_mixes_the_graphs() -> None:
    """The first tenth of the published grid has every graph, device and deadline."""
    published = instances((1,))
    part = in_running_order(published)[: len(published) // 10]
    for key in ("model", "device", "deadline"):
        assert len({getattr(each, key) for each in part}) == len(
            {getattr(each, key) for each in published}
        )


def test_smoke_run_has_every_kind_of_instance() -> None:
    """Every goal, method and deadline has one small instance."""
    small = smoke_instances()
    kinds = {(each.goal, each.method, each.deadline) for each in instances()}
    covered = {(each.goal, each.method, each.deadline) for each in small}
    assert kinds - {(3, "default", None)} <= covered
    assert {each.goal for each in small} == set(GOALS)
    assert len({each.name for each in small}) == len(small)
