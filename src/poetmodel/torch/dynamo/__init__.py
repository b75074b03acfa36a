"""A back end for ``torch.compile``: the joint graph of AOTAutograd, planned within a RAM budget.

One storage that the graph makes is one tensor of the plan; views are made again from it. The plan
becomes a joint graph in its own order, in which a recomputation is a copy of a node and a page is
an operator, and PyTorch splits it into the forward and the backward pass.
"""

from __future__ import annotations

import sys

import torch  # noqa: F401


def _let_pickle_find_torch() -> None:
    """Put Pyomo's mock modules of optional packages behind PyTorch in ``sys.modules``.

    Inductor pickles its graphs. For an object that names no module, ``torch.contiguous_format``
    say, pickle asks all modules in turn, and the mock of a package that is not installed answers
    with an error that is no ``AttributeError``. So a process that loads Pyomo before PyTorch could
    not compile by Inductor at all.
    """
    for name in [name for name in sys.modules if name.startswith("pyomo.common.dependencies.")]:
        sys.modules[name] = sys.modules.pop(name)


_let_pickle_find_torch()
