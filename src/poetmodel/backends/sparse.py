"""Sparse arrays of scipy, loaded without all of ``scipy.stats``.

A Pyomo that is loaded watches for the import of scipy and then loads four of its packages,
``scipy.stats`` among them: a second of processor time, where a small problem is solved in less. Its
hook, of https://github.com/Pyomo/pyomo/pull/3167, is only a convenience: what of Pyomo needs scipy
loads these packages when it first does. So the hook is passed over once.
"""

from __future__ import annotations

import sys


def _load_scipy() -> None:
    """Import scipy without Pyomo's import hook, which stays in place for everything else."""
    if "scipy" in sys.modules:
        return
    pyomo = sys.modules.get("pyomo.common.dependencies")
    finder = getattr(pyomo, "DeferredImportCallbackFinder", ())
    hooks = [hook for hook in sys.meta_path if isinstance(hook, finder)]
    for hook in hooks:
        sys.meta_path.remove(hook)
    try:
        import scipy  # noqa: F401
    finally:
        sys.meta_path[:0] = hooks


_load_scipy()

from scipy.sparse import coo_array, csr_array, vstack  # noqa: E402

__all__ = ["coo_array", "csr_array", "vstack"]
