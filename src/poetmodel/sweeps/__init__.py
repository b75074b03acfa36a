"""Sweeps: resumable series of runs, each one problem solved by one method."""

from poetmodel.sweeps.runner import Progress, shard, sweep
from poetmodel.sweeps.runs import Run, Settings, grid
from poetmodel.sweeps.store import Store

__all__ = ["Progress", "Run", "Settings", "Store", "grid", "shard", "sweep"]
