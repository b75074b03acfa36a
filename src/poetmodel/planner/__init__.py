"""From schedules to plans: Algorithm 2 made sound, and just-in-time transfers."""

from poetmodel.planner.planning import make_plan, verify

__all__ = ["make_plan", "verify"]
