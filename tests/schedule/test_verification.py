"""The verdict: limits of the problem, switches, claims of a file, and whose schedule it is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.instances import make_rng, random_graph, random_instance, random_schedule, random_step
from kit.worked import bench_device, even_costs, make_state_node, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.errors import InputError, ScheduleError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.report.facts import decision_rows
from poetmodel.result import Status
from poetmodel.schedule import (
    Schedule,
    check_identity,
    check_schedule,
    checkpoint_all,
    simulate,
    with_immediate_page_outs,
)
from poetmodel.schedule.decisions import (
    Treatment,
    find_decisions,
    in_place_uses,
    saved_in_place_bytes,
    steps_at_limit,
)
from poetmodel.solver import solve


@pytest.fixture
def graph():
    """Return x(8), y(x; 8), z(y; 8), w(z, x; 1), with 100 resident bytes."""
    return Graph(
        name="skip",
        nodes=(
            operation("x", output_bytes=8),
            operation("y", output_bytes=8, inputs=("x",)),
            operation("z", output_bytes=8, inputs=("y",)),
            operation("w", output_bytes=1, inputs=("z", "x")),
        ),
        resident_bytes={"parameters": 60, "gradients": 40},
    )


@pytest.fixture
def costs(graph):
    """Return 1 s and 2 J per node, 0.5 s and 1 J per transfer."""
    return Costs.from_arrays(
        graph,
        compute_time_s=[1.0] * 4,
        compute_energy_j=[2.0] * 4,
        page_in=[(0.5, 1.0)] * 4,
        page_out=[(0.5, 1.0)] * 4,
    )


@pytest.fixture
def paged(graph):
    """Return x paged out and in: peak 17 B, 8 B on storage, 4 s and 1 s, 8 J and 2 J."""
    return replace(
        checkpoint_all(graph),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )


@pytest.fixture
def recomputed(graph):
    """Return x computed again in stage 3: peak 17 B, 5 s, 10 J."""
    return replace(
        checkpoint_all(graph),
        R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
    )


def test_valid_schedule_has_no_violations(graph, costs, paged):
    """Within every limit its figures are the simulation's; else everything is reported."""
    problem = Problem(graph, costs, ram=17, deadline=5.0, aux_bytes=8, energy_budget=10.0)
    verdict = check_schedule(problem, paged)
    assert verdict.valid
    assert verdict.violations == ()
    assert verdict.simulation == simulate(graph, costs, paged, deadline_counts="serial")
    problem = Problem(
        graph, costs, ram=16, deadline=1.0, aux_bytes=1, energy_budget=1.0, paging=False
    )
    broken = replace(paged, S_RAM=paged.S_RAM[1:])
    verdict = check_schedule(problem, broken)
    kinds = [text.split(" ")[0].split("[")[0] for text in verdict.violations]
    assert kinds == ["R", "M_in", "M_out", "peak", "storage", "time", "energy"]
    assert not verdict.valid


@pytest.mark.parametrize(
    ("limits", "violation"),
    [
        (
            {"ram": 16},
            "peak RAM 17 B at stage 3, step 3 ('w') is 1 B above the 16 B that tensors may use",
        ),
        ({"ram": 17}, None),
        ({"ram": 117, "count_parameters": True}, None),
        ({"aux_bytes": 7}, "storage used 8 B is above the limit of 7 B"),
        ({"aux_bytes": 8}, None),
        ({"deadline": 4.9}, "time 5 s (serial) is above the deadline of 4.9 s"),
        ({"deadline": 5.0}, None),
        ({"deadline": 4.0, "deadline_counts": "compute"}, None),
        (
            {"deadline": 3.9, "deadline_counts": "compute"},
            "time 4 s (compute) is above the deadline of 3.9 s",
        ),
        ({"energy_budget": 9.5}, "energy 10 J is above the budget of 9.5 J"),
        ({"energy_budget": 10.0}, None),
    ],
)
def test_each_limit_is_verified(graph, costs, paged, limits, violation):
    """A value equal to the limit is valid; beyond it, the violation has both numbers."""
    verdict = check_schedule(Problem(graph, costs, **{"ram": 100, **limits}), paged)
    assert verdict.violations == (() if violation is None else (violation,))


@pytest.mark.parametrize(("excess", "valid"), [(0.0, True), (9e-10, True), (1.2e-9, False)])
@pytest.mark.parametrize("key", ["deadline", "energy_budget"])
def test_times_and_energies_have_a_relative_tolerance(graph, key, excess, *, valid):
    """A part in 1e9 above the limit is still within it, a little more is not."""
    scale = 1e6 * (1 + excess)
    costs = Costs.from_arrays(
        graph, compute_time_s=[scale / 4] * 4, compute_energy_j=[scale / 4] * 4
    )
    limit = {key: 1e6}
    assert (
        check_schedule(Problem(graph, costs, ram=100, **limit), checkpoint_all(graph)).valid
        is valid
    )


def test_deadline_of_exactly_one_pass_is_feasible(graph):
    """Times that have no exact sum do not make 100 % of one pass a violation."""
    costs = Costs.from_arrays(graph, compute_time_s=[0.1, 0.2, 0.3, 1e-7], compute_energy_j=[1] * 4)
    for deadline in ("100%", sum([1e-7, 0.3, 0.2, 0.1])):
        assert check_schedule(
            Problem(graph, costs, ram=100, deadline=deadline), checkpoint_all(graph)
        ).valid


def test_recomputation_and_paging_can_be_forbidden(graph, costs, paged, recomputed):
    """Each forbidden entry is named."""
    problem = Problem(graph, costs, ram=100, recompute=False)
    assert check_schedule(problem, recomputed).violations == (
        "R[3,0]: the problem allows no recomputation",
    )
    assert check_schedule(problem, paged).valid
    problem = Problem(graph, costs, ram=100, paging=False)
    assert check_schedule(problem, recomputed).valid
    assert check_schedule(problem, paged).violations == (
        "M_in[3,0]: the problem allows no paging",
        "M_out[0,0]: the problem allows no paging",
    )


def test_storage_of_no_size_still_gives_its_samples(graph, costs):
    """With room for no page-out, a tensor that starts on storage may still be paged in."""
    nodes = (replace(graph.nodes[0], on_aux=True), *graph.nodes[1:])
    sample = replace(graph, nodes=nodes)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 3)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((3, 0),),
        M_in=((3, 0),),
    )
    problem = Problem(sample, costs, ram=17, aux_bytes=0)
    assert problem.can_page
    assert check_schedule(problem, schedule).violations == ()
    out = check_schedule(problem, replace(schedule, M_out=((1, 1),)))
    assert out.violations == ("storage used 8 B is above the limit of 0 B",)


def test_schedule_of_another_graph_is_refused(graph, costs):
    """A schedule that names another graph is not verified at all; the error names both."""
    other = replace(graph, name="other")
    schedule = checkpoint_all(other)
    with pytest.raises(ScheduleError, match=r"made for graph 'other' .*not for this 'skip'"):
        check_schedule(Problem(graph, costs, ram=100), schedule)
    with pytest.raises(ScheduleError):
        check_identity(graph, schedule)
    check_identity(graph, replace(schedule, identity=None))
    check_identity(other, schedule)
    wrongs = ((None, "got nothing$"), (SimpleNamespace(schedule=schedule), "give its .schedule$"))
    for wrong, words in wrongs:
        with pytest.raises(ScheduleError, match=f"expected a Schedule, .*{words}"):
            check_identity(graph, wrong)


def test_overlap_deadline_takes_a_makespan(graph, costs, paged):
    """A deadline that a plan must keep is not measured by serial time behind the user's back."""
    problem = Problem(graph, costs, ram=100, deadline=10, deadline_counts="overlap")
    with pytest.raises(InputError, match="requires a plan"):
        check_schedule(problem, paged)
    assert check_schedule(problem, paged, makespan_s=10.0).valid
    late = check_schedule(problem, paged, makespan_s=10.5)
    assert late.simulation.time_s == late.simulation.makespan_s == 10.5
    assert late.violations == ("time 10.5 s (overlap) is above the deadline of 10 s",)
    assert check_schedule(Problem(graph, costs, ram=100, deadline_counts="overlap"), paged).valid


def test_idle_power_counts_against_the_energy_budget(graph, costs, paged):
    """2 W over 5 s of serial time, or over 4 s of compute, count against the energy budget."""
    idle = replace(costs, device=bench_device(idle_power_w=2.0))
    serial = Problem(graph, idle, ram=100, deadline_counts="serial", energy_budget=19.9)
    assert check_schedule(serial, paged).violations == (
        "energy 20 J is above the budget of 19.9 J",
    )
    compute = Problem(graph, idle, ram=100, deadline_counts="compute", energy_budget=18.0)
    assert check_schedule(compute, paged).valid


def test_wanted_page_outs_count_once(graph, costs):
    """Paging out a tensor on storage satisfies no lower limit; without one, it is valid waste."""
    plain = Problem(graph, costs, ram=100)
    twice = replace(checkpoint_all(graph), M_out=((0, 0), (1, 0)))
    assert check_schedule(plain, twice).valid
    name = graph.tensors[0].name
    wanted = plain.subject_to(out=lambda v: v.page_outs[name] >= 2)
    assert solve(wanted).status == Status.INFEASIBLE
    verdict = check_schedule(wanted, twice)
    assert len(verdict.violations) == 1
    assert verdict.violations[0].startswith("M_out[1,0]: tensor 'x' is on storage already")


# -- claims of a file --------------------------------------------------------------------------
TRUE = {
    "energy_j": 10.0,
    "baseline_energy_j": 8.0,
    "overhead_j": 2.0,
    "peak_ram_bytes": 17,
    "compute_s": 4.0,
    "transfer_s": 1.0,
    "makespan_s": 5.0,
    "bound_j": 9.0,
    "build_s": 123.0,
}


def test_true_claims_pass(graph, costs, paged):
    """Figures that the simulation confirms, absent ones, and ones it cannot know all pass.

    An overhead is a difference of energies: rounding of them is no false claim. No bound can be
    above the energy of a schedule that exists.
    """
    problem = Problem(graph, costs, ram=100)
    assert check_schedule(problem, paged, stated=TRUE).valid
    assert check_schedule(problem, paged, stated=dict.fromkeys(TRUE)).valid
    assert check_schedule(problem, paged, stated={"energy_j": 10.0 * (1 + 9e-10)}).valid
    assert check_schedule(problem, checkpoint_all(graph), stated={"overhead_j": 1e-9}).valid
    assert not check_schedule(problem, checkpoint_all(graph), stated={"overhead_j": 1e-7}).valid
    verdict = check_schedule(problem, paged, stated={"bound_j": 10.1})
    assert verdict.violations == (
        "bound_j: the stated bound 10.1 is above the simulated energy 10.0",
    )
    assert check_schedule(problem, paged, stated={"bound_j": 10.0 * (1 + 5e-10)}).valid


@pytest.mark.parametrize(
    ("key", "claim"),
    [
        ("energy_j", 9.99),
        ("energy_j", 10.0 * (1 + 1.1e-9)),
        ("baseline_energy_j", 8.1),
        ("overhead_j", 2.1),
        ("peak_ram_bytes", 16),
        ("peak_ram_bytes", 17.000000001),
        ("compute_s", 4.1),
        ("transfer_s", 0.0),
        ("makespan_s", 4.0),
    ],
)
def test_each_false_claim_is_named(graph, costs, paged, key, claim):
    """A number that the simulation does not confirm is a violation with both numbers."""
    verdict = check_schedule(Problem(graph, costs, ram=100), paged, stated={**TRUE, key: claim})
    assert len(verdict.violations) == 1
    assert verdict.violations[0].startswith(f"{key}: the file says {claim!r}, the simulation gives")


@pytest.mark.parametrize(
    ("bound_j", "gap", "said"),
    [
        (2.1, 0.0, "overhead_bound_j: the stated bound 2.1 is above the simulated overhead 2.0"),
        (1.0, 0.0, "gap: the file says 0.0, but its bound 1.0 leaves 1.0 J of the simulated"),
        (0.0, 0.5, "gap: the file says 0.5, but its bound 0.0 leaves 2.0 J of the simulated"),
        (1.0, 0.5, None),
        (2.0, 0.0, None),
        (0.0, None, None),
        (None, 0.3, None),
    ],
)
def test_gap_is_that_of_the_bound_beside_it(graph, costs, paged, bound_j, gap, said):
    """A file cannot claim a proof that its own bound does not permit."""
    stated = {**TRUE, "overhead_bound_j": bound_j, "gap": gap}
    verdict = check_schedule(Problem(graph, costs, ram=100), paged, stated=stated)
    assert len(verdict.violations) == (said is not None)
    assert all(violation.startswith(said or "") for violation in verdict.violations)


@pytest.mark.parametrize(
    ("minimize", "bound", "gap", "asked", "said"),
    [
        ("energy", 9.0, 0.5, 0.5, None),
        ("energy", 9.0, 0.5, None, None),
        ("energy", 9.0, 0.4, None, "objective.gap: the file says 0.4, but its bound 9.0 leaves 1"),
        ("energy", 9.0, 0.5, 0.1, "status: the file says optimal to a gap of 0.1, but its gap is"),
        ("energy", None, 1.0, 0.1, "status: the file says optimal to a gap of 0.1, but its gap is"),
        ("writes", 6, 0.25, 0.25, None),
        ("writes", 6, 0.0, 0.0, "objective.gap: the file says 0.0, but its bound 6 leaves 2"),
        ("ram", 11, 0.0, 0.0, "objective.gap: the file says 0.0, but its bound 11 leaves 6"),
    ],
)
def test_gap_and_status_are_those_of_the_objective(
    graph, costs, paged, minimize, bound, gap, asked, said
):
    """A file that calls a schedule optimal has a bound that is near enough to its value."""
    problem = Problem(graph, costs, ram=100, minimize=minimize)
    stated = {"objective.bound": bound, "objective.gap": gap, "problem.gap": asked}
    verdict = check_schedule(problem, paged, stated=stated)
    assert len(verdict.violations) == (said is not None), verdict.violations
    assert all(violation.startswith(said or "") for violation in verdict.violations)


# -- properties --------------------------------------------------------------------------------
@given(seed=st.integers(min_value=0, max_value=2**32))
@settings(deadline=None)
def test_verdict_is_the_simulation_plus_the_limits(seed):
    """A valid simulation is valid for a problem if and only if every figure keeps its limit."""
    rng = make_rng(seed)
    problem = random_instance(rng, (2, 6))
    schedule = random_schedule(rng, problem.graph)
    verdict = check_schedule(problem, schedule)
    run = verdict.simulation
    assert run.violations == ()
    kept = (
        run.peak_ram_bytes <= problem.usable_ram_bytes
        and (problem.aux_limit_bytes is None or run.aux_used_bytes <= problem.aux_limit_bytes)
        and (problem.deadline_s is None or run.time_s <= problem.deadline_s)
        and (problem.energy_budget_j is None or run.energy_j <= problem.energy_budget_j)
        and (problem.recompute or len(schedule.R) == len(problem.graph.nodes))
        and (problem.paging or not (schedule.M_in or schedule.M_out))
    )
    assert verdict.valid == kept, verdict.violations


# -- decisions -----------------------------------------------------------------------------------
def test_decisions_of_the_worked_example():
    """With 13 B, a is recomputed in stage 3, for 1 J and 1 s; the others are kept.

    Without recomputation, a is paged out in stage 0 and in in stage 3, for 2 J and 2 s. If
    nothing is recomputed or paged, RAM is at its limit at the peak.
    """
    problem = skip_problem()
    result = solve(problem)
    points = steps_at_limit(problem, result.require_schedule(), result.simulation)
    a, b, c, d = find_decisions(problem, result.require_schedule(), points)
    assert (a.treatment, a.recomputed, a.energy_j, a.time_s) == (
        Treatment.RECOMPUTED,
        (3,),
        1.0,
        1.0,
    )
    assert (a.in_ram, a.on_storage) == (((0, 1), (3, 3)), ())
    assert [decision.treatment for decision in (b, c, d)] == [
        Treatment.KEPT,
        Treatment.KEPT,
        Treatment.UNUSED,
    ]
    assert [(point.stage, point.node) for point in points] == [(2, 2)]
    assert [decision.bytes_at_limit for decision in (a, b, c, d)] == [0, 6, 5, 0]
    assert a.to_dict(problem.graph)["in_ram"] == [[0, 1], [3, 3]]
    problem = skip_problem(recompute=False)
    a, *_ = find_decisions(problem, solve(problem).require_schedule())
    assert (a.treatment, a.paged_out, a.paged_in) == (Treatment.PAGED, (0,), (3,))
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
    rng = make_rng(f"held/{number}")
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
    rng = make_rng(f"decisions on state, mapped {mapped}")
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
    """State pays for its first read and its write-back; replacements cost nothing."""
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
            homes.add(decision.treatment)
            assert (decision.treatment == Treatment.RESIDENT) == (i in schedule.resident)
            away = i in graph.state_tensors and i not in schedule.resident
            assert (decision.treatment == Treatment.ON_STORAGE) == away
            assert (decision.treatment == Treatment.REPLACEMENT) == (
                i in graph.replacement_of.values()
            )
            if decision.treatment == Treatment.RESIDENT:
                assert decision.in_ram == ((0, len(graph.nodes) - 1),)
            if decision.treatment == Treatment.ON_STORAGE and mapped:
                assert decision.in_ram == decision.paged_in == ()
    assert {Treatment.RESIDENT, Treatment.ON_STORAGE, Treatment.REPLACEMENT} <= homes


def test_outputs_are_in_place_where_the_simulator_has_them_so():
    """At each step, the curve is lower by the saved bytes, and the peak is the stated one."""
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
    """Steps with less free RAM than a state tensor on storage are those that keep it there."""
    w, v = make_state_node("w", 8), make_state_node("v", 3)
    nodes = (
        w,
        v,
        operation("y", output_bytes=6, inputs=("w", "v")),
        operation("z", output_bytes=2, inputs=("y",)),
        operation("end", output_bytes=1, inputs=("z",)),
    )
    graph = Graph(name="step", nodes=nodes)
    schedule = with_immediate_page_outs(
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
