"""``paper``: Algorithm 1 as published, refusals, and the verdicts about its schedules."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pyomo.environ as pyo
import pytest

from kit.instances import make_rng, random_instance, random_instances
from kit.oracle import optimum
from kit.own_rows import own_rows_problem
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.worked import costs_of, even_costs, make_node, parse_graph, skip_graph, skip_problem
from poetmodel.device import Costs, Device
from poetmodel.errors import ModelError
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.zoo import MODELS as ZOO
from poetmodel.model import build
from poetmodel.model.paper import check_supported, describe_reduction, merge_outputs
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule import check_schedule
from poetmodel.solver import solve


def chain(n=4, **limits):
    """State a chain of `n` nodes of 2 bytes each."""
    graph = Graph(
        name="chain",
        nodes=tuple(
            operation(f"n{k}", output_bytes=2, inputs=(f"n{k - 1}",) if k else ()) for k in range(n)
        ),
    )
    return Problem(graph, even_costs(graph), **{"ram": 4, **limits})


ONCE = skip_graph(recomputable=False)
"""A graph whose first node is computed once."""


# -- what it is made of ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("problem", "fixed"),
    [
        (chain(paging=False), {"M_in": {0}, "M_out": {0}}),
        # Nodes that run once are not recomputed, and only they.
        (Problem(ONCE, even_costs(ONCE), ram=13), {"R": {(t, 0): 0 for t in range(1, 4)}}),
    ],
)
def test_what_a_problem_forbids_is_fixed(problem, fixed):
    """`test_golden` tests its other rows: ``R[t,t]`` is 1 in any case."""
    model = build(problem, "paper")
    first = {(t, t): 1 for t in range(4)}
    decided = {index: var.value for index, var in model.R.items() if var.fixed}
    assert decided == first | fixed.pop("R", {})
    for name, values in fixed.items():
        assert {var.value for var in getattr(model, name).values() if var.fixed} == values
        assert all(var.fixed for var in getattr(model, name).values())


# -- what it refuses ---------------------------------------------------------------------------
def on_storage(**limits):
    """State a problem whose first tensor lies on storage from the start."""
    graph = skip_graph(mask=True, on_aux=True)
    return Problem(graph, even_costs(graph), ram=13, **limits)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (on_storage(), ["'a'"]),
        (skip_problem(minimize="time"), ["not time"]),
        (skip_problem(minimize="ram"), ["not ram"]),
        (skip_problem(energy_budget=20), ["energy budget"]),
        (skip_problem().minimizing(lambda v: v.bytes_written), ["not own"]),
        (on_storage(minimize="writes", energy_budget=20), ["'a'", "not writes", "energy budget"]),
    ],
)
def test_what_it_cannot_state_is_refused(problem, words):
    """Building and solving list all unsupported properties."""
    for attempt in (lambda: build(problem, "paper"), lambda: solve(problem, formulation="paper")):
        with pytest.raises(ModelError) as caught:
            attempt()
        assert all(each in str(caught.value) for each in words)


# -- nodes with several outputs or none ---------------------------------------------------------
def several_outputs():
    """Make a chain whose second node has two outputs that are read and one that is not."""
    made = (Tensor(name="b", bytes=3), Tensor(name="mask", bytes=2), Tensor(name="z", bytes=1))
    return Graph(
        name="several",
        nodes=(
            operation("a", output_bytes=4),
            make_node("b", ("a",), made),
            operation("c", output_bytes=1, inputs=("b", "mask")),
            Node(name="log", op="op", phase="forward", inputs=("c",)),
            operation("d", output_bytes=1, inputs=("a", "b", "mask", "c")),
        ),
    )


def test_outputs_of_a_node_are_one_tensor():
    """Bytes sum over all outputs, page costs over those that are read; limits stay.

    Outputs of a node have one variable; unread ones are never kept or paged.
    """
    graph = several_outputs()
    pages = [(float(i), 10.0 * i) for i in range(len(graph.tensors))]
    costs = costs_of(graph, [1] * 5, page_ins=pages)
    problem = Problem(graph, costs, ram="90%", deadline="150%")
    reduced = merge_outputs(problem)
    assert reduced.graph.tensor_bytes == (4, 6, 1, 0, 1)
    assert reduced.graph.inputs_of == ((), (0,), (1,), (2,), (0, 1, 2))
    assert list(reduced.table.page_in_time_s) == [0, 1 + 2, 4, 0, 0]
    assert list(reduced.table.page_out_energy_j) == [0, 10 + 20, 40, 0, 0]
    limits = ("ram_budget_bytes", "deadline_s", "deadline_counts", "aux_limit_bytes")
    assert [getattr(reduced, name) for name in limits] == [
        getattr(problem, name) for name in limits
    ]
    assert "2 of 5 nodes have several or none, such as 'b'" in str(describe_reduction(graph))
    assert describe_reduction(reduced.graph) is None
    model = build(Problem(graph, even_costs(graph), ram="90%"), "paper")
    b, mask, z = graph.outputs_of[1]
    assert model.problem.graph is graph
    for name in ("S_RAM", "S_AUX", "M_in", "M_out"):
        relation = getattr(model, name)
        assert relation[3, b] is relation[3, mask]
        assert relation[3, z] is model.zero


def test_rules_of_a_users_own_hold_on_a_reduced_model():
    """If `mask` may not be paged out, neither output of its node is, and `a` is paged instead."""
    graph = several_outputs()
    graph = replace(
        graph, nodes=(*graph.nodes[:3], operation("big", output_bytes=6), graph.nodes[-1])
    )
    pages = [(5.0, 5.0)] + [(0.1, 0.1)] * (len(graph.tensors) - 1)
    costs = costs_of(graph, [1] * 5, page_ins=pages)
    problem = Problem(graph, costs, ram=13, recompute=False)
    mask = graph.outputs_of[1][1]
    paged = []
    for rule in (False, True):
        model = build(problem, "paper")
        if rule:
            model.never = pyo.Constraint(expr=sum(model.M_out[t, mask] for t in range(1, 5)) <= 0)
        result = solve(model)
        assert result.reduction != ""
        schedule = result.require_schedule()
        assert result.violations == check_schedule(problem, schedule).violations
        paged.append({graph.tensors[i].name for _, i in schedule.M_in})
    assert "mask" in paged[0]
    assert not {"b", "mask"} & paged[1]


@parametrize_parts(2)
def test_schedules_of_reduced_models_are_verified_on_the_graph(part):
    """The simulator's overhead is the model's, and every violation is reported."""
    found = rejected = 0
    for problem in part.select(random_instances(400, (3, 5), seed=91)):
        if problem.minimize != "energy" or problem.energy_budget_j is not None:
            continue
        if any(node.on_aux for node in problem.graph.nodes):
            continue
        if describe_reduction(problem.graph) is None:
            continue
        result = solve(problem, formulation="paper", time_limit=20)
        if result.schedule is None:
            continue
        found += 1
        assert result.violations == check_schedule(problem, result.schedule).violations
        rejected += bool(result.violations)
        value = result.statistics.get("model_value")
        if value is not None and result.overhead_j is not None:
            assert result.overhead_j <= value + 1e-6 * (1 + value)
    assert found > part.divide(20)
    assert rejected > 0


@pytest.mark.parametrize("name", mark_seeds_except(sorted(ZOO), {"mlp", "transformer"}, ZOO))
def test_every_network_of_the_zoo_can_be_stated(name):
    """The reduced graph has one tensor for each node, and as many bytes."""
    graph = load_model(name)
    problem = Problem(graph, Costs.estimate(graph, Device.load("rpi4b")), ram="70%")
    check_supported(problem)
    reduced = merge_outputs(problem)
    assert len(reduced.graph.tensors) == len(graph.nodes)
    assert sum(reduced.graph.tensor_bytes) == sum(graph.tensor_bytes)
    assert reduced.ram_budget_bytes == problem.ram_budget_bytes
    assert reduced.baseline_energy_j == pytest.approx(problem.baseline_energy_j)
    result = solve(problem, formulation="paper", time_limit=0.5)
    assert result.reduction.startswith("formulation 'paper' supports one output per node")
    assert result.termination in (Termination.TIME_LIMIT, Termination.PROVED, Termination.STALLED)


# -- what it says ------------------------------------------------------------------------------
COMPUTE_J = (1.0, 4.0, 1.0)
PAGE_J = ((1.0, 0.5), (0.25, 0.5), (9.0, 9.0))
"""Energy to page each tensor in, and out."""


def algorithm_1():
    """Yield memory, compute time and overhead of everything that Algorithm 1 admits.

    An independent reading of the paper, by trying all values of the relations on three nodes; the
    recurrence of ``U`` is followed, ``FREE`` is 1 exactly where no hazard forbids it.
    """
    sizes, inputs, users = (3, 2, 1), ((), (0,), (0, 1)), ((1, 2), (2,), ())
    lower = ((1, 0), (2, 0), (2, 1))
    cells = dict.fromkeys(("R", "S", "A", "I", "O"), lower)
    keys = [(name, cell) for name, found in cells.items() for cell in found]
    for bits in product((0, 1), repeat=len(keys)):
        value = dict(zip(keys, bits, strict=True))
        value |= {("R", (t, t)): 1 for t in range(3)}

        def x(name, t, i, value=value):
            return value.get((name, (t, i)), 0)

        stages = [(t, i) for t in range(3) for i in range(t + 1)]
        if any(x("R", t, j) > x("R", t, i) + x("S", t, i) for t, j in stages for i in inputs[j]):
            continue
        if any(
            x("S", t, i) > x("R", t - 1, i) + x("S", t - 1, i) + x("I", t - 1, i)
            or x("A", t, i) > x("A", t - 1, i) + x("O", t - 1, i)
            or x("I", t, i) > x("A", t, i)
            or x("O", t, i) > x("S", t, i)
            for t, i in lower
        ):
            continue
        peak = 0
        for t in range(3):
            used = sum(sizes[i] * x("S", t, i) for i in range(t))
            for k in range(t + 1):
                used += sizes[k] * x("R", t, k)
                peak = max(peak, used)
                for i in inputs[k]:
                    later = any(x("R", t, j) for j in users[i] if k < j <= t)
                    if x("R", t, k) and not x("S", t + 1, i) and not later:
                        used -= sizes[i]
        again = [sum(x("R", t, k) for t in range(k + 1, 3)) for k in range(3)]
        overhead = sum(count * cost for count, cost in zip(again, COMPUTE_J, strict=True))
        for i, (into, out) in enumerate(PAGE_J):
            overhead += into * sum(x("I", t, i) for t in range(3))
            overhead += out * sum(x("O", t, i) for t in range(3))
        yield peak, sum(COMPUTE_J) + sum(map(float.__mul__, map(float, again), COMPUTE_J)), overhead


@cache
def admitted():
    """Return the distinct results of `algorithm_1`."""
    return tuple(set(algorithm_1()))


@pytest.mark.parametrize("ram", range(4, 9))
@pytest.mark.parametrize("deadline", [None, 6.0, 7.0])
def test_it_states_algorithm_1(ram, deadline):
    """The optimum is that of an independent, exhaustive reading of the paper."""
    graph = parse_graph("a 3", "b 2 a", "c 1 a b")
    costs = costs_of(
        graph,
        COMPUTE_J,
        page_ins=[(1.0, into) for into, _ in PAGE_J],
        page_outs=[(1.0, out) for _, out in PAGE_J],
    )
    problem = Problem(graph, costs, ram=ram, deadline=deadline, deadline_counts="compute")
    expected = [
        overhead
        for peak, time_s, overhead in admitted()
        if peak <= ram and (deadline is None or time_s <= deadline)
    ]
    result = solve(build(problem, "paper"), gap=0.0)
    if not expected:
        assert result.schedule is None
    else:
        assert result.statistics["model_value"] == pytest.approx(min(expected), abs=1e-6)


def test_the_exhaustive_reading_tells_budgets_apart():
    """The comparison above is sharp: the budget decides which schedules are admitted."""
    best = [
        min((cost for peak, _, cost in admitted() if peak <= ram), default=None)
        for ram in range(4, 8)
    ]
    assert len(set(best)) > 1


# -- what the verifier says of it -----------------------------------------------------------------
def rejected_problem():
    """State a problem where its schedule is not valid.

    Only `a` can leave while `c` is computed. ``paper`` pages it in in stage 2, to have it in stage
    3; its ``U`` counts the 4 bytes from stage 3 on, the verifier at once, beside 11 of `b` and `c`.
    """
    return skip_problem(recompute=False)


def test_an_accepted_schedule():
    """It is a schedule like any other, but its bound is not claimed."""
    problem = skip_problem(paging=False)  # `a` is recomputed for `d`
    result = solve(problem, formulation="paper", gap=0.0)
    assert (result.violations, result.overhead_j) == ((), 1.0)
    assert not check_schedule(problem, result.require_schedule()).violations
    assert (result.bound_j, result.gap) == (problem.baseline_energy_j, 1.0)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.STALLED)


@pytest.mark.parametrize("built", [False, True])
def test_a_rejected_schedule(built):
    """The result lists the violations, without an exception, and claims nothing.

    Building the model first changes nothing.
    """
    problem = rejected_problem()
    result = solve(build(problem, "paper") if built else problem, formulation="paper", gap=0.0)
    assert (result.formulation, result.status) == ("paper", Status.FEASIBLE)
    assert any("peak RAM 15 B" in violation for violation in result.violations)
    assert result.violations == check_schedule(problem, result.require_schedule()).violations
    assert (result.bound_j, result.gap) == (problem.baseline_energy_j, 1.0)
    assert "rejected by the verifier" in result.summary()


def late_page_out(**limits):
    """Return a problem that needs a page-out in the stage of the first computation.

    ``z`` is computed beside ``x`` (9 + 5 B of 20), so ``y`` (7 B) must be out of RAM before; it
    can be paged out after its computation, but ``paper`` pages out only tensors from the
    beginning of a stage.
    """
    graph = parse_graph("x 9", "y 7 x", "z 5 x", "w 2 x y")
    cheap = (0.25, 0.25)
    return Problem(graph, even_costs(graph, page_in=cheap, page_out=cheap), ram=20, **limits)


def test_its_bound_does_not_hold_for_the_problem():
    """Paging `y` costs 0.5 J; its model can only recompute it, for 2 J, and proves 2 J.

    Where `y` may not be recomputed its model is infeasible, the problem is not.
    """
    problem = late_page_out()
    assert solve(problem, formulation="compact", gap=0.0).overhead_j == 0.5
    result = solve(problem, formulation="paper", gap=0.0)
    assert (result.violations, result.overhead_j) == ((), 2.0)
    assert result.statistics["model_bound"] == pytest.approx(2.0)
    assert (result.overhead_bound_j, result.bound_j) == (0.0, problem.baseline_energy_j)
    problem = late_page_out(recompute=False)
    assert solve(problem, formulation="compact").overhead_j == 0.5
    result = solve(problem, formulation="paper")
    assert (result.status, result.schedule) == (Status.UNKNOWN, None)
    assert result.termination == Termination.STALLED
    assert "'paper' has no schedule, which proves nothing of the problem" in result.reason


def own_rows(number):
    """Make a problem with own constraints that it may be able to state."""
    stated = {"minimize": "energy", "deadline_counts": "compute", "recompute": True, "paging": True}
    return own_rows_problem(f"paper/{number}", aux_bytes=None, energy_budget=None, **stated)


def plain(number):
    """Make one that it can state."""
    kept = dict.fromkeys(("two_outputs", "no_outputs", "on_aux", "energy_budget"), False)
    return random_instance(make_rng(f"paper/{number}"), (3, 5), minimize="energy", **kept)


@pytest.mark.parametrize(("make", "count", "least"), [(own_rows, 120, 10), (plain, 60, 6)])
@parametrize_parts(3)
def test_its_bound_is_never_reported(part, make, count, least):
    """The bound is the baseline, no valid schedule beats the optimum, and all keep own rows."""
    counts = Counter(valid=0, rejected=0)
    for number in part.select(range(count)):
        problem = make(number)
        try:
            result = solve(problem, formulation="paper", gap=0.0)
        except ModelError:  # it cannot state every problem
            continue
        if result.schedule is None:
            continue
        found = check_schedule(problem, result.schedule)
        assert found.violations == result.violations
        assert not [said for said in found.violations if said.startswith("constraint")], number
        assert result.bound_j == problem.baseline_energy_j
        counts["rejected" if found.violations else "valid"] += 1
        if not found.violations:
            best = optimum(problem)
            assert problem.objective.value_of(found.simulation) >= best.value - 1e-6, number
    assert counts.total() > part.divide(least)
    assert make is own_rows or min(counts.values()) >= part.divide(3), counts
