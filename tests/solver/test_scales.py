"""Bytes from 1 to 2**53 and costs times 1e±15 against exhaustive search, by every way to an answer.

What a result claims must hold whatever a solver's tolerances hide: the simulator accepts its
schedule, its bound is not above the optimum, its value is within the gap that it states, and it
says "infeasible" only where the search finds nothing. Every instance has its seed in its name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyomo.environ as pyo
import pytest

from kit.claims import wrongly_ended
from kit.instances import scaled_instance, seeded
from kit.oracle import optimum
from poetmodel.backends.registry import backend
from poetmodel.device import Costs
from poetmodel.errors import InputError
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.model import build
from poetmodel.model.linear import limit_row
from poetmodel.problem import LinearRow, Problem
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poetmodel.result import SolveResult
    from poetmodel.solver.request import SolveProgress

WAYS: Final = ("lazy", "compact", "unreduced")
BACKENDS: Final = tuple(
    pytest.param(name, marks=pytest.mark.skipif(not backend(name).available(), reason="missing"))
    for name in ("highs", "scip", "gurobi")
)
EACH_WAY: Final = (*WAYS[:2], pytest.param("unreduced", marks=pytest.mark.slow))
"""The formulations of a problem, and, slow, the model of a user."""
QUICK, BATCH, ALL = 20, 100, 12
"""Instances of the quick sample; of each slow test; and how many of those."""


def answer(problem: Problem, way: str, name: str, gap: float) -> SolveResult:
    """Solve a problem one of the three ways."""
    if way == "unreduced":
        return solve(build(problem, reductions=False), backend=name, gap=gap, time_limit=120.0)
    return solve(problem, formulation=way, backend=name, gap=gap, time_limit=120.0)


def fault(problem: Problem, way: str, name: str, gap: float) -> str:
    """Return what of a result is wrong against exhaustive search, or nothing."""
    rounded = way == "unreduced"
    return wrongly_ended(problem, lambda: answer(problem, way, name, gap), gap, rounded=rounded)


def faults(seeds: Iterable[int], way: str, name: str) -> dict[str, str]:
    """Return the instances on which search and result differ, by seed."""
    found = {}
    for number in seeds:
        seed = f"scales/{number}"
        problem = scaled_instance(seeded(seed))
        what = fault(problem, way, name, (0.0, 1e-4)[number % 2])
        if what:
            found[seed] = what
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_claim_holds_at_every_scale(way: str, name: str) -> None:
    """Forty instances each way with each solver."""
    assert not faults(range(QUICK), way, name)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_solve_may_end_while_its_search_is_set_up(name: str) -> None:
    """SCIP finds the solution that ends this one before its search begins."""
    assert not faults([927], "lazy", name)


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(ALL))
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_claim_holds_on_more(way: str, name: str, number: int) -> None:
    """Twelve hundred more each way with each solver, 10,800 in all."""
    begin = QUICK + number * BATCH
    assert not faults(range(begin, begin + BATCH), way, name)


@pytest.mark.slow
def test_the_instances_reach_every_scale_and_limit() -> None:
    """The quick sample and the slow ones have small and large bytes and costs, and every limit."""
    seen: Counter[str] = Counter()
    for number in range(8 * QUICK):
        problem = scaled_instance(seeded(f"scales/{number}"))
        sizes = [size for size in problem.graph.tensor_bytes if size]
        costs = [cost for cost in problem.table.compute_energy_j if cost]
        best = optimum(problem)
        seen.update(
            {
                f"minimize {problem.minimize}": True,
                "deadline": problem.deadline_s is not None,
                "storage limit": problem.aux_limit_bytes is not None and problem.can_page,
                "energy budget": problem.energy_budget_j is not None,
                "a byte beside a billion": bool(sizes) and max(sizes) > 1e9 * min(sizes),
                "nothing": 0 in problem.table.compute_energy_j,
                "costs 1e12 apart": bool(costs) and max(costs) > 1e12 * min(costs),
                "infeasible": best is None,
                "worth deciding": best is not None
                and verify_schedule(problem, best.schedule).value > 0,
            }
        )
    assert len(seen) == 12
    assert min(seen.values()) > 10, seen


def graph_of(*nodes: tuple[str, int | tuple[int, ...], int], on_aux: bool = True) -> Graph:
    """Return a graph of (inputs, bytes of the outputs, workspace); ``v0`` may come from storage.

    Second outputs are called ``v1.b``.
    """
    made = []
    for k, (inputs, outputs, workspace) in enumerate(nodes):
        sizes = (outputs,) if isinstance(outputs, int) else outputs
        names = [f"v{k}", f"v{k}.b"][: len(sizes)]
        tensors = tuple(Tensor(name=n, bytes=size) for n, size in zip(names, sizes, strict=True))
        made.append(
            Node(
                name=f"v{k}",
                op="op",
                phase="forward",
                inputs=tuple(inputs.split()),
                outputs=tensors,
                workspace_bytes=workspace,
                on_aux=on_aux and not k,
            )
        )
    return Graph(name="scales", nodes=tuple(made))


def small_beside_large() -> Problem:
    """Return a problem whose tensors of 7 B stand beside ones of 700 MB; nothing is to be written.

    ``v1.b`` finds no room beside the workspace of ``v2`` and may be recomputed afterwards.
    """
    graph = graph_of(
        ("", 710986500, 0),
        ("v0", (0, 7), 0),
        ("v1 v0", 7, 736579686),
        ("v1.b", 7, 0),
        ("v3 v2", 7, 0),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1, 0.1, 0.1, 2, 1],
        compute_energy_j=[2, 7, 7, 0.1, 1],
        page_in=[(0.2, 0.2), (1, 1), (1, 3), (1, 3), (1, 3), (0.2, 1)],
        page_out=[(1, 3), (1, 1), (0.2, 0.2), (1, 1), (0.2, 0.2), (0.2, 1)],
    )
    return Problem(graph, costs, ram=1447566196, minimize="writes")


def one_byte_of_terabytes() -> Problem:
    """Return a problem in which a tensor of 1 B decides, in a budget of 318 TB."""
    graph = graph_of(
        ("", 180800644505546, 0),
        ("v0", 1, 0),
        ("v0", 1, 0),
        ("v2", 159634889834268, 0),
        ("v1 v3", 158998152261536, 0),
        ("v4 v2", 38185061735238, 0),
    )
    nodes = (*graph.nodes[:-1], replace(graph.nodes[-1], recomputable=False))
    graph = replace(graph, nodes=nodes)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[5, 1, 2, 1, 2, 1],
        compute_energy_j=[1, 1, 7, 1, 0.1, 1],
        page_in=[(0.2, 0.2), (0.2, 3), (1, 3), (1, 0.2), (0.2, 0.2), (1, 1)],
        page_out=[(0.2, 1), (0.2, 3), (0.2, 0.2), (1, 0.2), (0.2, 3), (0.2, 3)],
    )
    return Problem(graph, costs, ram=318633042095805, deadline="15.6s", deadline_counts="serial")


def one_byte_written() -> Problem:
    """Return a problem among whose tensors of terabytes one of 1 B may be paged out in vain."""
    graph = graph_of(
        ("", 396078334283, 0),
        ("v0", 1, 507871058122),
        ("v1 v0", 414279641661, 0),
        ("v1", 786375951067, 0),
        ("v0", 359308566247, 0),
        ("v2 v1 v3", 33969439072, 0),
        on_aux=False,
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1] * 6,
        compute_energy_j=[1] * 6,
        page_in=[(1, 1)] * 6,
        page_out=[(1, 1)] * 6,
    )
    return Problem(graph, costs, ram=1263257958651, minimize="writes")


def bytes_below_the_peak(missing: int) -> Problem:
    """Return a problem that misses these bytes of the 172 TB that every tensor together takes."""
    graph = graph_of(
        ("", 1, 0),
        ("v0", (7, 32434333559732), 0),
        ("v1.b", 127467292596718, 0),
        ("v0", 11717955144366, 0),
        ("v1.b v1 v2", (1, 7), 0),
        ("v4.b", 137628490222182, 0),
        on_aux=False,
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[2, 0.1, 0.1, 0.1, 1, 2],
        compute_energy_j=[2, 2, 2, 7, 2, 1],
        page_in=[(0.2, 0.2), (0.2, 3), *[(0.2, 0.2)] * 4, (0.2, 0.2), (1, 0.2)],
        page_out=[(0.2, 1), (1, 3), (0.2, 1), (0.2, 3), *[(0.2, 0.2)] * 4],
    )
    return Problem(graph, costs, ram=171619581300824 - missing)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("made", [small_beside_large, one_byte_written])
def test_the_least_bytes_written_beside_large_tensors(
    made: Callable[[], Problem], way: str, name: str
) -> None:
    """A few bytes are below a tolerance in units of 700 MB or 1 TB: none is the proved optimum."""
    problem = made()
    assert fault(problem, way, name, 1e-4) == ""
    assert answer(problem, way, name, 1e-4).objective_value == 0


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", EACH_WAY)
def test_one_byte_too_many_leads_to_a_cut(way: str, name: str) -> None:
    """A peak 1 B above 318 TB, which no floating-point row shows, ends in the right schedule."""
    assert fault(one_byte_of_terabytes(), way, name, 0.0) == ""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize(("missing", "energy_j"), [(0, 16.0), (1, 17.2), (8, 17.2)])
def test_keeping_all_is_ruled_out_by_one_byte(
    missing: int, energy_j: float, way: str, name: str
) -> None:
    """With 1 B less than the peak of keep-all, of 172 TB, something is paged: proved, at 17.2 J."""
    problem = bytes_below_the_peak(missing)
    assert fault(problem, way, name, 1e-4) == ""
    result = answer(problem, way, name, 1e-4)
    assert (result.status, result.energy_j) == (Status.OPTIMAL, pytest.approx(energy_j, rel=1e-9))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("reductions", [True, False])
@pytest.mark.parametrize(("minimize", "least"), [("writes", 4000000007), ("ram", 12000000008)])
def test_models_with_own_rows_are_proved_to_the_byte(
    minimize: str, least: int, reductions: bool, name: str
) -> None:
    """Without any gap, and beside a row that no other problem has: the cheaper page-out is out."""
    sizes = (4000000007, 4000000001, 8000000007)
    problem = transfers(1, 1, sizes=sizes, ram=12000000014, minimize=minimize)
    model = build(problem, reductions=reductions)
    paged_out = [model.M_out[t, 1] for t in range(4) if (t, 1) in model.M_out]
    model.b_stays = pyo.Constraint(expr=sum(paged_out) == 0)
    before = set(model.component_map())
    result = solve(model, backend=name, gap=0.0)
    assert (result.status, result.objective_value) == (Status.OPTIMAL, least)
    assert result.objective_bound == least
    assert set(model.component_map()) == before


def transfers(
    time_s: float,
    energy_j: float,
    *,
    sizes: tuple[int, int, int] = (4, 4, 8),
    ram: int = 12,
    **limits: object,
) -> Problem:
    """Return a problem in which one of two transfers that would do has these costs."""
    a_bytes, b_bytes, c_bytes = sizes
    graph = Graph(
        name="transfers",
        nodes=(
            operation("a", output_bytes=a_bytes, recomputable=False),
            operation("b", output_bytes=b_bytes, recomputable=False),
            operation("c", output_bytes=c_bytes, recomputable=False),
            operation("d", output_bytes=1, inputs=("a", "b")),
        ),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1] * 4,
        compute_energy_j=[1] * 4,
        page_in=[(time_s, energy_j), *[(1, 1)] * 3],
        page_out=[(1, 1)] * 4,
    )
    return Problem(graph, costs, ram=ram, **limits)


@pytest.mark.parametrize("minimize", ["energy", "time", "writes"])
@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("cost", [1e-300, 1e-30, 1e15, 1e30, 1e300])
def test_one_cost_beyond_all_others(cost: float, way: str, minimize: str) -> None:
    """A transfer that takes next to nothing, or more than anything, is decided about exactly."""
    for limits in ({}, {"deadline": 8.0}, {"energy_budget": 8.0}):
        problem = transfers(cost, cost, minimize=minimize, **limits)
        assert fault(problem, way, "highs", 0.0) == "", limits


@pytest.mark.parametrize("scale", [1e-300, 1e-290, 1e290])
@pytest.mark.parametrize("way", EACH_WAY)
def test_all_costs_next_to_nothing_or_enormous(scale: float, way: str) -> None:
    """Figures of a device of 1e30 FLOP/s and beyond: only what they are of each other counts."""
    plain = transfers(1, 1)
    table = plain.table
    costs = Costs.from_arrays(
        plain.graph,
        compute_time_s=[scale * value for value in table.compute_time_s],
        compute_energy_j=[scale * value for value in table.compute_energy_j],
        page_in=[(1, scale), (1, 2 * scale), *[(1, scale)] * 2],
        page_out=[(1, scale)] * 4,
    )
    problem = Problem(plain.graph, costs, ram=12)
    assert fault(problem, way, "highs", 0.0) == ""
    result = answer(problem, way, "highs", 0.0)
    assert result.overhead_j == pytest.approx(2 * scale)


def test_costs_beyond_numbers_are_refused() -> None:
    """Before any solve, with the node or tensor and the field."""
    with pytest.raises(InputError, match=r"a: page_in_time_s: 1e\+308 is too large"):
        transfers(1e308, 1)
    with pytest.raises(InputError, match=r"a: page_in_energy_j: .* at least 1e-300, got 1e-305"):
        transfers(1, 1e-305)


def test_bytes_are_decided_where_rows_cannot_tell() -> None:
    """The least peak of 2**50 B, and the least writes, to the byte and with a gap of 0."""
    size = 2**50
    plain = transfers(1, 1).graph
    sizes = [size, size + 1, 2 * size + 3, 1]
    graph = replace(
        plain,
        nodes=tuple(
            replace(node, outputs=(replace(node.outputs[0], bytes=more),))
            for node, more in zip(plain.nodes, sizes, strict=True)
        ),
    )
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1] * 4,
        compute_energy_j=[1] * 4,
        page_in=[(1, 1)] * 4,
        page_out=[(1, 1)] * 4,
    )
    for way in ("lazy", "compact"):
        ram = solve(Problem(graph, costs, ram="100%", minimize="ram"), formulation=way, gap=0.0)
        assert (ram.status, ram.objective_value) == (Status.OPTIMAL, 2 * size + 3)
        tight = Problem(graph, costs, ram=3 * size + 3, minimize="writes")
        writes = solve(tight, formulation=way, gap=0.0)
        assert (writes.status, writes.objective_value) == (Status.OPTIMAL, size + 1)


@pytest.mark.parametrize("way", ["lazy", "compact"])
def test_progress_never_falls_behind(way: str) -> None:
    """Where a problem is solved again in finer units, what was known before stays known."""
    for problem in (small_beside_large(), one_byte_of_terabytes(), transfers(1e15, 1e15)):
        seen: list[SolveProgress] = []
        result = solve(problem, formulation=way, gap=0.0, on_progress=seen.append)
        bounds = [progress.bound for progress in seen if progress.bound is not None]
        values = [progress.incumbent for progress in seen if progress.incumbent is not None]
        assert bounds == sorted(bounds)
        assert values == sorted(values, reverse=True)
        assert result.status == Status.OPTIMAL


def test_no_point_that_keeps_a_limit_is_near_its_row() -> None:
    """Rows of random limits, bytes and reals: what keeps the limit has five tolerances to spare."""
    for number in range(300):
        rng = seeded(f"rows/{number}")
        whole = rng.random() < 0.5
        values = [10 ** rng.uniform(-8, 8) for _ in range(6)]
        if whole:
            values = [int(2 ** rng.uniform(0, 53)) for _ in range(6)]
        names = list(range(6))
        chosen = [value for value in values if rng.random() < 0.5]
        limit = sum(chosen)
        row = limit_row(LinearRow.of(zip(values, names, strict=True), upper=limit))
        if row is None:
            assert sum(values) <= limit
            continue
        coefficients, right = {name: value for value, name in row.terms}, row.upper
        assert max(coefficients.values()) <= 1e3 * max(right, 1.0)
        for mask in range(64):
            used = [name for name in names if mask >> name & 1]
            if sum(values[name] for name in used) <= limit:
                activity = sum(coefficients.get(name, 0.0) for name in used)
                assert activity <= max(0.0, right - 4e-7 * right)
