"""Recompute earlier what does not fit into its stage beside what the stage reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.heuristics.restorations import RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.heuristics.partial_schedule import PartialSchedule


STAGES: Final = 8
"""How many stages earlier what does not fit may be recomputed."""
ATTEMPTS: Final = 4
"""How often that is tried for one recomputation."""
CHOICES: Final = 16
"""Most recomputations of a stage of which it is tried: each try updates all stages in between."""


@dataclass(slots=True, kw_only=True)
class EarlierRecomputation:
    """Moves recomputations, with what serves them alone, to stages before; that costs nothing.

    A stage may have room for what is recomputed in it, and for its own step, but not for the step
    of the recomputation beside what its own step reads.
    """

    partial: PartialSchedule
    limit_bytes: int
    """RAM that every step keeps within [B]."""
    has_room_for: Callable[[Restoration], bool]
    """Whether limits other than RAM let a restoration be added."""
    _failed: dict[Restoration, int] = field(default_factory=dict)
    """How often that was in vain."""
    _moved: set[Restoration] = field(default_factory=set)
    """Where recomputations were moved to: nowhere twice, so that this ends."""

    def relieve(self, t: int) -> bool:
        """Move one recomputation of stage `t` if that lowers the excess; return whether it does."""
        partial, before = self.partial, self._excess()
        if not 0 < len(partial.recomputed[t]) <= CHOICES or not partial.extra_bytes[t]:
            return False
        for k in sorted(partial.recomputed[t], reverse=True):
            late = Restoration(t, k, RECOMPUTE)
            if self._failed.get(late, 0) < ATTEMPTS:
                mark = partial.mark()
                if self._move(late, before):
                    return True
                partial.undo(mark)
                self._failed[late] = self._failed.get(late, 0) + 1
        return False

    def _move(self, late: Restoration, before: int) -> bool:
        """Move a recomputation to the last earlier stage where less is exceeded than before."""
        partial, (t, k, _) = self.partial, late
        peak = partial.peak(t)
        served = (i for i in partial.graph.outputs_of[k] if partial.serves(i, t))
        back_bytes = sum(partial.sizes[i] for i in served)
        moving = partial.remove(late)
        if partial.peak(t) >= peak:
            return False
        mark = partial.mark()
        for stage in range(t - 1, max(k, t - 1 - STAGES), -1):
            if stage < t - 1 and int(partial.row_bytes[stage + 1]) + back_bytes > self.limit_bytes:
                return False
            early = late._replace(stage=stage)
            if early in partial or early in self._moved:
                continue
            for restoration in moving:
                moved = restoration._replace(stage=min(restoration.stage, stage))
                if moved not in partial and self.has_room_for(moved):
                    partial.add(moved)
            if self._excess() < before:
                self._moved.add(early)
                return True
            partial.undo(mark)
        return False

    def _excess(self) -> int:
        return int(np.maximum(self.partial.peaks() - self.limit_bytes, 0).sum())
