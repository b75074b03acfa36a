"""The numbers that bytes stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What bytes stand for: ``(byte - zero) * scale``, and which bytes there may be."""

    scale: float
    zero: int
    low: int
    high: int

    @property
    def inverse(self) -> float:
        """1 / scale in float32, as PyTorch has it."""
        return single(1.0 / self.scale)

    def of(self, real: float) -> int:
        """Return the byte of a number, which may lie outside of the limits."""
        return round(float(np.rint(np.float32(real) * np.float32(self.inverse)))) + self.zero

    def within(self, clamp: tuple[float, float]) -> Levels:
        """Return the same with the limits that an activation sets."""
        low, high = (self.of(x) if math.isfinite(x) else x for x in clamp)
        return replace(self, low=int(max(self.low, low)), high=int(min(self.high, high)))

    @property
    def ending(self) -> tuple[float, int, int, int]:
        """The arguments for its result of an operator that rounds."""
        return self.inverse, self.zero, self.low, self.high


def single(number: float) -> float:
    """Return a number of float32."""
    return float(np.float32(number))
