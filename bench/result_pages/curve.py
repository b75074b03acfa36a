"""The chart of a training curve: an emulated board's beside PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from result_pages.drawing import BLUE, RED, Chart

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEAN_OF: Final = 10
"""Steps whose mean is drawn."""


def chart(records: Sequence[dict[str, Any]]) -> Chart:
    """Return the losses of each step of the last record, and their moving means."""
    shown = [[record["losses"], record["torch_losses"]] for record in records[-1:]]
    return Chart(shown=shown, paint=_paint)


def _paint(figure: Any, shown: Any) -> None:
    ((ours, theirs),) = shown
    axes = figure.subplots()
    axes.plot(range(1, len(ours) + 1), ours, ".", color="#bbbbbb", markersize=3)
    steps = range(_MEAN_OF, len(ours) + 1)
    axes.plot(steps, _means(theirs), color=BLUE, linewidth=4, alpha=0.5, label="PyTorch")
    axes.plot(steps, _means(ours), color=RED, linewidth=1, label="emulated Cortex-M4")
    axes.set(xlabel="step", title=f"Loss, mean of {_MEAN_OF} steps", ylim=(0, None))
    axes.legend()


def _means(values: Sequence[float]) -> list[float]:
    return [sum(values[k - _MEAN_OF : k]) / _MEAN_OF for k in range(_MEAN_OF, len(values) + 1)]
