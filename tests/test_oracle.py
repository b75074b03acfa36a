"""The exhaustive oracle against a dumber search: every relation there is, simulated."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kit.instances import random_costs, random_graph, random_problem, random_step, seeded
from kit.oracle import Optimum, optimum
from kit.own_rows import constrained
from kit.rotation import Part, parts
from kit.worked import bench_device
from poetmodel.device import Costs
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.problem import OWN, Problem
from poetmodel.schedule import Schedule, Simulation, simulate, verify

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

QUANTITIES = ("energy", "time", "ram", "writes")


Pairs = list[tuple[int, int]]


class Outcome(NamedTuple):
    """What one valid schedule does."""

    runs: dict[str, Simulation]
    """As simulated, by the time that counts."""
    recomputes: bool
    pages: bool

    def value(self, problem: Problem) -> float:
        """Return the quantity that a problem minimizes."""
        run = self.runs[str(problem.deadline_counts)]
        if problem.minimize == OWN:
            return run.total(problem.graph, problem.own_objective)
        figures = (run.energy_j, run.time_s, run.peak_ram_bytes, run.written_bytes)
        return figures[QUANTITIES.index(str(problem.minimize))] or 0.0

    def keeps(self, problem: Problem) -> bool:
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


def every_schedule(
    graph: Graph, *, recompute: bool = True, paging: bool = True, storage: bool = False
) -> Iterator[Schedule]:
    """Yield every schedule of a graph; with `storage` also every choice of ``S_AUX``.

    Without it ``S_AUX`` lists all that storage holds; an entry less can only forbid a page-in.
    Left out, to save time, are those that page in what was kept or is not on storage, and those
    that page a tensor out twice.
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


def _every_choice(
    graph: Graph,
    again: Pairs,
    carried: Pairs,
    into: Pairs,
    out: list[tuple[tuple[tuple[int, int], ...], ...]],
    *,
    storage: bool,
) -> Iterator[tuple[tuple[tuple[int, int], ...], ...]]:
    """Yield recomputations, what is kept, stored, paged in and paged out, state apart."""
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


def _every_subset(pairs: list[Any]) -> list[tuple[Any, ...]]:
    sizes = range(len(pairs) + 1)
    return [subset for size in sizes for subset in itertools.combinations(pairs, size)]


def outcomes(graph: Graph, costs: Costs, **choices: bool) -> list[Outcome]:
    """Return the simulated outcomes of all valid schedules of a graph, each once."""
    found: dict[str, Outcome] = {}
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


def best(problem: Problem, ways: list[Outcome]) -> float | None:
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


def compare_with_every_relation(family: str, numbers: range) -> None:
    """Compare oracle and every relation on random graphs, each with 32 problems over it."""
    n, of_graph, of_search = FAMILIES[family]
    switches = {key: value for key, value in of_search.items() if key != "storage"}
    feasible = paid = with_rows = 0
    for number in numbers:
        rng = seeded(f"{family}/{number}")
        graph = _training_step(rng, n) if family == "state" else _roomy_graph(rng, n, **of_graph)
        costs = random_costs(rng, graph)
        ways = outcomes(graph, costs, **of_search)
        for minimize in QUANTITIES * 8:
            problem = random_problem(
                rng, graph, costs, minimize=minimize, below_floor=True, **switches
            )
            found = _compared(problem, ways)
            feasible += found is not None
            paid += found is not None and _pays(found.schedule)
            with_rows += _compared(constrained(rng, problem), ways) is not None
    assert feasible > 8 * len(numbers)
    assert paid > 2 * len(numbers)
    assert with_rows > 8 * len(numbers)


def _compared(problem: Problem, ways: list[Outcome]) -> Optimum | None:
    """Return what the oracle finds, once that is the best of all ways."""
    found = optimum(problem)
    assert (found.value if found else None) == best(problem, ways), (problem, problem.to_dict())
    return found


def _pays(schedule: Schedule) -> bool:
    """Return whether a schedule recomputes or pages."""
    return bool(schedule.M_in) or any(k < t for t, k in schedule.R)


@pytest.mark.parametrize(
    ("family", "count"),
    [("both", 1), ("paging", 2), ("recompute", 1), ("storage", 1), ("state", 1)],
)
def test_oracle_equals_trying_every_relation(family: str, count: int) -> None:
    """For small graphs and many limits the oracle finds the value that trying everything finds."""
    compare_with_every_relation(family, range(count))


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("family", "count"),
    [("both", 14), ("paging", 45), ("recompute", 19), ("storage", 14), ("state", 23)],
)
def test_oracle_equals_trying_every_relation_often(family: str, count: int) -> None:
    """The same over some thousand problems more."""
    compare_with_every_relation(family, range(100, 100 + count))


def _roomy_graph(rng: random.Random, n: tuple[int, int], **choices: bool) -> Graph:
    """Draw graphs until one can do with less RAM than keep-all takes."""
    while True:
        graph = random_graph(rng, n, **choices)
        if len(graph.tensors) <= 4 and checkpoint_all_peak_bytes(graph) > floor(graph).bytes:
            return graph


def _training_step(rng: random.Random, n: tuple[int, int]) -> Graph:
    """Draw steps with state until one can do with less RAM than keep-all takes, and is small."""
    while True:
        graph = random_step(rng, n)
        moved = len(graph.tensors) - len(graph.replacement_of)
        roomy = checkpoint_all_peak_bytes(graph) > floor(graph).bytes
        if graph.state_tensors and roomy and moved <= (3 if len(graph.nodes) < 4 else 2):
            return graph


@pytest.mark.parametrize("minimize", QUANTITIES)
@parts(4)
def test_oracle_schedules_pass_the_verifier(part: Part, minimize: str) -> None:
    """What the oracle returns is valid, and its simulated value is the one claimed."""
    checked = 0
    for seed in part.of(range(150)):
        rng = seeded(f"judge/{minimize}/{seed}")
        graph = random_graph(rng, (3, 6))
        problem = random_problem(rng, graph, random_costs(rng, graph), minimize=minimize)
        found = optimum(problem)
        if found is None:
            continue
        verdict = verify(problem, found.schedule)
        assert verdict.violations == (), (seed, problem)
        run = verdict.simulation
        values = (run.energy_j, run.time_s, run.peak_ram_bytes, run.written_bytes)
        assert values[QUANTITIES.index(minimize)] == found.value, (seed, problem)
        checked += 1
    assert checked > part.share(100)


@pytest.mark.slow
def test_oracle_schedules_keep_own_constraints() -> None:
    """Theirs are valid too, wasteful ones where a constraint or an objective wants waste."""
    checked = wasteful = 0
    for seed in range(150):
        rng = seeded(f"judge/own/{seed}")
        graph = random_graph(rng, (3, 5))
        problem = constrained(rng, random_problem(rng, graph, random_costs(rng, graph)))
        found = optimum(problem)
        if found is None:
            continue
        verdict = verify(problem, found.schedule)
        assert verdict.violations == (), (seed, problem)
        assert problem.objective.measured(verdict.simulation) == found.value, (seed, problem)
        checked += 1
        wasteful += len(found.schedule.M_out) > len({i for _, i in found.schedule.M_in})
    assert checked > 80
    assert wasteful > 10


def test_oracle_finds_the_early_recomputation_of_the_design_note() -> None:
    """It can pay to recompute before any stage needs it; both published examples cost 1."""
    first = _unit_graph(
        [("", 10), ("0", 2), ("0", 9), ("2", 9), ("13", 1)], workspace={2: 2}, once={2}
    )
    second = _unit_graph(
        [("", 10), ("0", 2), ("0", 9), ("", 1), ("3", 9), ("124", 0)], workspace={2: 4}
    )
    for graph, ram in ((first, 21), (second, 23)):
        n = len(graph.nodes)
        costs = Costs.from_arrays(graph, compute_time_s=[1] * n, compute_energy_j=[1] * n)
        found = optimum(Problem(graph, costs, ram=ram))
        assert found is not None
        assert found.value == n + 1


def _unit_graph(
    nodes: list[tuple[str, int]],
    *,
    workspace: dict[int, int],
    once: frozenset[int] | set[int] = frozenset(),
) -> Graph:
    return Graph(
        name="example",
        nodes=tuple(
            operation(
                f"n{k}",
                output_bytes=size,
                inputs=[f"n{u}" for u in inputs],
                workspace_bytes=workspace.get(k, 0),
                recomputable=k not in once,
            )
            for k, (inputs, size) in enumerate(nodes)
        ),
    )


def test_oracle_refuses_what_needs_a_plan() -> None:
    """A deadline or idle power in the meaning overlap has no answer without a plan."""
    graph = _unit_graph([("", 1), ("0", 1)], workspace={})
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 1],
        compute_energy_j=[1, 1],
        page_in=[(1, 1)] * 2,
        page_out=[(1, 1)] * 2,
    )
    problem = Problem(graph, costs, ram=2, deadline=9, deadline_counts="overlap")
    with pytest.raises(ValueError, match="overlap"):
        optimum(problem)
    idle = dataclasses.replace(costs, device=bench_device(idle_power_w=1.0))
    with pytest.raises(ValueError, match="overlap"):
        optimum(Problem(graph, idle, ram=2, deadline_counts="overlap"))
    free = optimum(Problem(graph, costs, ram=2, deadline_counts="overlap"))
    assert free is not None
    assert free.value == 2


def test_oracle_minimizes_another_quantity_on_request() -> None:
    """`minimize` replaces the problem's own quantity and leaves its limits alone."""
    graph = _unit_graph([("", 4), ("0", 4), ("1", 1), ("0", 1)], workspace={})
    costs = Costs.from_arrays(graph, compute_time_s=[1] * 4, compute_energy_j=[1] * 4)
    problem = Problem(graph, costs, ram="100%")
    plain = optimum(problem)
    least = optimum(problem, minimize="ram")
    assert plain is not None
    assert least is not None
    assert (plain.value, least.value) == (4, 8)
    # Keeping x to stage 3 takes x + y + z = 9 B in stage 2; computing it again there takes 8 B.
    assert len(plain.schedule.R) == 4
    assert len(least.schedule.R) > 4
