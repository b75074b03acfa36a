"""Formulations of the problem, as arrays or for Pyomo; symbols of the paper live here."""

from poetmodel.errors import check_docstrings

check_docstrings()

from poetmodel.model.building import FORMULATIONS, build, read_schedule  # noqa: E402
from poetmodel.model.formulation import Component, Formulation  # noqa: E402

__all__ = ["FORMULATIONS", "Component", "Formulation", "build", "read_schedule"]
