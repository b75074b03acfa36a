"""Sweeps: many problems, each solved by many methods, recorded one line at a time."""

from poetmodel.bench.cells import Cell, Settings, grid
from poetmodel.bench.runner import Progress, sweep
from poetmodel.bench.store import Store

__all__ = ["Cell", "Progress", "Settings", "Store", "grid", "sweep"]
