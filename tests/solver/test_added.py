"""Models that users have extended: solved in another way where that says the same."""

from functools import partial

import pyomo.environ as pyo
import pytest

from kit.instances import random_instances, seeded, state_problem
from kit.worked import comb_graph, even_costs, skip_graph
from poetmodel import Problem, build, solve
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.greedy import construct
from poetmodel.result import Status, Termination
from poetmodel.schedule import check_schedule

SAID = "on totals"
"""What the log says where a model is solved as a problem with further constraints."""
BY_STAGE = "name stages"
"""What it says where some of them are rows over stages."""


ROUNDS, SEED = 120, 43
"""Random models with rows over stages, each solved twice."""


def skip_problem():
    """Return the worked example, in which something has to be paged or recomputed."""
    graph = skip_graph()
    return Problem(graph, even_costs(graph), ram=12)


def both_ways(problem, seed, rows):
    """Solve a model with rows in two ways, and compare the answers.

    The second model has rows with a variable of their own: it is solved as it was built, without
    looking at what was added. Rows are a function of a generator and a model.
    """
    results = []
    for as_built in (False, True):
        model, rng = build(problem), seeded(seed)
        model.added = pyo.ConstraintList()
        for row in rows(rng, model):
            if not isinstance(row, bool):
                model.added.add(row)
        if as_built:
            model.own = pyo.Var(bounds=(0, 0))
            model.beside = pyo.Constraint(expr=model.own <= 0)
        results.append(solve(model, gap=0.0))
    quick, slow = results
    assert quick.status == slow.status, (seed, quick.reason, slow.reason)
    if quick.schedule is not None:
        near = pytest.approx(slow.objective_value, rel=1e-6, abs=1e-9)
        assert quick.objective_value == near, seed
        assert quick.objective_bound == pytest.approx(quick.objective_value, rel=1e-6, abs=1e-6)
        assert not check_schedule(problem, quick.schedule).violations
    return quick


@pytest.mark.parametrize("sign", [1, -1])
def test_objectives_on_totals_have_the_answer_of_the_model(sign):
    """Minimized, or less of it maximized, beside state and not: sense, value and bound."""
    quickly = 0
    for number in range(12):
        problem, results = state_problem(f"weighed/{number}", (4, 6)), []
        for as_built in (False, True):
            model = build(problem)
            weighed = sum(model.R.values()) + 2 * sum(model.M_out.values())
            weighed += 0.5 * sum(model.M_in.values())
            model.objective.deactivate()
            sense = pyo.minimize if sign > 0 else pyo.maximize
            model.mine = pyo.Objective(expr=sign * weighed + 0 * model.R[0, 0], sense=sense)
            if as_built:
                model.own = pyo.Var(bounds=(0, 0))
                model.beside = pyo.Constraint(expr=model.own <= 0)
            results.append(solve(model, gap=0.0))
        quick, slow = results
        quickly += SAID in quick.log
        assert quick.status == slow.status, number
        assert (quick.own_objective is None) == (slow.own_objective is None)
        if quick.own_objective is not None:
            own = slow.own_objective
            assert (quick.own_objective.name, quick.own_objective.sense) == (own.name, own.sense)
            assert quick.own_objective.value == pytest.approx(own.value, rel=1e-6, abs=1e-9)
            assert quick.own_objective.gap == 0
    assert quickly > 3


def test_the_classifier_stays_in_ram():
    """The home of a state tensor is chosen by its position, and only state has one."""
    for number in range(40):
        problem = state_problem(f"classifier/{number}", minimize="energy")
        free = solve(problem, gap=0.0)
        if free.schedule is None or set(free.schedule.resident) == set(problem.graph.state_tensors):
            continue
        (i, *_) = set(problem.graph.state_tensors) - set(free.schedule.resident)
        model = build(problem)
        model.keep = pyo.Constraint(expr=model.resident[i] >= 1)
        kept = solve(model, gap=0.0)
        if kept.schedule is None:
            continue
        assert i in kept.schedule.resident
        assert kept.energy_j >= free.energy_j
        assert SAID in kept.log
        break
    else:
        pytest.fail("nothing was to be kept")


def stage_limits(rng, model, schedule):
    """Yield rows that name stages, each of which a schedule breaks."""
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(("R", "M_in"))
        done = [(t, x) for t, x in getattr(schedule, kind) if (kind, t) != ("R", x)]
        if not done:
            continue
        t, item = rng.choice(done)
        first, last = t - rng.choice((0, 0, 1, 2)), t + rng.choice((0, 0, 1, 2))
        only = {item} if rng.random() < 0.3 else {x for _, x in getattr(model, kind)}
        named = [
            (index, rng.choice((1, 1, 1, 2)))
            for index in getattr(model, kind)
            if first <= index[0] <= last
            and index[1] in only
            and (kind, index[0]) != ("R", index[1])
        ]
        limit = sum(value for index, value in named if index in done) - 1
        yield sum(value * getattr(model, kind)[index] for index, value in named) <= limit


@pytest.mark.slow
def test_rows_on_stages_have_the_answer_of_the_model():
    """On random problems, whatever is minimized and limited: status and value of the model."""
    seen = []
    for number, problem in enumerate(random_instances(ROUNDS, (4, 8), seed=SEED)):
        free = solve(problem, gap=0.0)
        if free.schedule is None:
            continue
        rows = partial(stage_limits, schedule=free.schedule)
        quick = both_ways(problem, f"stages/{SEED}/{number}", rows)
        if BY_STAGE in quick.log:
            seen.append(quick.objective_value != free.objective_value)
    assert sum(seen) > len(seen) // 3 > ROUNDS // 20


def few_transfers(model):
    """Limit a total."""
    return sum(model.M_out.values()) + sum(model.M_in.values()) <= 1


@pytest.mark.parametrize(
    ("rule", "totals"),
    [
        (few_transfers, True),
        # What happens in one stage, and something that serves nothing else.
        (lambda m: sum(var for (t, _), var in m.M_in.items() if t == 3) <= 0, False),
        (lambda m: sum(m.M_out.values()) >= 2, False),
    ],
)
def test_the_log_says_how_a_model_was_solved(rule, *, totals):
    """Only rows on totals make a model a problem; a model alone is solved as it was built."""
    model = build(skip_problem())
    assert SAID not in solve(model).log
    model.added = pyo.Constraint(expr=rule(model))
    assert (SAID in solve(model).log) == totals


def change_a_row(model):
    """State a row anew."""
    row = next(iter(model.inputs.values()))
    row.set_value(row.body >= 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: next(iter(model.paged_in.values())).fix(0),
        lambda model: model.memory.deactivate(),
        lambda model: model.memory.__delitem__(next(iter(model.memory))),
        change_a_row,
    ],
)
def test_a_changed_model_is_solved_as_it_is(change):
    """What the model says counts, not the problem that it was built of."""
    model = build(skip_problem())
    model.added = pyo.Constraint(expr=few_transfers(model))
    change(model)
    try:
        log = solve(model).log
    except VerificationError as error:  # without its rows a model has answers that break rules
        log = str(error)
    assert SAID not in log


def test_rows_on_totals_hold_beside_those_of_the_problem():
    """Nothing keeps some: the reason speaks of what was added, and of reductions.

    A row may have the name of a constraint of the problem: both hold, one page-out and one page-in.
    """
    model = build(skip_problem())
    model.added = pyo.Constraint(
        expr=sum(model.M_in.values()) + sum(model.recomputed.values()) <= 0
    )
    result = solve(model)
    assert result.status == Status.INFEASIBLE
    assert "the constraints added to the model" in result.reason
    assert "reductions=False" in result.reason
    problem = skip_problem().subject_to(few=lambda v: sum(v.page_outs.values()) <= 1)
    model = build(problem)
    model.few = pyo.Constraint(expr=sum(model.M_in.values()) <= 1)
    result = solve(model)
    assert SAID in result.log
    assert len(result.schedule.M_out) <= 1
    assert len(result.schedule.M_in) <= 1


def test_without_time_a_schedule_that_keeps_the_rows_is_the_answer(monkeypatch):
    """Greedy recomputes; without that it keeps the row, as is known before anything is compiled."""
    graph = comb_graph(9)
    problem = Problem(graph, even_costs(graph, page_in=(9, 9), page_out=(9, 9)), ram=17)

    def too_late(_):
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.solver.extended.compile_model", too_late)
    model = build(problem)
    # Only the model is solved with a coefficient below 0.
    wanted = next(iter(model.paged_in.values()))
    model.added = pyo.Constraint(expr=sum(model.recomputed.values()) - wanted / 1000 <= 0)
    result = solve(model)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert all(k == t for t, k in result.require_schedule().R)
    greedy = construct(problem)
    assert any(k < t for t, k in greedy.R)
