"""Check that the first values of a step are finite."""

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
"""The kernel for which a buffer of only NaN has no value yet."""


def check_values(step: LoweredStep) -> None:
    """Raise `InputError` if parameters, buffers, constants or optimizer state are not finite.

    Exceptions: constants may contain minus infinity (attention masks), tables of byte inputs any
    value, and a momentum buffer that has no value yet only NaN.
    """
    steps = (step, *step.evaluation_steps)
    check_finite(step.graph.name, (name for each in steps for name in _find_not_finite(each)))


def check_finite(step: str, names: Iterable[str]) -> None:
    """Raise `InputError` if `names`, the tensors of a step that are not finite, is not empty."""
    unique_names = [*dict.fromkeys(names)]
    if unique_names:
        verb = "hold" if len(unique_names) > 1 else "holds"
        raise InputError(
            f"{step}: {listed(unique_names)} {verb} NaN or infinite numbers; expected finite "
            "parameters, buffers, constants and optimizer state: repair or reload the model, then "
            "export again"
        )


def _find_not_finite(step: LoweredStep) -> Iterator[str]:
    """Yield the names of the tensors of a step that must be finite but are not."""
    graph = step.graph
    replaced = {graph.tensors[old].name for old in graph.replacement_of}
    state_names = {value.pieces[0].buffer: value.name for value in step.states}
    calls = [call for node_calls in step.calls for call in node_calls]
    tables = {call_refs(call)[-1].buffer for call in calls if call.kernel == LOOKUP}
    momenta = {call_refs(call)[1].buffer for call in calls if call.kernel == _MOMENTUM}
    for name, values in step.values.items():
        if name in tables or np.isfinite(values).all():
            continue
        is_new = name in momenta and np.isnan(values).all()
        is_mask = name not in replaced and np.isfinite(values[values != -np.inf]).all()
        if not (is_new or is_mask):
            yield state_names.get(name, name)
