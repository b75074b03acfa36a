"""Sweeps: many problems, each solved by many methods, recorded one line at a time."""

from poetmodel.sweeps.runner import Progress, shard, sweep
from poetmodel.sweeps.runs import Run, Settings, grid
from poetmodel.sweeps.store import Store

__all__ = ["Progress", "Run", "Settings", "Store", "grid", "shard", "sweep"]
