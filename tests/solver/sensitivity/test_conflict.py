"""Own constraints in conflict: an irreducible set of them, and the nearest limit of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo
import pytest

from kit.instances import random_instances, seeded
from kit.oracle import optimum
from kit.own_rows import constrained
from kit.worked import comb_problem, skip_problem
from poetmodel.model import build
from poetmodel.problem import Constraint, Problem
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import Change, Remedy, conflict, explain_infeasible
from poetmodel.solver.sensitivity.conflict import find_conflict
from poetmodel.solver.sensitivity.remedies import freed, name_of, stated_limits

if TYPE_CHECKING:
    from poetmodel.solver.sensitivity import Explanation


def upper(name: str, limit: float, **terms: float) -> Constraint:
    """Return a row with an upper limit; a key has ``__`` for its colon."""
    keys = {key.replace("__", ":"): weight for key, weight in terms.items()}
    return Constraint(name=name, terms=keys, upper=limit)


def explained(problem: Problem) -> Explanation:
    """Return the explanation of an infeasible problem."""
    result = solve(problem)
    assert result.status == Status.INFEASIBLE
    return explain_infeasible(result)


def with_rows(*rows: Constraint, **limits: object) -> Problem:
    """Return the worked problem with rows: in less than 15 B, a (4 B) is paged or recomputed."""
    return replace(skip_problem(**limits), constraints=rows)


@pytest.mark.parametrize(
    ("problem", "hints"),
    [
        (
            with_rows(upper("wear", 3, bytes_written=1), recompute=False),
            [
                "constraint 'wear' cannot be kept together with the RAM budget and no "
                "recomputation",
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible with recomputation",
                "feasible with constraint 'wear' at most 4 bytes",
            ],
        ),
        (
            with_rows(
                upper("wear", 3, bytes_written=1),
                upper("idle", 100, energy_j=1),
                upper("once", 0, recomputations__a=1),
            ),
            [
                "constraints 'wear' and 'once' cannot be kept together with the RAM budget",
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible with constraint 'wear' at most 4 bytes",
                "feasible with constraint 'once' at most 1",
            ],
        ),
        (
            with_rows(upper("thrift", 10.5, energy_j=1)),
            [
                "constraint 'thrift' cannot be kept together with the RAM budget",
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible with constraint 'thrift' at most 11 J",
            ],
        ),
        (
            with_rows(upper("wear", 3, bytes_written=1), ram=11),
            ["feasible from 12 bytes of RAM"],
        ),
    ],
)
def test_rows_in_conflict_are_named(problem: Problem, hints: list[str]) -> None:
    """With the limits that take part, and with what would do; rows that take no part are not."""
    assert list(explained(problem).hints()) == hints


def test_json_has_what_is_in_conflict_and_the_nearest_limit() -> None:
    """Names of rows beside limits in words; a change of a row says which limit of it."""
    found = explained(with_rows(upper("wear", 3, bytes_written=1), recompute=False)).to_dict()
    assert found["constraints"] == ["wear"]
    assert found["limits"] == ["the RAM budget", "no recomputation"]
    change = found["changes"][-1]
    expected = {"change": "constraint", "constraint": "wear", "side": "upper", "unit": "bytes"}
    assert {key: change[key] for key in expected} == expected
    assert (change["allowed"], change["nearest"], change["bound"]) == (3, 4, 4)
    assert change["proven"] is True
    assert "constraint" not in found["changes"][0]


def test_rows_with_two_limits_are_left_out_as_a_whole() -> None:
    """An equality has no nearest limit."""
    row = Constraint(name="same", terms={"page_ins:a": 1, "page_outs:b": -1}, lower=-1)
    row = replace(row, upper=-1)
    found = explained(with_rows(row, upper("few", 0, page_outs__b=1)))
    sentences = list(found.sentences())
    assert "feasible without constraint 'same'" in sentences
    assert "feasible with constraint 'few' at most 1" in sentences


def test_rows_of_one_rule_are_named_together_where_many_take_part() -> None:
    """A few are named one by one."""
    every = [upper(f"each[{name}]", 0, **{f"page_outs__{name}": 1}) for name in ("a", "b", "c")]
    problem = with_rows(*every, upper("once", 0, recomputations__a=1))
    assert "constraints 'each[a]' and 'once' cannot be kept together with the RAM budget" in list(
        explained(problem).hints()
    )
    rows = [upper(f"each[f{k}]", 0, **{f"page_outs__f{k}": 1}) for k in range(8)]
    comb = comb_problem(teeth=8, ram=30, recompute=False)  # any of f0 to f5 could leave
    found = explained(replace(comb, constraints=tuple(rows)))
    assert next(found.hints()) == (
        "constraint 'each[...]' cannot be kept together with the RAM budget and no recomputation"
    )
    assert "feasible without constraint 'each[...]'" in list(found.hints())


def test_ctrl_c_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is solved."""
    problem = with_rows(upper("wear", 3, bytes_written=1), recompute=False)
    calls = []

    def interrupted(problem: Problem, **options: Any) -> Any:
        calls.append(problem)
        return replace(solve(problem, **options), termination=Termination.INTERRUPTED)

    monkeypatch.setattr(conflict, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_conflict(problem, time_limit=10)
    assert len(calls) == 1


def test_without_time_nothing_is_left_out() -> None:
    """Everything stays in conflict, and is not called irreducible."""
    problem = with_rows(upper("wear", 3, bytes_written=1), upper("idle", 100, energy_j=1))
    found, irreducible = find_conflict(problem, time_limit=0)
    assert not irreducible
    assert len(found) == 3


def limited(problem: Problem, remedy: Remedy, limit: float) -> Problem:
    """Return a problem with another limit for the row that a remedy is about."""
    changed = [
        replace(row, **{str(remedy.side): limit}) if row.name == remedy.constraint else row
        for row in problem.constraints
    ]
    return replace(problem, constraints=tuple(changed))


@pytest.mark.slow
def test_conflicts_are_irreducible_and_nearest_limits_exact() -> None:
    """The oracle finds no schedule for a conflict, and one without any of its members.

    A limit that works has a schedule, and the next nearer one has none.
    """
    infeasible = checked = 0
    for number, base in enumerate(random_instances(120, n=(3, 4))):
        problem = constrained(seeded(number), base)
        if optimum(problem) is not None:
            continue
        infeasible += 1
        found, irreducible = find_conflict(problem, time_limit=20)
        assert irreducible
        rows = {row for each in found if isinstance(each, tuple) for row in each}
        others = [each for each in stated_limits(problem) if each not in found]
        others += [(row,) for row in problem.constraints if row not in rows]
        assert optimum(freed(problem, *others)) is None
        for each in found:
            assert optimum(freed(problem, *others, each)) is not None
        result = solve(problem)
        for remedy in explain_infeasible(result, time_limit=20).remedies:
            if remedy.change != Change.CONSTRAINT:
                continue
            (rows,) = (
                each
                for each in found
                if isinstance(each, tuple) and name_of(each) == remedy.constraint
            )
            assert (optimum(freed(problem, rows)) is not None) is remedy.works
            if remedy.nearest is None:
                continue
            checked += 1
            assert remedy.proven
            assert optimum(limited(problem, remedy, remedy.nearest)) is not None
            step = 1 if isinstance(remedy.nearest, int) else 1e-6 * max(1, abs(remedy.nearest))
            nearer = remedy.nearest + (step if remedy.side == "lower" else -step)
            assert optimum(limited(problem, remedy, nearer)) is None
    assert infeasible > 15
    assert checked > 5
    assert checked > 5


def test_rows_of_the_problem_stand_beside_those_added_to_its_model() -> None:
    """The added constraint is blamed, the problem's own one takes part."""
    model = build(with_rows(upper("wear", 3, bytes_written=1)))
    model.mine = pyo.Constraint(expr=sum(model.R[t, 0] for t in range(1, 4)) <= 0)
    found = explain_infeasible(solve(model), model=model)
    assert found.constraints == ("mine",)
    assert "constraint 'wear'" in found.limits
