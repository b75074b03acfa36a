"""Formulations of the problem, as arrays or as Pyomo models, with the symbols of the paper.

In code, `m` is the model that a function reads or extends; `t`, `k`, `j`, `i` and `a` are the
indices of `docs/concepts/glossary.md`.

Modules that build whole models are imported on first use, since ``lazy`` builds its own
relaxations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.errors import check_docstrings

check_docstrings()

from poetmodel.model.formulation import Component, Formulation  # noqa: E402

if TYPE_CHECKING:
    from poetmodel.model.building import FORMULATIONS, build, read_schedule

__all__ = ["FORMULATIONS", "Component", "Formulation", "build", "read_schedule"]


def __getattr__(name: str) -> Any:
    if name in ("FORMULATIONS", "build", "read_schedule"):
        from poetmodel.model import building

        return getattr(building, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
