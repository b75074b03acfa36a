"""Move recomputations to earlier stages if they do not fit beside inputs of the stage's node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.heuristics.restorations import RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.heuristics.partial_schedule import PartialSchedule


MAX_STAGES: Final = 8
"""Maximum number of stages by which a recomputation is moved."""
MAX_ATTEMPTS: Final = 4
"""Maximum number of failed attempts to move one recomputation."""
MAX_RECOMPUTATIONS: Final = 16
"""Maximum number of recomputations in a stage from which one is moved. The number is small, because
each attempt updates all stages from its target to that stage."""


@dataclass(slots=True, kw_only=True)
class EarlierRecomputation:
    """Moves recomputations, and restorations that serve only them, to earlier stages at no cost.

    A stage may have RAM for its recomputed tensors at its last step, but not for the step of the
    recomputation beside the inputs of the last step.
    """

    partial: PartialSchedule
    limit_bytes: int
    """RAM limit of every step [B]."""
    fits_limits: Callable[[Restoration], bool]
    """Returns whether limits other than RAM permit a restoration."""
    _n_failures: dict[Restoration, int] = field(default_factory=dict)
    """Number of failed attempts to move each recomputation."""
    _moved_to: set[Restoration] = field(default_factory=set)
    """Recomputations that earlier moves added. No move adds one of them again, so the moves end."""

    def relieve(self, t: int) -> bool:
        """Move one recomputation of stage `t` earlier if the RAM excess falls; return success.

        Tries none in a stage with more than `MAX_RECOMPUTATIONS`, or after `MAX_ATTEMPTS` failures.
        """
        partial, excess_bytes = self.partial, self._excess_bytes()
        if not 0 < len(partial.recomputed[t]) <= MAX_RECOMPUTATIONS or not partial.extra_bytes[t]:
            return False
        for k in sorted(partial.recomputed[t], reverse=True):
            original = Restoration(t, k, RECOMPUTE)
            if self._n_failures.get(original, 0) < MAX_ATTEMPTS:
                mark = partial.mark()
                if self._move(original, excess_bytes):
                    return True
                partial.undo(mark)
                self._n_failures[original] = self._n_failures.get(original, 0) + 1
        return False

    def _move(self, original: Restoration, max_excess_bytes: int) -> bool:
        """Move a recomputation to the last earlier stage with less excess than `max_excess_bytes`.

        After a failure (False), the recomputation and restorations that serve only it are missing:
        the caller must undo their removal.
        """
        partial, (t, k, _) = self.partial, original
        peak = partial.peak(t)
        read_outputs = (i for i in partial.graph.outputs_of[k] if partial.is_read_from(i, t))
        restored_bytes = sum(partial.sizes[i] for i in read_outputs)
        removed_restorations = partial.remove(original)
        if partial.peak(t) >= peak:
            return False
        mark = partial.mark()
        for stage in range(t - 1, max(k, t - 1 - MAX_STAGES), -1):
            if (
                stage < t - 1
                and int(partial.row_bytes[stage + 1]) + restored_bytes > self.limit_bytes
            ):
                return False
            candidate = original._replace(stage=stage)
            if candidate in partial or candidate in self._moved_to:
                continue
            for restoration in removed_restorations:
                moved_restoration = restoration._replace(stage=min(restoration.stage, stage))
                if moved_restoration not in partial and self.fits_limits(moved_restoration):
                    partial.add(moved_restoration)
            if self._excess_bytes() < max_excess_bytes:
                self._moved_to.add(candidate)
                return True
            partial.undo(mark)
        return False

    def _excess_bytes(self) -> int:
        """Return the sum over all stages of the excess of the peak over the limit [B]."""
        return int(np.maximum(self.partial.peaks() - self.limit_bytes, 0).sum())
