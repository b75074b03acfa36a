"""Convert schedules to plans: Algorithm 2 of POET, corrected, and late page-ins for DMA."""

from poetmodel.planner.planning import make_checked_plan, make_plan, verify

__all__ = ["make_checked_plan", "make_plan", "verify"]
