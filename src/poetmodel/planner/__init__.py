"""Convert schedules to plans, and verify schedules and plans.

Blocking plans follow Algorithm 2 of POET, corrected. For DMA, a search chooses when transfers
begin.
"""

from poetmodel.planner.planning import make_checked_plan, make_plan, verify

__all__ = ["make_checked_plan", "make_plan", "verify"]
