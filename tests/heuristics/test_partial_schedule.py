"""Drafts: whatever is brought back, the rules are kept and the RAM is that of the judge."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from instances import random_costs, random_graph, seeded
from poetmodel.graph import checkpoint_all_peak_bytes, checkpoint_all_profile
from poetmodel.heuristics.partial_schedule import Draft, Supply
from poetmodel.heuristics.trimming import trim
from poetmodel.schedule import checkpoint_all, simulate
from worked import skip_graph

if TYPE_CHECKING:
    import random

    from poetmodel.graph import Graph


def random_supplies(rng: random.Random, graph: Graph, chance: float) -> list[Supply]:
    """Draw recomputations and page-ins of anything anywhere."""
    n = len(graph.nodes)
    again = [Supply(t, k, again=True) for t in range(n) for k in range(t) if rng.random() < chance]
    tensors = range(len(graph.tensors))
    pages = [
        Supply(t, i, again=False)
        for i in tensors
        for t in range(graph.node_of[i] + 1, n)
        if rng.random() < chance
    ]
    return rng.sample(again + pages, len(again) + len(pages))


def highest(draft: Draft) -> list[int]:
    """Return the highest RAM use of every stage as the judge walks it."""
    curve = simulate(draft.graph, None, draft.schedule()).curve
    found: dict[int, int] = defaultdict(int)
    for point in curve:
        found[point.stage] = max(found[point.stage], point.ram_bytes)
    return [found[t] for t in range(len(draft.graph.nodes))]


def test_without_supplies_it_is_checkpoint_all() -> None:
    """Everything is computed once and kept to its last use."""
    draft = Draft(skip_graph())
    assert draft.schedule() == checkpoint_all(draft.graph)
    assert draft.peak_bytes() == checkpoint_all_peak_bytes(draft.graph)
    assert draft.load.tolist() == list(checkpoint_all_profile(draft.graph))
    assert draft.supplies() == []


def test_a_recomputation_frees_the_stages_before_it() -> None:
    """With `a` made again for `d`, stage 2 no longer counts it."""
    draft = Draft(skip_graph())
    before = int(draft.load[2])
    draft.add(Supply(3, 0, again=True))
    assert draft.load[2] == before - draft.sizes[0]
    assert draft.gaps[0] == []
    assert (3, 0) in draft.schedule().R
    assert not draft.enters(0, 3)
    assert draft.at_hand(0, 3)
    assert draft.source(0, 3) == Supply(3, 0, again=True)


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_any_supplies_keep_the_rules_and_ram_is_that_of_the_judge(chance: float) -> None:
    """Every stage of 150 random drafts, whatever they bring back; also after changes of it."""
    for number in range(50):
        rng = seeded(f"draft/{number}/{chance}")
        graph = random_graph(rng, (3, 12), non_recomputable=False, max_bytes=50)
        supplies = random_supplies(rng, graph, chance)
        draft = Draft(graph)
        for supply in supplies:
            draft.add(supply)
        for supply in rng.sample(supplies, len(supplies) // 3):
            draft.drop(supply)
        simulation = simulate(graph, random_costs(rng, graph), draft.schedule())
        assert not simulation.violations
        draft.settle()
        assert (draft.load + draft.extra).tolist() == highest(draft)
        assert draft.peak_bytes() == simulation.peak_ram_bytes
        assert draft.written_bytes == simulation.aux_used_bytes
        assert draft.fits(simulation.peak_ram_bytes)
        assert not draft.fits(simulation.peak_ram_bytes - 1)


def test_changes_can_be_taken_back() -> None:
    """What is undone leaves no trace in supplies, rows or bytes written."""
    for number in range(40):
        rng = seeded(f"undo/{number}")
        graph = random_graph(rng, (4, 12), non_recomputable=False)
        supplies = random_supplies(rng, graph, 0.3)
        half = len(supplies) // 2
        draft = Draft(graph, supplies[:half])
        draft.settle()
        before = (draft.supplies(), draft.load.copy(), draft.extra.copy(), draft.written_bytes)
        mark = draft.mark()
        for supply in supplies[half:]:
            draft.add(supply)
        for supply in supplies[:half]:
            if supply in draft:
                draft.remove(supply)
        draft.undo(mark)
        draft.settle()
        assert draft.supplies() == before[0]
        assert np.array_equal(draft.load, before[1])
        assert np.array_equal(draft.extra, before[2])
        assert draft.written_bytes == before[3]


def test_useless_supplies_are_those_that_trimming_removes() -> None:
    """Without them, one after the other, a draft is what trimming leaves of its schedule."""
    for number in range(60):
        rng = seeded(f"useless/{number}")
        graph = random_graph(rng, (4, 10), two_outputs=False, non_recomputable=False)
        draft = Draft(graph, random_supplies(rng, graph, 0.2))
        tidy = trim(graph, draft.schedule())
        while useless := [s for s in draft.supplies() if draft.is_useless(s)]:
            draft.drop(useless[0])
        assert draft.schedule() == tidy


def test_what_served_only_a_removed_supply_goes_with_it() -> None:
    """Chains of recomputations vanish as a whole."""
    draft = Draft(skip_graph(), [Supply(3, 0, again=True), Supply(3, 1, again=True)])
    draft.remove(Supply(3, 1, again=True))
    assert Supply(3, 0, again=True) in draft  # d reads a itself
    draft.remove(Supply(3, 0, again=True))
    assert draft.supplies() == []
