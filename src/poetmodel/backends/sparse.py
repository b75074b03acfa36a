"""Import scipy's sparse arrays without loading ``scipy.stats``.

Pyomo installs an import hook that loads four packages of scipy, ``scipy.stats`` among them, when
scipy is first imported. This takes a second of processor time, longer than a small problem takes
to solve. The hook (https://github.com/Pyomo/pyomo/pull/3167) is only a convenience: parts of Pyomo
that need scipy import these packages on first use. So the hook is disabled for this one import.
"""

from __future__ import annotations

import sys


def _load_scipy() -> None:
    """Import scipy, unless it is loaded, with Pyomo's import hook disabled; restore the hook."""
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
