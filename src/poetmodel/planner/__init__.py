"""From schedules to plans: Algorithm 2 made sound, and just-in-time transfers."""

from poetmodel.planner.planning import checked_plan, make_plan, verify

__all__ = ["checked_plan", "make_plan", "verify"]
