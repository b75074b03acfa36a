"""Results: their file, the simulator's values, the meaning of None; public names."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace

import pytest

import poetmodel as pm
from kit.instances import random_instances, random_state_problems
from kit.worked import bench_device, even_costs, skip_graph, skip_problem
from poetmodel.baselines import METHODS, run
from poetmodel.errors import NoScheduleError
from poetmodel.planner import make_plan
from poetmodel.problem import Problem
from poetmodel.result import (
    SolveResult,
    Status,
    Termination,
    gap_over_time,
    primal_integral_s,
    relative_gap,
)
from poetmodel.schedule import GraphIdentity, Schedule, check_schedule, simulate
from poetmodel.schedule.document import load_document
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import explain_infeasible, find_limits

KEYS = [
    *("format", "version", "written_by", "graph", "device", "costs", "problem", "status"),
    *("violations", "objective"),
    *("energy_j", "bound_j", "baseline_energy_j", "overhead_j", "overhead_bound_j", "gap"),
    *("peak_ram_bytes", "compute_s", "transfer_s", "makespan_s", "build_s", "solve_s"),
    *("primal_integral_s", "history", "nodes", "tensors"),
]
STATED = [metric.key for metric in metrics_at(Display.FILE)]
IN_FILES = ("peak_ram_bytes", "compute_s", "transfer_s", "makespan_s", "baseline_energy_j")
"""Metrics of the simulation that schedule files state."""
IN_THE_SIMULATION = ("written_bytes", "read_bytes", "aux_used_bytes", "time_s")
RELATION_KEYS = ["R", "S_RAM", "S_AUX", "M_in", "M_out"]


def without_schedule(status=Status.INFEASIBLE, **more):
    """Return a result that holds no schedule."""
    return SolveResult(
        problem=skip_problem(), status=status, termination=Termination.PROVED, **more
    )


# -- the file ----------------------------------------------------------------------------------
def test_the_figures_of_the_worked_example():
    """Each figure under its key, in SI units."""
    problem = skip_problem(deadline=20, energy_budget=30, aux_bytes=100)
    document = solve(problem, time_limit=30, gap=0.25, formulation="compact").to_dict()
    assert list(document) == KEYS + RELATION_KEYS
    assert (document["format"], document["version"]) == ("poetmodel-schedule", 1)
    assert document["graph"] == {"name": "skip", "sha256": problem.graph.sha256}
    assert (document["status"], document["violations"]) == ("optimal", [])
    assert document["objective"] == {"minimize": "energy", "value": 11, "bound": 11, "gap": 0}
    figures = {key: document[key] for key in KEYS if key in STATED}
    del figures["build_s"], figures["solve_s"], figures["primal_integral_s"]
    assert figures == {
        "energy_j": 11.0,
        "bound_j": 11.0,
        "baseline_energy_j": 10.0,
        "overhead_j": 1.0,
        "overhead_bound_j": 1.0,
        "gap": 0.0,
        "peak_ram_bytes": 12,
        "compute_s": 11.0,
        "transfer_s": 0.0,
        "makespan_s": 11.0,
    }
    assert document["nodes"] == document["tensors"] == ["a", "b", "c", "d"]
    assert document["R"] == [[0, 0], [1, 1], [2, 2], [3, 0], [3, 3]]
    assert document["S_RAM"] == [[1, 0], [2, 1], [3, 2]]
    assert document["S_AUX"] == document["M_in"] == document["M_out"] == []


@pytest.mark.parametrize("status", [Status.INFEASIBLE, Status.UNKNOWN])
def test_without_a_schedule_figures_are_null_and_relations_absent(status):
    """Absent, not empty; null, not 0."""
    document = without_schedule(status).to_dict()
    assert list(document) == [key for key in KEYS if key != "history"]
    assert document["status"] == status.value
    assert all(document.get(key) is None for key in STATED)
    assert document["objective"] == {
        "minimize": "energy",
        "value": None,
        "bound": None,
        "gap": None,
    }
    json.dumps(document, allow_nan=False)


def test_the_device_is_named_by_its_key():
    """A shipped device by its short name, another one by its own; none is null."""
    graph = skip_graph()
    named = Problem(graph, even_costs(graph, device=bench_device()), ram=13)
    assert solve(named).to_dict()["device"] == "bench"
    assert solve(skip_problem()).to_dict()["device"] is None


def test_results_are_written_and_read_back(tmp_path):
    """A file of a random problem has the schedule, the request, and true values.

    Files of graphs with state list resident tensors, even if none; others do not.
    """
    path = tmp_path / "random.schedule.json"
    stateful = random_state_problems(8, (3, 5), seed=71, minimize="energy")
    for problem in (*random_instances(30, (3, 5), seed=71), *stateful):
        result = solve(problem, formulation="compact")
        if result.schedule is None:
            continue
        result.save(path)
        assert json.loads(path.read_text("utf-8")) == result.to_dict()
        assert ("resident" in result.to_dict()) == bool(problem.graph.state_tensors)
        document = load_document(path)
        assert document.schedule == result.require_schedule() is not None
        assert document.schedule.identity == GraphIdentity.from_graph(problem.graph)
        assert document.status == result.status
        assert document.device == "bench"
        assert document.problem.model_dump(exclude_unset=True) == result.to_dict()["problem"]
        assert document.stated_metrics == {key: result.to_dict().get(key) for key in STATED}
        assert not check_schedule(
            problem, document.schedule, stated=document.stated_metrics
        ).violations


def test_violations_are_listed():
    """A schedule of ``paper`` that the verifier rejects carries its objections into the file."""
    result = solve(skip_problem(recompute=False), formulation="paper")
    document = result.to_dict()
    assert document["status"] == "feasible"
    assert document["violations"] == list(result.violations) != []


# -- what a result says ------------------------------------------------------------------------
def test_require_schedule_raises_with_the_result():
    """Error and summary state why there is none; the error has all other values."""
    result = without_schedule(reason="the sky fell")
    with pytest.raises(NoScheduleError, match="infeasible: the sky fell") as caught:
        result.require_schedule()
    assert caught.value.result is result
    assert without_schedule().summary() == "infeasible: no schedule was found"
    assert without_schedule(Status.UNKNOWN, reason="late").summary() == "unknown: late"


def test_energies_are_told_where_they_were_asked_for():
    """Not for the minimum time with costs of no device; but with a limit, or a device."""
    timed = skip_problem(minimize="time")
    silent = replace(timed, costs=replace(timed.costs, device=None))
    for problem, told in (
        (silent, False),
        (replace(silent, energy_budget=100.0), True),
        (replace(silent, costs=replace(timed.costs, device=bench_device())), True),
    ):
        result = solve(problem)
        time = f"{result.simulation.makespan_s:.4g} s"
        assert result.summary().startswith(f"optimal: time {time}, bound ")
        assert (" J" in result.summary(), " J" in repr(result)) == (told, told)
        assert result.to_dict()["energy_j"] == result.energy_j > 0


def test_an_own_objective_is_told_with_its_weights():
    """In the summary, and shortened in the repr; the energy is stated, too.

    Recomputing a costs 11 J; paging it out, which writes 4 B, and in, costs 12 J.
    """
    weights = (("energy_j", 1), ("recomputations:a", 3), ("bytes_written", 0.25))
    result = solve(replace(skip_problem(), minimize="own", user_objective=weights))
    assert result.summary() == (
        "optimal: energy_j + 3 recomputations:a + 0.25 bytes_written: 13, bound 13, gap 0.00%; "
        "energy 12 J"
    )
    assert "objective 13, gap 0.00%, energy 12 J" in repr(result)
    many = tuple((f"page_ins:{name}", 1) for name in ("a", "b", "c", "d"))
    summary = solve(replace(skip_problem(), minimize="own", user_objective=many)).summary()
    assert "page_ins:a + page_ins:b + page_ins:c + page_ins:d: 0, " in summary


@pytest.mark.parametrize(
    ("minimize", "ram", "value", "words"),
    [
        ("energy", 13, 11.0, "energy 11 J, bound 11 J"),
        ("time", 13, 11.0, "time 11 s, bound 11 s"),
        ("ram", 15, 12, "peak RAM 12 B, bound 12 B"),
        ("writes", 13, 0, "bytes paged out 0 B, bound 0 B"),
        ("own", 13, 12.0, "energy_j + 3 recomputations:a: 12, bound 12"),
    ],
)
def test_value_bound_and_gap_are_those_of_what_was_minimized(minimize, ram, value, words):
    """In the library, in words and in the file: optimal never has a larger gap."""
    weights = (("energy_j", 1), ("recomputations:a", 3)) if minimize == "own" else ()
    result = solve(skip_problem(minimize=minimize, ram=ram, user_objective=weights), gap=0.0)
    assert result.status == Status.OPTIMAL
    assert (result.value, result.bound, result.gap) == (value, value, 0.0)
    assert result.overhead == value - result.problem.objective.baseline
    assert result.summary().startswith(f"optimal: {words}, gap 0.00%")
    assert "gap 0.00%" in repr(result)
    document = result.to_dict()
    stated = {"minimize": minimize, "value": value, "bound": value, "gap": 0.0}
    assert {key: document["objective"][key] for key in stated} == stated
    of_energy = [document[key] for key in ("bound_j", "overhead_bound_j", "gap")]
    known = minimize == "energy"
    assert of_energy == ([11.0, 1.0, 0.0] if known else [None] * 3)
    assert result.bound_j == of_energy[0]
    proved = replace(result, overhead_bound_j=0.5)
    assert proved.to_dict()["overhead_bound_j"] == 0.5
    assert proved.bound_j == 10.5
    assert proved.to_dict()["gap"] is not None


def test_nothing_proved_of_rewards_is_no_bound_of_zero():
    """Without a bound, a result has that of all rewards, below 0 here."""
    problem = replace(skip_problem(), minimize="own", user_objective=(("page_outs:a", -3),))
    proved = solve(problem)
    assert (proved.value, proved.gap) == (-3, 0.0)
    open_ = replace(solve(skip_problem()), problem=problem, objective_bound=None)
    assert open_.value == 0
    assert open_.to_dict()["objective"]["bound"] == -3
    assert open_.gap == 1.0


def test_absent_figures_are_none():
    """Never 0, -1, inf or nan; the time of a solve is known all the same."""
    for result in (without_schedule(), solve(skip_problem(ram=1))):
        assert result.status == Status.INFEASIBLE
        absent = ["energy_j", "overhead_j", "bound_j", "value", "bound", "overhead", "gap"]
        assert {getattr(result, name) for name in absent} == {None}
        assert result.problem.baseline_energy_j == 10.0
        assert result.wall_s >= 0


@pytest.mark.parametrize(
    ("value", "bound", "gap"),
    [(2.0, 1.0, 0.5), (2.0, 2.0, 0.0), (2.0, 3.0, 0.0), (0.0, 0.0, 0.0), (1.0, 0.0, 1.0)],
)
def test_gaps_are_fractions_of_the_value(value, bound, gap):
    """0 if both are 0, 1 if nothing is proven."""
    assert relative_gap(value, bound) == gap


def test_the_gap_is_of_the_overhead():
    """Bound 0.5 J of 1 J overhead is 50 %, whatever the baseline."""
    problem = skip_problem()
    schedule = solve(problem).require_schedule()
    result = SolveResult(
        problem=problem,
        status=Status.FEASIBLE,
        termination=Termination.TIME_LIMIT,
        schedule=schedule,
        simulation=simulate(problem.graph, problem.costs, schedule),
        overhead_bound_j=0.5,
        objective_bound=10.5,
    )
    assert (result.gap, result.bound_j) == (0.5, 10.5)


def test_idle_power_is_in_the_baseline():
    """For one pass of compute, and for the time that the schedule adds."""
    graph = skip_graph()
    costs = even_costs(graph, device=bench_device(idle_power_w=2.0))
    result = solve(Problem(graph, costs, ram=13), gap=0.0)
    assert (result.simulation.baseline_energy_j, result.energy_j) == (30.0, 33.0)
    assert result.overhead_j == 3.0
    assert result.bound_j == 33.0


def test_figures_on_the_result_are_the_simulators():
    """A result has the metrics that files state; the others are read from its simulation."""
    result = solve(skip_problem(recompute=False))
    simulation = result.simulation
    assert (result.energy_j, result.overhead_j) == (simulation.energy_j, simulation.overhead_j)
    assert simulation.written_bytes == simulation.read_bytes == simulation.aux_used_bytes > 0
    for name in IN_FILES:
        assert getattr(result, name) == getattr(simulation, name) is not None
        assert name == "baseline_energy_j" or getattr(without_schedule(), name) is None
    absent = [*IN_THE_SIMULATION, "objective_value", "objective_gap"]
    assert [name for name in absent if hasattr(result, name)] == []
    assert [name for name in IN_THE_SIMULATION if getattr(simulation, name) is None] == []
    assert isinstance(result.schedule, Schedule)
    with pytest.raises(AttributeError):
        result.status = Status.UNKNOWN  # type: ignore[misc]


@pytest.mark.parametrize("name", ["optimal", "checkmate", "paging-only", "checkpoint-all"])
@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_build_and_solve_are_all_of_the_wall_time(name, mode, monkeypatch):
    """The two times of the file sum to the wall time of the whole solve."""
    graph = skip_graph()
    costs = replace(even_costs(graph), device=bench_device(mode=mode))
    problem = Problem(graph, costs, ram="100%", minimize="ram" if name == "optimal" else "energy")
    monkeypatch.setattr("poetmodel.solver.request.Request.elapsed_s", lambda _: 7.0)
    result = run(problem, name)
    document = result.to_dict()
    assert result.wall_s == document["build_s"] + document["solve_s"] == pytest.approx(7.0)
    assert 0 < result.verify_s < result.solve_s


def public_objects():
    """Return one of everything that people meet, of a network of 97 nodes."""
    graph = pm.zoo.vgg16_cifar()
    device = pm.Device.load("rpi4b")
    costs = pm.Costs.estimate(graph, device)
    problem = pm.Problem(graph, costs, ram="70%", deadline="150%")
    result = solve(problem)
    schedule = result.require_schedule()
    plan = make_plan(graph, costs, schedule, mode="blocking")
    broken = Schedule(R=schedule.R, identity=schedule.identity)
    impossible = pm.Problem(graph, costs, ram="10%")
    return [
        graph,
        *graph.nodes,
        *graph.tensors,
        device,
        costs,
        problem.table,
        problem,
        result,
        schedule,
        schedule.identity,
        result.simulation,
        pm.verify(problem, schedule),
        pm.verify(problem, broken),
        plan,
        pm.check_plan(graph, costs, plan),
        pm.solve(impossible),
        (explanation := explain_infeasible(pm.solve(impossible))),
        *explanation.remedies,
        *METHODS.values(),
        run(pm.Problem(graph, costs, ram="100%"), "checkpoint-all"),
        *find_limits(pm.Problem(skip_graph(), even_costs(skip_graph()), ram=100)),
    ]


def test_repr_is_one_short_line():
    """The repr has the main facts in less than 200 characters."""
    for thing in public_objects():
        text = repr(thing)
        assert len(text) < 200, text
        assert "\n" not in text
        assert text.startswith(type(thing).__name__)
    text = repr(solve(skip_problem()))
    for fact in ("optimal", "energy", "gap 0.00%", "peak RAM", "method optimal"):
        assert fact in text


# -- public names --------------------------------------------------------------------------------
def test_public_names_load():
    """All names of ``__all__`` exist, and are listed by ``dir``; a misspelt name is an error."""
    assert set(pm.__all__) <= set(dir(pm))
    assert [name for name in pm.__all__ if getattr(pm, name) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'slove'"):
        pm.slove  # noqa: B018


@pytest.mark.parametrize(
    "before", ["", "import poetmodel.solver.facade\n", "pm.solve\nimport poetmodel.solver\n"]
)
def test_solve_is_called_whatever_was_imported_before(before):
    """``pm.solve`` works as a function whatever was imported."""
    script = f"""
import poetmodel as pm
from poetmodel.solver import solve
{before}
graph = pm.Graph(name="pair", nodes=(pm.operation("a", output_bytes=8),
                                     pm.operation("b", output_bytes=4, inputs=("a",))))
costs = pm.Costs.from_arrays(graph, compute_time_s=[1, 1], compute_energy_j=[2, 3])
print(pm.solve(pm.Problem(graph, costs, ram=12)).status)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "optimal"


def test_signatures_are_those_of_the_contract():
    """Keyword names that users write down in scripts."""
    assert list(inspect.signature(solve).parameters) == [
        "problem_or_model", "formulation", "backend", "time_limit", "gap", "threads", "seed",
        "start", "on_progress", "solver_options",
    ]  # fmt: skip
    limits = {"ram", "deadline", "deadline_counts", "aux_bytes", "recompute"}
    assert {"graph", "costs", *limits} <= set(inspect.signature(pm.Problem).parameters)
    assert {"formulation", "reductions"} <= set(inspect.signature(pm.build).parameters)


# -- histories -----------------------------------------------------------------------------------
HISTORY = ((1.0, None, 2.0), (3.0, 10.0, None), (4.0, 5.0, 2.0), (6.0, 5.0, 5.0))
"""First a bound, then a schedule, a better one, and the proof."""


def test_gap_over_time_falls_from_one_to_the_last_gap():
    """It is 1 without a schedule or a bound."""
    assert gap_over_time(HISTORY) == ((1.0, 1.0), (3.0, 1.0), (4.0, 0.6), (6.0, 0.0))
    assert gap_over_time(()) == ()
    assert gap_over_time([(1.0, 0.0, None)]) == ((1.0, 0.0),)


def test_primal_integral_counts_time_by_distance_to_the_best():
    """Three seconds without a schedule, one at twice the last value, two at that."""
    assert primal_integral_s(HISTORY) == pytest.approx(3 + 0.5)
    assert primal_integral_s(HISTORY, best_value=4.0) == pytest.approx(3 + 0.6 + 2 * 0.2)
    assert primal_integral_s(HISTORY[:1]) is None
    assert primal_integral_s(()) is None


def test_result_has_both_of_its_history():
    """As a file states them; a solve without a schedule has no primal integral."""
    result = solve(skip_problem(), time_limit=30)
    assert result.gap_over_time[-1] == (result.history[-1][0], result.gap)
    assert 0 < result.primal_integral_s <= result.wall_s
    assert result.to_dict()["primal_integral_s"] == result.primal_integral_s
    assert without_schedule().primal_integral_s is None
