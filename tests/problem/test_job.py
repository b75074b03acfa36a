"""A whole job: how its limits become those of a step."""

from __future__ import annotations

from typing import Any

import pytest

from poetmodel.errors import BudgetError
from poetmodel.graph import Graph, operation
from poetmodel.problem.job import Job


def batch_of(size: int) -> Graph:
    """Return a graph that trains on batches of a size."""
    return Graph(name="one", nodes=(operation("a", output_bytes=1),), batch_size=size)


def test_limits_are_split_over_the_steps() -> None:
    """500 samples in batches of 8 are 63 steps, the last one half full, at the same cost."""
    job, graph = Job(samples=500, within="6h", battery="1.2Wh"), batch_of(8)
    assert job.steps(graph) == 63
    assert job.deadline_s(graph) == pytest.approx(21600 / 63, rel=1e-12)
    assert job.energy_budget_j(graph) == pytest.approx(4320 / 63, rel=1e-12)


def test_full_batches_need_no_further_step() -> None:
    """16 samples in batches of 8 are two steps; in batches of one, sixteen."""
    assert Job(samples=16).steps(batch_of(8)) == 2
    assert Job(samples=16).steps(batch_of(1)) == 16


def test_what_is_not_stated_is_no_limit() -> None:
    """Samples alone only say how long the job is."""
    job = Job(samples=3)
    assert (job.deadline_s(batch_of(1)), job.energy_budget_j(batch_of(1))) == (None, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 0}, "samples: expected a whole number from 1, got 0"),
        ({"samples": True}, "samples: .* got true"),
        ({"samples": 1, "within": "0s"}, "within: expected more than 0, got '0s'"),
        ({"samples": 1, "within": "6 moons"}, "within: .*moons"),
        ({"samples": 1, "within": "50%"}, "within: a percentage has no meaning"),
        ({"samples": 1, "battery": "-1J"}, "battery: .*'-1J'"),
    ],
)
def test_nonsense_is_refused_with_its_field(given: dict[str, Any], words: str) -> None:
    """The message names the field and what came."""
    with pytest.raises(BudgetError, match=words):
        Job(**given)


def test_all_faults_are_told_at_once() -> None:
    """Three wrong fields, three faults."""
    with pytest.raises(BudgetError) as caught:
        Job(samples=-1, within="soon", battery="full")
    assert len(caught.value.faults) == 3
