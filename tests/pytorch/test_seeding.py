"""Seeds in forward are refused, and nothing of it stays."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch import CaptureError, capture  # noqa: E402
from traced_models import checkpointed, rows  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


def by_function(parts: Any, x: Any) -> Any:
    """Seed."""
    torch.manual_seed(3)
    return parts[0](x) + torch.randn(3, 4)


def within_fork(parts: Any, x: Any) -> Any:
    """Seed, and put the state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(3, 4)
    return parts[0](x) + noise


def by_generator(parts: Any, x: Any) -> Any:
    """Seed the generator itself."""
    torch.default_generator.manual_seed(3)
    return parts[0](x) + torch.randn(3, 4)


def at_random(parts: Any, x: Any) -> Any:
    """Seed by chance."""
    torch.seed()
    return parts[0](x) + torch.randn(3, 4)


@pytest.mark.parametrize("forward", [by_function, within_fork, by_generator, at_random])
def test_seeding_is_refused(forward: Any) -> None:
    """The error names the line; the generator can be seeded afterwards, and is as it was."""
    step = rows(nn.Linear(4, 4), by=forward)
    generator, state = torch.default_generator, torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"is seeded at .*test_seeding.py:\d+ .*seed.*outside"):
        capture(*step)
    assert torch.default_generator is torch.random.default_generator is generator
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.manual_seed(1) is generator


def test_states_that_are_put_back_are_no_seeds() -> None:
    """The user's own checkpoint sets states of the generator, and is captured."""
    capture(*checkpointed())


def test_own_generators_are_refused() -> None:
    """Draws of another generator cannot be repeated: the error names the operation."""
    own = torch.Generator()
    step = rows(nn.Linear(4, 4), by=lambda p, x: p[0](x) + torch.randn(3, 4, generator=own))
    with pytest.raises(CaptureError, match=r"aten.randn.generator.* random generator of its own"):
        capture(*step)
