"""Sweeps: many problems, each solved by many methods, recorded one line at a time."""

from poetmodel.bench.runner import Progress, sweep
from poetmodel.bench.runs import Run, Settings, grid
from poetmodel.bench.store import Store

__all__ = ["Progress", "Run", "Settings", "Store", "grid", "sweep"]
