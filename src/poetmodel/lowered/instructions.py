"""Estimates of the instructions of kernels on a Cortex-M with an FPU, without an emulator.

The repeated units of a call are counted: blocks, rows, taps, elements. A table has the
instructions per unit by kernel, measured by ``bench/mcu/instructions.py`` with an emulator. Names
of units, such as ``4x4 step``, are keys of this table.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from poetmodel.lowered.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.graph import Node
    from poetmodel.lowered.calls import Call

TABLE_FILE: Final = "instructions.json"
"""File of the table, in the folder of this module."""
OTHER_KERNELS: Final = "other"
"""Key of the table for kernels without an entry."""


@cache
def load_table() -> dict[str, dict[str, float]]:
    """Return the instructions per repeated unit, by key of `count_work` and unit; do not modify."""
    text = (files("poetmodel.lowered") / TABLE_FILE).read_text(encoding="utf-8")
    costs: dict[str, dict[str, float]] = json.loads(text)
    return costs


def estimate_instructions(node: Node, calls: Iterable[Call]) -> int:
    """Return the estimated instructions of calls that compute a node, without in-place copies."""
    return round(sum(map(estimate_call_instructions, find_computing_calls(node, calls))))


def find_computing_calls(node: Node, calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls of a node, except copies of inputs that its outputs overwrite in place."""
    return (call for call in calls if _copied_buffers(call) not in node.in_place)


def _copied_buffers(call: Call) -> tuple[str, str] | None:
    """Return the buffers (target, source) of a copy; None for other calls."""
    return (call["out"].buffer, call["x"].buffer) if call.is_copy else None


def estimate_call_instructions(call: Call) -> float:
    """Return the estimated instructions of a call, as if its condition, if any, were true."""
    name, counts = count_work(call)
    costs = load_table()
    unit_costs = next(costs[key] for key in (name, call.kernel, OTHER_KERNELS) if key in costs)
    return sum(unit_costs.get(unit, 0.0) * count for unit, count in counts.items())


def count_work(call: Call) -> tuple[str, Counter[str]]:
    """Return the table key of a call, and the number of each repeated unit; ``call`` is 1.

    The key is the kernel, with ``, decay`` behind it for updates with weight decay, updates that
    maximize, and minima. The table may lack this key.
    """
    arguments = call.named_arguments
    counts = Counter({"call": 1})
    CATALOGUE[call.kernel].work(counts, arguments)
    has_decay = arguments.get("decay", 0.0) != 0 or arguments.get("sign", 1.0) != 1
    return f"{call.kernel}, decay" if has_decay else call.kernel, counts
