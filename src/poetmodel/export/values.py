"""The values that a step begins with: they must be finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.errors import InputError, listed
from poetmodel.lowered.loops import call_refs
from poetmodel.lowered.tables import LOOKUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.lowered.step import LoweredStep

_MOMENTUM: Final = "pm_momentum"
"""The kernel that takes a buffer of NaN as one that has no value yet."""


def check_values(step: LoweredStep) -> None:
    """Raise `InputError` if parameters, buffers, constants or optimizer state are not finite.

    A constant may hold minus infinity, as masks of attention do, and tables of byte inputs hold
    whatever a model makes of a byte. A momentum buffer without a value yet is all NaN.
    """
    parts = (step, *step.evaluation_steps)
    check_finite(step.graph.name, (name for part in parts for name in _find_not_finite(part)))


def check_finite(step: str, names: Iterable[str]) -> None:
    """Raise `InputError` if there are names of tensors that are not finite."""
    found = [*dict.fromkeys(names)]
    if found:
        verb = "hold" if len(found) > 1 else "holds"
        raise InputError(
            f"{step}: {listed(found)} {verb} NaN or infinite numbers; expected finite parameters, "
            "buffers, constants and optimizer state: repair or reload the model, then export again"
        )


def _find_not_finite(step: LoweredStep) -> Iterator[str]:
    """Yield the names of the tensors of a step that must be finite, and are not."""
    graph = step.graph
    replaced = {graph.tensors[old].name for old in graph.replacement_of}
    seen = {value.pieces[0].buffer: value.name for value in step.states}
    calls = [call for of_node in step.calls for call in of_node]
    tables = {call_refs(call)[-1].buffer for call in calls if call.kernel == LOOKUP}
    momenta = {call_refs(call)[1].buffer for call in calls if call.kernel == _MOMENTUM}
    for name, values in step.values.items():
        if name in tables or np.isfinite(values).all():
            continue
        is_new = name in momenta and np.isnan(values).all()
        is_mask = name not in replaced and np.isfinite(values[values != -np.inf]).all()
        if not (is_new or is_mask):
            yield seen.get(name, name)
