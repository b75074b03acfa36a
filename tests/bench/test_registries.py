"""What the studies run: complete, distinct, and in an order that is fair when cut short."""

import json
from collections import Counter
from dataclasses import replace

import pytest

import against
import compared
from compared import CURVES, LAYERED, MAIN, SAME, layered_graph, methods_of, problems
from grid import (
    FLOOR,
    METHODS,
    PROFILE,
    Course,
    Instance,
    graph_of,
    in_running_order,
    instances,
    measure,
)
from harness import recorded
from measured import records
from poetmodel.baselines import METHODS as SHIPPED
from poetmodel.bench.measurement import FAILED
from poetmodel.graph import floor
from poetmodel.solver import SolveProgress
from pytorch import compare
from pytorch.runs import (
    AT_PEERS,
    FUSED_SHARES,
    KNOBS,
    SHARES,
    fused_runs,
    training_runs,
)
from pytorch.runs import METHODS as TRAINING_METHODS
from pytorch.runs import NETWORKS as TRAINING_NETWORKS

SMALL = Instance(goal=1, model="paper/linear", device="paper-m4", ram="70%", limit_s=5.0)


# -- the grid --------------------------------------------------------------------------------------
def test_published_grid_is_a_full_product():
    """Seven graphs, three devices, ten budgets and four deadlines, none chosen by hand."""
    published = instances((1,))
    assert len(published) == 7 * 3 * 10 * 4
    for key, count in (("model", 7), ("device", 3), ("ram", 10), ("deadline", 4)):
        assert len({getattr(each, key) for each in published}) == count
    assert len(instances((2,))) == 7 * 4 * 4
    names = [each.name for each in instances()]
    assert len(set(names)) == len(names)


def test_large_and_captured_graphs_have_their_own_limits():
    """BERT of 24, 48 and 96 blocks has a minute, three and ten; whole steps have two."""
    limits = {each.model: each.limit_s for each in instances((4,))}
    assert limits == {"paper/bert-24": 60.0, "paper/bert-48": 180.0, "paper/bert-96": 600.0}
    assert [len(graph_of(model).nodes) for model in limits] == [387, 771, 1539]
    for goal, folder, count, limit_s in ((6, "models", 12, 60.0), (7, "whole-steps", 6, 120.0)):
        found = instances((goal,))
        models = Counter(each.model for each in found)
        assert (set(models.values()), len(models)) == ({4}, count)
        assert all(model.startswith(f"traced/{folder}/") for model in models)
        assert {(each.device, each.limit_s) for each in found} == {(PROFILE, limit_s)}


def test_comparison_solves_each_instance_by_every_method():
    """What is compared are the same instances."""
    met = {}
    for each in instances((5,)):
        same = replace(each, method="default", limit_s=0.0)
        met.setdefault(same.name, set()).add(each.method)
    assert all(methods >= {"default", "compact", "paper"} for methods in met.values())
    assert set.union(*met.values()) == set(METHODS)


def test_problem_states_what_the_instance_says():
    """Budget, deadline and its meaning reach the problem; without a deadline the device decides."""
    each = replace(SMALL, ram=FLOOR, deadline="115%")
    problem = each.problem()
    assert problem.ram_budget_bytes == int(1.02 * floor(graph_of(each.model)).bytes)
    assert problem.deadline_counts == "serial"
    assert problem.deadline_s == pytest.approx(1.15 * problem.pass_time_s)
    assert replace(each, deadline=None).problem().deadline_s is None


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_order_cut_short_keeps_the_share_of_every_goal(share):
    """The first part of the order has that part of each goal's instances, to within one."""
    whole = Counter(each.goal for each in instances())
    order = in_running_order(instances())
    assert order == in_running_order(instances())
    part = Counter(each.goal for each in order[: int(share * len(order))])
    for goal, count in whole.items():
        assert part[goal] == pytest.approx(share * count, abs=1.0)


def test_course_notes_the_first_schedule_and_each_fall_of_the_gap():
    """Gaps that fall by little are left out, the first schedule and a closed gap never."""
    course = Course()
    states = [(0.1, None, 1.0), (0.2, 4.0, 1.0), (0.3, 3.99, 1.0), (0.4, 2.0, 1.0), (0.5, 1.0, 1.0)]
    for seconds, incumbent, bound in (*states, (0.6, 1.0, 1.0)):
        course.note(SolveProgress(seconds=seconds, incumbent=incumbent, bound=bound))
    assert course.first_schedule_s == 0.2
    assert course.gaps == [(0.2, 0.75), (0.4, 0.5), (0.5, 0.0)]


def test_measurement_is_plain_data_and_ends_where_the_solve_ended():
    """A proved instance has its gap, its course down to it, and nothing that JSON refuses."""
    facts = measure(SMALL.to_dict())
    json.dumps(facts, allow_nan=False)
    assert (facts["cell"], facts["status"]) == (SMALL.to_dict(), "optimal")
    assert facts["gap"] <= facts["requested_gap"]
    assert 0 < facts["first_schedule_s"] <= facts["seconds"]
    assert facts["gaps"][-1][1] <= facts["requested_gap"]
    paper = measure(replace(SMALL, method="paper", ram="90%", limit_s=30.0).to_dict())
    assert paper["formulation"] == "paper"
    assert paper["gap"] <= paper["requested_gap"]  # of the published model
    hopeless = measure(replace(SMALL, ram="1%").to_dict())
    assert (hopeless["status"], hopeless["first_schedule_s"]) == ("infeasible", None)


# -- two states of the code ------------------------------------------------------------------------
def test_both_states_solve_each_instance_in_turns():
    """One right after the other, and which one is first changes."""
    found = list(against.runs(2))
    assert len({run.key for run in found}) == len(found) == 4 * len(against.SAMPLE)
    assert [run.code for run in found[:4]] == ["before", "here", "here", "before"]
    assert len({run.instance for run in found[:4]}) == 1


# -- every method ----------------------------------------------------------------------------------
def test_problems_are_many_and_can_be_solved():
    """At least 170, of six kinds, none below the minimum RAM, none twice."""
    found = problems(MAIN)
    assert len(found) >= 170
    assert len({problem.key for problem in found}) == len(found)
    assert {problem.kind for problem in found} == set(MAIN)
    curves = {(run.kind, run.model, run.device, run.ram) for run in found}
    assert [kind for kind, *_ in CURVES] == list(MAIN)
    for kind, model, device, budgets in CURVES:
        assert sum((kind, model, device, ram) in curves for ram in budgets) >= 4


def test_every_shipped_method_is_run_on_whole_steps():
    """All of the registry but one, and more; all runs of a problem come right after each other."""
    steps = methods_of(compared.STEPS)
    assert set(SHIPPED) - {SAME} < set(steps)
    runs = [run for run in compared.runs((compared.STEPS,)) if run.ram == "least+30%"]
    assert tuple(run.method for run in runs[: len(steps)]) == steps


def test_every_run_of_the_comparison_is_on_record():
    """Each registered run has its record, with its commit; none failed, all had the same limit."""
    found = {key(record["cell"]): record for record in records("compared")}
    for run in compared.runs():
        record = found[key(run.to_dict())]
        assert record["commit"]
        assert record["status"] != FAILED
        assert record["cell"]["limit_s"] == run.limit_s


def key(cell):
    """Return the problem and the method of a run."""
    return tuple(cell[name] for name in ("kind", "model", "device", "ram", "method"))


def test_published_layered_graph_is_read(tmp_path, monkeypatch):
    """Its order, sizes and durations are those of the file."""
    sizes = {0: 100, 1: 10, 2: 100, 3: 100}
    content = {
        "nodes": [{"name": k, "out_cost": size, "duration": k} for k, size in sizes.items()],
        "links": [{"0": a, "1": b} for a, b in ((0, 2), (2, 3), (3, 1), (0, 1))],
        "graph": {"order": [0, 2, 3, 1]},
    }
    (tmp_path / "random_layered_n4.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setenv("MOCCASIN_DATA", str(tmp_path))
    graph = layered_graph("random_layered_n4")
    assert [node.name for node in graph.nodes] == ["v0", "v2", "v3", "v1"]
    assert [node.inputs for node in graph.nodes] == [(), ("v0",), ("v2",), ("v3", "v0")]
    assert (graph.nodes[3].output_bytes, graph.nodes[3].flops) == (10 * 1024, 1_000_000)
    assert "random_layered_n4" in {run.model for run in compared.runs((LAYERED,))}


# -- training methods ------------------------------------------------------------------------------
def record_of(run, peak_bytes, **changes):
    """Return the record of a run."""
    return {"cell": run.to_dict(), "status": "ran", "heap_peak_bytes": peak_bytes, **changes}


def test_peers_run_before_those_that_need_their_peak():
    """Whatever order is asked for, a peer comes first; all names differ."""
    names = [run.name for run in training_runs()]
    count = len(TRAINING_NETWORKS) * (5 + 5 * len(SHARES) + len(AT_PEERS) - 1)
    assert len(names) == len(set(names)) == count
    asked = ("both@file-hooks", "file-hooks", "both@memory-budget", "memory-budget")
    found = training_runs(("unet-b8",), asked, (0.5,))
    assert [run.method for run in found] == [
        "file-hooks", "memory-budget", "both@file-hooks", "both@memory-budget",
    ]  # fmt: skip
    for run in training_runs():
        if run.peer is not None:
            assert TRAINING_METHODS.index(run.peer) < TRAINING_METHODS.index(run.method)


def test_peaks_of_peers_become_budgets(tmp_path):
    """The peak on record, with the slack, is the budget, share by share; peers have none."""
    store = recorded(tmp_path / "x-training.jsonl")
    methods = ("memory-budget", "both@memory-budget")
    half, quarter, own_half, own_quarter = training_runs(
        ("unet-b8",), methods, (0.5, 0.25), slack=0.01
    )
    store.add(record_of(half, 1000))
    store.add(record_of(quarter, 500))
    assert compare.budget_bytes(own_half, store) == 1010
    assert compare.budget_bytes(own_quarter, store) == 505
    assert compare.budget_bytes(half, store) is None


def test_fused_kernels_are_compared_with_stock_at_its_peaks(tmp_path):
    """Each setting of stock runs before the back end at its peak; a share alone is one of all."""
    store = recorded(tmp_path / "x-fused.jsonl")
    runs = {run.name: run for run in fused_runs(("unet-b8",))}
    names = list(runs)
    for knob in KNOBS:
        stock, own = (f"unet-b8 | {method} | {knob:.0%}" for method in ("stock", "fused@stock"))
        assert names.index(stock) < names.index(own)
    least = runs[f"unet-b8 | fused | {min(FUSED_SHARES):.0%}"]
    assert compare.budget_bytes(least, store) is None
    without = compare.measure(least.to_dict(), (None, ""))
    assert (without["status"], without["reason"]) == ("failed", "stock has no peak on record")
    store.add(record_of(runs["unet-b8 | stock"], 1000))
    store.add(record_of(runs["unet-b8 | stock | 40%"], 700))
    assert compare.budget_bytes(least, store) == int(1000 * min(FUSED_SHARES))
    assert compare.budget_bytes(runs["unet-b8 | fused@stock | 40%"], store) == 700
