"""A whole job: how its limits become those of a step."""

import pytest

from poetmodel.errors import BudgetError
from poetmodel.graph import Graph, operation
from poetmodel.problem.job import Job


def batch_of(size):
    """Return a graph that trains on batches of a size."""
    return Graph(name="one", nodes=(operation("a", output_bytes=1),), batch_size=size)


def test_limits_are_split_over_the_steps():
    """500 samples in batches of 8 are 63 steps, the last one half full, at the same cost."""
    job, graph = Job(samples=500, within="6h", battery="1.2Wh"), batch_of(8)
    assert job.steps(graph) == 63
    assert job.deadline_s(graph) == pytest.approx(21600 / 63, rel=1e-12)
    assert job.energy_budget_j(graph) == pytest.approx(4320 / 63, rel=1e-12)
    whole = Job(samples=16)
    assert (whole.steps(batch_of(8)), whole.steps(batch_of(1))) == (2, 16)
    assert (whole.deadline_s(graph), whole.energy_budget_j(graph)) == (None, None)


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
def test_nonsense_is_refused_with_its_field(given, words):
    """The message names the field and what came."""
    with pytest.raises(BudgetError, match=words):
        Job(**given)


def test_all_faults_are_told_at_once():
    """Three wrong fields, three faults."""
    with pytest.raises(BudgetError) as caught:
        Job(samples=-1, within="soon", battery="full")
    assert len(caught.value.faults) == 3
