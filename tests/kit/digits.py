"""The step of the tutorial, which needs no PyTorch, and batches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

STEP: Final = Path(__file__).parents[2] / "docs" / "digits.step.json"


def digit_batches(count: int, *, seed: int) -> bytes:
    """Return random batches as its exported program reads them: pictures, then labels."""
    random = np.random.default_rng(seed)
    return b"".join(
        random.normal(size=576).astype("<f4").tobytes()
        + random.integers(0, 4, 4).astype("<i4").tobytes()
        for _ in range(count)
    )
