"""Convert schedules to plans: Algorithm 2 of POET made sound, and just-in-time transfers."""

from poetmodel.planner.planning import checked_plan, make_plan, verify

__all__ = ["checked_plan", "make_plan", "verify"]
