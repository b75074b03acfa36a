"""Programs of ExecuTorch: a training step in an order and at addresses that keep a budget.

What ExecuTorch does not promise to keep is used in `edge` alone.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from poetmodel.torch.capturing.replay import temporarily

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what PyTorch and ExecuTorch warn and log about their own code to themselves."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), temporarily(logging.disable, logging.WARNING, before):
        warnings.simplefilter("ignore")
        yield


with quiet():
    import executorch.exir
    import executorch.runtime  # noqa: F401 - both tell what they would like to have
