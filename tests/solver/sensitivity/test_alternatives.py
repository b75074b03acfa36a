"""Costs of decisions, and the next step of RAM: by hand, and by exhaustive search."""

from dataclasses import replace
from functools import partial

import pytest

from kit.instances import make_rng, random_instance, random_step
from kit.oracle import optimum
from kit.worked import bench_device, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.planner import verify
from poetmodel.problem import Constraint, Problem
from poetmodel.result import Status, Termination
from poetmodel.schedule.decisions import Treatment, find_decisions
from poetmodel.solver import solve
from poetmodel.solver.facade import execute
from poetmodel.solver.sensitivity import (
    Forbidden,
    RamStep,
    find_alternatives,
    find_ram_step,
    variants,
)


def solved(problem):
    """Return the best schedule of a problem."""
    return solve(problem, gap=0.0).require_schedule()


@pytest.mark.parametrize(
    ("limits", "tensor", "expected"),
    [
        # In 13 B tensor a is recomputed for 1 J; paging takes 2 J, and it cannot be kept.
        ({}, 0, "recomputation: paged +1, recomputation and paging: impossible"),
        ({"paging": False}, 0, "recomputation: impossible"),
        ({"recompute": False}, 0, "paging: impossible"),
        # In 15 B all are kept; a can be recomputed for 1 J, b for 2 J, c for 3 J or paged for 2 J.
        ({"ram": 15}, 0, "keeping: recomputed +1"),
        ({"ram": 15}, 1, "keeping: recomputed +2"),
        ({"ram": 15}, 2, "keeping: paged +2"),
        ({"ram": 15, "deadline": "100%"}, 0, "keeping: impossible"),
        ({"ram": 15}, 3, ""),
        ({"minimize": "time"}, 0, "recomputation: paged +1, recomputation and paging: impossible"),
        (
            {"minimize": "writes"},
            0,
            "recomputation: paged +4, recomputation and paging: impossible",
        ),
    ],
)
def test_alternatives_of_the_worked_example(limits, tensor, expected):
    """Each decision forbidden in turn: the new treatment of the tensor, and its proven cost."""
    problem = skip_problem(**limits)
    schedule = solved(problem)
    told = []
    for other in find_alternatives(problem, schedule, tensor):
        assert other.proven
        assert other.min_extra == other.extra
        if other.status == Status.INFEASIBLE:
            told.append(f"{other.forbidden}: impossible")
        else:
            told.append(f"{other.forbidden}: {other.becomes} {other.extra:+g}")
            assert verify(problem, other.schedule).valid
    assert told == (expected.split(", ") if expected else [])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (15, 1)),
        ({"ram": 14}, (15, 1)),
        ({"recompute": False}, (15, 2)),
        ({"minimize": "time"}, (15, 1)),
        ({"minimize": "writes", "recompute": False}, (15, 4)),
        ({"ram": 15}, None),
        # The least RAM itself has no next step.
        ({"ram": 13, "minimize": "ram"}, "no question"),
    ],
)
def test_next_step_of_ram_of_the_worked_example(limits, expected):
    """The minimum RAM with a better schedule, and its saving, both proven."""
    problem = skip_problem(**limits)
    step = find_ram_step(problem, solved(problem))
    if expected == "no question":
        assert step is None
        return
    assert step is not None
    assert step.proven
    if expected is None:
        assert step == RamStep(status=Status.INFEASIBLE)
        return
    ram, saved = expected
    assert (step.ram_bytes, step.min_ram_bytes) == (ram, ram)
    assert (step.saved, step.max_saved) == (pytest.approx(saved), pytest.approx(saved))


def test_own_sum_has_a_next_step_of_ram():
    """Each recomputation costs 1, beside a constant 7: in 15 B, no node is recomputed."""
    problem = skip_problem(paging=False).minimizing(lambda v: sum(v.recomputations.values()) + 7)
    step = find_ram_step(problem, solved(problem))
    assert step is not None
    assert (step.ram_bytes, step.min_ram_bytes, step.saved) == (15, 15, pytest.approx(1))


def test_schedule_that_is_not_the_best_is_told():
    """Beside a schedule that pages, recomputing saves 1 J in the same RAM: an extra below 0."""
    problem = skip_problem()
    paged = solved(replace(problem, recompute=False))
    other, _ = find_alternatives(problem, paged, 0)
    assert (other.forbidden, other.extra) == (Forbidden.PAGING, -1.0)
    step = find_ram_step(problem, paged)
    assert step is not None
    assert (step.ram_bytes, step.saved) == (problem.ram_budget_bytes, 1.0)


def test_own_constraints_hold_for_alternatives():
    """If writes are forbidden, a cannot be paged, for any names of constraints."""
    row = Constraint(name="without recomputation", terms={"bytes_written": 1}, upper=3)
    problem = replace(skip_problem(), constraints=(row,))
    found = find_alternatives(problem, solved(problem), 0)
    assert {other.status for other in found} == {Status.INFEASIBLE}


@pytest.mark.parametrize("number", ["3/19", "4/10", "4/17", "5/17", "5/22"])
def test_alternatives_are_those_of_an_exhaustive_search(number):
    """Every decision of a random instance, against the oracle with the same decision forbidden."""
    choices = {"minimize": "energy", "aux_limit": False, "switches": False, "deadline": False}
    problem = random_instance(make_rng(number), (4, 5), **choices)
    schedule = solved(problem)
    value = verify(problem, schedule).simulation.energy_j
    for decision in find_decisions(problem, schedule):
        for other in find_alternatives(problem, schedule, decision.tensor):
            name = problem.graph.tensors[other.tensor].name
            node = problem.graph.nodes[problem.graph.node_of[other.tensor]].name
            terms = {f"recomputations:{node}": 1, f"page_ins:{name}": 1}
            limit = {"lower": 1} if other.forbidden == Forbidden.KEEPING else {"upper": 0}
            if other.forbidden == Forbidden.PAGING:
                del terms[f"recomputations:{node}"]
            if other.forbidden == Forbidden.RECOMPUTATION:
                del terms[f"page_ins:{name}"]
            row = Constraint(name="forbidden", terms=terms, **limit)
            best = optimum(replace(problem, constraints=(*problem.constraints, row)))
            if best is None:
                assert other.extra is None
            elif other.extra is not None:
                assert other.min_extra is not None
                assert other.min_extra <= best.value - value + 1e-9
                assert other.extra >= best.value - value - 1e-9
                if other.proven:
                    assert other.extra == pytest.approx(best.value - value, rel=1e-3, abs=1e-9)
            else:
                assert other.forbidden == Forbidden.KEEPING  # of no use once it is read


def test_known_bound_holds_for_alternatives():
    """A bound of the problem is one of each alternative, if its solve proves less."""
    problem = skip_problem()
    schedule = solved(problem)
    unproved = replace(
        solve(problem), schedule=None, simulation=None, status=Status.UNKNOWN, objective_bound=None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "execute", lambda *_, **__: unproved)
        (blank, _) = find_alternatives(problem, schedule, 0)
        (bounded, _) = find_alternatives(problem, schedule, 0, bound=11.0)
        step = find_ram_step(problem, schedule)
    assert (blank.status, blank.extra, blank.min_extra) == (Status.UNKNOWN, None, -1.0)
    assert (bounded.status, bounded.extra, bounded.min_extra) == (Status.UNKNOWN, None, 0.0)
    assert step is not None
    assert (step.status, step.ram_bytes, step.proven) == (Status.UNKNOWN, None, False)


@pytest.mark.parametrize("find", [partial(find_alternatives, tensor=0), find_ram_step])
def test_ctrl_c_ends_the_search(monkeypatch, find):
    """An interrupted solve has no result for its decision."""

    def interrupted(problem, *arguments):
        return replace(execute(problem, *arguments), termination=Termination.INTERRUPTED)

    problem = skip_problem()
    schedule = solved(problem)
    monkeypatch.setattr(variants, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find(problem, schedule)


@pytest.mark.slow
def test_other_homes_of_state_cost_what_the_best_schedule_with_them_costs():
    """Each home but that of the schedule, against another formulation with the home fixed."""
    rng, seen = make_rng("other homes of state"), set()
    for _ in range(40):
        graph = random_step(rng, (4, 7), flops=1_000_000)
        if not graph.state_tensors:
            continue
        share = rng.choice((0.0, 0.3, 0.7))
        costs = Costs.estimate(graph, bench_device())
        low, high = Problem(graph, costs, ram=1).floor.bytes, checkpoint_all_peak_bytes(graph)
        problem = Problem(graph, costs, ram=max(1, low + int(share * (high - low))))
        result = solve(problem, gap=0.0)
        for decision in find_decisions(problem, result.require_schedule()):
            i, choice = decision.tensor, decision.treatment
            others = find_alternatives(problem, result.require_schedule(), i)
            if choice == Treatment.REPLACEMENT:
                assert others == ()
            if choice not in (Treatment.RESIDENT, Treatment.ON_STORAGE):
                continue
            (other,) = others
            moved = int(choice == Treatment.ON_STORAGE)
            there = problem.subject_to(there=lambda v, i=i, moved=moved: v.resident[i] == moved)
            known = solve(there, formulation="compact", gap=0.0)
            seen.add((choice, other.status))
            if known.energy_j is None:
                assert other.status == Status.INFEASIBLE
                continue
            extra_j = known.energy_j - (result.energy_j or 0.0)
            assert other.extra == pytest.approx(extra_j, rel=1e-3, abs=1e-9)
            assert other.becomes in (Treatment.RESIDENT, Treatment.ON_STORAGE)
            assert other.becomes != choice
    assert {Treatment.RESIDENT, Treatment.ON_STORAGE} == {choice for choice, _ in seen}
    assert {Status.OPTIMAL, Status.INFEASIBLE} <= {status for _, status in seen}
