"""What a schedule decides on each tensor, what that costs, and where RAM is at its limit."""

from dataclasses import replace

import pytest

from kit.instances import (
    random_graph,
    random_schedule,
    random_step,
    seeded,
)
from kit.worked import bench_device, even_costs, skip_graph, skip_problem, state
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.report.facts import decision_rows
from poetmodel.schedule import checkpoint_all, paged_at_once, simulate
from poetmodel.schedule.decisions import (
    Treatment,
    find_decisions,
    in_place_uses,
    saved_in_place_bytes,
    steps_at_limit,
)
from poetmodel.solver import solve


def test_decisions_of_the_worked_example():
    """With 13 B, a is computed again in stage 3, for 1 J and 1 s; the others are kept.

    Without recomputation, a goes out in stage 0 and comes back in stage 3, for 2 J and 2 s. If
    nothing is recomputed or paged, RAM is at its limit at the peak.
    """
    problem = skip_problem()
    result = solve(problem)
    points = steps_at_limit(problem, result.require_schedule(), result.simulation)
    a, b, c, d = find_decisions(problem, result.require_schedule(), points)
    assert (a.choice, a.recomputed, a.energy_j, a.time_s) == (Treatment.RECOMPUTED, (3,), 1.0, 1.0)
    assert (a.in_ram, a.on_storage) == (((0, 1), (3, 3)), ())
    assert [decision.choice for decision in (b, c, d)] == [
        Treatment.KEPT,
        Treatment.KEPT,
        Treatment.UNUSED,
    ]
    assert [(point.stage, point.node) for point in points] == [(2, 2)]
    assert [decision.bytes_at_limit for decision in (a, b, c, d)] == [0, 6, 5, 0]
    assert a.to_dict(problem.graph)["in_ram"] == [[0, 1], [3, 3]]
    problem = skip_problem(recompute=False)
    a, *_ = find_decisions(problem, solve(problem).require_schedule())
    assert (a.choice, a.paged_out, a.paged_in) == (Treatment.PAGED, (0,), (3,))
    assert (a.energy_j, a.time_s) == (2.0, 2.0)
    assert a.on_storage == ((1, 3),)
    graph = skip_graph()
    problem = Problem(graph, even_costs(graph), ram=20)
    schedule = checkpoint_all(graph)
    points = steps_at_limit(problem, schedule, simulate(graph, None, schedule))
    assert [(point.stage, point.node, point.ram_bytes) for point in points] == [(2, 2, 15)]


@pytest.mark.parametrize("number", range(12))
def test_tensors_in_ram_are_those_that_the_simulator_counts(number):
    """At every executed step the tensors in RAM add up to the simulator's curve."""
    rng = seeded(f"held/{number}")
    graph = random_graph(rng, (4, 7), on_aux=False, two_outputs=False)
    schedule = random_schedule(rng, graph)
    problem = Problem(graph, even_costs(graph), ram=2**40)
    simulation = simulate(graph, None, schedule)
    assert simulation.valid
    for point in simulation.curve:
        t, k, used_bytes = point
        total = sum(d.bytes_at_limit for d in find_decisions(problem, schedule, [point]))
        computed = (t, k) in schedule.R
        total += graph.nodes[k].workspace_bytes * computed
        # A node that is computed beside an old copy of its output counts both for that step.
        old = sum(
            graph.tensor_bytes[i]
            for i in graph.outputs_of[k]
            if computed and ((t, i) in schedule.S_RAM or (t, i) in schedule.M_in)
        )
        assert used_bytes == total + old


# -- state and operators in place --------------------------------------------------------------
def random_steps(count, *, mapped):
    """Yield valid schedules of random training steps, on storage that is memory-mapped or not."""
    rng = seeded(f"decisions on state, mapped {mapped}")
    device = bench_device()
    assert device.storage is not None
    device = replace(device, storage=replace(device.storage, memory_mapped=mapped))
    while count:
        graph = random_step(rng, (4, 9), flops=1_000_000)
        schedule = random_schedule(rng, graph, mapped=mapped)
        if schedule is None:
            continue
        problem = Problem(graph, Costs.estimate(graph, device), ram=10**6)
        simulation = simulate(graph, problem.costs, schedule)
        if simulation.valid:
            count -= 1
            yield problem, schedule, simulation


@pytest.mark.parametrize("mapped", [False, True])
def test_what_tensors_cost_adds_up_to_the_overhead(mapped):
    """State pays for its first read and its write-back; replacements pay nothing."""
    homes = set()
    for problem, schedule, simulation in random_steps(150, mapped=mapped):
        rows = list(decision_rows(problem, schedule))
        assert sum(row["energy_j"] for row in rows) == pytest.approx(simulation.overhead_j)
        read = sum(row["paged_in"] * row["size_bytes"] for row in rows)
        written = sum(row["paged_out"] * row["size_bytes"] for row in rows)
        assert (read, written) == (simulation.read_bytes, simulation.written_bytes)
        graph = problem.graph
        for decision in find_decisions(problem, schedule):
            i = decision.tensor
            homes.add(decision.choice)
            assert (decision.choice == Treatment.RESIDENT) == (i in schedule.resident)
            away = i in graph.state_tensors and i not in schedule.resident
            assert (decision.choice == Treatment.ON_STORAGE) == away
            assert (decision.choice == Treatment.REPLACEMENT) == (
                i in graph.replacement_of.values()
            )
            if decision.choice == Treatment.RESIDENT:
                assert decision.in_ram == ((0, len(graph.nodes) - 1),)
            if decision.choice == Treatment.ON_STORAGE and mapped:
                assert decision.in_ram == decision.paged_in == ()
    assert {Treatment.RESIDENT, Treatment.ON_STORAGE, Treatment.REPLACEMENT} <= homes


def test_outputs_are_in_place_where_the_simulator_has_them_so():
    """At each step the curve is lower by what they save, and the peak by what is said of it."""
    lower = 0
    for problem, schedule, simulation in random_steps(200, mapped=False):
        graph = problem.graph
        apart = replace(graph, nodes=tuple(replace(node, in_place=()) for node in graph.nodes))
        without = simulate(apart, problem.costs, schedule)
        saved = {}
        for use in in_place_uses(graph, schedule):
            assert (use.output, use.input) in graph.in_place_of[use.node]
            at = (use.stage, use.node)
            saved[at] = saved.get(at, 0) + use.saved_bytes
        read = {(t, graph.node_of[i]) for t, i in schedule.M_in}
        for point, plain in zip(simulation.curve, without.curve, strict=True):
            at = (point.stage, point.node)
            difference = plain.ram_bytes - point.ram_bytes
            assert difference <= saved.get(at, 0)
            assert difference == saved.get(at, 0) or at in read
        peak = saved_in_place_bytes(problem, schedule, simulation)
        assert peak == without.peak_ram_bytes - simulation.peak_ram_bytes
        lower += peak > 0
    assert lower > 10


def test_state_on_storage_has_ram_at_its_limit():
    """Steps with less room than a state tensor on storage takes are those that keep it there."""
    w, v = state("w", 8), state("v", 3)
    nodes = (
        w,
        v,
        operation("y", output_bytes=6, inputs=("w", "v")),
        operation("z", output_bytes=2, inputs=("y",)),
        operation("end", output_bytes=1, inputs=("z",)),
    )
    graph = Graph(name="step", nodes=nodes)
    schedule = paged_at_once(
        graph,
        R=[(t, t) for t in range(5)],
        kept=[(0, 1, 2), (2, 3, 3), (3, 4, 4)],
        M_in=(),
        identity=None,
        resident=(1,),
    )
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=17)
    simulation = simulate(graph, problem.costs, schedule)
    assert simulation.valid
    # w is out of RAM from stage 3 on: 3 + 6 + 2 B there leave 6 B, and at the end 11 B are free.
    assert [point.stage for point in steps_at_limit(problem, schedule, simulation)] == [3]
    loose = replace(problem, ram=19)
    assert steps_at_limit(loose, schedule, simulation) == ()
