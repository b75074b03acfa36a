"""Partial schedules: the rules are kept, RAM is the simulator's, and nothing useless is left."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.instances import (
    random_costs,
    random_graph,
    random_instances,
    random_schedule,
    random_state_schedule,
    random_step,
    seeded,
    state_costs,
)
from kit.oracle import optimum
from kit.rotation import Part, parts
from kit.worked import skip_graph
from poetmodel.device import Costs
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, STORAGE_HOME, Restoration
from poetmodel.problem import Problem
from poetmodel.schedule import GraphIdentity, Schedule, checkpoint_all, simulate

if TYPE_CHECKING:
    import random

    from poetmodel.graph import Graph
    from poetmodel.schedule import Simulation


def random_restorations(rng: random.Random, graph: Graph, chance: float) -> list[Restoration]:
    """Draw recomputations and page-ins of anything anywhere."""
    n = len(graph.nodes)
    again = [
        Restoration(t, k, RECOMPUTE) for t in range(n) for k in range(t) if rng.random() < chance
    ]
    tensors = range(len(graph.tensors))
    pages = [
        Restoration(t, i, PAGE_IN)
        for i in tensors
        for t in range(graph.node_of[i] + 1, n)
        if rng.random() < chance
    ]
    return rng.sample(again + pages, len(again) + len(pages))


def highest(partial: PartialSchedule, simulation: Simulation | None = None) -> list[int]:
    """Return the highest RAM use of every stage as the simulator counts it."""
    if simulation is None:
        simulation = simulate(partial.graph, None, partial.schedule())
    found: dict[int, int] = defaultdict(int)
    for point in simulation.curve:
        found[point.stage] = max(found[point.stage], point.ram_bytes)
    return [found[t] for t in range(len(partial.graph.nodes))]


def test_without_restorations_it_is_checkpoint_all() -> None:
    """Everything is computed once and kept to its last use."""
    partial = PartialSchedule(skip_graph())
    assert partial.schedule() == checkpoint_all(partial.graph)
    assert partial.peaks().max() == checkpoint_all_peak_bytes(partial.graph)
    assert partial.row_bytes.tolist() == list(checkpoint_all_profile(partial.graph))
    assert partial.restorations() == []


def test_a_recomputation_frees_the_stages_before_it() -> None:
    """With `a` made again for `d`, stage 2 no longer counts it."""
    partial = PartialSchedule(skip_graph())
    before = int(partial.row_bytes[2])
    partial.add(Restoration(3, 0, RECOMPUTE))
    assert partial.row_bytes[2] == before - partial.sizes[0]
    assert partial.gaps[0] == []
    assert (3, 0) in partial.schedule().R
    assert not partial.enters(0, 3)
    assert partial.is_available(0, 3)
    assert partial.source(0, 3) == Restoration(3, 0, RECOMPUTE)


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_any_restorations_keep_the_rules_and_ram_is_that_of_the_simulator(chance: float) -> None:
    """Every stage of 150 random ones, whatever they bring back; also after changes."""
    for number in range(50):
        rng = seeded(f"partial/{number}/{chance}")
        graph = random_graph(rng, (3, 12), non_recomputable=False, max_bytes=50)
        restorations = random_restorations(rng, graph, chance)
        partial = PartialSchedule(graph)
        for restoration in restorations:
            partial.add(restoration)
        for restoration in rng.sample(restorations, len(restorations) // 3):
            partial.drop(restoration)
        simulation = simulate(graph, random_costs(rng, graph), partial.schedule())
        assert not simulation.violations
        assert partial.peaks().tolist() == highest(partial)
        assert partial.peaks().max() == simulation.peak_ram_bytes
        assert partial.aux_used_bytes == simulation.aux_used_bytes
        assert partial.fits(simulation.peak_ram_bytes)
        assert not partial.fits(simulation.peak_ram_bytes - 1)


def test_changes_can_be_taken_back() -> None:
    """What is undone leaves no trace in restorations, rows or bytes written."""
    for number in range(40):
        rng = seeded(f"undo/{number}")
        graph = random_graph(rng, (4, 12), non_recomputable=False)
        restorations = random_restorations(rng, graph, 0.3)
        half = len(restorations) // 2
        partial = PartialSchedule(graph, restorations[:half])
        before = (partial.restorations(), partial.row_bytes.copy(), partial.aux_used_bytes)
        peaks = partial.peaks()
        mark = partial.mark()
        for restoration in restorations[half:]:
            partial.add(restoration)
        for restoration in restorations[:half]:
            if restoration in partial:
                partial.remove(restoration)
        partial.undo(mark)
        assert partial.restorations() == before[0]
        assert np.array_equal(partial.row_bytes, before[1])
        assert partial.aux_used_bytes == before[2]
        assert np.array_equal(partial.peaks(), peaks)


def test_useless_restorations_are_those_that_a_schedule_does_not_need() -> None:
    """Without them, one after the other, it is what its schedule needs."""
    for number in range(60):
        rng = seeded(f"useless/{number}")
        graph = random_graph(rng, (4, 10), two_outputs=False, non_recomputable=False)
        partial = PartialSchedule(graph, random_restorations(rng, graph, 0.2))
        tidy = needed(graph, partial.schedule())
        while useless := [s for s in partial.restorations() if partial.is_useless(s)]:
            partial.drop(useless[0])
        assert partial.schedule() == tidy


def test_what_served_only_a_removed_restoration_goes_with_it() -> None:
    """Chains of recomputations vanish as a whole."""
    partial = PartialSchedule(
        skip_graph(), [Restoration(3, 0, RECOMPUTE), Restoration(3, 1, RECOMPUTE)]
    )
    partial.remove(Restoration(3, 1, RECOMPUTE))
    assert Restoration(3, 0, RECOMPUTE) in partial  # d reads a itself
    partial.remove(Restoration(3, 0, RECOMPUTE))
    assert partial.restorations() == []


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


def needed(graph: Graph, schedule: Schedule) -> Schedule:
    """Return what a schedule needs."""
    return PartialSchedule.of(graph, schedule).schedule()


def check_no_worse(graph: Graph, before: Schedule, after: Schedule) -> None:
    """Check validity, every sum, and the RAM of every step."""
    check_simulations(run(graph, before), run(graph, after))


def check_simulations(old: Simulation, new: Simulation) -> None:
    """Do that with two simulations."""
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


@parts(4)
def test_random_schedules_get_no_worse(part: Part) -> None:
    """Energy, times, writes, storage, and the RAM of each step: 800 wasteful schedules."""
    shorter = 0
    for seed in part.of(range(800)):
        rng = seeded(f"needed/{seed}")
        graph = random_graph(rng, (1, 8))
        schedule = random_schedule(rng, graph)
        lean = needed(graph, schedule)
        check_no_worse(graph, schedule, lean)
        shorter += run(graph, lean).energy_j < run(graph, schedule).energy_j  # type: ignore[operator]
        assert needed(graph, lean) == lean
    assert shorter > part.share(300)


def test_best_schedules_lose_nothing_that_costs() -> None:
    """Where every entry is needed, energy stays; 100 optima of exhaustive search."""
    for problem in random_instances(100, (3, 5), seed=61, minimize="energy"):
        best = optimum(problem)
        if best is not None:
            after = needed(problem.graph, best.schedule)
            check_no_worse(problem.graph, best.schedule, after)
            simulation = simulate(
                problem.graph, problem.costs, after, deadline_counts=problem.deadline_counts
            )
            assert simulation.energy_j == pytest.approx(best.value)


def test_all_kept_stays_as_it_is() -> None:
    """Nothing in it serves nothing."""
    graph = skip_graph()
    assert needed(graph, checkpoint_all(graph)) == checkpoint_all(graph)


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
    lean = needed(graph, wasteful)
    check_no_worse(graph, wasteful, lean)
    if "R" not in junk or (3, 0) not in junk["R"]:
        assert lean == LEAN
    else:  # both ways to have `a` again: one of them is left
        assert len(lean.R) + len(lean.M_in) == 5


def test_a_late_page_out_moves_to_the_first_computation() -> None:
    """Kept only to be written later, a tensor need not be kept."""
    graph = skip_graph()
    late = replace(LEAN, S_RAM=((1, 0), (2, 0), (2, 1), (3, 2)), S_AUX=((3, 0),), M_out=((2, 0),))
    assert run(graph, late).valid
    assert needed(graph, late) == LEAN
    check_no_worse(graph, late, LEAN)


def test_tensors_on_storage_stay_listed_there() -> None:
    """Their S_AUX is a fact, not a choice; they are never paged out."""
    graph = skip_graph(on_aux=True)
    schedule = replace(LEAN, M_out=((0, 0),))
    lean = needed(graph, schedule)
    assert lean.S_AUX == ((1, 0), (2, 0), (3, 0))
    assert lean.M_out == ()
    check_no_worse(graph, schedule, lean)


def test_one_of_two_outputs_is_enough_to_keep_a_recomputation() -> None:
    """Made again for one tensor, a node makes the other too, which then need not be kept."""
    graph = skip_graph(mask=True)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 3)),
    )
    lean = needed(graph, schedule)
    assert (3, 2) in lean.R
    assert (3, 3) not in lean.S_RAM
    check_no_worse(graph, schedule, lean)


def test_the_identity_of_the_graph_stays() -> None:
    """A lean schedule still says which graph it is for."""
    graph = skip_graph()
    identity = GraphIdentity.of(graph)
    assert needed(graph, replace(LEAN, identity=identity)).identity == identity


def random_state_restorations(rng: random.Random, problem: Problem) -> list[Restoration]:
    """Draw homes on storage, then recomputations and page-ins of anything that state allows."""
    graph, last, chance = problem.graph, problem.graph.last_stages, rng.choice((0.05, 0.2, 0.5))
    n = len(graph.nodes)
    again = [
        Restoration(t, k, RECOMPUTE)
        for k, node in enumerate(graph.nodes)
        for t in range(k + 1, last[k] + 1)
        if node.recomputable and rng.random() < chance
    ]
    away = [i for i in graph.state_tensors if rng.random() < 0.6]
    unread = {*graph.state_tensors, *graph.replacement_of.values()}.difference(
        () if problem.reads_in_place else away
    )
    pages = [
        Restoration(t, i, PAGE_IN)
        for i, k in enumerate(graph.node_of)
        for t in range(k + 1, (last[k] + 1) if graph.nodes[k].is_state else n)
        if i not in unread and rng.random() < chance
    ]
    homes = [Restoration.at_its_node(graph, i, STORAGE_HOME) for i in away]
    return homes + rng.sample(again + pages, len(again) + len(pages))


@pytest.mark.parametrize("mapped", [False, True])
@parts(3)
def test_with_state_ram_is_that_of_the_simulator(part: Part, mapped: bool) -> None:
    """Homes, in-place operators and restorations at random, added, removed and taken back."""
    for number in part.of(range(150)):
        rng = seeded(f"partial/state/{mapped}/{number}")
        graph = random_step(rng, (3, 12), max_bytes=50)
        costs = state_costs(rng, graph, mapped=mapped)
        problem = Problem(graph, costs, ram=1)
        partial = PartialSchedule(graph, working=problem.working_graph)

        def check(partial: PartialSchedule) -> None:
            simulation = simulate(graph, costs, partial.schedule())  # noqa: B023 - called at once
            assert not simulation.violations
            assert partial.peaks().tolist() == highest(partial, simulation)
            assert partial.aux_used_bytes == simulation.aux_used_bytes

        assert partial.schedule() == checkpoint_all(graph)
        check(partial)
        restorations = random_state_restorations(rng, problem)
        for restoration in restorations:
            partial.add(restoration)
        check(partial)
        before, mark = (partial.restorations(), partial.peaks().tolist()), partial.mark()
        for restoration in rng.sample(restorations, len(restorations) // 2):
            if restoration in partial:
                partial.remove(restoration)
        check(partial)
        again = PartialSchedule(graph, partial.restorations(), working=problem.working_graph)
        assert again.schedule() == partial.schedule()
        check(again)
        partial.undo(mark)
        assert (partial.restorations(), partial.peaks().tolist()) == before


@pytest.mark.parametrize("mapped", [False, True])
@parts(3)
def test_schedules_with_state_get_no_worse(part: Part, mapped: bool) -> None:
    """Homes stay; energy, times, writes, storage and the RAM of each step do not rise."""
    shorter = 0
    for number in part.of(range(300)):
        rng = seeded(f"needed/state/{mapped}/{number}")
        graph = random_step(rng, (3, 10))
        schedule = random_state_schedule(rng, graph, mapped=mapped)
        if schedule is None:
            continue
        costs = state_costs(rng, graph, mapped=mapped)
        working = Problem(graph, costs, ram=1).working_graph
        lean = PartialSchedule.of(graph, schedule, working=working).schedule()
        old, new = (simulate(graph, costs, each) for each in (schedule, lean))
        check_simulations(old, new)
        assert lean.resident == schedule.resident
        assert PartialSchedule.of(graph, lean, working=working).schedule() == lean
        shorter += old.energy_j != new.energy_j
    assert shorter > part.share(50)


def test_state_that_comes_home_is_no_longer_paged_in() -> None:
    """Without its home on storage, nothing pages it in; both come back together."""
    for number in range(20):
        graph = random_step(seeded(f"home/{number}"), (5, 10))
        paged = [
            Restoration(need, i, PAGE_IN) for i in graph.state_tensors for need in graph.users_of[i]
        ]
        homes = [Restoration.at_its_node(graph, i, STORAGE_HOME) for i in graph.state_tensors]
        partial = PartialSchedule(graph, [*homes, *paged])
        before, mark = partial.restorations(), partial.mark()
        for home in homes:
            partial.remove(home)
        assert partial.schedule() == checkpoint_all(graph)
        partial.undo(mark)
        assert partial.restorations() == before
