"""Models that users have extended: solved in another way where that says the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo
import pytest

from kit.instances import random_instances, seeded, state_problem
from kit.rotation import Part, parts
from kit.worked import comb_graph, even_costs, skip_graph
from poetmodel import Problem, build, solve
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.greedy import construct
from poetmodel.result import Status, Termination
from poetmodel.schedule import verify

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule

SAID = "on totals"
"""What the log says where a model is solved as a problem with further constraints."""
BY_STAGE = "name stages"
"""What it says where some of them are rows over stages."""


ROUNDS, SEED = 120, 43
"""Random models with rows over stages, each solved twice."""


def skip_problem() -> Problem:
    """Return the worked example, in which something has to be paged or recomputed."""
    graph = skip_graph()
    return Problem(graph, even_costs(graph), ram=12)


def as_built(model: pyo.ConcreteModel) -> SolveResult:
    """Solve a model without looking what was added to it: rows have a variable of their own."""
    model.own = pyo.Var(bounds=(0, 0))
    model.beside = pyo.Constraint(expr=model.own <= 0)
    return solve(model, gap=0.0)


def total_rows(rng: random.Random, model: pyo.ConcreteModel) -> list[Any]:
    """Return some rows over totals; coefficients are the same in all stages."""
    graph = model.problem.graph
    nodes = [rng.choice((0, 0, 1, 2)) for _ in graph.nodes]
    ins = [rng.choice((0, 0, 1, 3)) for _ in graph.tensors]
    outs = [rng.choice((0, 0, 1, 3)) for _ in graph.tensors]
    computed = sum(nodes[k] * var for (_, k), var in model.R.items())
    first = sum(nodes)
    paged_in = sum(ins[i] * var for (_, i), var in model.M_in.items())
    paged_out = sum(outs[i] * var for (_, i), var in model.M_out.items())
    return [
        computed <= first + rng.randint(0, 3),
        -paged_in - paged_out >= -rng.randint(0, 4),
        pyo.inequality(-1, computed + paged_out, first + rng.randint(0, 5)),
    ][: rng.randint(1, 3)]


@pytest.mark.slow
def test_rows_on_totals_have_the_answer_of_the_model() -> None:
    """On random problems: status and value are those of the model as it was built."""
    seen = set()
    for number, problem in enumerate(random_instances(120, (3, 7), seed=41)):
        rng = seeded(f"totals/{number}")
        models = [build(problem) for _ in range(2)]
        for model in models:
            rng.seed(number)
            rows = [row for row in total_rows(rng, model) if not isinstance(row, bool)]
            model.added = pyo.ConstraintList()
            for row in rows:
                model.added.add(row)
        quick, slow = solve(models[0], gap=0.0), as_built(models[1])
        assert quick.status == slow.status, number
        if quick.schedule is not None and slow.schedule is not None:
            assert quick.objective_value == pytest.approx(slow.objective_value, rel=1e-6, abs=1e-9)
            assert not verify(problem, quick.schedule).violations
        if SAID in quick.log:
            seen.add(quick.status)
    assert seen >= {Status.OPTIMAL, Status.INFEASIBLE}


@parts(3)
def test_objectives_on_totals_have_the_answer_of_the_model(part: Part) -> None:
    """On random problems, to minimize or to maximize: name, sense, value and bound of the model."""
    seen = []
    for number, problem in part.of(enumerate(random_instances(60, (3, 7), seed=47))):
        rng = seeded(f"objective/{number}")
        models = [build(problem) for _ in range(2)]
        for model in models:
            rng.seed(number)
            graph, sign = problem.graph, rng.choice((1, -1))
            weight = [rng.choice((0, 0.5, 2)) for _ in (*graph.nodes, *graph.tensors)]
            added = sum(weight[k] * var for (_, k), var in model.R.items())
            added += sum(weight[-i] * var for (_, i), var in model.M_in.items())
            added += sum(weight[i] * var for (_, i), var in model.M_out.items())
            model.objective.deactivate()
            sense = pyo.minimize if sign > 0 else pyo.maximize
            model.mine = pyo.Objective(expr=sign * added + 0 * model.R[0, 0], sense=sense)
        quick, slow = solve(models[0], gap=0.0), as_built(models[1])
        assert quick.status == slow.status, (number, quick.reason, slow.reason)
        if quick.own_objective is not None and slow.own_objective is not None:
            own = slow.own_objective
            assert (quick.own_objective.name, quick.own_objective.sense) == (own.name, own.sense)
            assert quick.own_objective.value == pytest.approx(own.value, rel=1e-6, abs=1e-9)
            assert quick.own_objective.gap == 0
            assert quick.bound_j == slow.bound_j
        seen.append(SAID in quick.log)
    assert sum(seen) > len(seen) // 2


def rows_of_state(rng: random.Random, model: pyo.ConcreteModel) -> list[Any]:
    """Return some rows over homes, first reads, write-backs and copies of state."""
    graph = model.problem.graph
    state = graph.state_tensors
    of = {i: rng.choice((0, 1, 1, 2)) for i in state}
    home = sum(of[i] * model.resident[i] for i in state)
    most = sum(of.values())
    ins = sum(of[i] * var for (_, i), var in model.M_in.items() if i in of)
    news = {new: old for old, new in graph.replacement_of.items()}
    out = sum(of[news[i]] * var for (_, i), var in model.M_out.items() if i in news)
    stored = sum(rng.choice((1, 2)) * var for (_, i), var in model.S_AUX.items() if i in of)
    computed = sum(var for (t, k), var in model.R.items() if k < t)
    every = [
        home >= rng.randint(0, most),
        home <= rng.randint(0, most),
        home == rng.randint(0, most),
        ins <= rng.randint(0, 1),
        out + ins <= rng.randint(0, 3),
        home + computed <= rng.randint(0, most + 1),
        computed - home <= 1 - rng.randint(0, most),
        stored <= rng.randint(0, 4),
        pyo.inequality(rng.randint(0, 1), home + out, rng.randint(1, 4)),
    ]
    return rng.sample(every, rng.randint(1, 3))


@pytest.mark.slow
def test_rows_on_state_have_the_answer_of_the_model() -> None:
    """On random training steps: status and value are those of the model as it was built."""
    seen, quickly = Counter[str](), 0
    for number in range(60):
        problem = state_problem(f"added/{number}", (4, 7))
        if not problem.graph.state_tensors:
            continue
        models = [build(problem) for _ in range(2)]
        for model in models:
            rng = seeded(f"state rows/{number}")
            model.added = pyo.ConstraintList()
            for row in rows_of_state(rng, model):
                if not isinstance(row, bool):
                    model.added.add(row)
        quick, slow = solve(models[0], gap=0.0), as_built(models[1])
        assert quick.status == slow.status, (number, quick.reason, slow.reason)
        seen[quick.status] += 1
        if quick.schedule is not None and slow.schedule is not None:
            near = pytest.approx(slow.objective_value, rel=1e-6, abs=1e-9)
            assert quick.objective_value == near, number
            assert not verify(problem, quick.schedule).violations
            assert quick.objective_bound == pytest.approx(quick.objective_value, abs=1e-6), number
        quickly += SAID in quick.log
    assert seen[Status.OPTIMAL] > 10
    assert seen[Status.INFEASIBLE] > 3
    assert quickly > 20


@parts(2)
def test_objectives_on_state_have_the_answer_of_the_model(part: Part) -> None:
    """To write back and read little: value and bound of the model."""
    seen = []
    for number in part.of(range(30)):
        problem = state_problem(f"wear/{number}", (4, 7))
        if not problem.graph.state_tensors:
            continue
        models = [build(problem) for _ in range(2)]
        for model in models:
            sizes = problem.graph.tensor_bytes
            wear = sum(sizes[i] * var for (_, i), var in model.M_out.items())
            read = sum(2 * var for _, var in model.M_in.items())
            model.objective.deactivate()
            model.wear = pyo.Objective(expr=wear + read + 0 * model.R[0, 0])
        quick, slow = solve(models[0], gap=0.0), as_built(models[1])
        assert quick.status == slow.status, (number, quick.reason, slow.reason)
        if quick.own_objective is not None and slow.own_objective is not None:
            own = slow.own_objective
            assert quick.own_objective.value == pytest.approx(own.value, rel=1e-6, abs=1e-9)
            assert quick.own_objective.gap == 0
        seen.append(SAID in quick.log)
    assert sum(seen) > part.share(5)


def test_the_classifier_stays_in_ram() -> None:
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


def stage_limits(rng: random.Random, model: pyo.ConcreteModel, schedule: Schedule) -> Iterator[Any]:
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
def test_rows_on_stages_have_the_answer_of_the_model() -> None:
    """On random problems, whatever is minimized and limited: status and value of the model."""
    seen = []
    for number, problem in enumerate(random_instances(ROUNDS, (4, 8), seed=SEED)):
        free = solve(problem, gap=0.0)
        if free.schedule is None:
            continue
        models = [build(problem) for _ in range(2)]
        for model in models:
            rng = seeded(f"stages/{SEED}/{number}")
            model.added = pyo.ConstraintList()
            for row in stage_limits(rng, model, free.schedule):
                if not isinstance(row, bool):
                    model.added.add(row)
        quick, slow = solve(models[0], gap=0.0), as_built(models[1])
        assert quick.status == slow.status, (number, quick.reason, slow.reason)
        if quick.schedule is not None and slow.schedule is not None:
            value = pytest.approx(slow.objective_value, rel=1e-6, abs=1e-9)
            assert quick.objective_value == value, number
            assert not verify(problem, quick.schedule).violations
        if BY_STAGE in quick.log:
            seen.append(quick.objective_value != free.objective_value)
    assert sum(seen) > len(seen) // 3 > ROUNDS // 20


def few_transfers(model: pyo.ConcreteModel) -> Any:
    """Limit a total."""
    return sum(model.M_out.values()) + sum(model.M_in.values()) <= 1


def one_stage(model: pyo.ConcreteModel) -> Any:
    """Limit what happens in one stage."""
    return sum(var for (t, _), var in model.M_in.items() if t == 3) <= 0


def a_transfer(model: pyo.ConcreteModel) -> Any:
    """Want something that serves nothing else."""
    return sum(model.M_out.values()) >= 2


@pytest.mark.parametrize(
    ("rule", "totals"), [(few_transfers, True), (one_stage, False), (a_transfer, False)]
)
def test_the_log_says_how_a_model_was_solved(
    rule: Callable[[pyo.ConcreteModel], Any], *, totals: bool
) -> None:
    """Only rows on totals make a model a problem; a model alone is solved as it was built."""
    model = build(skip_problem())
    assert SAID not in solve(model).log
    model.added = pyo.Constraint(expr=rule(model))
    assert (SAID in solve(model).log) == totals


def test_a_row_may_have_the_name_of_a_constraint_of_the_problem() -> None:
    """Both hold: at most one page-out by the one, and one page-in by the other."""
    problem = skip_problem().subject_to(few=lambda v: sum(v.page_outs.values()) <= 1)
    model = build(problem)
    model.few = pyo.Constraint(expr=sum(model.M_in.values()) <= 1)
    result = solve(model)
    assert SAID in result.log
    assert result.schedule is not None
    assert len(result.schedule.M_out) <= 1
    assert len(result.schedule.M_in) <= 1


def fix(model: pyo.ConcreteModel) -> None:
    """Decide something."""
    next(iter(model.paged_in.values())).fix(0)


def drop_memory(model: pyo.ConcreteModel) -> None:
    """Leave all rows of memory out."""
    model.memory.deactivate()


def drop_one_row(model: pyo.ConcreteModel) -> None:
    """Leave one row out."""
    del model.memory[next(iter(model.memory))]


def change_a_row(model: pyo.ConcreteModel) -> None:
    """State a row anew."""
    row = next(iter(model.inputs.values()))
    row.set_value(row.body >= 0)


@pytest.mark.parametrize("change", [fix, drop_memory, drop_one_row, change_a_row])
def test_a_changed_model_is_solved_as_it_is(change: Callable[[pyo.ConcreteModel], None]) -> None:
    """What the model says counts, not the problem that it was built of."""
    model = build(skip_problem())
    model.added = pyo.Constraint(expr=few_transfers(model))
    change(model)
    try:
        log = solve(model).log
    except VerificationError as error:  # without its rows a model has answers that break rules
        log = str(error)
    assert SAID not in log


def test_nothing_keeps_rows_on_totals() -> None:
    """The reason speaks of what was added, and says that the reductions may be to blame."""
    model = build(skip_problem())
    model.added = pyo.Constraint(
        expr=sum(model.M_in.values()) + sum(model.recomputed.values()) <= 0
    )
    result = solve(model)
    assert result.status == Status.INFEASIBLE
    assert "the constraints added to the model" in result.reason
    assert "reductions=False" in result.reason


def test_without_time_a_schedule_that_keeps_the_rows_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy recomputes; without that it keeps the row, as is known before anything is compiled."""
    graph = comb_graph(9)
    problem = Problem(graph, even_costs(graph, page_in=(9, 9), page_out=(9, 9)), ram=17)

    def too_late(_: object) -> None:
        raise TimeLimitError("the time limit has passed")

    monkeypatch.setattr("poetmodel.backends.compiler.compile_model", too_late)
    model = build(problem)
    # Only the model is solved with a coefficient below 0.
    wanted = next(iter(model.paged_in.values()))
    model.added = pyo.Constraint(expr=sum(model.recomputed.values()) - wanted / 1000 <= 0)
    result = solve(model)
    assert (result.status, result.termination) == (Status.FEASIBLE, Termination.TIME_LIMIT)
    assert all(k == t for t, k in result.require_schedule().R)
    greedy = construct(problem)
    assert greedy is not None
    assert any(k < t for t, k in greedy.R)
