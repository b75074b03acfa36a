"""Quantization levels: the real numbers that bytes represent."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Quantization of a tensor: bytes represent ``(byte - zero) * scale``, within limits."""

    scale: float
    zero: int
    """The byte that represents 0."""
    low: int
    """Smallest byte."""
    high: int
    """Largest byte."""

    @property
    def inverse(self) -> float:
        """1 / scale, rounded to float32 as in PyTorch."""
        return to_float32(1.0 / self.scale)

    def quantize(self, real: float) -> int:
        """Return the byte of a finite real number; the result may be outside of the limits."""
        return round(float(np.rint(np.float32(real) * np.float32(self.inverse)))) + self.zero

    def narrow_limits(self, clamp: tuple[float, float]) -> Levels:
        """Return a copy with limits narrowed to `clamp`, the real limits of an activation."""
        low, high = (self.quantize(x) if math.isfinite(x) else x for x in clamp)
        return replace(self, low=int(max(self.low, low)), high=int(min(self.high, high)))

    @property
    def rounding(self) -> tuple[float, int, int, int]:
        """The last arguments of operators that round to these levels: inverse, zero, low, high."""
        return self.inverse, self.zero, self.low, self.high


def to_float32(number: float) -> float:
    """Round a number to float32."""
    return float(np.float32(number))
