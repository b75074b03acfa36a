"""How long each unit takes on this host."""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from poetmodel.torch.replay import call, replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from poetmodel.torch.joint import Joint
    from poetmodel.torch.units import Units


def unit_times_s(
    joint: Joint, parts: Units, *, repeats: int = 5, threads: int = 1
) -> tuple[float, ...]:
    """Measure the time of each unit, the least of several whole steps.

    Parameters
    ----------
    joint : Joint
        The captured step.
    parts : Units
        Its units.
    repeats : int
        Steps that are timed, after one that is not.
    threads : int
        Threads that PyTorch may use meanwhile.

    Returns
    -------
    tuple of float, one per unit [s]
        The operation and the views that it makes anew of its inputs.

    Notes
    -----
    Whole steps are repeated, not single operations: an operation that runs again and again on the
    same inputs finds them in the cache, which it does not in a training step. The least is taken
    because whatever else the machine does only adds. With one thread its processor time is taken,
    which does not run while other programs have the core; with more, the time of the wall clock.
    """
    least: dict[fx.Node, float] = {}
    clock = thread_time if threads == 1 else perf_counter

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        begin = clock()
        value = call(node, arguments, keywords)
        took = clock() - begin
        least[node] = min(took, least.get(node, took))
        return value

    with limited_threads(threads):
        replay(joint)
        for _ in range(repeats):
            replay(joint, execute)
    return tuple(
        least[unit.node] + sum(least[view] for view in unit.reads.views) for unit in parts.units
    )


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Let PyTorch compute with so many threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
