"""Drafts: whatever is brought back, the rules are kept and the RAM is that of the judge."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from instances import random_costs, random_graph, seeded
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.heuristics.partial_schedule import PartialSchedule, Restoration
from poetmodel.heuristics.trimming import trim
from poetmodel.schedule import checkpoint_all, simulate
from worked import skip_graph

if TYPE_CHECKING:
    import random

    from poetmodel.graph import Graph


def random_restorations(rng: random.Random, graph: Graph, chance: float) -> list[Restoration]:
    """Draw recomputations and page-ins of anything anywhere."""
    n = len(graph.nodes)
    again = [
        Restoration(t, k, recompute=True)
        for t in range(n)
        for k in range(t)
        if rng.random() < chance
    ]
    tensors = range(len(graph.tensors))
    pages = [
        Restoration(t, i, recompute=False)
        for i in tensors
        for t in range(graph.node_of[i] + 1, n)
        if rng.random() < chance
    ]
    return rng.sample(again + pages, len(again) + len(pages))


def highest(partial: PartialSchedule) -> list[int]:
    """Return the highest RAM use of every stage as the judge walks it."""
    curve = simulate(partial.graph, None, partial.schedule()).curve
    found: dict[int, int] = defaultdict(int)
    for point in curve:
        found[point.stage] = max(found[point.stage], point.ram_bytes)
    return [found[t] for t in range(len(partial.graph.nodes))]


def test_without_supplies_it_is_checkpoint_all() -> None:
    """Everything is computed once and kept to its last use."""
    partial = PartialSchedule(skip_graph())
    assert partial.schedule() == checkpoint_all(partial.graph)
    assert partial.peak_bytes() == checkpoint_all_peak_bytes(partial.graph)
    assert partial.load.tolist() == list(checkpoint_all_profile(partial.graph))
    assert partial.restorations() == []


def test_a_recomputation_frees_the_stages_before_it() -> None:
    """With `a` made again for `d`, stage 2 no longer counts it."""
    partial = PartialSchedule(skip_graph())
    before = int(partial.load[2])
    partial.add(Restoration(3, 0, recompute=True))
    assert partial.load[2] == before - partial.sizes[0]
    assert partial.gaps[0] == []
    assert (3, 0) in partial.schedule().R
    assert not partial.enters(0, 3)
    assert partial.at_hand(0, 3)
    assert partial.source(0, 3) == Restoration(3, 0, recompute=True)


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_any_supplies_keep_the_rules_and_ram_is_that_of_the_judge(chance: float) -> None:
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
        partial.settle()
        assert (partial.load + partial.extra).tolist() == highest(partial)
        assert partial.peak_bytes() == simulation.peak_ram_bytes
        assert partial.written_bytes == simulation.aux_used_bytes
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
        partial.settle()
        before = (
            partial.restorations(),
            partial.load.copy(),
            partial.extra.copy(),
            partial.written_bytes,
        )
        mark = partial.mark()
        for restoration in restorations[half:]:
            partial.add(restoration)
        for restoration in restorations[:half]:
            if restoration in partial:
                partial.remove(restoration)
        partial.undo(mark)
        partial.settle()
        assert partial.restorations() == before[0]
        assert np.array_equal(partial.load, before[1])
        assert np.array_equal(partial.extra, before[2])
        assert partial.written_bytes == before[3]


def test_useless_supplies_are_those_that_trimming_removes() -> None:
    """Without them, one after the other, it is what trimming leaves of its schedule."""
    for number in range(60):
        rng = seeded(f"useless/{number}")
        graph = random_graph(rng, (4, 10), two_outputs=False, non_recomputable=False)
        partial = PartialSchedule(graph, random_restorations(rng, graph, 0.2))
        tidy = trim(graph, partial.schedule())
        while useless := [s for s in partial.restorations() if partial.is_useless(s)]:
            partial.drop(useless[0])
        assert partial.schedule() == tidy


def test_what_served_only_a_removed_supply_goes_with_it() -> None:
    """Chains of recomputations vanish as a whole."""
    partial = PartialSchedule(
        skip_graph(), [Restoration(3, 0, recompute=True), Restoration(3, 1, recompute=True)]
    )
    partial.remove(Restoration(3, 1, recompute=True))
    assert Restoration(3, 0, recompute=True) in partial  # d reads a itself
    partial.remove(Restoration(3, 0, recompute=True))
    assert partial.restorations() == []
