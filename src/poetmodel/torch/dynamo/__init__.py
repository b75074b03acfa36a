"""A back end for ``torch.compile``: the joint graph of AOTAutograd, planned within a RAM budget.

Each storage that the graph allocates is a tensor of the plan; views are recreated from it. The plan
is written as a joint graph in the plan's order: a recomputation is a copy of a node, and a page
transfer is an operator. PyTorch splits that graph into the forward and the backward pass.
"""

from __future__ import annotations

import sys

import torch  # noqa: F401 - so that the mock modules are moved behind it


def _reorder_mock_modules() -> None:
    """Move Pyomo's mock modules of missing packages to the end of ``sys.modules``.

    To pickle ``torch.contiguous_format``, Inductor searches all modules in turn up to PyTorch; a
    mock raises an error that is no `AttributeError`.
    """
    for name in [name for name in sys.modules if name.startswith("pyomo.common.dependencies.")]:
        sys.modules[name] = sys.modules.pop(name)


_reorder_mock_modules()
