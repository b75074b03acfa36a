"""Formulations of the problem as Pyomo models; symbols of the paper live here."""

import sys

from poetmodel.errors import ModelError

if sys.flags.optimize > 1:
    raise ModelError(
        "Python strips docstrings here (-OO or PYTHONOPTIMIZE=2), and Pyomo cannot be imported "
        "without them: start Python with -O or without"
    )

from poetmodel.model.building import FORMULATIONS, build, read_schedule
from poetmodel.model.component import Component, Formulation

__all__ = ["FORMULATIONS", "Component", "Formulation", "build", "read_schedule"]
