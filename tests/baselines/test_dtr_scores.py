"""Sets of evicted tensors and their costs."""

from __future__ import annotations

from poetmodel.baselines.dtr_scores import CostSets


def test_sets_join_through_a_common_neighbour() -> None:
    """Two sets become one when a tensor beside both is added; its cost counts once."""
    sets = CostSets()
    sets.add(0, 1.0, [])
    sets.add(1, 2.0, [])
    assert sets.total([0, 1]) == 3.0
    sets.add(2, 4.0, [0, 1])
    assert sets.total([0]) == sets.total([0, 1, 2]) == 7.0


def test_a_tensor_that_is_back_takes_only_its_cost_along() -> None:
    """The rest of its set stays together, though nothing joins it any more."""
    sets = CostSets()
    sets.add(0, 1.0, [])
    sets.add(1, 2.0, [0])
    sets.add(2, 4.0, [1])
    sets.remove(1, 2.0)
    assert sets.total([1]) == 0.0
    assert sets.total([0]) == sets.total([0, 2]) == 5.0


def test_a_tensor_can_be_evicted_again() -> None:
    """It then starts a set of its own, joined with those beside it."""
    sets = CostSets()
    sets.add(0, 1.0, [])
    sets.remove(0, 1.0)
    sets.add(0, 1.0, [])
    sets.add(1, 2.0, [])
    assert (sets.total([0]), sets.total([1])) == (1.0, 2.0)
