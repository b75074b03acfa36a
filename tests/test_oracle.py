"""The exhaustive oracle against a simpler search: all relations, simulated.

And the random problems of other tests: reproducible, and as requested.
"""

import dataclasses
import itertools
from typing import NamedTuple

import pytest

from kit.instances import (
    make_rng,
    random_costs,
    random_graph,
    random_instances,
    random_problem,
    random_schedule,
    random_step,
    state_problem,
)
from kit.oracle import optimum
from kit.own_rows import add_measured_rows, state_rows_problem
from kit.rotation import parametrize_parts
from kit.worked import bench_device, even_costs
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import USER_OBJECTIVE, Problem
from poetmodel.schedule import Schedule, Simulation, check_schedule, simulate

QUANTITIES = ("energy", "time", "ram", "writes")


class Outcome(NamedTuple):
    """Results of one valid schedule."""

    runs: dict[str, Simulation]
    """As simulated, by the time that counts."""
    recomputes: bool
    pages: bool

    def value(self, problem):
        """Return the quantity that a problem minimizes."""
        run = self.runs[str(problem.deadline_counts)]
        if problem.minimize == USER_OBJECTIVE:
            return run.total(problem.graph, problem.user_objective)
        figures = (run.energy_j, run.time_s, run.peak_ram_bytes, run.written_bytes)
        return figures[QUANTITIES.index(str(problem.minimize))] or 0.0

    def keeps(self, problem):
        """Return whether it is within all limits of a problem."""
        run = self.runs[str(problem.deadline_counts)]
        limits = [
            (run.peak_ram_bytes, problem.usable_ram_bytes),
            (run.aux_used_bytes, problem.aux_limit_bytes),
            (run.time_s or 0.0, problem.deadline_s),
            (run.energy_j or 0.0, problem.energy_budget_j),
        ]
        for row in problem.constraints:
            total = run.total(problem.graph, row.terms.items())
            limits += [(total, row.upper), (-total, None if row.lower is None else -row.lower)]
        return (
            all(limit is None or amount <= limit for amount, limit in limits)
            and (problem.recompute or not self.recomputes)
            and (problem.paging or not self.pages)
        )


def every_schedule(graph, *, recompute=True, paging=True, storage=False):
    """Yield all schedules of a graph; with `storage`, also all choices of ``S_AUX``.

    Without it, ``S_AUX`` lists all tensors on storage; fewer entries can only forbid a page-in.
    To save time, schedules are omitted that page in a kept tensor or one that is not on
    storage, and those that page a tensor out twice.
    """
    n, made_by = len(graph.nodes), graph.node_of
    again = [(t, k) for t in range(n) for k in range(t) if recompute]
    new = graph.replacement_of
    ends = {w: graph.node_of[new[w]] if w in new else n for w in graph.state_tensors}
    carried = [
        (t, i)
        for t in range(n)
        for i, k in enumerate(made_by)
        if k < t <= ends.get(i, n) and i not in new.values()
    ]
    into = carried if paging else []
    out = [
        ((), *(((t, i),) for t in range(k, n) if paging and i not in {*ends, *new.values()}))
        for i, k in enumerate(made_by)
    ]  # each tensor at one stage, or never
    first = tuple((t, t) for t in range(n))
    homes = [tuple(ends)] if not paging else _every_subset(sorted(ends))
    for resident in homes:
        stored = {(t, i) for t, i in carried if i in ends and i not in resident}
        back = tuple((ends[w], new[w]) for w in new if w not in resident)
        for found in _every_choice(graph, again, carried, into, out, storage=storage):
            R, S_RAM, S_AUX, M_in, M_out = found  # noqa: N806 - the relations
            if {i for _, i in (*S_RAM, *M_in)} & {*resident}:
                continue
            yield Schedule(
                R=first + R,
                S_RAM=S_RAM,
                S_AUX=(*S_AUX, *stored),
                M_in=M_in,
                M_out=M_out + back,
                resident=resident,
            )


def _every_choice(graph, again, carried, into, out, *, storage):
    """Yield recomputations, kept, stored, paged-in and paged-out tensors, without state."""
    n, made_by = len(graph.nodes), graph.node_of
    state = frozenset(graph.state_tensors)
    for computed, kept, read, chosen in itertools.product(
        *map(_every_subset, (again, carried, into)), list(itertools.product(*out))
    ):
        written = tuple(itertools.chain(*chosen))
        held = {(t, i) for t, i in carried if graph.nodes[made_by[i]].on_aux}
        held |= {(t, i) for s, i in written for t in range(s + 1, n)}
        plain = {(t, i) for t, i in read if i not in state}
        if not held.difference(kept).issuperset(plain) or not set(kept).isdisjoint(read):
            continue
        for listed in _every_subset(sorted(held)) if storage else (tuple(held),):
            yield computed, kept, listed, read, written


def _every_subset(pairs):
    sizes = range(len(pairs) + 1)
    return [subset for size in sizes for subset in itertools.combinations(pairs, size)]


def outcomes(graph, costs, **choices):
    """Return the simulated outcomes of all valid schedules of a graph, each once."""
    found = {}
    for schedule in every_schedule(graph, **choices):
        run = simulate(graph, None, schedule)
        what = repr((run.peak_ram_bytes, run.recomputations, run.page_ins, run.page_outs))
        if not run.valid or what in found:
            continue
        runs = {
            counts: simulate(graph, costs, schedule, deadline_counts=counts)
            for counts in ("compute", "serial")
        }
        at_home = set(schedule.resident) == set(graph.state_tensors)
        pages = bool(schedule.M_in or schedule.M_out) or not at_home
        found[what] = Outcome(runs, len(schedule.R) > len(graph.nodes), pages)
    return list(found.values())


def best(problem, ways):
    """Return the least value of the minimized quantity among the outcomes within the limits."""
    return min((way.value(problem) for way in ways if way.keeps(problem)), default=None)


FAMILIES = {
    "both": ((3, 3), {"two_outputs": False}, {}),
    "paging": ((3, 3), {"two_outputs": False}, {"recompute": False}),
    "recompute": ((3, 4), {}, {"paging": False}),
    "storage": ((3, 3), {"two_outputs": False}, {"recompute": False, "storage": True}),
    "state": ((3, 4), {}, {}),
}
"""By name: nodes, choices of the graph, choices of the search."""


def compare_with_every_relation(family, numbers):
    """Compare oracle and every relation on random graphs, each with 32 problems over it."""
    n, of_graph, of_search = FAMILIES[family]
    switches = {key: value for key, value in of_search.items() if key != "storage"}
    feasible = paid = with_rows = 0
    for number in numbers:
        rng = make_rng(f"{family}/{number}")
        graph = _training_step(rng, n) if family == "state" else _roomy_graph(rng, n, **of_graph)
        costs = random_costs(rng, graph)
        ways = outcomes(graph, costs, **of_search)
        for minimize in QUANTITIES * 8:
            problem = random_problem(
                rng, graph, costs, minimize=minimize, below_floor=True, **switches
            )
            found = _compared(problem, ways)
            feasible += found is not None
            schedule = None if found is None else found.schedule
            paid += bool(schedule and (schedule.M_in or any(k < t for t, k in schedule.R)))
            with_rows += _compared(add_measured_rows(rng, problem), ways) is not None
    assert feasible > 8 * len(numbers)
    assert paid > 2 * len(numbers)
    assert with_rows > 8 * len(numbers)


def _compared(problem, ways):
    """Return the result of the exhaustive search, after a comparison with all methods."""
    found = optimum(problem)
    assert (found.value if found else None) == best(problem, ways), (problem, problem.to_dict())
    return found


@pytest.mark.parametrize(
    ("family", "begin", "count"),
    [
        *(("paging", 1, 1), ("storage", 0, 1), ("state", 0, 1)),
        *(pytest.param(family, 0, 1, marks=pytest.mark.slow) for family in ("both", "recompute")),
        *(
            pytest.param(family, 100, count, marks=pytest.mark.seeds)
            for family, count in (
                ("both", 14), ("paging", 45), ("recompute", 19), ("storage", 14), ("state", 23)
            )
        ),
    ],
)  # fmt: skip
def test_oracle_equals_trying_every_relation(family, begin, count):
    """For small graphs and many limits the oracle finds the value that trying everything finds."""
    compare_with_every_relation(family, range(begin, begin + count))


def _roomy_graph(rng, n, **choices):
    """Draw graphs until one needs less RAM than keep-all."""
    while True:
        graph = random_graph(rng, n, **choices)
        if len(graph.tensors) <= 4 and checkpoint_all_peak_bytes(graph) > floor(graph).bytes:
            return graph


def _training_step(rng, n):
    """Draw small steps with state until one needs less RAM than keep-all."""
    while True:
        graph = random_step(rng, n)
        moved = len(graph.tensors) - len(graph.replacement_of)
        roomy = checkpoint_all_peak_bytes(graph) > floor(graph).bytes
        if graph.state_tensors and roomy and moved <= (3 if len(graph.nodes) < 4 else 2):
            return graph


def judged(kind, number):
    """Return a problem of a kind: its objective, user rows, or steps with state."""
    if kind.startswith("state"):
        return (state_rows_problem if kind == "state rows" else state_problem)(f"judge/{number}")
    rng = make_rng(f"judge/{kind}/{number}")
    graph = random_graph(rng, (3, 5) if kind == "own" else (3, 6))
    fixed = {} if kind == "own" else {"minimize": kind}
    problem = random_problem(rng, graph, random_costs(rng, graph), **fixed)
    return add_measured_rows(rng, problem) if kind == "own" else problem


@pytest.mark.parametrize(
    ("kind", "count", "least"),
    [
        *((quantity, 150, 100) for quantity in QUANTITIES),
        pytest.param("own", 150, 80, marks=pytest.mark.slow),
        ("state", 60, 20),
        ("state rows", 60, 16),
    ],
)
@parametrize_parts(8)
def test_oracle_schedules_pass_the_verifier(part, kind, count, least):
    """The result is valid, rows included, and its simulated value is the stated one.

    Schedules are wasteful if a constraint or an objective rewards waste.
    """
    checked = wasteful = 0
    for number in part.select(range(count)):
        problem = judged(kind, number)
        found = optimum(problem)
        if found is None:
            continue
        verdict = check_schedule(problem, found.schedule)
        assert verdict.violations == (), (number, problem)
        measured = problem.objective.value_of(verdict.simulation)
        assert measured == pytest.approx(found.value, abs=1e-9), (number, problem)
        checked += 1
        wasteful += len(found.schedule.M_out) > len({i for _, i in found.schedule.M_in})
    assert checked >= part.divide(least)
    assert kind != "own" or wasteful >= part.divide(10)


def _unit_graph(*nodes):
    """Return a graph of (numbers of the nodes that are read, bytes)."""
    return Graph(
        name="example",
        nodes=tuple(
            operation(f"n{k}", output_bytes=size, inputs=[f"n{u}" for u in inputs])
            for k, (inputs, size) in enumerate(nodes)
        ),
    )


def test_oracle_refuses_what_needs_a_plan():
    """A deadline or idle power in the meaning overlap has no answer without a plan."""
    graph = _unit_graph(("", 1), ("0", 1))
    costs = even_costs(graph)
    problem = Problem(graph, costs, ram=2, deadline=9, deadline_counts="overlap")
    with pytest.raises(ValueError, match="overlap"):
        optimum(problem)
    idle = dataclasses.replace(costs, device=bench_device(idle_power_w=1.0))
    with pytest.raises(ValueError, match="overlap"):
        optimum(Problem(graph, idle, ram=2, deadline_counts="overlap"))
    free = optimum(Problem(graph, costs, ram=2, deadline_counts="overlap"))
    assert free.value == 3


# -- the random problems that other tests rest on ----------------------------------------------
def test_the_same_seed_gives_the_same_problem():
    """A problem depends on its seed and number alone, not on the problems before it."""
    first, again = (list(random_instances(20, (1, 6), seed=3)) for _ in range(2))
    assert [p.graph for p in first] == [p.graph for p in again]
    assert [p.to_dict() for p in first] == [p.to_dict() for p in again]
    fewer = list(random_instances(5, (1, 6), seed=3))
    assert [p.to_dict() for p in fewer] == [p.to_dict() for p in first[:5]]
    other = list(random_instances(20, (1, 6), seed=4))
    assert [p.graph for p in other] != [p.graph for p in first]


def test_what_is_switched_off_does_not_occur():
    """Keywords go to graph, costs, limits or `Problem`, and hold."""
    problems = random_instances(
        100, 4, two_outputs=False, no_outputs=False, workspace=False, on_aux=False,
        non_recomputable=False, zero_bytes=False, zero_cost=False, idle=False, deadline=False,
        aux_limit=False, energy_budget=False, switches=False, minimize="time",
    )  # fmt: skip
    for problem in problems:
        for node in problem.graph.nodes:
            assert len(node.outputs) == 1
            assert node.output_bytes > 0
            assert node.workspace_bytes == 0
            assert node.recomputable
            assert not node.on_aux
        assert min(problem.table.compute_energy_j + problem.table.page_in_time_s) > 0
        stated = problem.to_dict()
        assert {stated[key] for key in ("deadline_s", "aux_bytes", "energy_budget_j")} == {None}
        assert (problem.minimize, problem.recompute, problem.paging) == ("time", True, True)
        assert problem.idle_power_w == 0
        whole = checkpoint_all_peak_bytes(problem.graph)
        assert floor(problem.graph).bytes <= problem.ram_budget_bytes <= whole


def test_random_schedules_are_valid_and_do_everything():
    """Some hundred random schedules keep every rule, and recompute, page, and waste."""
    pairs = {"R": 0, "M_in": 0, "M_out": 0}
    for seed in range(200):
        rng = make_rng(seed)
        graph = random_graph(rng, (3, 7))
        schedule = random_schedule(rng, graph)
        assert simulate(graph, None, schedule).violations == ()
        pairs["R"] += len(schedule.R) - len(graph.nodes)
        pairs["M_in"] += len(schedule.M_in)
        pairs["M_out"] += len(schedule.M_out)
        plain = random_schedule(rng, graph, recompute=False, paging=False)
        assert len(plain.R) == len(graph.nodes)
        assert plain.M_in == plain.M_out == ()
        assert simulate(graph, None, plain).violations == ()
    assert min(pairs.values()) > 100
