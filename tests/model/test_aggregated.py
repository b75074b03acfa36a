"""Stages merged into groups: groups, step rows, and unchanged optima."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from kit.instances import (
    make_rng,
    pointwise_graph,
    random_instance,
    random_instances,
    scarce_problem,
    varied_graph,
)
from kit.oracle import optimum
from kit.own_rows import add_measured_rows
from kit.relaxation import SOLVER_TOLERANCE, find_minimum, make_relaxation, random_rows
from kit.rotation import parametrize_parts
from kit.worked import costs_of, parse_graph
from poetmodel.backends.layout import to_standard_form
from poetmodel.graph import Graph, operation
from poetmodel.model import aggregated
from poetmodel.model.aggregated import build_relaxation
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.events import find_events, recomputable_nodes
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import infeasibility_reason


def chain(uses, n, **of_node):
    """Make `n` nodes of 4 bytes in a row; `uses` names further readers of some of them."""
    nodes = []
    for k in range(n):
        inputs = {k - 1} if k else set()
        inputs |= {i for i, readers in uses.items() if k in readers}
        names = tuple(f"n{i}" for i in sorted(inputs))
        options = of_node.get(f"n{k}", {})
        nodes.append(operation(f"n{k}", **{"output_bytes": 4, "inputs": names, **options}))
    return Graph(name="chain", nodes=tuple(nodes))


def problem_of(graph, *, page=9.0, dear="", **limits):
    """State a problem in which every computation costs 1, those of the nodes in `dear` 100."""
    compute = [100.0 if node.name in dear.split() else 1.0 for node in graph.nodes]
    pages = [(page, page)] * len(graph.tensors)
    costs = costs_of(graph, compute, page_ins=pages)
    return Problem(graph, costs, **{"ram": 12, **limits})


def events_of(problem, grouping):
    """Return the decisions and the tensors present, for the enforced rows."""
    return find_events(
        problem,
        grouping.group_of,
        recomputable=recomputable_nodes(problem),
        is_free=partial(grouping.is_free, problem.graph),
    )


# -- groups ------------------------------------------------------------------------------------
def test_groups_end_where_coefficients_of_an_own_row_change():
    """Own rows bring their cuts; rows of memory that are added later leave them there."""
    grouping = Grouping(6).with_rows(ends_of_user_row={0: frozenset({1, 2})})
    assert grouping.user_rows == {0}
    assert grouping.group_of == (0, 0, 1, 2, 2, 2)
    finer = grouping.with_rows([4], ends_of_user_row={3: frozenset({2})})
    assert finer.user_rows == {0, 3}
    assert finer.group_of == (0, 0, 1, 2, 2, 3)


def test_page_ins_that_an_own_row_counts_wait_for_nothing():
    """They are offered in every group that the row has up to the last use, kept for free or not."""
    problem = scarce_problem("waiting", 9, minimize="energy")
    n = len(problem.graph.nodes)
    stated = problem.subject_to(
        few=lambda v: sum(v.page_ins[t, i] for t in range(n) for i in v.page_ins) <= 0
    )
    recomputable = recomputable_nodes(stated)
    grouping = Grouping(n).with_rows([n // 2], ends_of_user_row={0: frozenset(range(n))})
    found = build_relaxation(stated, grouping, recomputable)
    for i, (k, stages) in enumerate(
        zip(problem.graph.node_of, found.events.page_in_groups, strict=True)
    ):
        last = max(found.events.event_groups[i], default=-1)
        present = found.events.present_groups[i]
        assert stages == tuple(t for t in range(k + 1, last + 1) if t not in present)
    assert found.events.dominated_keeps == frozenset()
    (row,) = found.row_families["stage_limits"]
    assert found.row_upper[row] == 0


def test_groups_of_random_rows_are_consistent():
    """Groups are runs of stages; each row's stage ends one, and a step's stage is one."""
    for number in range(200):
        rng = make_rng(f"groups/{number}")
        problem = next(random_instances(1, (1, 12), seed=number))
        grouping = random_rows(rng, problem, 0.4)
        n = len(problem.graph.nodes)
        runs = list(zip(grouping.first_stage, grouping.last_stage, strict=True))
        assert [t for a, b in runs for t in range(a, b + 1)] == list(range(n))
        assert all(grouping.group_of[t] == g for g, (a, b) in enumerate(runs) for t in (a, b))
        assert grouping.stage_rows <= set(grouping.last_stage)
        assert all((t, t) in runs for t in grouping.step_stages)
        finer = grouping.with_rows(tuple(random_rows(rng, problem, 0.3).stage_rows))
        assert set(grouping.first_stage) <= set(finer.first_stage)


# -- dominated keeps ---------------------------------------------------------------------------
def test_what_a_reader_makes_stays_in_place_of_what_it_alone_reads():
    """`i` is neither kept nor paged once `o` was made of it, unless time is a makespan.

    Groups are stages 0-3, 4 and 5-6; `a` and `o` have two readers each. In a makespan, the
    replacing transfers may delay others.
    """
    graph = parse_graph("a 6", "i 4 a", "o 4 i", "q 1", "r 1 a", "z 6 o", "y 6 o")
    problem = problem_of(graph)
    found = build_relaxation(problem, Grouping(7, frozenset({3, 4})), [True] * 7)
    i, o = 1, 2
    assert found.events.recompute_groups[i] == (1, 2)
    assert found.events.dominated_keeps == {(i, 0), (i, 1)}
    assert all(found.fixed[found.kept[i, a]] == 0 for a in (0, 1))
    later = range(1, len(found.events.event_groups[o]))
    assert not any(found.kept[o, a] in found.fixed for a in later)
    assert (found.events.page_in_groups[i], found.events.page_in_groups[o]) == ((), (2,))
    assert i not in found.paged_out
    graph = parse_graph("a 6", "i 4 a", "o 4 i", "q 1", "r 1 a", "z 6 o", "y 6 o")
    problem = problem_of(graph, deadline="99 s", deadline_counts="overlap")
    found = build_relaxation(problem, Grouping(7, frozenset({3, 4})), [True] * 7)
    assert found.events.dominated_keeps == frozenset()
    assert found.events.page_in_groups[1] == (1, 2)


NOT_DOMINATED = {
    # Row 2 has room for `i` and not for `o`.
    "more bytes": (
        parse_graph("i 2", "o 4 i", "q 9", "z 1 o"),
        "i",
        12,
        Grouping(4, frozenset({2})),
        1,
    ),
    # Stage 4 computes `x` again, for `y`, so that `i` can be. `o` has no room beside both, nor in
    # stage 5, beside `y`.
    "no room at the step": (
        parse_graph("x 6", "i 4 x", "o 4+3 i", "q 11", "y 4 x", "r 5 y", "z 1 o"),
        "x",
        14,
        Grouping(7, frozenset({2, 3, 5}), frozenset({(4, 2), (5, 2)})),
        102,
    ),
    # Stage 6 has `x` for `i` and stage 8 `y` for `j`: only there is `o` made of both.
    "another input": (
        parse_graph("x 6", "i 4 x", "y 6", "j 4 y", "o 4 i j", "q 10", "s 1 x", "r 8", "z 1 y o"),
        "x y",
        12,
        Grouping(9, frozenset({4, 5, 7})),
        203,
    ),
}
"""Graph, dear nodes, RAM, rows and optimum where what a reader makes cannot take the place."""


@pytest.mark.parametrize("kind", NOT_DOMINATED)
def test_a_keep_that_is_better_is_not_dominated(kind):
    """The optimum needs it: without it something dear is computed once more."""
    graph, dear, ram, grouping, expected = NOT_DOMINATED[kind]
    problem = problem_of(graph, page=1000.0, dear=dear, ram=ram)
    relaxation = make_relaxation(problem, grouping)
    assert find_minimum(relaxation.form, relaxation.unit) == pytest.approx(expected)


# -- beside step rows --------------------------------------------------------------------------
def test_nothing_is_sure_beside_the_stage_of_a_step_row():
    """Rows within stage 3 count tensors that enter and leave it, whichever stages 2 and 3 read.

    With the row of stage 2 alone, keeping `n0` is free, because stage 2 reads it; likewise
    `n3`, which stage 3 makes. With step ``(3, 1)`` enforced, both ends of stage 3 may count
    them. A keep that reaches no end of a step's stage is as free as without it.
    """
    problem = problem_of(chain({0: (2, 5), 3: (5,)}, 6))
    plain = events_of(problem, Grouping(6, frozenset({2, 3})))
    assert plain.use_groups[0] == (2,)
    assert plain.present_groups[3] == {2}
    stepped = Grouping(6, frozenset({2, 3}), frozenset({(3, 1)}))
    assert stepped.group_of == (0, 0, 0, 1, 2, 2)
    found = events_of(problem, stepped)
    assert found.present_groups[0] == found.present_groups[3] == frozenset()
    assert found.page_in_groups[3] == found.recompute_groups[3] == (2,)
    # `n0` may also be read in stage 3, to recompute `n2` for stage 5.
    assert found.page_in_groups[0] == found.recompute_groups[0] == (1, 2)
    problem = problem_of(chain({0: (1, 2), 2: (5,)}, 6))
    found = events_of(problem, Grouping(6, frozenset({1}), frozenset({(4, 2)})))
    # Groups are stages 0-1, 2-3, 4 and 5.
    assert found.present_groups[0] == {1}
    assert found.event_groups[2] == (2, 3)
    assert found.present_groups[2] == frozenset()


# -- that nothing is lost ----------------------------------------------------------------------
def instances(kind, numbers, graph_of=varied_graph):
    """Yield random problems of 5 to 9 nodes with random rows to enforce."""
    for number in numbers:
        seed = f"grouping-{kind}/{number}"
        problem = scarce_problem(seed, (5, 9), graph_of)
        if infeasibility_reason(problem) is None:
            rng = make_rng(f"rows of {seed}")
            yield seed, problem, random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))


def own_pointwise(kind, numbers):
    """Yield problems with own constraints, and random rows to enforce."""
    for number in numbers:
        seed = f"own-{kind}/{number}"
        rng = make_rng(seed)
        problem = add_measured_rows(rng, scarce_problem(seed, (4, 7), pointwise_graph))
        if infeasibility_reason(problem) is None:
            yield seed, problem, random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))


def ungrouped(problem, grouping):
    """Return `compact` with all its stages, but only the memory rows of a grouping."""
    m = Model(problem, COMPACT, exact=True)
    m.grouping = replace(grouping, user_row_ends=frozenset(range(grouping.n_stages)))
    chosen = recomputable_nodes(problem)
    m.events = find_events(problem, m.grouping.group_of, recomputable=chosen)
    COMPACT.populate(m)
    return m


def with_free_keeps(problem, grouping, monkeypatch):
    """Return the relaxation that decides keeps that are free, too."""
    with monkeypatch.context() as patch:
        patch.setattr(Grouping, "is_free", lambda *_: False)
        return make_relaxation(problem, grouping)


def with_dominated_keeps(problem, grouping, monkeypatch):
    """Return the relaxation that offers keeps for which there is a better one."""
    with monkeypatch.context() as patch:
        patch.setattr(aggregated, "mark_dominated_keeps", lambda _, events, **__: events)
        return make_relaxation(problem, grouping)


KEEP, MERGE = partial(instances, "keep"), partial(instances, "merge")
DOMINATED = partial(instances, "more-dominated", graph_of=pointwise_graph)
OWN_DOMINATED = partial(own_pointwise, "more-dominated")
FURTHER = [
    *((with_free_keeps, KEEP, range(first, first + 65)) for first in range(20, 500, 65)),
    *((ungrouped, MERGE, range(first, first + 65)) for first in range(15, 1000, 65)),
    *((with_dominated_keeps, DOMINATED, range(first, first + 60)) for first in range(60, 1500, 60)),
    *((with_dominated_keeps, OWN_DOMINATED, range(k, k + 60)) for k in range(60, 1500, 60)),
]


@pytest.mark.parametrize(
    ("variant", "problems", "numbers", "reached"),
    [
        (with_free_keeps, KEEP, range(20), {"fewer": 0.2}),
        (ungrouped, MERGE, range(15), {"fewer": 0.5}),
        *(
            pytest.param(with_dominated_keeps, *more, marks=pytest.mark.slow)
            for more in (
                (DOMINATED, range(60), {"kept": 15, "paged": 5}),
                (OWN_DOMINATED, range(60), {"kept": 10, "paged": 0}),
            )
        ),
        *(pytest.param(*more, {}, marks=pytest.mark.seeds) for more in FURTHER),
    ],
)
def test_reductions_lose_nothing(variant, problems, numbers, reached, monkeypatch):
    """Without a reduction, the optimum is the same, and there are more columns.

    User constraints and rewards are included. Reductions are free keeps, dominated keeps, and,
    with the same rows enforced, one decision per group. A number below 1 is a fraction of the
    columns.
    """
    seen = Counter()
    for seed, problem, grouping in problems(numbers):
        reduced = make_relaxation(problem, grouping)
        if variant is ungrouped:
            whole = ungrouped(problem, grouping)
            form, unit = to_standard_form(whole), whole.objective_unit
        else:
            whole = variant(problem, grouping, monkeypatch)
            form, unit = whole.form, whole.unit
        expected = pytest.approx(find_minimum(form, unit), abs=SOLVER_TOLERANCE)
        assert find_minimum(reduced.form, reduced.unit) == expected, seed
        seen["columns"] += form.n_columns
        seen["fewer"] += form.n_columns - reduced.form.n_columns
        seen["kept"] += len(reduced.events.dominated_keeps)
        found, every = reduced.events.page_in_groups, whole.events.page_in_groups
        seen["paged"] += sum(map(len, every)) - sum(map(len, found))
    for name, more in reached.items():
        assert seen[name] > (more * seen["columns"] if 0 < more < 1 else more), seen


@parametrize_parts(12)
def test_merging_stages_keeps_every_count_that_is_wanted(part):
    """Own constraints and objectives: no bound is above the best value; single stages lose none."""
    beside = looser = 0
    for number in part.select(range(180)):
        seed = f"grouping-own/{number}"
        rng = make_rng(seed)
        problem = add_measured_rows(rng, random_instance(rng, (4, 5)))
        if infeasibility_reason(problem) is not None:
            continue
        grouping = random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))
        best = optimum(problem)
        merged = make_relaxation(problem, grouping)
        found = find_minimum(merged.form, merged.unit)
        apart = ungrouped(problem, grouping)
        expected = find_minimum(to_standard_form(apart), apart.objective_unit)
        assert expected is None or (found is not None and found <= expected + SOLVER_TOLERANCE), (
            seed
        )
        if best is not None:
            assert problem.objective.baseline + found <= best.value + SOLVER_TOLERANCE, seed
        looser += found != pytest.approx(expected, abs=SOLVER_TOLERANCE)
        beside += bool(len(merged.model.extra_recomputed) or len(merged.model.extra_paged_in))
        singles = grouping.with_rows(range(grouping.n_stages), ())
        merged, apart = make_relaxation(problem, singles), ungrouped(problem, singles)
        assert not len(merged.model.extra_recomputed)
        assert not len(merged.model.extra_paged_in)
        found = find_minimum(merged.form, merged.unit)
        assert found == pytest.approx(
            find_minimum(to_standard_form(apart), apart.objective_unit), abs=SOLVER_TOLERANCE
        )
    assert beside >= part.divide(48)
    assert looser < part.divide(96)
