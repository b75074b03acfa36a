"""A back end for ``torch.compile``: the joint graph of AOTAutograd, planned within a RAM budget.

Each storage that the graph allocates is a tensor of the plan; views are recreated from it. The plan
is written as a joint graph in the plan's order: a recomputation is a copy of a node, and a page
transfer is an operator. PyTorch splits that graph into the forward and the backward pass.
"""

from __future__ import annotations

import sys

import torch  # noqa: F401 - so that the mock modules are moved behind it


def _reorder_mock_modules() -> None:
    """Move Pyomo's mock modules of optional packages to the end of ``sys.modules``.

    Inductor pickles its graphs. For an object without a module name, such as
    ``torch.contiguous_format``, pickle searches all modules in turn, and ends at PyTorch. The mock
    of a missing package raises an error that is no ``AttributeError``. Therefore a process that
    loads Pyomo before PyTorch could not compile with Inductor.
    """
    for name in [name for name in sys.modules if name.startswith("pyomo.common.dependencies.")]:
        sys.modules[name] = sys.modules.pop(name)


_reorder_mock_modules()
