"""Stages merged into groups: groups, beside step rows, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import (
    pointwise_graph,
    random_instance,
    random_instances,
    scarce_problem,
    seeded,
    varied_graph,
)
from kit.oracle import optimum
from kit.own_rows import constrained
from kit.relaxation import CLOSE, random_rows, relaxation_of
from poetmodel.backends.layout import form_of
from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.device import Costs
from poetmodel.graph import Graph, operation
from poetmodel.model import aggregated
from poetmodel.model.aggregated import Grouping, build_relaxation
from poetmodel.model.arrays import Model
from poetmodel.model.compact import COMPACT
from poetmodel.model.events import Events, find_events, recomputable_nodes
from poetmodel.problem import LinearRow, Problem
from poetmodel.problem.infeasibility import obstacle

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.backends.standard_form import StandardForm


def chain(uses: dict[int, tuple[int, ...]], n: int, **of_node: dict[str, Any]) -> Graph:
    """Make `n` nodes of 4 bytes in a row; `uses` names further readers of some of them."""
    nodes = []
    for k in range(n):
        inputs = {k - 1} if k else set()
        inputs |= {i for i, readers in uses.items() if k in readers}
        names = tuple(f"n{i}" for i in sorted(inputs))
        options = of_node.get(f"n{k}", {})
        nodes.append(operation(f"n{k}", **{"output_bytes": 4, "inputs": names, **options}))
    return Graph(name="chain", nodes=tuple(nodes))


def problem_of(graph: Graph, *, page: float = 9.0, dear: str = "", **limits: Any) -> Problem:
    """State a problem in which every computation costs 1, those of the nodes in `dear` 100."""
    compute = [100.0 if node.name in dear.split() else 1.0 for node in graph.nodes]
    pages = [(page, page)] * len(graph.tensors)
    costs = Costs.from_arrays(
        graph, compute_time_s=compute, compute_energy_j=compute, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, **{"ram": 12, **limits})


def events_of(problem: Problem, grouping: Grouping) -> Events:
    """Return what is decided, and what is sure, for the enforced rows."""
    return find_events(
        problem,
        grouping.group_of,
        recomputable=recomputable_nodes(problem),
        is_free=partial(grouping.is_free, problem.graph),
    )


# -- groups ------------------------------------------------------------------------------------


def test_groups_end_where_coefficients_of_an_own_row_change() -> None:
    """Own rows bring their cuts; rows of memory that are added later leave them there."""
    grouping = Grouping(6).add(own={0: frozenset({1, 2})})
    assert grouping.own_rows == {0}
    assert grouping.group_of == (0, 0, 1, 2, 2, 2)
    finer = grouping.add([4], own={3: frozenset({2})})
    assert finer.own_rows == {0, 3}
    assert finer.group_of == (0, 0, 1, 2, 2, 3)


def test_page_ins_that_an_own_row_counts_wait_for_nothing() -> None:
    """They are offered in every group in which a reader could run, kept for free there or not."""
    problem = scarce_problem("waiting", 9, minimize="energy")
    n = len(problem.graph.nodes)
    paged_in = [(t, i) for i, k in enumerate(problem.graph.node_of) for t in range(k + 1, n)]
    row = LinearRow.of([(1, ("paged_in", index)) for index in paged_in], name="few", upper=0)
    stated = problem.surrogate(rows=(row,))
    recomputable = recomputable_nodes(stated)
    every = find_events(stated, range(n), recomputable=recomputable)
    grouping = Grouping(n).add([n // 2], own={0: frozenset(range(n))})
    found = build_relaxation(stated, grouping, recomputable)
    for i, stages in enumerate(found.events.page_in):
        last = max(found.events.events[i], default=-1)
        sure = found.events.sure[i]
        assert stages == tuple(t for t in every.page_in[i] if t <= last and t not in sure)
    assert found.events.dominated == frozenset()
    (row,) = found.row_families["stage_limits"]
    assert found.row_upper[row] == 0


def test_groups_of_random_rows_are_consistent() -> None:
    """Groups are runs of stages; each row's stage ends one, and a step's stage is one."""
    for number in range(200):
        rng = seeded(f"groups/{number}")
        problem = next(random_instances(1, (1, 12), seed=number))
        grouping = random_rows(rng, problem, 0.4)
        n = len(problem.graph.nodes)
        runs = list(zip(grouping.first_stage, grouping.last_stage, strict=True))
        assert [t for a, b in runs for t in range(a, b + 1)] == list(range(n))
        assert all(grouping.group_of[t] == g for g, (a, b) in enumerate(runs) for t in (a, b))
        assert grouping.stage_rows <= set(grouping.last_stage)
        assert all((t, t) in runs for t in grouping.step_stages)
        finer = grouping.add(tuple(random_rows(rng, problem, 0.3).stage_rows))
        assert set(grouping.first_stage) <= set(finer.first_stage)


# -- dominated keeps ---------------------------------------------------------------------------


def written(*lines: str) -> Graph:
    """Make a graph of lines ``name bytes[+workspace] [inputs]``."""
    nodes = []
    for line in lines:
        name, size, *inputs = line.split()
        taken, _, space = size.partition("+")
        nodes.append(
            operation(
                name,
                output_bytes=int(taken),
                inputs=tuple(inputs),
                workspace_bytes=int(space or 0),
            )
        )
    return Graph(name="written", nodes=tuple(nodes))


def test_what_a_reader_makes_stays_in_place_of_what_it_alone_reads() -> None:
    """Groups are stages 0-3, 4 and 5-6. `i` is kept nowhere once `o` was made, nor paged.

    `a` and `o` have two readers each.
    """
    problem = problem_of(written("a 6", "i 4 a", "o 4 i", "q 1", "r 1 a", "z 6 o", "y 6 o"))
    found = build_relaxation(problem, Grouping(7, frozenset({3, 4})), [True] * 7)
    i, o = 1, 2
    assert found.events.recompute[i] == (1, 2)
    assert found.events.dominated == {(i, 0), (i, 1)}
    assert all(found.fixed[found.kept[i, a]] == 0 for a in (0, 1))
    later = range(1, len(found.events.events[o]))
    assert not any(found.kept[o, a] in found.fixed for a in later)
    assert found.events.page_in[i] == ()
    assert found.events.page_in[o] == (2,)
    assert i not in found.paged_out
    # With recompute-memory cuts `o` is not recomputed earlier for that, whatever the room.
    found = build_relaxation(problem, found.grouping, [True] * 7, restoring=True)
    assert found.events.dominated == {(i, 0)}


def test_nothing_is_dominated_where_time_is_a_makespan() -> None:
    """What goes and what comes may meet other transfers then."""
    graph = written("a 6", "i 4 a", "o 4 i", "q 1", "r 1 a", "z 6 o", "y 6 o")
    problem = problem_of(graph, deadline="99 s", deadline_counts="overlap")
    found = build_relaxation(problem, Grouping(7, frozenset({3, 4})), [True] * 7)
    assert found.events.dominated == frozenset()
    assert found.events.page_in[1] == (1, 2)


NOT_DOMINATED: dict[str, tuple[Graph, str, int, Grouping, float]] = {
    # Row 2 has room for `i` and not for `o`.
    "more bytes": (
        written("i 2", "o 4 i", "q 9", "z 1 o"),
        "i",
        12,
        Grouping(4, frozenset({2})),
        1,
    ),
    # Stage 4 computes `x` again, for `y`, so that `i` can be. `o` has no room beside both, nor in
    # stage 5, beside `y`.
    "no room at the step": (
        written("x 6", "i 4 x", "o 4+3 i", "q 11", "y 4 x", "r 5 y", "z 1 o"),
        "x",
        14,
        Grouping(7, frozenset({2, 3, 5}), frozenset({(4, 2), (5, 2)})),
        102,
    ),
    # Stage 6 has `x` for `i` and stage 8 `y` for `j`: only there is `o` made of both.
    "another input": (
        written("x 6", "i 4 x", "y 6", "j 4 y", "o 4 i j", "q 10", "s 1 x", "r 8", "z 1 y o"),
        "x y",
        12,
        Grouping(9, frozenset({4, 5, 7})),
        203,
    ),
}
"""Graph, dear nodes, RAM, rows and optimum where what a reader makes cannot take the place."""


@pytest.mark.parametrize("kind", NOT_DOMINATED)
def test_a_keep_that_is_better_is_not_dominated(kind: str) -> None:
    """The optimum needs it: without it something dear is computed once more."""
    graph, dear, ram, grouping, expected = NOT_DOMINATED[kind]
    problem = problem_of(graph, page=1000.0, dear=dear, ram=ram)
    relaxation = relaxation_of(problem, grouping)
    assert least(relaxation.form, relaxation.unit) == pytest.approx(expected)


# -- beside step rows --------------------------------------------------------------------------


def test_nothing_is_sure_beside_the_stage_of_a_step_row() -> None:
    """Rows within stage 3 count what enters it and what leaves it, whatever stages 2 and 3 read.

    With the row of stage 2 alone, `n0` is kept for nothing, since stage 2 reads it; likewise `n3`,
    which stage 3 makes. With step ``(3, 1)`` enforced, both ends of stage 3 may count them.
    """
    problem = problem_of(chain({0: (2, 5), 3: (5,)}, 6))
    plain = events_of(problem, Grouping(6, frozenset({2, 3})))
    assert plain.uses[0] == (2,)
    assert plain.sure[3] == {2}
    stepped = Grouping(6, frozenset({2, 3}), frozenset({(3, 1)}))
    assert stepped.group_of == (0, 0, 0, 1, 2, 2)
    found = events_of(problem, stepped)
    assert found.sure[0] == found.sure[3] == frozenset()
    assert found.page_in[3] == found.recompute[3] == (2,)
    # `n0` may also be read in stage 3, to recompute `n2` for stage 5.
    assert found.page_in[0] == found.recompute[0] == (1, 2)


def test_what_ends_before_a_step_row_is_sure() -> None:
    """A keep that reaches no end of the step's stage is as free as without it."""
    problem = problem_of(chain({0: (1, 2), 2: (5,)}, 6))
    found = events_of(problem, Grouping(6, frozenset({1}), frozenset({(4, 2)})))
    # Groups are stages 0-1, 2-3, 4 and 5.
    assert found.sure[0] == {1}
    assert found.events[2] == (2, 3)
    assert found.sure[2] == frozenset()


# -- that nothing is lost ----------------------------------------------------------------------


def least(form: StandardForm, unit: float) -> float | None:
    """Return the optimum of a form in the problem's quantity, None where it has no point."""
    raw = backend("highs").solve(form, Limits(rel_gap=0.0))
    assert raw.x is not None or raw.infeasible
    return None if raw.objective is None else raw.objective * unit


def instances(
    kind: str, count: int, graph_of: Callable[[random.Random, int], Graph] = varied_graph
) -> Iterator[tuple[str, Problem, Grouping]]:
    """Yield random problems of 5 to 9 nodes with random rows to enforce."""
    for number in range(count):
        seed = f"grouping-{kind}/{number}"
        problem = scarce_problem(seed, (5, 9), graph_of)
        if obstacle(problem) is None:
            rng = seeded(f"rows of {seed}")
            yield seed, problem, random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))


def check_free_keeps(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Compare relaxations with and without free keeps; return their columns in total."""
    columns = [0, 0]
    for seed, problem, grouping in instances(kind, count):
        reduced = relaxation_of(problem, grouping)
        with monkeypatch.context() as patch:
            patch.setattr(Grouping, "is_free", lambda *_: False)
            whole = relaxation_of(problem, grouping)
        expected = least(whole.form, whole.unit)
        assert least(reduced.form, reduced.unit) == pytest.approx(expected, abs=CLOSE), seed
        columns[0] += reduced.form.n_columns
        columns[1] += whole.form.n_columns
    return columns[0], columns[1]


def test_free_keeps_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relaxation without them has the same optimum, and more columns."""
    reduced, whole = check_free_keeps("keep", 20, monkeypatch)
    assert reduced < 0.8 * whole


@pytest.mark.seeds
def test_free_keeps_lose_nothing_on_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on 500 instances."""
    check_free_keeps("keep", 500, monkeypatch)


def check_dominated_keeps(
    found_in: Iterable[tuple[str, Problem, Grouping]], monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Compare relaxations with and without dominated keeps; return how many went."""
    seen: Counter[str] = Counter()
    for seed, problem, grouping in found_in:
        reduced = relaxation_of(problem, grouping)
        with monkeypatch.context() as patch:
            patch.setattr(aggregated, "without_dominated_keeps", lambda _, events, **__: events)
            whole = relaxation_of(problem, grouping)
        expected = least(whole.form, whole.unit)
        assert least(reduced.form, reduced.unit) == pytest.approx(expected, abs=CLOSE), seed
        seen["kept"] += len(reduced.events.dominated)
        found, every = reduced.events.page_in, whole.events.page_in
        seen["paged"] += sum(map(len, every)) - sum(map(len, found))
        seen["columns"] += whole.form.n_columns - reduced.form.n_columns
    return seen


@pytest.mark.slow
def test_dominated_keeps_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relaxation with them has the same optimum, and more columns."""
    seen = check_dominated_keeps(instances("dominated", 200, pointwise_graph), monkeypatch)
    assert min(seen["kept"], seen["paged"]) > 50, seen


@pytest.mark.seeds
def test_dominated_keeps_lose_nothing_on_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on 3,000 instances."""
    check_dominated_keeps(instances("more-dominated", 3000, pointwise_graph), monkeypatch)


def own_pointwise(kind: str, count: int) -> Iterator[tuple[str, Problem, Grouping]]:
    """Yield problems with own constraints, and random rows to enforce."""
    for number in range(count):
        seed = f"own-{kind}/{number}"
        rng = seeded(seed)
        problem = constrained(rng, scarce_problem(seed, (4, 7), pointwise_graph))
        if obstacle(problem) is None:
            yield seed, problem, random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))


@pytest.mark.slow
def test_dominated_keeps_lose_nothing_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with own constraints and objectives."""
    seen = check_dominated_keeps(own_pointwise("dominated", 150), monkeypatch)
    assert seen["kept"] > 30, seen
    assert seen["paged"] > 0, seen


@pytest.mark.seeds
def test_dominated_keeps_lose_nothing_that_is_wanted_on_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same on 3,000 instances."""
    check_dominated_keeps(own_pointwise("more-dominated", 3000), monkeypatch)


def ungrouped(problem: Problem, grouping: Grouping) -> Model:
    """Return `compact` with all its stages, but only the memory rows of a grouping."""
    m = Model(problem, COMPACT, exact=True)
    m.grouping = replace(grouping, own_cuts=frozenset(range(grouping.n_stages)))
    chosen = recomputable_nodes(problem)
    m.events = find_events(problem, m.grouping.group_of, recomputable=chosen)
    COMPACT.populate(m)
    return m


def check_merging(kind: str, count: int) -> tuple[int, int]:
    """Compare grouped and ungrouped relaxations; return their columns in total."""
    columns = [0, 0]
    for seed, problem, grouping in instances(kind, count):
        merged, apart = relaxation_of(problem, grouping), ungrouped(problem, grouping)
        form = form_of(apart)
        expected = least(form, apart.objective_unit)
        assert least(merged.form, merged.unit) == pytest.approx(expected, abs=CLOSE), seed
        columns[0] += merged.form.n_columns
        columns[1] += form.n_columns
    return columns[0], columns[1]


def test_merging_stages_loses_nothing() -> None:
    """With the same rows enforced, deciding once for each stage gives the same optimum."""
    merged, apart = check_merging("merge", 15)
    assert merged < 0.5 * apart


@pytest.mark.seeds
def test_merging_stages_loses_nothing_on_more() -> None:
    """The same on 1,000 instances."""
    check_merging("merge", 1000)


def own_instances(count: int) -> Iterator[tuple[str, Problem, Grouping]]:
    """Yield random problems with own constraints, and random rows to enforce."""
    for number in range(count):
        seed = f"grouping-own/{number}"
        rng = seeded(seed)
        problem = constrained(rng, random_instance(rng, (4, 5)))
        if obstacle(problem) is None:
            yield seed, problem, random_rows(rng, problem, rng.choice((0.15, 0.3, 0.6)))


@pytest.mark.slow
def test_merging_stages_keeps_every_count_that_is_wanted() -> None:
    """Own constraints and objectives: no bound is above the best value; single stages lose none."""
    beside = looser = 0
    for seed, problem, grouping in own_instances(150):
        best = optimum(problem)
        merged = relaxation_of(problem, grouping)
        found = least(merged.form, merged.unit)
        apart = ungrouped(problem, grouping)
        expected = least(form_of(apart), apart.objective_unit)
        assert expected is None or (found is not None and found <= expected + CLOSE), seed
        if best is not None:
            assert found is not None, seed
            assert problem.objective.baseline + found <= best.value + CLOSE, seed
        looser += found != pytest.approx(expected, abs=CLOSE)
        beside += bool(len(merged.model.recomputed_beside) or len(merged.model.paged_in_beside))
        singles = grouping.add(range(grouping.n_stages), ())
        merged, apart = relaxation_of(problem, singles), ungrouped(problem, singles)
        assert not len(merged.model.recomputed_beside)
        assert not len(merged.model.paged_in_beside)
        found = least(merged.form, merged.unit)
        assert found == pytest.approx(least(form_of(apart), apart.objective_unit), abs=CLOSE)
    assert beside > 50
    assert looser < 50
