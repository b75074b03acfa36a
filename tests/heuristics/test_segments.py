"""Schedules by segments: recurrences of many steps get one within a fraction of their RAM."""

from dataclasses import replace

import pytest

from poetmodel.device import Costs
from poetmodel.errors import TimeLimitError
from poetmodel.graph import Graph, Node, Phase, Tensor, checkpoint_all_peak_bytes, floor
from poetmodel.heuristics.repair import Repair
from poetmodel.heuristics.segments import SegmentSearch
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import check_schedule
from poetmodel.solver import solve, task

STATE_BYTES, GATES_BYTES = 100, 700


def recurrence(steps):
    """Return a recurrence: each step makes gates, then the next state; both gradients read both."""

    def node(name, size_bytes, inputs, phase):
        made = Tensor(name=name, bytes=size_bytes)
        return Node(name=name, op="step", phase=phase, inputs=inputs, outputs=(made,), flops=100)

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    nodes = [node("state0", STATE_BYTES, (), forward)]
    for k in range(1, steps + 1):
        nodes.append(node(f"gates{k}", GATES_BYTES, (f"state{k - 1}",), forward))
        nodes.append(node(f"state{k}", STATE_BYTES, (f"gates{k}",), forward))
    gradient = f"state{steps}"
    for k in range(steps, 0, -1):
        read = tuple(dict.fromkeys((f"gates{k}", f"state{k - 1}", gradient)))
        gradient = f"gradient{k}"
        nodes.append(node(gradient, STATE_BYTES, read, backward))
    return Graph(name="recurrence", nodes=tuple(nodes))


def problem_of(graph, **limits):
    """Return the problem of least time, every node as long as the next."""
    times = [1.0] * len(graph.nodes)
    costs = Costs.from_arrays(graph, compute_time_s=times, compute_energy_j=times)
    return Problem(graph, costs, paging=False, **limits)


def find_schedule(problem):
    """Return the best schedule by segments, repaired; None if none meets the limits."""
    search = SegmentSearch(problem)
    search.find_best()
    search.improve()
    return search.schedule()


@pytest.mark.parametrize("steps", [100, 200])
def test_recurrences_get_schedules_within_a_fraction_of_their_ram(steps):
    """A fifth of keep-all is enough, and no node of the forward pass runs three times."""
    graph = recurrence(steps)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) // 5, minimize="time")
    schedule = find_schedule(problem)
    assert not check_schedule(problem, schedule).violations
    recomputed = [k for t, k in schedule.R if k < t]
    assert len(recomputed) == len(set(recomputed)) > 0


def test_least_ram_of_a_recurrence_is_near_that_of_the_best_segments():
    """With √n segments a chain needs about 2√n steps in RAM (Chen et al., 2016)."""
    graph = recurrence(100)
    problem = problem_of(graph, ram="100%", minimize="ram")
    schedule = find_schedule(problem)
    verdict = check_schedule(problem, schedule)
    assert not verdict.violations
    peak_bytes = verdict.simulation.peak_ram_bytes
    # 10 segments: 10 states kept, and 10 steps of one segment with their gates; repair goes lower.
    segment_bytes = 10 * (STATE_BYTES + GATES_BYTES)
    assert floor(graph).bytes <= peak_bytes <= 10 * STATE_BYTES + segment_bytes + 2 * GATES_BYTES


def test_best_segments_are_kept_where_time_ends_in_their_repair(monkeypatch):
    """A time limit during the repair loses only the gain of the repair."""

    def run_out_of_time(_):
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr(Repair, "fit", run_out_of_time)
    problem = problem_of(recurrence(100), ram="100%", minimize="ram")
    verdict = check_schedule(problem, find_schedule(problem))
    assert not verdict.violations
    assert verdict.simulation.peak_ram_bytes < checkpoint_all_peak_bytes(problem.graph) / 3


def test_phases_may_be_plain_words():
    """A graph of a file, whose phases are strings, is divided as one whose phases are members."""
    made = recurrence(100)
    read = Graph.from_dict(made.to_dict())
    schedules = [
        find_schedule(problem_of(graph, ram="20%", minimize="time")) for graph in (made, read)
    ]
    assert schedules[0] is not None
    assert schedules[0].R == schedules[1].R


def test_nothing_is_cut_where_that_cannot_help():
    """Small graphs, those that fit, and those without recomputation have no such schedule."""
    large, small = recurrence(100), recurrence(20)
    limited = problem_of(large, ram="50%", minimize="time")
    assert SegmentSearch.applies_to(limited)
    assert find_schedule(limited) is not None
    assert not SegmentSearch.applies_to(replace(limited, ram="100%"))
    assert find_schedule(replace(limited, recompute=False)) is None
    assert not SegmentSearch.applies_to(problem_of(small, ram="50%", minimize="time"))


def test_greedy_repair_counts_before_segments():
    """If a user stops at the first report, the result is better than the best division."""
    graph = recurrence(100)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) // 3, minimize="time")
    search = SegmentSearch(problem)
    search.find_best()
    result = solve(problem, on_progress=lambda _: False)
    assert result.termination == Termination.INTERRUPTED
    divided = check_schedule(problem, search.schedule()).simulation
    assert result.simulation.makespan_s < divided.makespan_s


def test_segments_follow_where_greedy_repair_finds_nothing(monkeypatch):
    """The first schedule is the best division into segments."""
    monkeypatch.setattr(task, "construct", lambda *_, **__: None)
    graph = recurrence(100)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) // 3, minimize="time")
    search = SegmentSearch(problem)
    search.find_best()
    result = solve(problem, on_progress=lambda _: False)
    assert search.schedule() is not None
    assert result.schedule == search.schedule()


def test_the_first_division_of_a_large_graph_counts_before_the_others(monkeypatch):
    """It is worse than the best one, which the search still finds."""
    monkeypatch.setattr(task, "EARLY_NODES", 0)
    graph = recurrence(150)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) * 2 // 3, minimize="time")
    first, best = SegmentSearch(problem), SegmentSearch(problem)
    first.find_first()
    best.find_best()
    early = first.schedule()
    assert early != best.schedule()
    result = solve(problem, on_progress=lambda _: False)
    assert result.schedule == early
    first.find_best()
    assert first.schedule() == best.schedule()


def test_a_large_graph_needs_no_greedy_repair_after_a_division(monkeypatch):
    """The first division is the first schedule; that of the proof is the optimum."""
    graph = recurrence(70)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) * 2 // 3, minimize="time")
    usual = solve(problem, gap=0.0)
    monkeypatch.setattr(task, "EARLY_NODES", 0)
    monkeypatch.setattr(task, "construct", lambda *_, **__: pytest.fail("no repair is needed"))
    result = solve(problem, gap=0.0)
    assert result.status == usual.status == Status.OPTIMAL
    assert result.simulation.makespan_s == usual.simulation.makespan_s


def test_a_large_graph_that_no_division_fits_is_repaired(monkeypatch):
    """A schedule by the other divisions or by greedy repair is the first."""
    monkeypatch.setattr(task, "EARLY_NODES", 0)
    graph = recurrence(70)
    problem = problem_of(graph, ram=checkpoint_all_peak_bytes(graph) // 15, minimize="time")
    divided = SegmentSearch(problem)
    divided.find_first()
    assert divided.schedule() is None
    result = solve(problem, on_progress=lambda _: False)
    assert result.schedule is not None
