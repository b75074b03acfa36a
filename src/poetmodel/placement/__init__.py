"""From plans to addresses: an offset for all that is in RAM, in one block."""

from poetmodel.placement.placing import place

__all__ = ["place"]
