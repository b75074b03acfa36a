"""Workspace: the memory that an operation needs beside its inputs and outputs, measured."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.replay import call, replay
from poetmodel.torch.roles import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import fx

    from poetmodel.torch.joint import Joint
    from poetmodel.torch.units import Units

_MARK: Final = "poetmodel.unit."
MEMORY: Final = "[memory]"
"""Name of the events that tell of memory taken and given back."""
_NOTICE: Final = b"USDT:"
"""How lines begin that the profiler writes to stderr on every start and stop."""


def workspace_bytes(joint: Joint, parts: Units) -> tuple[int, ...]:
    """Measure the workspace of each unit, with the memory events of PyTorch's profiler.

    Parameters
    ----------
    joint : Joint
        The captured step; runs twice, first to fill the caches of libraries.
    parts : Units
        Its units.

    Returns
    -------
    tuple of int, one per unit [B]
        The highest total of allocations during the operation, less its outputs; 0 on the ``meta``
        device, where nothing is computed.

    Notes
    -----
    Only memory that goes through PyTorch's allocator is seen; that includes the scratchpads of
    oneDNN convolutions, which are the largest.
    """
    from torch.autograd.profiler import profile, record_function

    if any(joint.value(a).is_meta for a in joint.of(Source.PARAMETER)):
        return (0,) * len(parts.units)
    numbers = {unit.node: unit.index for unit in parts.units}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if node not in numbers:
            return call(node, arguments, keywords)
        with record_function(f"{_MARK}{numbers[node]}"):
            return call(node, arguments, keywords)

    replay(joint)
    with without_notices(), profile(profile_memory=True) as recorded:
        replay(joint, execute)
    peaks = _peaks(recorded.kineto_results.events())
    sizes = [sum(parts.storages[index].bytes for index in unit.storages) for unit in parts.units]
    return tuple(max(0, peaks.get(k, 0) - size) for k, size in enumerate(sizes))


def _peaks(events: Iterable[Any]) -> dict[int, int]:
    """Return for each marked unit the highest running sum of its allocations [B]."""
    spans: list[tuple[int, int, int]] = []
    changes: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name == MEMORY:
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            begin = event.start_ns()
            spans.append((begin, begin + event.duration_ns(), int(name.removeprefix(_MARK))))
    spans.sort()
    changes.sort(key=lambda change: change[0])
    peaks: dict[int, int] = {}
    place = 0
    for begin, end, number in spans:
        running = highest = 0
        while place < len(changes) and changes[place][0] <= end:
            moment, size = changes[place]
            place += 1
            if moment >= begin:
                running += size
                highest = max(highest, running)
        peaks[number] = highest
    return peaks


@contextmanager
def without_notices() -> Iterator[None]:
    """Leave the profiler's notices out of stderr; all else that is written there gets through."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not line.startswith(_NOTICE):
                    os.write(2, line)
