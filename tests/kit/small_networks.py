"""The steps of four small networks, which are held to their instructions on a board."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mcu.small_networks import NETWORKS, training
from poetmodel.export.exporting import in_tiles

if TYPE_CHECKING:
    from poetmodel.export.step import LoweredStep

__all__ = ["NETWORKS", "captured"]


def captured(name: str, tile: str | None = None) -> LoweredStep:
    """Return the step of a network with plain SGD, in tiles of a size if one is given."""
    torch = pytest.importorskip("torch")
    from poetmodel.torch.lowering.step import lower

    model, loss_fn, inputs = training(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return in_tiles(lower(model, loss_fn, inputs, optimizer=optimizer), tile)
