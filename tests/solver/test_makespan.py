"""Makespans: a deadline is kept by the plan, the bound holds for every plan."""

from dataclasses import replace

import pyomo.environ as pyo
import pytest

from kit.instances import (
    make_rng,
    random_costs,
    random_graph,
    random_schedule,
    random_step,
    scarce_problem,
    state_problem,
)
from kit.oracle import optimum
from kit.rotation import parametrize_parts
from kit.worked import bench_device
from poetmodel.device import Costs
from poetmodel.errors import TimeLimitError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.model import build
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.sensitivity import find_limits

CLOSE = 1e-6
SEEDS_OF_BRANCHES = (18, 31)
MORE_BRANCHES = pytest.param(range(100, 160), marks=pytest.mark.seeds)


def slow_storage(page_s=2.0, **limits):
    """Return a chain whose sample must leave RAM, by a slow page or an expensive recomputation.

    x is read at once by a and in the end by d; b has a workspace for which x must be evicted.
    All tensors have 4 B, and the budget is 12 B. One pass takes 10 s and 10 J: x 1 s, a 3 s, b
    3 s, c 2 s, d 1 s, and 2 J each. Paging x costs 1 J, and a transfer 2 s: out from 1 s to 3
    s, in from 7 s, when b has ended, to 9 s, when d begins. Recomputing it takes 1 s and 2 J.
    """
    graph = Graph(
        name="slow-storage",
        nodes=(
            operation("x", output_bytes=4),
            operation("a", output_bytes=4, inputs=("x",)),
            operation("b", output_bytes=4, inputs=("a",), workspace_bytes=4),
            operation("c", output_bytes=4, inputs=("b",)),
            operation("d", output_bytes=4, inputs=("c", "x")),
        ),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 3, 3, 2, 1],
        compute_energy_j=[2, 2, 2, 2, 2],
        page_in=[(page_s, 0.5)] * 5,
        page_out=[(page_s, 0.5)] * 5,
    )
    return Problem(graph, costs, **{"ram": 12, "deadline_counts": "overlap", **limits})


def two_branches(**limits):
    """Return a training step of two branches whose quickest plan misses each sum that is tried.

    Its least time needs transfers that hide behind computations, in another order than that of any
    surrogate with a deadline.
    """
    rows = (
        ("t0", (), 64, (16, 6), (15, 16), (10, 2)),
        ("t1", (), 52, (8, 13), (20, 19), (4, 3)),
        ("t2", (), 35, (20, 18), (2, 4), (1, 20)),
        ("t3", (), 6, (14, 18), (3, 19), (3, 4)),
        ("p0", ("t0", "t1"), 50, (18, 8), (3, 2), (19, 17)),
        ("p1", ("t2", "t3"), 17, (18, 17), (6, 19), (12, 2)),
        ("l", ("p0", "p1"), 7, (20, 12), (5, 15), (18, 10)),
        ("ga", ("l", "t0", "t1"), 47, (8, 2), (20, 6), (1, 10)),
        ("gb", ("l", "t2", "t3", "ga"), 64, (14, 4), (11, 11), (13, 10)),
    )
    fixed, spacious = {"p0", "p1", "gb"}, {"p0", "gb"}
    phases = {"l": "loss", "ga": "backward", "gb": "backward"}
    nodes = tuple(
        operation(
            name,
            output_bytes=size,
            inputs=inputs,
            phase=phases.get(name, "forward"),
            workspace_bytes=27 if name in spacious else 0,
            recomputable=name not in fixed,
        )
        for name, inputs, size, *_ in rows
    )
    graph = Graph(name="two-branches", nodes=nodes)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[row[3][0] for row in rows],
        compute_energy_j=[row[3][1] for row in rows],
        page_in=[row[4] for row in rows],
        page_out=[row[5] for row in rows],
    )
    return Problem(graph, costs, **{"ram": 198, "deadline_counts": "overlap", **limits})


def planned_s(problem, result):
    """Return the makespan of a result's plan, by the verifier of plans."""
    graph, costs, ram = problem.graph, problem.costs, problem.usable_ram_bytes
    plan = make_plan(graph, costs, result.require_schedule(), mode="dma", ram_budget_bytes=ram)
    check = check_plan(graph, costs, plan)
    assert check.valid, check.violations
    return check.makespan_s


def overlapping(problem, **changes):
    """Return a problem in the meaning ``overlap``, without a device and so without idle power.

    Idle power is drawn over the time that counts, so meanings could not be compared.
    """
    costs = replace(problem.costs, device=None)
    return replace(problem, **{"costs": costs, "deadline_counts": "overlap", **changes})


@pytest.mark.parametrize("formulation", ["lazy", "compact"])
def test_transfers_hide_behind_computing(formulation):
    """Paging x takes 4 s of the bus and none of the core, so one pass of 10 s is enough."""
    problem = slow_storage(deadline=10)
    result = solve(problem, formulation=formulation)
    assert result.status == Status.OPTIMAL
    assert result.overhead_j == pytest.approx(1.0)
    assert result.to_dict()["makespan_s"] == pytest.approx(10.0)
    assert planned_s(problem, result) == pytest.approx(10.0)
    assert solve(slow_storage(deadline=10, deadline_counts="serial")).schedule is None


@pytest.mark.parametrize(
    ("seed", "minimize"), [(24, "energy"), (55, "time"), (363, "time"), (365, "ram")]
)
def test_deadline_of_the_quickest_plan_is_kept(seed, minimize):
    """The minimum time is found again if it is the deadline of a makespan.

    The sum of compute time and a part of the transfer time misses it, for all tried fractions.
    """
    rng = make_rng(f"dl/{seed}")
    graph = random_step(rng, (4, 7)) if seed % 2 else random_graph(rng, (4, 6))
    costs = random_costs(rng, graph, mode="dma", idle=False)
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    ram = rng.randint(low, high - 1)
    problem = Problem(graph, costs, ram=ram, deadline_counts="overlap", minimize="time")
    quickest_s = solve(problem, gap=0.0).simulation.time_s
    assert quickest_s is not None
    result = solve(replace(problem, minimize=minimize, deadline=quickest_s), gap=0.0)
    assert result.schedule is not None, result.reason
    assert verify(result.problem, result.schedule).valid


def test_makespans_are_those_of_plans():
    """Paging takes no additional time here: the pass of 10 s is reached and proven.

    Without a deadline, `makespan_s` is the plan's, and the status that of the energy; idle
    power of 3 W is drawn over it, and in the baseline over one pass. Below one pass, a deadline
    is infeasible; if only plans miss it, unknown with the best makespan. A callback that
    returns False ends the search.
    """
    result = solve(slow_storage(minimize="time"))
    assert (result.status, result.value) == (Status.OPTIMAL, pytest.approx(10.0))
    assert result.gap == 0.0
    problem = slow_storage()
    result = solve(problem)
    assert (result.status, result.simulation.compute_s) == (Status.OPTIMAL, 10.0)
    assert result.simulation.makespan_s == planned_s(problem, result)
    costs = replace(problem.costs, device=bench_device(idle_power_w=3.0))
    result = solve(replace(problem, costs=costs))
    figures = (result.energy_j, result.problem.baseline_energy_j, result.overhead_j)
    assert figures == pytest.approx((10.0 + 1.0 + 30.0, 40.0, 1.0))
    assert solve(slow_storage(deadline=9.9)).status == Status.INFEASIBLE
    # With 4.9 s a transfer core and bus are each within 10 s, but b waits for the page-out until
    # 5.9 s, and d for the page-in, from 8.9 s, until 13.8 s. With x computed anew it takes 11 s.
    result = solve(slow_storage(4.9, deadline=10))
    assert result.status == Status.UNKNOWN
    assert result.termination != Termination.PROVED
    assert "makespan found is 11 s" in result.reason
    result = solve(slow_storage(deadline=10), on_progress=lambda _: False)
    assert result.termination in (Termination.INTERRUPTED, Termination.PROVED)


def random_branches(seed):
    """Draw the costs, sizes and RAM of a training step of two branches, as `two_branches` has."""
    rng = make_rng(f"branches/{seed}")
    heads, loss = {"p0": ("t0", "t1"), "p1": ("t2", "t3")}, ("p0", "p1")
    ends = {"ga": ("l", "t0", "t1"), "gb": ("l", "t2", "t3", "ga")}
    inputs = {**{f"t{i}": () for i in range(4)}, **heads, "l": loss, **ends}
    nodes = tuple(
        operation(
            name,
            output_bytes=rng.randint(5, 64),
            inputs=read,
            phase="loss" if name == "l" else "backward" if name in ends else "forward",
            workspace_bytes=rng.choice((0, 27)) if name in ("p0", "gb") else 0,
            recomputable=name not in ("p0", "p1", "gb"),
        )
        for name, read in inputs.items()
    )
    graph = Graph(name="branches", nodes=nodes)
    costs = random_costs(rng, graph, mode="dma", idle=False, zero_cost=False)
    low, high = floor(graph).bytes, checkpoint_all_peak_bytes(graph)
    ram = rng.randint(low, max(low, high - 1))
    return Problem(graph, costs, ram=ram, deadline_counts="overlap", minimize="time")


@pytest.mark.parametrize("seeds", [SEEDS_OF_BRANCHES, MORE_BRANCHES])
def test_the_least_time_of_two_branches_is_a_deadline_that_is_met(seeds):
    """Whatever is minimized within the deadline."""
    for seed in seeds:
        problem = random_branches(seed)
        least = solve(problem)
        if least.schedule is None:
            continue
        result = solve(replace(problem, minimize="energy", deadline=least.simulation.time_s))
        assert result.schedule is not None, (seed, result.reason)


@pytest.mark.parametrize(
    "minimize",
    ["energy", *(pytest.param(m, marks=pytest.mark.slow) for m in ("time", "ram", "writes"))],
)
def test_a_deadline_just_above_the_least_time_is_met(minimize):
    """The least time that is found for two branches is 146 s, which a deadline of 147 s admits."""
    least = solve(two_branches(minimize="time"))
    assert least.simulation.time_s == 146
    result = solve(two_branches(minimize=minimize, deadline=147))
    assert result.schedule is not None, result.reason
    assert verify(result.problem, result.schedule).valid
    late = solve(two_branches(minimize=minimize, deadline=145))
    assert late.schedule is None
    assert "best makespan found is 2.43 min" in late.reason


def test_model_with_own_rows_keeps_the_deadline_of_its_plan():
    """A user's constraint forbids the page-out; then x is recomputed, for 11 s."""
    for deadline, status in ((11, Status.OPTIMAL), (10, Status.INFEASIBLE)):
        model = build(slow_storage(deadline=deadline))
        model.no_writes = pyo.Constraint(
            expr=sum(model.M_out[t, i] for t in range(5) for i in range(t + 1)) <= 0
        )
        objective, problem = model.objective.expr, model.problem
        result = solve(model)
        assert result.status == status, deadline
        assert model.objective.expr is objective
        assert model.problem is problem
        assert model.component("stated_deadline") is None


def test_start_that_violates_rows_of_a_model_is_not_returned():
    """A schedule that pages x is no start of a model without page-outs."""
    problem = slow_storage(deadline=12)
    paged = solve(slow_storage(recompute=False)).require_schedule()
    assert paged.M_out
    model = build(problem)
    model.no_writes = pyo.Constraint(expr=sum(model.M_out[t, i] for t, i in model.M_out) <= 0)
    result = solve(model, start=paged)
    assert result.status == Status.OPTIMAL
    assert not result.require_schedule().M_out
    assert solve(build(problem), start=paged).require_schedule().M_out


@pytest.mark.parametrize("own_objective", [False, True])
def test_start_that_only_its_plan_brings_in_time_is_returned_by_a_model(own_objective):
    """The sums of a model miss the deadline of 147 s; a start that satisfies its rows meets it."""
    quickest = solve(two_branches(minimize="time")).require_schedule()
    n_written = len(quickest.M_out)
    for limit, found in ((n_written, True), (n_written - 1, False)):
        model = build(two_branches(deadline=147))
        written = sum(model.M_out.values())
        model.wear = pyo.Constraint(expr=written <= limit)
        if own_objective:
            model.objective.deactivate()
            model.few = pyo.Objective(expr=written)
        result = solve(model, start=quickest)
        assert (result.schedule is not None) == found
        if found:
            assert result.simulation.time_s <= 147
        if found and own_objective:
            assert result.value == len(result.schedule.M_out)
            assert result.bound is None or result.bound <= result.value


def test_given_plan_keeps_the_budget_of_the_problem():
    """A plan made for 16 B has x in RAM before b has ended, and 12 B do not hold it."""
    roomy, tight = slow_storage(page_s=3.0, ram=16), slow_storage(page_s=3.0)
    schedule = solve(slow_storage(recompute=False, page_s=3.0)).require_schedule()
    plan = make_plan(roomy.graph, roomy.costs, schedule, mode="dma", ram_budget_bytes=16)
    assert check_plan(roomy.graph, roomy.costs, plan).peak_ram_bytes == 16
    assert verify(roomy, schedule, plan=plan).valid
    assert "16 B" in verify(tight, schedule, plan=plan).violations[0]
    assert verify(tight, schedule).valid


def test_page_outs_that_a_plan_leaves_out_prove_nothing_of_its_makespan():
    """A user row requires page-outs that no page-in reads: a plan omits them."""

    def out(v):
        return sum(v.page_outs[name] for name in "abc") >= 3

    wanted = slow_storage(page_s=4.0, ram=16, deadline="100%").subject_to(out=out)
    result = solve(wanted)
    assert result.status == Status.OPTIMAL
    assert result.simulation.makespan_s == planned_s(wanted, result) == 10
    assert verify(wanted, result.require_schedule()).valid
    fastest = solve(slow_storage(page_s=4.0, minimize="time").subject_to(out=out))
    assert (
        fastest.value == 11
    )  # x is computed anew; page-outs, and the mean of both sums, take 23/2
    assert fastest.bound <= 11
    assert not fastest.reason
    problem = slow_storage()
    result = solve(problem)
    assert result.simulation.makespan_s == 10
    schedule, most_s = result.require_schedule(), 10 + result.simulation.transfer_s
    for stated_s, valid in ((10, True), (11.5, True), (most_s, True), (15, False), (9, False)):
        verdict = verify(problem, schedule, stated={"makespan_s": stated_s})
        assert verdict.valid == valid, stated_s
    late = verify(replace(problem, deadline=11), schedule, stated={"makespan_s": 11.5})
    assert "time 11.5 s (overlap) is above the deadline of 11 s" in late.violations[0]


@pytest.mark.parametrize("reductions", [True, False])
def test_rows_of_a_model_may_want_page_outs_that_no_plan_makes(*, reductions):
    """So they prove nothing about the bus."""
    problem = slow_storage(page_s=4.0, ram=16, deadline="100%")
    model = build(problem, reductions=reductions)
    first = [model.M_out[t, i] for t, i in model.M_out if i < 3]
    model.out = pyo.Constraint(expr=sum(first) >= 3)
    result = solve(model)
    assert (result.status, result.simulation.makespan_s) == (Status.OPTIMAL, 10)


def test_least_ram_is_that_in_which_the_plan_keeps_the_deadline():
    """Paging x needs 12 B if x is paged in when b has ended, at 11 s; with 16 B it is earlier."""
    limits = {"page_s": 3.0, "deadline": 10.5, "recompute": False}
    result = solve(slow_storage(**limits, ram=20, minimize="ram"))
    assert (result.value, result.simulation.makespan_s) == (16, 10)
    assert result.bound <= 16
    stated = {limit.name: limit for limit in find_limits(slow_storage(**limits, ram=20))}["stated"]
    assert stated.value == 16
    assert solve(slow_storage(**limits, ram=15)).schedule is None
    assert solve(slow_storage(**limits, ram=16)).schedule is not None
    paged = solve(slow_storage(page_s=3.0, recompute=False)).require_schedule()
    verdict = verify(result.problem, paged)
    assert verdict.valid
    assert (verdict.simulation.peak_ram_bytes, verdict.simulation.needed_ram_bytes) == (12, 16)
    for stated, valid in ((16, True), (20, True), (21, False), (12, False)):
        claimed = verify(result.problem, paged, stated={"objective.value": stated})
        assert claimed.valid == valid


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(n, marks=pytest.mark.seeds) for n in range(4, 200))]
)
@pytest.mark.parametrize("with_state", [False, True])
def test_result_lies_between_both_sums(number, *, with_state):
    """Between the optimum with compute time alone and that with all transfers added, both exact.

    The plan keeps the deadline, and no schedule that is drawn at random and whose plan keeps it
    beats the bound. With state, first reads and write-backs are transfers, and homes are chosen.
    """
    if with_state:
        seed = f"overlap of state/{number}"
        problem = state_problem(seed, (4, 6), minimize="energy", deadline=None, energy_budget=None)
    else:
        seed = f"overlap/{number}"
        problem = scarce_problem(
            seed, (3, 5), minimize="energy", deadline=False, energy_budget=False
        )
    problem, rng = overlapping(problem), make_rng(f"{seed}/deadline")
    deadline = problem.pass_time_s + rng.randint(0, 6)
    if deadline == 0:
        return
    problem = overlapping(problem, deadline=deadline)
    result = solve(problem, gap=0.0, time_limit=60)
    below = optimum(overlapping(problem, deadline_counts="compute"))
    above = optimum(overlapping(problem, deadline_counts="serial"))
    if result.schedule is None:
        assert above is None
        assert result.status in (Status.INFEASIBLE, Status.UNKNOWN)
        return
    assert planned_s(problem, result) <= deadline * (1 + 1e-9)
    assert below.value <= result.bound_j + CLOSE
    assert result.bound_j <= result.energy_j + CLOSE
    if above is not None:
        assert result.energy_j <= above.value + CLOSE
    for verdict in random_verdicts(rng, problem, with_state=with_state):
        assert result.bound_j <= verdict.simulation.energy_j + CLOSE


def random_verdicts(rng, problem, *, with_state=False):
    """Yield the verdicts on schedules that are drawn at random and keep all limits."""
    for _ in range(10):
        if with_state:
            schedule = random_schedule(rng, problem.graph)
        else:
            schedule = random_schedule(rng, problem.graph, paging=problem.can_page)
        verdict = schedule and verify(problem, schedule)
        if verdict and verdict.valid:
            yield verdict


@pytest.mark.parametrize("number", range(12))
def test_least_makespan_lies_between_its_bounds(number):
    """Not above the serial optimum, not below its own bound, which no random plan beats."""
    limits = {"minimize": "time", "energy_budget": False, "deadline": False}
    problem = overlapping(scarce_problem(f"makespan/{number}", (3, 5), **limits))
    result = solve(problem, gap=0.0)
    serial = optimum(overlapping(problem, deadline_counts="serial"))
    if serial is None:
        assert result.schedule is None
        return
    assert planned_s(problem, result) == pytest.approx(result.value)
    assert result.objective_bound - CLOSE <= result.value <= serial.value + CLOSE
    for verdict in random_verdicts(make_rng(f"makespan/{number}/plans"), problem):
        assert result.objective_bound <= verdict.simulation.time_s + CLOSE


@pytest.mark.parametrize("deadline", [10, None])
def test_progress_tells_only_what_holds_for_the_makespan(deadline):
    """No bound exceeds the final result; plans of schedules meet the deadline.

    Schedules of a surrogate that miss it are not reported as best ones.
    """
    problem, reported = slow_storage(deadline=deadline), []
    result = solve(problem, on_progress=reported.append)
    assert any(progress.schedule is not None for progress in reported)
    for progress in reported:
        assert progress.bound is None or progress.bound <= result.energy_j + CLOSE
        assert (progress.schedule is None) == (progress.value is None)
        if progress.schedule is not None:
            assert progress.value >= result.energy_j - CLOSE
            assert verify(problem, progress.schedule).valid


def test_start_that_keeps_the_deadline_is_never_lost(monkeypatch):
    """Without any time, the start is the result.

    Ctrl-C during the verification of a plan ends the search with the earlier schedule.
    """
    problem = slow_storage(deadline=10)
    first = solve(problem).require_schedule()
    again = solve(problem, start=first, time_limit=1e-3)
    assert again.overhead_j == pytest.approx(1.0)
    seen = []

    def interrupted(stated, schedule, **_):
        seen.append(schedule)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return make_candidate(stated, schedule)

    monkeypatch.setattr("poetmodel.solver.makespan.make_candidate", interrupted)
    result = solve(problem, start=first)
    assert len(seen) == 2
    assert result.schedule == first


@parametrize_parts(2)
def test_an_own_limit_on_energy_is_held_as_the_energy_budget_is(part):
    """Idle power over the makespan counts in both: the same is found, and the same is proved."""
    kept = 0
    for number in part.select(range(20)):
        rng = make_rng(f"idle energy/{number}")
        graph = random_graph(rng, (3, 5), on_aux=False)
        costs = random_costs(rng, graph, mode="dma")
        if not graph.tensors or costs.device is None:
            continue
        ram = max(floor(graph).bytes, int(0.8 * checkpoint_all_peak_bytes(graph)))
        problem = Problem(graph, costs, ram=ram, minimize="writes", deadline_counts="overlap")
        most = solve(replace(problem, minimize="energy")).energy_j
        if most is None:
            continue
        by_budget = solve(replace(problem, energy_budget=most))
        by_row = solve(problem.subject_to(least=lambda v, most=most: v.energy_j <= most))
        assert by_row.status == by_budget.status
        assert by_row.value == by_budget.value
        kept += by_row.schedule is not None and problem.idle_power_w > 0
    assert kept


# -- without time ------------------------------------------------------------------------------
@pytest.mark.parametrize("limits", [{}, {"deadline": 30}, {"minimize": "time"}])
def test_a_schedule_that_is_found_is_returned_without_time_to_plan_it(monkeypatch, limits):
    """Planning takes long for thousands of nodes; transfers and computing then alternate."""
    problem = slow_storage(**limits)

    def late(stated, schedule, **_):
        return make_candidate(stated, schedule, planning_s=-1.0)

    monkeypatch.setattr("poetmodel.solver.makespan.make_candidate", late)
    result = solve(problem)
    assert not verify(problem, result.schedule).violations
    run = result.simulation
    assert run.makespan_s == run.compute_s + run.transfer_s


STAGES = (
    "poetmodel.solver.search.Search.accept",
    "poetmodel.solver.task.Task.prove",
    "poetmodel.solver.lazy.proof.Session",
    "poetmodel.solver.lazy.row_generation.add_rows",
    "poetmodel.solver.lazy.session.Relaxation.build",
)
"""What runs after the first schedule was found."""


@pytest.mark.parametrize("counts", ["serial", "overlap"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_loses_a_schedule_when_time_runs_out_in_it(monkeypatch, stage, counts):
    """The greedy schedule is the result if the limit strikes at any later point."""
    reached = []

    def late(*_, **__):
        reached.append(stage)
        raise TimeLimitError

    monkeypatch.setattr(stage, late)
    problem = slow_storage(deadline_counts=counts)
    result = solve(problem)
    assert reached
    assert result.schedule is not None
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
