"""The benchmark of what steps cost: both measurements run; no speed is asserted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytorch import networks  # noqa: E402
from pytorch.step_costs import beside_eager, convolutions  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the network be two wide convolutions; put the number of threads back."""

    def made() -> Any:
        model = nn.Sequential(
            nn.Conv2d(3, 96, 3), nn.ReLU(), nn.Conv2d(96, 96, 3), nn.Flatten(), nn.Linear(384, 10)
        )
        inputs = (torch.randn(2, 3, 6, 6), torch.randint(0, 10, (2,)))
        return model, nn.functional.cross_entropy, inputs

    monkeypatch.setitem(networks.NETWORKS, "vgg16-b8", made)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_steps_are_timed_in_pairs() -> None:
    """Each pair has times and page faults of both, for either kind of gradients."""
    found = beside_eager("vgg16-b8", 3)
    for mode in ("new", "added"):
        assert len(found[mode]) == 3
        assert all(pair[0] > 0 and pair[2] > 0 for pair in found[mode])


def test_convolutions_are_compared_on_the_data_of_the_step() -> None:
    """All bits are equal, and no budget is larger than with whole convolutions."""
    found = convolutions("vgg16-b8", 5)
    assert found["unequal"] == 0
    assert found["least_in_parts_bytes"] <= found["least_bytes"] <= found["keep_all_bytes"]
