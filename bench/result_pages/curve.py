"""The picture of a training curve: an emulated board's beside PyTorch's, as SVG."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MEAN_OF: Final = 10
"""Steps whose mean is drawn."""


def digest(record: dict[str, Any]) -> str:
    """Return what identifies the content of the picture."""
    shown = [record["losses"], record["torch_losses"], record["cell"]]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def current(path: Path, record: dict[str, Any]) -> bool:
    """Return whether a file shows this record."""
    return path.is_file() and f"data {digest(record)}" in path.read_text(encoding="utf-8")


def write_picture(path: Path, record: dict[str, Any]) -> None:
    """Draw the losses of each step, and their moving means, into a file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "poetmodel", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7.0, 3.4), layout="constrained")
        ours, theirs = record["losses"], record["torch_losses"]
        axes.plot(range(1, len(ours) + 1), ours, ".", color="#bbbbbb", markersize=3)
        steps = range(_MEAN_OF, len(ours) + 1)
        axes.plot(steps, _means(theirs), color="#2166ac", linewidth=4, alpha=0.5, label="PyTorch")
        axes.plot(steps, _means(ours), color="#b2182b", linewidth=1, label="emulated Cortex-M4")
        axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(title=f"mean of {_MEAN_OF} steps", fontsize="small", title_fontsize="small")
        figure.savefig(path, metadata={"Date": None, "Description": f"data {digest(record)}"})
    plt.close(figure)


def _means(values: Sequence[float]) -> list[float]:
    return [sum(values[k - _MEAN_OF : k]) / _MEAN_OF for k in range(_MEAN_OF, len(values) + 1)]
