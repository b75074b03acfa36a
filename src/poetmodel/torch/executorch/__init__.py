"""Programs of ExecuTorch: a training step in an order and at addresses that keep a budget.

What ExecuTorch does not promise to keep is used in `edge` alone.
"""

from __future__ import annotations

from poetmodel.torch.errors import quiet

with quiet():
    import executorch.exir
    import executorch.runtime  # noqa: F401 - both tell what they would like to have
