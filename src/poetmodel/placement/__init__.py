"""Assign an address to each tensor and workspace of a plan, as an offset in one arena."""

from poetmodel.placement.placing import place

__all__ = ["place"]
