"""Check that the initial values of a step are finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from poetmodel.errors import InputError, join_names
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.tables import LOOKUP_KERNEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.lowered.step import LoweredStep


def check_values(step: LoweredStep) -> None:
    """Raise `InputError` if parameters, buffers, constants or optimizer state are not finite.

    Allowed are minus infinity in values that the step does not replace (attention masks), any value
    in tables of byte inputs, and a new momentum buffer of NaN. Checks forward passes, too.
    """
    steps = (step, *step.forward_passes)
    require_all_finite(
        step.graph.name, (name for each_step in steps for name in _find_nonfinite(each_step))
    )


def require_all_finite(step_name: str, nonfinite_names: Iterable[str]) -> None:
    """Raise `InputError` that lists `nonfinite_names`, each once, unless there are none."""
    unique_names = [*dict.fromkeys(nonfinite_names)]
    if unique_names:
        verb = "hold" if len(unique_names) > 1 else "holds"
        raise InputError(
            f"{step_name}: {join_names(unique_names)} {verb} NaN or infinite numbers; expected "
            "finite parameters, buffers, constants and optimizer state: repair or reload the "
            "model, then export again"
        )


def _find_nonfinite(step: LoweredStep) -> Iterator[str]:
    """Yield the names of the tensors of a step that must be finite but are not (`check_values`)."""
    graph = step.graph
    replaced_names = {graph.tensors[old].name for old in graph.replacement_of}
    state_names = {tensor.pieces[0].buffer: tensor.name for tensor in step.states}
    calls = [call for node_calls in step.calls for call in node_calls]
    table_names = {call["table"].buffer for call in calls if call.kernel == LOOKUP_KERNEL}
    unset_parameters = ((call, CATALOGUE[call.kernel].begins_as_nan) for call in calls)
    unset_names = {call[name].buffer for call, name in unset_parameters if name is not None}
    for name, values in step.values.items():
        if name in table_names or np.isfinite(values).all():
            continue
        is_new = name in unset_names and np.isnan(values).all()
        is_mask = name not in replaced_names and np.isfinite(values[values != -np.inf]).all()
        if not (is_new or is_mask):
            yield state_names.get(name, name)
