"""Trimming: whatever is taken from a schedule, it stays valid and no figure gets worse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from instances import random_graph, random_instances, random_schedule, seeded
from oracle import optimum
from poetmodel.device import Costs
from poetmodel.heuristics.trimming import trim
from poetmodel.schedule import GraphIdentity, Schedule, checkpoint_all, simulate
from worked import skip_graph

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import Simulation


def telling_costs(graph: Graph) -> Costs:
    """Make costs above 0 for everything, so that whatever is dropped is seen."""
    n, m = len(graph.nodes), len(graph.tensors)
    return Costs.from_arrays(
        graph,
        compute_time_s=[1.0 + k for k in range(n)],
        compute_energy_j=[2.0 + k for k in range(n)],
        page_in=[(1.0 + i, 3.0 + i) for i in range(m)],
        page_out=[(2.0 + i, 4.0 + i) for i in range(m)],
    )


def run(graph: Graph, schedule: Schedule) -> Simulation:
    """Simulate with telling costs."""
    return simulate(graph, telling_costs(graph), schedule, deadline_counts="serial")


def check_no_worse(graph: Graph, before: Schedule, after: Schedule) -> None:
    """Check validity, every sum, and the RAM of every step."""
    old, new = run(graph, before), run(graph, after)
    assert old.valid
    assert new.valid, new.violations
    for name in (
        "energy_j",
        "time_s",
        "compute_s",
        "transfer_s",
        "written_bytes",
        "read_bytes",
        "aux_used_bytes",
        "peak_ram_bytes",
    ):
        assert getattr(new, name) <= getattr(old, name), name
    curve = {(point.stage, point.node): point.ram_bytes for point in old.curve}
    for point in new.curve:
        assert point.ram_bytes <= curve[point.stage, point.node]


def test_random_schedules_get_no_worse() -> None:
    """Energy, times, writes, storage, and the RAM of each step: 800 wasteful schedules."""
    shorter = 0
    for seed in range(800):
        rng = seeded(f"trim/{seed}")
        graph = random_graph(rng, (1, 8))
        schedule = random_schedule(rng, graph)
        trimmed = trim(graph, schedule)
        check_no_worse(graph, schedule, trimmed)
        shorter += run(graph, trimmed).energy_j < run(graph, schedule).energy_j  # type: ignore[operator]
        assert trim(graph, trimmed) == trimmed
    assert shorter > 300


def test_best_schedules_lose_nothing_that_costs() -> None:
    """Where every entry is needed, energy stays; 100 optima of exhaustive search."""
    for problem in random_instances(100, (3, 5), seed=61, minimize="energy"):
        best = optimum(problem)
        if best is not None:
            after = trim(problem.graph, best.schedule)
            check_no_worse(problem.graph, best.schedule, after)
            simulation = simulate(
                problem.graph, problem.costs, after, deadline_counts=problem.deadline_counts
            )
            assert simulation.energy_j == pytest.approx(best.value)


def test_all_kept_stays_as_it_is() -> None:
    """Nothing in it serves nothing."""
    graph = skip_graph()
    assert trim(graph, checkpoint_all(graph)) == checkpoint_all(graph)


LEAN = Schedule(
    R=((0, 0), (1, 1), (2, 2), (3, 3)),
    S_RAM=((1, 0), (2, 1), (3, 2)),
    S_AUX=((1, 0), (2, 0), (3, 0)),
    M_in=((3, 0),),
    M_out=((0, 0),),
)
"""`a` of the skip graph is paged out at once and in for its last use."""


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param({"S_RAM": ((3, 1),), "R": ((3, 0), (3, 1)), "M_in": ((3, 0),)}, id="R again"),
        pytest.param({"M_out": ((1, 0),)}, id="page-out twice"),
        pytest.param({"M_out": ((1, 1),), "S_AUX": ((2, 1), (3, 1))}, id="page-out for nothing"),
        pytest.param({"M_out": ((3, 3),)}, id="page-out of the last"),
        pytest.param(
            {"M_out": ((1, 1),), "S_AUX": ((2, 1), (3, 1)), "M_in": ((3, 1),)}, id="round trip"
        ),
        pytest.param({"S_RAM": ((3, 1),)}, id="kept for nothing"),
        pytest.param({"R": ((1, 0),)}, id="recomputed at once"),
        pytest.param({"R": ((2, 0),)}, id="recomputed for nothing"),
    ],
)
def test_planted_junk_goes(junk: dict[str, tuple[tuple[int, int], ...]]) -> None:
    """What serves nothing leaves no trace."""
    graph = skip_graph()
    entries = {name: getattr(LEAN, name) + pairs for name, pairs in junk.items()}
    wasteful = replace(LEAN, **entries)
    assert run(graph, wasteful).valid
    trimmed = trim(graph, wasteful)
    check_no_worse(graph, wasteful, trimmed)
    if "R" not in junk or (3, 0) not in junk["R"]:
        assert trimmed == LEAN
    else:  # both ways to have `a` again: one of them is left
        assert len(trimmed.R) + len(trimmed.M_in) == 5


def test_a_late_page_out_moves_to_the_first_computation() -> None:
    """Kept only to be written later, a tensor need not be kept."""
    graph = skip_graph()
    late = replace(LEAN, S_RAM=((1, 0), (2, 0), (2, 1), (3, 2)), S_AUX=((3, 0),), M_out=((2, 0),))
    assert run(graph, late).valid
    assert trim(graph, late) == LEAN
    check_no_worse(graph, late, LEAN)


def test_tensors_on_storage_stay_listed_there() -> None:
    """Their S_AUX is a fact, not a choice; they are never paged out."""
    graph = skip_graph(on_aux=True)
    schedule = replace(LEAN, M_out=((0, 0),))
    trimmed = trim(graph, schedule)
    assert trimmed.S_AUX == ((1, 0), (2, 0), (3, 0))
    assert trimmed.M_out == ()
    check_no_worse(graph, schedule, trimmed)


def test_one_of_two_outputs_is_enough_to_keep_a_recomputation() -> None:
    """Made again for one tensor, a node makes the other too, which then need not be kept."""
    graph = skip_graph(mask=True)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 3)),
    )
    trimmed = trim(graph, schedule)
    assert (3, 2) in trimmed.R
    assert (3, 3) not in trimmed.S_RAM
    check_no_worse(graph, schedule, trimmed)


def test_the_identity_of_the_graph_stays() -> None:
    """A trimmed schedule still says which graph it is for."""
    graph = skip_graph()
    identity = GraphIdentity.of(graph)
    assert trim(graph, replace(LEAN, identity=identity)).identity == identity
